"""Attention by torch.nn.functional.scaled_dot_product_attention, under this project's causal rule.

PyTorch picks the backend (cuDNN, flash, memory-efficient, math). Its `is_causal` is aligned
top-left, so it is used only where top-left and bottom-right agree.
"""

import torch
import torch.nn.functional as F

from minitx.kernels.reference import causal_mask


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> torch.Tensor:
    """out [B, Hq, Sq, D] in q's dtype. Shapes as in `attention`.

    With 1 < Sq < Skv and `is_causal` a boolean mask of Sq * Skv bytes is made.
    """
    Sq, Skv = q.shape[2], k.shape[2]
    if Skv == 0:  # an empty product: zeros, with gradients of 0 for q and empty ones for k and v
        group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return (q @ k.transpose(-1, -2)) @ v
    if is_causal and Sq > Skv:  # the first Sq - Skv queries see no key
        out = sdpa_attention(q[:, :, Sq - Skv :], k, v, is_causal=True, scale=scale)
        return F.pad(out, (0, 0, Sq - Skv, 0))
    mask = causal_mask(Sq, Skv, q.device) if is_causal and 1 < Sq < Skv else None
    # Where torch.compile keeps sizes symbolic, a comparison is a bool only once it was branched on.
    is_square_causal = True if is_causal and Sq == Skv else False  # noqa: SIM210
    is_grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_square_causal,
        scale=scale,
        enable_gqa=is_grouped,
    )
