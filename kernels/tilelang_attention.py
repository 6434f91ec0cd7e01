"""Online-LSE attention in TileLang, forward and backward: tiles, launches, custom ops, autograd.

out [B, Hq, Sq, D] = softmax(scale * q k^T + causal mask) v and lse [B, Hq, Sq], the natural log of
the sum of exponentials. Scores never reach memory: keys and values stream past each tile of
queries (`tilelang_attention_fwd.py`), and once more in the backward, which recomputes the
probabilities from lse (`tilelang_attention_bwd.py`).
"""

import torch

from minitx.kernels.tilelang_attention_bwd import (
    build_attention_bwd_dkdv,
    build_attention_bwd_dq,
    build_attention_bwd_stats,
)
from minitx.kernels.tilelang_attention_fwd import build_attention_fwd
from minitx.kernels.tilelang_runtime import get_kernel

HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)


def tilelang_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, Sq, D] in q's dtype and lse [B, Hq, Sq] in float32, both differentiable once.

    q: [B, Hq, Sq, D]; k, v: [B, Hkv, Skv, D], Hq a multiple of Hkv; one dtype.
    """
    return torch.ops.minitx.tilelang_attention_fwd(q, k, v, is_causal, scale)


@torch.library.custom_op("minitx::tilelang_attention_fwd", mutates_args=())
def _attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    key = dict(
        dtype="float32",
        HEAD_DIM=next(d for d in HEAD_DIMS if d >= q.shape[3]),
        IS_CAUSAL=is_causal,
        BLOCK_M=32,
        BLOCK_N=32,
        num_stages=2,
        threads=128,
    )
    kernel = get_kernel(build_attention_fwd, q.device, **key)
    kernel(q, k, v, out, lse, scale * 1.0)
    return out, lse


@_attention_fwd.register_fake
def _attention_fwd_fake(q, k, v, is_causal, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("minitx::tilelang_attention_bwd", mutates_args=())
def _attention_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    if out.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    HEAD_DIM = next(d for d in HEAD_DIMS if d >= q.shape[3])
    S = -(-q.shape[2] // 32) * 32
    stats = torch.empty((*q.shape[:2], 2, S), dtype=torch.float32, device=q.device)
    kernel = get_kernel(
        build_attention_bwd_stats,
        q.device,
        dtype="float32",
        HEAD_DIM=HEAD_DIM,
        BLOCK_M=32,
        threads=128,
    )
    kernel(out, dout, lse, dlse, stats)
    key = dict(
        dtype="float32",
        HEAD_DIM=HEAD_DIM,
        IS_CAUSAL=is_causal,
        BLOCK_M=32,
        BLOCK_N=32,
        num_stages=2,
        threads=128,
    )
    kernel = get_kernel(build_attention_bwd_dkdv, q.device, **key)
    kernel(q, k, v, dout, stats, dk, dv, scale * 1.0, scale)
    kernel = get_kernel(build_attention_bwd_dq, q.device, **key)
    kernel(q, k, v, dout, stats, dq, scale * 1.0, scale)
    return dq, dk, dv


@_attention_bwd.register_fake
def _attention_bwd_fake(dout, dlse, q, k, v, out, lse, is_causal, scale):
    return tuple(torch.empty_like(t) for t in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, is_causal, scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.is_causal, ctx.scale = is_causal, scale


def _backward(ctx, dout, dlse):
    dq, dk, dv = torch.ops.minitx.tilelang_attention_bwd(
        dout, dlse, *ctx.saved_tensors, ctx.is_causal, ctx.scale
    )
    return dq, dk, dv, None, None


_attention_fwd.register_autograd(_backward, setup_context=_setup_context)
