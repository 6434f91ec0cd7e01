"""Machines that lack something: no home, no cache, no GPU or an old one, no compiler, no package.

What can still run does; what cannot is one line that names what to change.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import run_train, tiny_args

from minitx.kernels import (
    KernelUnavailableError,
    attention,
    runtime,
    supports,
    tilelang_runtime,
)
from minitx.trainer import resolve_dtype

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent
KERNELS_OF = {
    "triton": ("triton", "triton-softmax"),
    "tilelang": ("tilelang", "tilelang-softmax"),
}


def ask_again() -> None:
    """The answers are cached for a process's life; here the machine changes."""
    runtime.triton_problem.cache_clear()
    runtime.tilelang_problem.cache_clear()


@pytest.fixture(autouse=True)
def fresh_answers():
    ask_again()
    yield
    ask_again()


def on_gpu(dtype: torch.dtype = torch.bfloat16):
    """What `supports` looks at, of a tensor on a GPU that this machine need not have."""
    device = torch.device("cuda", 0)
    return SimpleNamespace(device=device, dtype=dtype, is_cuda=True, get_device=lambda: 0)


def gpu_problem(kernel: str) -> str | None:
    from minitx.kernels.api import _attention_problem

    return _attention_problem(kernel, on_gpu(), False)  # type: ignore[arg-type]


