"""How the TileLang kernels are written once, compiled once and launched.

A kernel is a *builder*: a function `build(lang, **key)` that returns a TileLang prim_func. One
builder serves the GPU and the CPU (TileLang's `c` target); `lang` is a `Language`, the words that
differ between the two. `key` is what the code depends on (dtype, head dim, flags), never a length:
sizes and strides are `T.dynamic(name, "int64")`, so that one compile serves every shape.

    def build_double(lang: Language, *, dtype: str):
        import tilelang.language as T      # here, not at the top of the file: nothing imports
                                           # tilelang before one of its kernels is asked for
        n, x_n, y_n = (T.dynamic(name, "int64") for name in ("n", "x_n", "y_n"))

        @T.prim_func
        def double(
            x: T.StridedTensor((n,), (x_n,), dtype),
            y: T.StridedTensor((n,), (y_n,), dtype),
            factor: T.float32,
        ):
            with T.Kernel(T.ceildiv(n, 128), threads=128) as block:
                tile = lang.tile((128,), dtype)
                for i in lang.each(128):
                    tile[i] = T.if_then_else(block * 128 + i < n, x[block * 128 + i], 0)
                for i in lang.each(128):
                    if block * 128 + i < n:
                        y[block * 128 + i] = factor * tile[i]

        return double

    kernel = get_kernel(build_double, x.device, dtype="float32")   # compiled at the first call
    kernel(x, y, 2.0)                                              # no copy, whatever the strides

Rules that keep it right:
- Call a kernel only with tensors that hold an element: an empty grid cannot be launched.
- Index arithmetic is in int64 where the sizes are; a loop variable times a constant may be int32.
- Strides that are `T.dynamic` are taken from the tensors, and nothing about them is assumed or
  checked, whatever the sizes (tile-ai/tilelang#1325 and #1697 are checks of constant strides).
- A stride or size variable belongs to one kernel: two tensors may share it only if they agree.
- Compiler options are part of the builder: `T.annotate_pass_configs({...})` in the prim_func.
- What a builder gives depends on its key and on constants and functions of this package, and on
  nothing else, such as an environment variable: a later process finds the kernel by these alone
  (`tilelang_found.py`).
"""

import functools
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from minitx.kernels import tilelang_found
from minitx.kernels.errors import KernelUnavailableError

logger = logging.getLogger("minitx")


class Target(NamedTuple):
    """What a kernel is compiled for: kind "c" (a CPU) or "cuda" with arch, e.g. "sm_90a"."""

    kind: str
    arch: str = ""


class Language(NamedTuple):
    """The words of TileLang that a GPU and the `c` target spell differently.

    tile(shape, dtype): on-chip memory of one block. GPU: `T.alloc_fragment`, registers spread over
        the block's threads. CPU: `T.alloc_local`.
    shared(shape, dtype): on-chip memory that every thread of the block can read. GPU:
        `T.alloc_shared`. CPU: `T.alloc_local`.
    each(*extents): a loop over a tile in no order. GPU: `T.Parallel`, spread over the threads. CPU:
        `T.serial` or `T.grid`.
    on_cpu: for the rare choice that needs more than a word, such as the size of a block.
    """

    tile: Callable[..., Any]
    shared: Callable[..., Any]
    each: Callable[..., Any]
    on_cpu: bool


