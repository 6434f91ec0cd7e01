"""Compiles the Triton attention for a Hopper GPU, on any machine, and prints what its kernels take.

    TRITON_INTERPRET=0 python tests/compile_triton_attention.py [bf16|fp16|fp32] [head dim]

A line a kernel: its name, shared memory in bytes, and how many wgmma instructions it has.
"""

import sys
from types import SimpleNamespace

import torch
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minitx.kernels import triton_attention, triton_attention_bwd, triton_attention_tiles
from minitx.kernels.triton_attention_tiles import padded_head_dim

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ALIGNED = [["tt.divisibility", 16]]


def compile_kernel(kernel, tiles, dtype: str, D: int):
    """The kernel for contiguous tensors [B, H, S, D] of dtype, causal, with every gradient."""
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
    float32 = ("lse_ptr", "dlse_ptr", "exponent_ptr", "delta_ptr")
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in float32 else f"*{dtype}"
            attributes[(i,)] = ALIGNED
        elif name == "dlse_strides":
            signature[name] = ("i32", "i32", "i32")
        elif name.endswith("_strides"):
            signature[name], constexprs[(i, 3)] = ("i32", "i32", "i32", "constexpr"), 1
            attributes |= {(i, dim): ALIGNED for dim in range(3)} if D % 16 == 0 else {}
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    options = {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": dtype != "fp32",
    }
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main(dtype: str = "bf16", D: str = "64") -> None:
    triton_attention_tiles.has_large_tiles = lambda device_index: True
    # What the choice of tiles looks at, without a GPU.
    x = SimpleNamespace(
        shape=(1, 1, 1024, int(D)), dtype=DTYPES[dtype], device=torch.device("cuda", 0)
    )
    for kernel, choose in (
        (triton_attention.attention_fwd, triton_attention.fwd_tiles),
        (triton_attention_bwd.attention_bwd_dq, triton_attention_bwd.dq_tiles),
        (triton_attention_bwd.attention_bwd_dkdv, triton_attention_bwd.dkdv_tiles),
    ):
        compiled = compile_kernel(kernel, choose(x, x), dtype, int(D))
        wgmma = compiled.asm["ptx"].count("wgmma.mma_async")
        print(kernel.__name__, compiled.metadata.shared, wgmma)


if __name__ == "__main__":
    main(*sys.argv[1:])