def python(script: str, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", script, *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


# Trains on PyTorch's kernels, then asks for the others and prints what they say.
TRAIN_AND_ASK = """
import sys
sys.path.insert(0, {tests!r})
{before}
from pathlib import Path
import torch
from command import run_train, tiny_args
from minitx.kernels import KernelUnavailableError, attention

assert run_train(tiny_args(Path({folder!r}), max_steps=2, kernel="sdpa", compare="eager")) == 0
assert not torch.cuda.is_initialized()
q = torch.zeros(1, 1, 4, 16)
for kernel in {kernels!r}:
    try:
        attention(q, q, q, kernel=kernel)
        print("ran:", kernel)
    except KernelUnavailableError as error:
        print("refused:", error)
"""


# --- No GPU, no home, no cache ----------------------------------------------------------------


def test_help_needs_neither_a_gpu_nor_a_home(tmp_path):
    file = tmp_path / "file"
    file.touch()
    environment = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"), str(file))
    environment |= {"TRITON_CACHE_DIR": f"{file}/t", "TILELANG_CACHE_DIR": f"{file}/t"}
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "--deterministic" in result.stdout


def test_no_folder_that_can_be_written_but_the_runs_own(tmp_path):
    """A home that is a file, as in a container of a user who has none: root cannot write it."""
    file = tmp_path / "file"
    file.touch()
    script = TRAIN_AND_ASK.format(
        tests=str(TESTS), before="", folder=str(tmp_path), kernels=("eager", "tilelang")
    )
    environment = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), str(file))
    environment["TILELANG_CACHE_DIR"] = f"{file}/cache"
    result = python(script, **environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()[-2:]
    assert lines[0] == "ran: eager"
    assert lines[1].startswith("refused: kernel 'tilelang' cannot run this attention: ")
    assert f"{file}/cache" in lines[1]
    assert "set TILELANG_CACHE_DIR" in lines[1]
    assert not list(file.parent.glob("**/.tilelang"))


@pytest.mark.parametrize("library", KERNELS_OF)
def test_an_unwritable_cache_names_its_variable(library, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(runtime, "_nvcc_problem", lambda: None)
    variable = f"{library.upper()}_CACHE_DIR"
    monkeypatch.setenv(variable, f"{file}/cache")
    for kernel in KERNELS_OF[library]:
        problem = gpu_problem(kernel)
        assert problem is not None
        assert f"{library} cannot write its cache, {file}/cache: Not a directory" in problem
        assert problem.endswith(f"set {variable}")
    for other in ("eager", "sdpa"):
        assert gpu_problem(other) is None
    monkeypatch.delenv(variable)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("HOME", str(file))
    ask_again()
    assert str(file) in (gpu_problem(library) or "")  # the default is in the home


# --- GPUs that are too old --------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "ok"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_gpu_before_ampere_is_refused_by_its_number(capability, ok, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(runtime, "_nvcc_problem", lambda: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    expected = None if ok else "this GPU has compute capability 7.5, and it needs 8.0 or newer"
    for kernels in KERNELS_OF.values():
        for kernel in kernels:
            assert gpu_problem(kernel) == expected
    assert gpu_problem("eager") is None
    assert gpu_problem("sdpa") is None


def test_the_default_dtype_is_one_the_gpu_has(monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert resolve_dtype("auto", gpu) == dtype
        assert resolve_dtype("float32", gpu) == torch.float32
    assert resolve_dtype("auto", cpu) == torch.float32


# --- Compilers that are not there -------------------------------------------------------------


@pytest.fixture
def no_cuda_toolkit(monkeypatch):
    def missing(*_):
        raise runtime.PackageNotFoundError

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(runtime, "version", missing)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_no_nvcc(no_cuda_toolkit):
    problem = runtime._tilelang_compiler_problem("cuda")
    assert problem == "it needs nvcc and found none: install the CUDA toolkit or set CUDA_HOME"


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_cuda_home_that_points_nowhere(variable, no_cuda_toolkit, monkeypatch):
    """tilelang looks nowhere else when it is set, even where nvcc is on the PATH."""
    monkeypatch.setenv(variable, "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    problem = runtime._tilelang_compiler_problem("cuda")
    assert problem is not None
    assert f"{variable}=/nowhere holds no bin/nvcc" in problem


@pytest.mark.parametrize("place", ["home", "path", "package", "usual"])
def test_every_place_of_nvcc_will_do(place, no_cuda_toolkit, monkeypatch):
    match place:
        case "home":
            monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
            monkeypatch.setattr(os.path, "exists", lambda path: path == "/opt/cuda/bin/nvcc")
        case "path":
            monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
        case "package":
            monkeypatch.setattr(runtime, "version", {"nvidia-cuda-nvcc": "13.0"}.__getitem__)
        case "usual":
            monkeypatch.setattr(os.path, "exists", lambda path: path == "/usr/local/cuda/bin/nvcc")
    assert runtime._tilelang_compiler_problem("cuda") is None


def test_no_cpp_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    q = torch.zeros(1, 1, 4, 16)
    support = supports("tilelang", q, q, q)
    assert (support.ok, support.reason) == (
        False,
        "it compiles to C++ here and found no compiler: install g++ or clang",
    )
    with pytest.raises(KernelUnavailableError, match=r"Kernels that can: .*eager, sdpa"):
        attention(q, q, q, kernel="tilelang")


# --- Packages that are missing, broken or do not go together ----------------------------------

HIDE = """
class Hiding:
    def find_spec(self, name, path=None, target=None):
        return None if name in ("triton", "tilelang") else self.finder.find_spec(name, path, target)
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
"""


def test_neither_triton_nor_tilelang_is_installed(tmp_path):
    kernels = ("eager", "triton", "triton-softmax", "tilelang", "tilelang-softmax")
    script = TRAIN_AND_ASK.format(
        tests=str(TESTS), before=HIDE, folder=str(tmp_path), kernels=kernels
    )
    result = python(script)
    assert result.returncode == 0, result.stderr
    first, *lines = result.stdout.splitlines()[-5:]
    assert first == "ran: eager"
    for kernel, line in zip(kernels[1:], lines, strict=True):
        package = kernel.split("-")[0]
        assert line == (
            f"refused: kernel '{kernel}' cannot run this attention: the package {package} is not "
            f"installed (it has wheels for Linux: pip install {package}). "
            "Kernels that can: eager, sdpa"
        )


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("module 'tvm_ffi' has no attribute 'register_global_func'"),
        ImportError("libtvm_ffi.so: undefined symbol: TVMFFIAnyToOwned"),
        RuntimeError("Type `tirx.Var` is already registered\nstack trace:\n  ..."),
        TypeError("register_object() got an unexpected keyword argument"),
        OSError("libtvm.so: cannot open shared object file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_tilelang_that_breaks_when_imported_is_one_line(error, tmp_path, monkeypatch, capsys):
    """As a newer apache-tvm-ffi makes it."""

    def broken(name, *args, **kwargs):
        if name == "tilelang":
            raise error
        return importing(name, *args, **kwargs)

    import builtins

    importing = builtins.__import__
    monkeypatch.setattr(tilelang_runtime, "_kernels", {})
    monkeypatch.setattr(builtins, "__import__", broken)
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(KernelUnavailableError) as raised:
        attention(q, q, q, kernel="tilelang-softmax")
    message = str(raised.value)
    assert message.startswith(f"tilelang cannot be imported: {str(error).splitlines()[0]}; install")
    assert "\n" not in message
    args = tiny_args(tmp_path, kernel="tilelang-softmax", max_steps=1)
    assert run_train(args) == 2
    assert capsys.readouterr().err.count("tilelang cannot be imported") == 1
    assert run_train([*args, "--kernel=eager", "--compare=none", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("triton", "numpy", "ok"),
    [("3.6.0", "2.5.1", False), ("3.6.0", "2.3.9", True), ("3.7.0", "2.4.0", True)],
)
def test_the_interpreter_and_a_numpy_it_breaks_with(triton, numpy, ok, monkeypatch):
    monkeypatch.setattr(runtime, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    problem = runtime.triton_problem("cpu")
    expected = (
        f"the interpreter of triton {triton} breaks with numpy {numpy}: "
        "pip install 'triton>=3.7' or 'numpy<2.4'"
    )
    assert problem == (None if ok else expected)


def test_the_versions_that_are_installed_are_those_asked_for():
    """tilelang is pinned: it breaks with another apache-tvm-ffi than its own."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [line.split(";")[0] for line in project["dependencies"]]
    assert "tilelang==0.1.15" in wanted
    assert "triton>=3.6" in wanted


def test_the_interpreters_bfloat16_product_is_not_trusted():
    """Small integers: bfloat16 holds them exactly, and triton's interpreter multiplies their bit
    patterns (triton-lang/triton#11584)."""
    if importlib.util.find_spec("triton") is None or runtime.triton_problem("cpu") is not None:
        pytest.skip("no interpreter here")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-2, 3, (1, 1, 16, 16), generator=g).float() for _ in range(3))
    truth = attention(q.double(), k.double(), v.double(), kernel="reference")
    out = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), kernel="triton")
    assert isinstance(out, torch.Tensor)
    assert isinstance(truth, torch.Tensor)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=2**-7)


# --- Several processes that compile at once ---------------------------------------------------

COMPILE = """
import sys, torch
from minitx.kernels import attention
kernel, device = sys.argv[1:]
g = torch.Generator().manual_seed(0)
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q = torch.randn(1, 2, 64, 64, generator=g).to(device, dtype).requires_grad_()
out = attention(q, q, q, kernel=kernel)
out.sum().backward()
print(out.float().sum().item(), q.grad.float().sum().item())
"""


def compile_at_once(kernel: str, device: str, processes: int, cache: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TILELANG_CACHE_DIR": str(cache / "tilelang"),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE, kernel, device],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    ends = [process.communicate(timeout=500) for process in running]
    for process, (_, error) in zip(running, ends, strict=True):
        assert process.returncode == 0, error
    assert len({out for out, _ in ends}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "tilelang"])
def test_eight_processes_compile_into_one_empty_cache(kernel, tmp_path):
    for attempt in range(2):
        compile_at_once(kernel, "cuda", 8, tmp_path / str(attempt))


@pytest.mark.slow
def test_two_processes_compile_for_the_cpu_into_one_empty_cache(tmp_path):
    compile_at_once("tilelang-softmax", "cpu", 2, tmp_path)
