"""Can triton and tilelang run here? Asked before either is imported, answered in one line.

`triton_problem` and `tilelang_problem` return None, or the reason why kernels of that library
cannot run on a device. They are cached: the answer does not change while the process lives.
"""

import functools
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

logger = logging.getLogger("minitx")

MIN_CUDA_CAPABILITY = (8, 0)  # bfloat16 tensor cores and cp.async: Ampere


def is_eager() -> bool:
    """Whether what runs is run as it is written: not compiled, and not within torch.func."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def choose_triton_interpreter() -> None:
    """Sets TRITON_INTERPRET=1 where there is no GPU to compile for; called when minitx.kernels is
    imported.

    It cannot wait until a Triton kernel is asked for: torch.compile imports triton too, and
    triton's own functions decide how they run when they are imported. NVML counts the GPUs, so none
    is initialised.
    """
    undecided = "TRITON_INTERPRET" not in os.environ and "triton" not in sys.modules
    if undecided and torch.cuda.device_count() == 0:
        os.environ["TRITON_INTERPRET"] = "1"


@functools.cache
def triton_is_interpreted() -> bool:
    """Whether Triton kernels run in the interpreter here; says so, once, when they do."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    logger.warning("triton kernels run in Triton's interpreter here: right, but slow")
    return True


def _release(package: str) -> tuple[int, ...]:
    numbers = []
    for part in version(package).split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _capability_problem(device_index: int | None) -> str | None:
    capability = torch.cuda.get_device_capability(device_index)
    if torch.version.hip is None and capability < MIN_CUDA_CAPABILITY:
        found, wanted = (f"{major}.{minor}" for major, minor in (capability, MIN_CUDA_CAPABILITY))
        return f"this GPU has compute capability {found}, and it needs {wanted} or newer"
    return None


def _unwritable(path: Path) -> str | None:
    """Why no file can be made in `path` (made if missing), or None."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"


@functools.cache
def triton_problem(device_type: str, device_index: int | None = None) -> str | None:
    """Why Triton kernels cannot run on this device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (it has wheels for Linux: pip install triton)"
    if device_type not in ("cpu", "cuda"):
        return f"it runs on CUDA GPUs, and on a CPU in Triton's interpreter, not on {device_type}"
    if device_type == "cuda":
        problem = _capability_problem(device_index)
        if problem is None:
            home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
            cache = os.environ.get("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache"))
            unwritable = _unwritable(Path(cache))
            if unwritable:
                problem = f"triton cannot write its cache, {unwritable}; set TRITON_CACHE_DIR"
        return problem
    if os.environ.get("TRITON_INTERPRET") != "1":
        if torch.cuda.device_count() == 0:
            return (
                "triton was imported before minitx: import minitx first, or set TRITON_INTERPRET=1"
            )
        return (
            "on a machine with a GPU it takes CPU tensors only in Triton's interpreter: "
            "move them to the GPU, or set TRITON_INTERPRET=1"
        )
    if _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        return (
            f"the interpreter of triton {version('triton')} breaks with numpy {version('numpy')}: "
            "pip install 'triton>=3.7' or 'numpy<2.4'"
        )
    return None


@functools.cache
def tilelang_problem(device_type: str, device_index: int | None = None) -> str | None:
    """Why TileLang kernels cannot run on this device, or None."""
    if importlib.util.find_spec("tilelang") is None:
        return (
            "the package tilelang is not installed (it has wheels for Linux: pip install tilelang)"
        )
    if device_type not in ("cpu", "cuda"):
        return f"it runs on CUDA GPUs, and on a CPU through C, not on {device_type}"
    # tilelang makes its cache folder when it is imported, and the import fails with it.
    cache = os.environ.get("TILELANG_CACHE_DIR", os.path.expanduser("~/.tilelang/cache"))
    unwritable = _unwritable(Path(cache))
    if unwritable:
        return f"tilelang cannot write its cache, {unwritable}; set TILELANG_CACHE_DIR"
    if device_type == "cuda":
        problem = _capability_problem(device_index)
        if problem:
            return problem
    return _tilelang_compiler_problem(device_type)


def _tilelang_compiler_problem(device_type: str) -> str | None:
    """TileLang calls nvcc for CUDA and a C++ compiler for the CPU: are they there?"""
    if device_type == "cuda":
        return _nvcc_problem()
    chosen = os.environ.get("CXX") or os.environ.get("CC")
    if any(shutil.which(name) for name in ([chosen] if chosen else ["g++", "clang++", "c++"])):
        return None
    return f"it compiles to C++ here and found no {chosen or 'compiler'}: install g++ or clang"


def _nvcc_problem() -> str | None:
    """Looks where tilelang does: in CUDA_HOME or CUDA_PATH alone where one is set, else on the
    PATH, in NVIDIA's package and in the usual place."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(name)
        if root and not os.path.exists(f"{root}/bin/nvcc"):
            return f"it needs nvcc, and {name}={root} holds no bin/nvcc: correct it or unset it"
        if root:
            return None
    if shutil.which("nvcc") or os.path.exists("/usr/local/cuda/bin/nvcc"):
        return None
    try:
        version("nvidia-cuda-nvcc")
    except PackageNotFoundError:
        return "it needs nvcc and found none: install the CUDA toolkit or set CUDA_HOME"
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks that take a whole multiprocessor run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count