class Kernel:
    """A compiled prim_func. Call it with the prim_func's arguments: torch tensors and numbers.

    The first argument is a tensor; every tensor lies on its device. The launch goes to PyTorch's
    current stream of that device, and the current device is what it was before.
    """

    def __init__(self, compiled: Any, target: Target, stride_slots: list[tuple[int, int]]) -> None:
        self._compiled = compiled
        self._on_cpu = target.kind == "c"
        self._stride_slots = stride_slots

    def __call__(self, *args: Any) -> None:
        if self._on_cpu:
            strides = [args[argument].stride(dim) for argument, dim in self._stride_slots]
            self._compiled(*args, *strides, stream=0)
            return
        device_index = args[0].get_device()
        if device_index == torch.cuda.current_device():
            self._main(*args)
        else:  # TileLang sets the device to the tensors' and leaves it there
            with torch.cuda.device(device_index):
                self._main(*args)

    @functools.cached_property
    def _main(self) -> Callable[..., None]:
        """The compiled function, which checks its arguments and finds their stream by itself.

        To call `compiled` is to pass through Python that makes outputs, of which our kernels have
        none, and that, after a compile, looks through all of TileLang's modules at every call.
        """
        if isinstance(self._compiled, tilelang_found.FoundKernel):
            return self._compiled.main
        return self._compiled.adapter.get_exportable_executable()["main"]

    @property
    def source(self) -> str:
        """The generated C or CUDA."""
        return self._compiled.get_kernel_source(kernel_only=True)


_kernels: dict[tuple, Kernel] = {}
_locks: dict[tuple, threading.Lock] = {}
_locks_guard = threading.Lock()
# One thread at a time imports TileLang and runs a builder. TileLang reads a builder's source by
# ast.parse, of which Python 3.11 takes two at once for an error in its own recursion
# (python/cpython#106905). A compile takes its time later.
_building = threading.Lock()


Request = tuple[Callable[..., Any], dict[str, Any]]  # a builder and its key


def get_kernel(
    build: Callable[..., Any],
    device: torch.device,
    soon: Callable[[], list[Request]] = list,
    **key: Any,
) -> Kernel:
    """`build`'s kernel for tensors on `device`, compiled at the first call with this key.

    soon: gives what is likely to be asked for next. Where this kernel has to be compiled, those
    are too, beside it and after it in the background; an error of theirs waits until they are asked
    for.

    Threads that ask for one kernel at once wait for one compile; different kernels compile side by
    side. TileLang keeps what it compiled in TILELANG_CACHE_DIR (~/.tilelang/cache), which it fills
    by renaming whole folders, so processes may share it. What is found there needs no TileLang,
    and starts nothing of what `soon` gives.

    Raises:
        KernelUnavailableError: tilelang, nvcc or the C++ compiler fails; one line says why.
    """
    kernel = _kernels.get((build, device, *key.items()))
    if kernel is None:

        def start_others() -> None:
            _compile_ahead(device, [r for r in soon() if r != (build, key)])

        kernel = _compile_once(build, _target(device), key, start_others)
        _kernels[build, device, *key.items()] = kernel
    return kernel


def _compile_ahead(device: torch.device, requests: list[Request]) -> None:
    """Starts compiling them, in their order, on all cores but one: somebody waits for what that one
    compiles. Who asks for one of these before its turn compiles it at once. The interpreter does
    not end before all are done."""
    if not requests:
        return
    pool = ThreadPoolExecutor(max(1, min(len(requests), (os.cpu_count() or 2) - 1)))
    for build, key in requests:
        pool.submit(get_kernel, build, device, **key)  # whose error stays in a future unread
    pool.shutdown(wait=False)


def get_kernels(device: torch.device, requests: list[Request]) -> list[Kernel]:
    """`get_kernel` for each (build, key). Those that must be compiled are compiled at once: most of
    the time goes to nvcc, a process of its own."""
    found = [_kernels.get((build, device, *key.items())) for build, key in requests]
    if None not in found:
        return found  # type: ignore[return-value]
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(
            pool.map(lambda request: get_kernel(request[0], device, **request[1]), requests)
        )


def compile_kernel(build: Callable[..., Any], target: Target, **key: Any) -> Kernel:
    """The same for a target: Target("cuda", "sm_90a") compiles without a GPU, given nvcc."""
    return _compile_once(build, target, key)


