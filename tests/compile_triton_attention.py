"""Compiles the Triton attention for a Hopper GPU, on any machine, and prints what its kernels take.

    TRITON_INTERPRET=0 python tests/compile_triton_attention.py [bf16|fp16|fp32] [head dim]
    TRITON_INTERPRET=0 python tests/compile_triton_attention.py [bf16|fp16] hopper

A line a kernel: its name, shared memory in bytes, and how many wgmma instructions it has. The
second compiles the kernels for Hopper alone, for their own head dims.
"""

import sys
from types import SimpleNamespace

import torch
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minitx.kernels import (
    triton_attention,
    triton_attention_bwd,
    triton_attention_dkdv,
    triton_attention_tiles,
)
from minitx.kernels.triton_attention_tiles import padded_head_dim

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ALIGNED = [["tt.divisibility", 16]]


def compile_kernel(
    kernel, dtype: str, D: int, options: dict, *, constants: dict, rows: dict, source=ASTSource
):
    """The kernel for contiguous tensors [B, H, S, D] of dtype.

    constants: its constexpr arguments and their values; rows: of each TMA descriptor, the rows (of
    one without columns, the numbers) it reads at a time, and the layout they get.
    """
    float32 = ("lse_ptr", "dlse_ptr", "exponent_ptr", "delta_ptr")
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        elif name in rows:
            n_rows, layout = rows[name]
            is_of_rows = name.removesuffix("_desc") not in ("exponent", "delta")
            box = f"{dtype}[1, 1, {n_rows}, {D}]" if is_of_rows else f"fp32[{n_rows}]"
            signature[name] = f"tensordesc<{box},{layout!r}>"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in float32 else f"*{dtype}"
            signature[name] = "*i32" if name == "taken_ptr" else signature[name]
            attributes[(i,)] = ALIGNED
        elif name == "dlse_strides":
            signature[name] = ("i32", "i32", "i32")
        elif name.endswith("_strides"):
            signature[name], constexprs[(i, 3)] = ("i32", "i32", "i32", "constexpr"), 1
            attributes |= {(i, dim): ALIGNED for dim in range(3)} if D % 16 == 0 else {}
        else:
            signature[name] = "fp32" if name.endswith("scale") else "i32"
    return triton_compile(
        source(kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )


def compile_portable(kernel, tiles, dtype: str, D: int):
    """A kernel for any GPU, causal, with every gradient."""
    constants = {
        "D": D,
        "HEAD_DIM": padded_head_dim(D),
        "IS_CAUSAL": True,
        "SCALE_SIGN": 1,
        "EXACT": dtype == "fp32",
        "GROUP": 1,
        "WIDE": False,
        "HAS_DLSE": True,
        "NEEDS_DQ": True,
        "NEEDS_DK": True,
        "NEEDS_DV": True,
        "BLOCK_M": tiles.BLOCK_M,
        "BLOCK_N": tiles.BLOCK_N,
    }
    options = {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": dtype != "fp32",
    }
    return compile_kernel(kernel, dtype, D, options, constants=constants, rows={})


def compile_hopper(dtype: str) -> list:
    """The kernels for Hopper alone, causal, with every gradient."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from minitx.kernels.triton_attention_bwd_hopper import attention_bwd_dq_hopper
    from minitx.kernels.triton_attention_dkdv_hopper import attention_bwd_dkdv_hopper
    from minitx.kernels.triton_attention_hopper import attention_fwd_hopper, choose_tiles
    from minitx.kernels.triton_hopper_tiles import FLOATS_LAYOUT, TILE_LAYOUT

    # Rows, or numbers, that each descriptor reads at a time.
    of_dq = {"q": 64, "dout": 64, "k": 128, "v": 128}
    names = ("q", "dout", "k", "v", "exponent", "delta", "dk", "dv")
    of_dkdv = dict.fromkeys(names, 64)
    kernels = [
        (attention_bwd_dq_hopper, 128, of_dq, {}),
        (attention_bwd_dkdv_hopper, 64, of_dkdv, {}),
        (attention_bwd_dkdv_hopper, 128, of_dkdv, {}),
    ]
    for D, Skv in ((64, 1024), (64, 8192), (128, 1024), (128, 8192)):  # few keys, and many
        tiles = choose_tiles(D, Skv)
        read = {"q": 64, "k": tiles.BLOCK_N, "v": tiles.BLOCK_N}
        kernels.append((attention_fwd_hopper, D, read, tiles._asdict()))
    return [
        compile_kernel(
            kernel,
            dtype,
            D,
            {"num_warps": 4, "enable_fp_fusion": True},
            constants={
                "IS_CAUSAL": True,
                "HAS_DLSE": True,
                "GROUP": 1,
                "HEAD_DIM": D,
                **tiles,
            },
            rows={
                f"{name}_desc": (n, FLOATS_LAYOUT if name in ("exponent", "delta") else TILE_LAYOUT)
                for name, n in read.items()
            },
            source=GluonASTSource,
        )
        for kernel, D, read, tiles in kernels
    ]


def compile_all(dtype: str, D: int) -> list:
    """The kernels for any GPU."""
    triton_attention_tiles.has_large_tiles = lambda device_index: True
    # What the choice of tiles looks at, without a GPU.
    x = SimpleNamespace(shape=(1, 1, 1024, D), dtype=DTYPES[dtype], device=torch.device("cuda", 0))
    return [
        compile_portable(kernel, choose(x, x), dtype, D)
        for kernel, choose in (
            (triton_attention.attention_fwd, triton_attention.fwd_tiles),
            (triton_attention_bwd.attention_bwd_dq, triton_attention_tiles.dq_tiles),
            (triton_attention_dkdv.attention_bwd_dkdv, triton_attention_tiles.dkdv_tiles),
        )
    ]


def main(dtype: str = "bf16", D: str = "64") -> None:
    for kernel in compile_hopper(dtype) if D == "hopper" else compile_all(dtype, int(D)):
        wgmma = kernel.asm["ptx"].count("wgmma.mma_async")
        print(kernel.metadata.name, kernel.metadata.shared, wgmma)


if __name__ == "__main__":
    main(*sys.argv[1:])
