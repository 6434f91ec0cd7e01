"""Launches Triton kernels twice, Triton's way and again without it, and compares what reaches the
GPU, on any machine: a driver that stands in for a Hopper GPU's records what it is to launch.

    TRITON_INTERPRET=0 python tests/launch_triton_again.py [attention|hopper|softmax|small ...]

A line a launch: the kernel's name and how many arguments were the same. Compiles, so that all but
`small` take a while. Raises AssertionError where the two differ.
"""

import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from minitx.kernels import (
    runtime,
    triton_attention,
    triton_attention_tiles,
    triton_launch,
    triton_softmax,
)
from minitx.kernels.triton_launch import Launch

STREAM = 11
launched: list[tuple] = []


class Utils:
    """Stands in for what Triton asks of CUDA when it loads a kernel."""

    def load_binary(self, name, binary, shared, device):
        return name, f"function of {name}", 32, 0, 1024

    def unload_module(self, module) -> None:
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 2**10}

    def fill_tma_descriptor(self, *args):
        return args  # of which a GPU's makes 128 bytes


class Launcher:
    """Stands in for the launcher of a kernel, and records what it is called with."""

    def __init__(self, src, metadata) -> None:
        self.name = src.fn.__name__

    def __call__(self, *args) -> None:
        # Not what a profiler would be told, and the empty chains of its hooks: 6, 7 and 8.
        launched.append((self.name, *args[:6], *(_plain(argument) for argument in args[9:])))


class Driver:
    """Stands in for the driver of a Hopper GPU."""

    utils, launcher_cls = Utils(), Launcher  # of 3.6, its own: see `keep_triton_s_launcher`

    def get_current_device(self) -> None:
        return None  # the index of the tensors' device, which is the CPU

    def get_current_stream(self, device: None) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def keep_triton_s_launcher() -> None:
    """Has Triton 3.6's launcher take descriptors apart, as it does for a GPU; what stands in is the
    function in C that it then calls, and records what it is called with."""
    from triton.backends.nvidia import driver as nvidia

    def record(*args) -> None:
        # Not what profilers would be told, and whom to tell: 10, 11 and 12.
        launched.append((*args[:10], *(_plain(argument) for argument in args[13:])))

    nvidia.library_dirs = list
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=record)
    Driver.launcher_cls = nvidia.CudaLauncher  # type: ignore[assignment]


def _plain(argument):
    """A tensor as its address, which is what the GPU gets of it; a descriptor as all it holds."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "base"):
        return {name: _plain(value) for name, value in vars(argument).items()}
    return argument


def stand_in() -> None:
    if triton_launch.CAN_RUN_EXPANDED:
        keep_triton_s_launcher()
    driver.set_active(Driver())  # type: ignore[arg-type]
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    triton_launch._current_stream = lambda index: STREAM
    triton_attention_tiles.has_large_tiles = lambda device_index: True
    triton_attention_tiles.has_hopper_kernels = lambda device_index: False
    runtime.multiprocessors = lambda device: 132  # type: ignore[assignment]
    launch_once = Launch.__call__

    def launch_twice(self: Launch, *tensors) -> None:
        launch_once(self, *tensors)  # cold
        launched.clear()
        launch_once(self, *tensors)  # where descriptors are kept, taking them apart
        launch_once(self, *tensors)
        self._launch_by_triton(tensors, is_aligned=True)
        first, again, by_triton = launched
        assert first == again == by_triton, f"\n{first}\n{again}\n{by_triton}"
        print(self.kernel.__name__, len(again), flush=True)

    Launch.__call__ = launch_twice


@triton.jit(do_not_specialize=["n"])
def small_kernel(x_ptr, none_ptr, y_ptr, strides, scale, n, BLOCK: tl.constexpr, ODD: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns * strides[0], mask=columns < n)
    tl.store(y_ptr + columns * strides[1], x * scale, mask=columns < n)


def small() -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    launch = Launch(
        small_kernel, x.device, 3, ((16, 1), 0.5, 7), ODD=True, num_warps=1, BLOCK=64, maxnreg=None
    )
    launch(x, None, y)


def attention(D: int = 64, is_hopper: bool = False) -> None:
    shapes = ((2, 4, 40, D), (2, 2, 56, D), (2, 2, 56, D), (2, 4, 40, D))
    q, k, v, dout = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    out, lse = triton_attention._fwd(q, k, v, True, 0.1)
    for dlse in (None, torch.zeros(2, 4, 40)):
        needs = [True, True, dlse is None or is_hopper]
        triton_attention._bwd(dout, dlse, q, k, v, out, lse, True, 0.1, needs)


def hopper() -> None:
    triton_attention_tiles.has_hopper_kernels = lambda device_index: True
    attention(64, is_hopper=True)
    attention(128, is_hopper=True)


def softmax() -> None:
    for x in (torch.zeros(6, 200), torch.zeros(200, 6).T):
        y = triton_softmax._fwd(x, True)
        triton_softmax._bwd(y, torch.zeros_like(y), True)


if __name__ == "__main__":
    stand_in()
    for name in sys.argv[1:]:
        {"small": small, "attention": attention, "hopper": hopper, "softmax": softmax}[name]()
