"""Kernels that TileLang compiled in an earlier process, found again without TileLang.

TileLang's key to its cache is made of what a builder gives: to look there takes its import and a
run of the builder, seconds of a process's start. So a note is kept beside that cache, under all
that a builder's result depends on: this package's source and what its modules hold now, the
builder's key, the target, and TileLang's version and environment variables. A note says which file
holds the kernel, and its hash. Where there is none, or it does not hold, TileLang is asked; of one
that does not hold a warning says why, as to ask takes those seconds at each start.
"""

import ctypes
import functools
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger("minitx")

FOLDER = Path(__file__).parent
# Those of TileLang's environment variables that a kernel does not depend on.
NEUTRAL_VARIABLES = ("TILELANG_CACHE_DIR", "TILELANG_PRINT_ON_COMPILATION")
LIBRARIES = {"libtvm_runtime.so": ctypes.RTLD_GLOBAL, "libtilelang.so": ctypes.RTLD_LOCAL}


class FoundKernel:
    """A kernel in TileLang's cache, read and ready to launch."""

    def __init__(self, folder: Path) -> None:
        import tvm_ffi

        _load_libraries()
        self.main: Callable[..., None] = tvm_ffi.load_module(folder / "executable.so")["main"]
        self._folder = folder

    def get_kernel_source(self, kernel_only: bool) -> str:
        """The generated CUDA, without its host's part."""
        assert kernel_only
        return (self._folder / "device_kernel.cu").read_text(encoding="utf-8")


def find(build: Callable[..., Any], target: Any, key: dict[str, Any]) -> FoundKernel | None:
    """The kernel that `note` was told of; None where it must be asked of TileLang."""
    path = _note_path(build, target, key)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return _pass_over(path, path, error)
    try:
        folder = _noted_folder(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _pass_over(path, path, error)
    try:
        return FoundKernel(folder)
    # Libraries that do not load, as they lie elsewhere in another TileLang: so for every kernel.
    except (OSError, ImportError, AttributeError, RuntimeError) as error:
        return _pass_over(_cache(), folder, error)


def note(build: Callable[..., Any], target: Any, key: dict[str, Any], compiled: Any) -> None:
    """Remembers where TileLang keeps what it compiled (a JITKernel), if it does."""
    folder = getattr(compiled, "_tilelang_cache_path", None)
    path = _note_path(build, target, key)
    # A builder is read when it is imported and, by TileLang, when it is run.
    if path is None or folder is None or _hash_source() != SOURCE:
        return
    try:
        noted = {
            "folder": str(Path(folder).relative_to(_cache())),
            "sha256": _hash(Path(folder) / "executable.so"),
        }
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(noted), encoding="utf-8")
        partial.replace(path)
    except (OSError, ValueError) as error:
        _warn_once(path.parent, f"{path.parent}: compiled kernels cannot be noted", error)


def _noted_folder(text: str) -> Path:
    """Where the kernel lies that a note tells of; an error says why it cannot be followed."""
    noted = json.loads(text)
    folder = _cache() / noted["folder"]
    if _hash(folder / "executable.so") != noted["sha256"]:
        raise ValueError(f"{folder / 'executable.so'} is not the file that was noted")
    return folder


def _pass_over(subject: Path, path: Path, error: Exception) -> None:
    _warn_once(subject, f"{path}: a compiled kernel is passed over", error)


def _warn_once(subject: Path, what: str, error: Exception) -> None:
    """Once a process for each subject: a note is looked for again when its kernel is compiled."""
    if subject not in _warned:
        _warned.add(subject)
        reason = (str(error) or "no reason given").splitlines()[0]
        why = f"{type(error).__name__}: {reason}"
        logger.warning("%s (%s); TileLang is asked, which takes seconds at a start", what, why)


_warned: set[Path] = set()


def _cache() -> Path:
    """TileLang's, where it would look for it now."""
    return Path(os.environ.get("TILELANG_CACHE_DIR", os.path.expanduser("~/.tilelang/cache")))


def _note_path(build: Callable[..., Any], target: Any, key: dict[str, Any]) -> Path | None:
    """None for what is no builder of this package, as its source is not known."""
    if target.kind != "cuda" or not build.__module__.startswith(f"{__package__}.") or not SOURCE:
        return None
    variables = [
        item
        for item in sorted(os.environ.items())
        if item[0].startswith("TILELANG_") and item[0] not in NEUTRAL_VARIABLES
    ]
    try:
        installed = (version("tilelang"), version("apache-tvm-ffi"), _library_stamp())
    except ImportError:  # no TileLang, which whoever asks it is told
        return None
    known = (
        SOURCE,
        _contents(build.__module__),
        (build.__module__, build.__qualname__, sorted(key.items()), tuple(target)),
        (*installed, variables),
    )
    return _cache() / "minitx" / f"{sha256(repr(known).encode()).hexdigest()}.json"


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _hash_source() -> str:
    """Of all of this package's files; "" where there are none, but an archive."""
    files = sorted(FOLDER.glob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else ""


SOURCE = _hash_source()  # as it is imported, not as it may be edited later


def _contents(builders: str) -> list[tuple[str, str, str]]:
    """(module, name, value) of what this package's modules hold that the module `builders` uses.

    Whoever tries another constant, or function, in a running process gets a kernel of its own.
    """
    return [
        (module.__name__, name, _value(value))
        for module in _reached(sys.modules[builders], {__name__: sys.modules[__name__]})
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
    ]


def _reached(module: ModuleType, seen: dict[str, ModuleType]) -> Iterator[ModuleType]:
    """It and those of this package that its names come from."""
    seen[module.__name__] = module
    yield module
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else _origin(value)
        if name.startswith(f"{__package__}.tilelang_") and name not in seen:
            yield from _reached(sys.modules[name], seen)


def _origin(value: Any) -> str:
    return getattr(value, "__module__", None) or ""


def _value(value: Any) -> str:
    """What distinguishes it: of a function or class where it comes from, as the source is known."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (str, int, float, tuple, list, dict)):
        return repr(value)
    return f"{_origin(value)}.{getattr(value, '__qualname__', type(value).__name__)}"


@functools.cache
def _libraries() -> Path:
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise ImportError("tilelang is not installed")
    return Path(spec.origin).parent / "lib"


def _library_stamp() -> tuple[int, ...]:
    """Of TileLang itself, which whoever works on it builds anew without another version."""
    try:
        stat = (_libraries() / "libtilelang.so").stat()
    except OSError:  # elsewhere; `_load_libraries` fails, and no note is followed
        return ()
    return stat.st_size, stat.st_mtime_ns


@functools.cache
def _load_libraries() -> None:
    """What a compiled kernel calls: CUDA's driver and TMA's descriptors through TVM. In the way in
    which TileLang loads them, which it may still do later."""
    for name, scope in LIBRARIES.items():
        ctypes.CDLL(str(_libraries() / name), mode=scope | os.RTLD_LAZY)
