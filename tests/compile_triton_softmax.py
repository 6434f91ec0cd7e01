"""Compiles the Triton softmax for a Hopper GPU, on any machine, as it would be launched there.

    TRITON_INTERPRET=0 python tests/compile_triton_softmax.py [float32|float16|bfloat16] [columns]

A line for the forward and the backward of full and causal rows: columns, the kernel's name,
is_causal, loads and stores of 16 bytes, registers a thread, and bytes that these overflow into.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minitx.kernels import triton_groups, triton_launch, triton_softmax, triton_softmax_wide

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "maxnreg", "launch_cooperative_grid")
KERNELS = {
    triton_softmax: ("_softmax_fwd_kernel", "_softmax_bwd_kernel"),
    triton_softmax_wide: ("_wide_fwd_kernel", "_wide_bwd_kernel"),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Compiled(NamedTuple):
    kernel: str
    is_causal: bool
    loads: int
    stores: int
    registers: int
    spilled: int


class Recorder:
    """Stands in for a kernel: compiles what it is launched with, and launches nothing."""

    def __init__(self, kernel, found: list[Compiled]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs) -> None:
        signature, constants, attributes = {}, {}, {}

        def describe(path: tuple[int, ...], value):
            if isinstance(value, tuple):
                return tuple(describe((*path, i), inner) for i, inner in enumerate(value))
            if isinstance(value, torch.Tensor):
                attributes[path] = [["tt.divisibility", 16]] if value.data_ptr() % 16 == 0 else []
                return TYPES[value.dtype]
            if value == 1:
                constants[path] = 1
                return "constexpr"
            if value % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return "i32" if value < 2**31 else "i64"

        for i, (name, value) in enumerate(zip(self.kernel.arg_names, args, strict=False)):
            signature[name] = describe((i,), value)
        for i, name in enumerate(self.kernel.arg_names[len(args) :], len(args)):
            signature[name], constants[(i,)] = "constexpr", kwargs[name]
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options={name: kwargs[name] for name in OPTIONS if kwargs.get(name) is not None},
        )
        ptx = compiled.asm["ptx"]
        registers, spilled = usage(compiled.asm["cubin"])
        self.found.append(
            Compiled(
                self.kernel.__name__,
                kwargs["IS_CAUSAL"],
                len(re.findall(r"ld\.global\S*\.v4", ptx)),
                len(re.findall(r"st\.global\S*\.v4", ptx)),
                registers,
                spilled,
            )
        )


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack: what the registers did not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2])


def compile_all(dtype: torch.dtype, n_cols: int) -> list[Compiled]:
    """The kernels for 64 contiguous rows of n_cols columns."""
    found: list[Compiled] = []
    with contextlib.ExitStack() as stack:

        def replace(module, name: str, value) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        for module, names in KERNELS.items():
            for name in names:
                replace(module, name, Recorder(getattr(module, name), found))
        for module in (triton_launch, triton_groups):
            replace(module, "launching_on", lambda device: contextlib.nullcontext())
        replace(triton_launch, "CAN_RUN_AGAIN", False)
        replace(triton_groups, "programs_at_once", lambda _, c: 132 * c.programs_per_sm)
        # On a CPU, so that addresses are real ones: nothing is launched.
        x = torch.empty(64, n_cols, dtype=dtype)
        for is_causal in (False, True):
            triton_softmax._fwd(x, is_causal)
            triton_softmax._bwd(x, x, is_causal)
    return found


def main(dtype: str = "bfloat16", *columns: str) -> None:
    for n in columns or ("128", "1024", "4096", "16384", "32768", "131072"):
        for line in compile_all(getattr(torch, dtype), int(n)):
            print(n, *line)


if __name__ == "__main__":
    main(*sys.argv[1:])
