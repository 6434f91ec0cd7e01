"""Attention over two sets of keys, from attention over each (FlashAttention-2, section 3.1.1).

With out_a, lse_a over keys A and out_b, lse_b over keys B, disjoint:

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

Split-KV decoding, ring attention and attention sinks are this function, repeated.
"""

import torch


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of attention over the union of two disjoint sets of keys.

    out_a, out_b: [B, Hq, Sq, D] of one dtype; lse_a, lse_b: [B, Hq, Sq] float32, natural log.
    Computed in float32 (float64 for float64 inputs); out has out_a's dtype. An empty part (out 0,
    lse -inf) leaves the other as it is; two empty parts give an empty one. Differentiable in all
    four.

    Raises ValueError or TypeError where shapes, dtypes or devices do not fit one another.
    """
    _check_parts(out_a, lse_a, out_b, lse_b)
    dtype = torch.promote_types(lse_a.dtype, torch.float32)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    top = torch.maximum(lse_a, lse_b).detach()
    # -inf - -inf is NaN: where both parts are empty, any finite shift will do. Where a part's lse
    # is +inf there is nothing left to weigh, and NaN is what attention over the whole gives too.
    top = top.masked_fill(top == float("-inf"), 0.0)
    weight_a, weight_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = weight_a + weight_b
    is_empty = total == 0
    divisor = total.masked_fill(is_empty, 1.0)
    out = out_a.to(dtype) * (weight_a / divisor).unsqueeze(-1) + out_b.to(dtype) * (
        weight_b / divisor
    ).unsqueeze(-1)
    lse = (divisor.log() + top).masked_fill(is_empty, float("-inf"))
    return out.to(out_a.dtype), lse


def _check_parts(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    if out_a.shape != out_b.shape:
        raise ValueError(
            "out_a and out_b must have one shape, "
            f"got {tuple(out_a.shape)} and {tuple(out_b.shape)}"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1]:
            raise ValueError(
                f"{name} must have out's shape without its last dim, {tuple(out_a.shape[:-1])}, "
                f"got {tuple(lse.shape)}"
            )
        if lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, got {lse.dtype}")
    if out_a.dtype != out_b.dtype:
        raise TypeError(f"out_a and out_b must have one dtype, got {out_a.dtype}, {out_b.dtype}")
    if len({t.device for t in (out_a, lse_a, out_b, lse_b)}) > 1:
        raise ValueError("out_a, lse_a, out_b and lse_b must be on one device")
