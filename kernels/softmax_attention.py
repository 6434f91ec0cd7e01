"""Attention in three steps around a row-softmax kernel: scores by matmul, softmax, matmul.

The rung between eager and fused attention: the mask and the softmax are one kernel, but the scores
are still in memory, O(Sq * Skv) per head.
"""

import torch


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    kernel: str,
) -> torch.Tensor:
    """out [B, Hq, Sq, D] in q's dtype. Shapes as in `attention`; `kernel` is the row softmax's
    name.

    K and V are read through a broadcast view, never repeated.
    """
    Hkv = k.shape[1]
    grouped = (q * scale).unflatten(1, (Hkv, -1)) if Hkv else q.unsqueeze(2)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2)  # [B, Hkv, group, Sq, Skv]
    p = _row_softmax(kernel, scores, is_causal)
    return (p @ v.unsqueeze(2)).flatten(1, 2)


def _row_softmax(kernel: str, scores: torch.Tensor, is_causal: bool) -> torch.Tensor:
    if kernel == "triton":
        from minitx.kernels.triton_softmax import triton_softmax

        return triton_softmax(scores, is_causal=is_causal)
    from minitx.kernels.tilelang_softmax import tilelang_softmax

    return tilelang_softmax(scores, is_causal=is_causal)