def _compile_once(
    build: Callable[..., Any],
    target: Target,
    key: dict[str, Any],
    when_built: Callable[[], None] = lambda: None,
) -> Kernel:
    """The kernel, compiled unless it is there, by one thread while others wait.

    when_built: called once the builder has run, which only one at a time may.
    """
    name = (build, target, *key.items())
    with _locks_guard:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        if name not in _kernels:
            _kernels[name] = _compile(build, target, key, when_built)
        return _kernels[name]


@functools.cache
def _target(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("c")
    major, minor = torch.cuda.get_device_capability(device)
    # "a": the instructions that one architecture alone has, such as Hopper's wgmma.
    return Target("cuda", f"sm_{major}{minor}" + ("a" if major >= 9 else ""))


def _compile(
    build: Callable[..., Any], target: Target, key: dict[str, Any], when_built: Callable[[], None]
) -> Kernel:
    if found := tilelang_found.find(build, target, key):
        return Kernel(found, target, [])
    started = time.perf_counter()
    with _building:
        tilelang = _import_tilelang()
        func = build(_language(target), **key)
    when_built()
    stride_slots: list[tuple[int, int]] = []
    if target.kind == "c":
        func, stride_slots = _with_stride_parameters(func)
        options: dict[str, Any] = {"target": "c", "compile_flags": ["-O3"]}
    else:
        options = {"target": {"kind": "cuda", "arch": target.arch}, "execution_backend": "tvm_ffi"}
    try:
        compiled = tilelang.compile(func, **options)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        first_line = str(error).strip().split("\n", 1)[0][:300]
        raise KernelUnavailableError(
            f"TileLang kernel '{build.__name__}' does not compile for {' '.join(target).strip()} "
            f"here: {first_line}"
        ) from error
    logger.debug("compiled %s %s in %.1f s", build.__name__, key, time.perf_counter() - started)
    tilelang_found.note(build, target, key, compiled)
    # Its host's part is compiled already, in the cache; TileLang would do so again.
    return Kernel(tilelang_found.find(build, target, key) or compiled, target, stride_slots)


def _import_tilelang() -> Any:
    # It announces every compile on stderr; minitx logs its own.
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    try:
        import tilelang
    except (ImportError, OSError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        # OSError: it makes its cache folder when imported. The others: an apache-tvm-ffi that is
        # not the one it was built with.
        first_line = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise KernelUnavailableError(
            f"tilelang cannot be imported: {first_line}; install tilelang==0.1.15 in a fresh "
            "environment, and set TILELANG_CACHE_DIR to a folder that can be written"
        ) from error
    return tilelang


def _language(target: Target) -> Language:
    import tilelang.language as T

    if target.kind == "c":
        return Language(T.alloc_local, T.alloc_local, _each_serially, on_cpu=True)
    return Language(T.alloc_fragment, T.alloc_shared, T.Parallel, on_cpu=False)


def _each_serially(*extents: Any) -> Any:
    from tilelang.language import grid, serial  # type: ignore[attr-defined]

    return serial(extents[0]) if len(extents) == 1 else grid(*extents)


def _with_stride_parameters(func: Any) -> tuple[Any, list[tuple[int, int]]]:
    """The prim_func with its dynamic strides as further int64 parameters, and where they come from.

    TileLang 0.1.15 forgets dynamic strides in the C function that its CPU back end calls, which
    then does not compile; parameters it passes on.

    Returns:
        The new prim_func, and (argument, dim) for each parameter added.
    """
    from tilelang import tvm

    added: list[Any] = []
    slots = []
    for argument, param in enumerate(func.params):
        strides = func.buffer_map[param].strides if param in func.buffer_map else []
        for dim, stride in enumerate(strides):
            if isinstance(stride, tvm.tirx.Var) and not any(stride.same_as(v) for v in added):
                added.append(stride)
                slots.append((argument, dim))
    params = [*func.params, *added]
    with_strides = tvm.tirx.PrimFunc(params, func.body, func.ret_type, func.buffer_map, func.attrs)
    return with_strides, slots
