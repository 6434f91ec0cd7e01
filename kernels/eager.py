"""Attention as five PyTorch calls: the baseline that every other kernel is compared with.

Products are made in the input dtype, the softmax in float32. Memory is O(Sq * Skv) per head,
several times over. Logits that are -inf at every visible key give NaN, as torch.softmax does.
"""

import torch
import torch.nn.functional as F

from minitx.kernels.reference import causal_mask


def eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [B, Hq, Sq, D] in q's dtype, and lse [B, Hq, Sq] in float32 if asked for.

    Shapes as in `attention`. K and V are read through a broadcast view, never repeated.
    """
    Sq, Skv, Hkv = q.shape[2], k.shape[2], k.shape[1]
    if is_causal and Sq > Skv:  # the first Sq - Skv queries see no key
        empty = Sq - Skv
        out, lse = eager_attention(
            q[:, :, empty:], k, v, is_causal=True, scale=scale, return_lse=return_lse
        )
        out = F.pad(out, (0, 0, empty, 0))
        return out, None if lse is None else F.pad(lse, (empty, 0), value=float("-inf"))
    # The scale goes on q, before the product: in float16 q @ k^T itself can exceed 65504.
    grouped = (q * scale).unflatten(1, (Hkv, -1)) if Hkv else q.unsqueeze(2)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2)  # [B, Hkv, group, Sq, Skv]
    if is_causal and Sq > 1:  # a single query is the last one: it sees every key
        scores = scores.masked_fill(~causal_mask(Sq, Skv, q.device), float("-inf"))
    p = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    out = (p @ v.unsqueeze(2)).flatten(1, 2)
    if not return_lse:
        return out, None
    return out, torch.logsumexp(scores.float(), dim=-1).flatten(1, 2)


def eager_softmax(x: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Row softmax over the last dim by torch.softmax, in float32; rows with nothing to see give
    zeros."""
    scores = x.float()
    if is_causal:
        mask = causal_mask(x.shape[-2], x.shape[-1], x.device)
        scores = scores.masked_fill(~mask, float("-inf"))
    if x.shape[-1] == 0:
        return x.clone()
    # An ordinary row in place of an empty one, so that neither its value nor its gradient is ever
    # NaN.
    is_empty = scores.detach().amax(-1, keepdim=True) == float("-inf")
    p = torch.softmax(scores.masked_fill(is_empty, 0.0), dim=-1)
    return p.masked_fill(is_empty, 0.0).to(x.dtype)
