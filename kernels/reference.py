"""The oracle: what attention and row softmax mean, in a few lines of float64 PyTorch.

Every other kernel is checked against these two functions, so they are written to be read, not to be
fast. Both are differentiable by autograd, any number of times.

Causal attention is aligned bottom-right: the last query sees every key. With Sq queries and Skv
keys, query i may read key j when j <= i + Skv - Sq (x: may read):

    Sq = 3, Skv = 5          Sq = 4, Skv = 2
      j 0 1 2 3 4              j 0 1
    i 0 x x x . .            i 0 . .    no key: out 0, lse -inf, gradients 0
      1 x x x x .              1 . .
      2 x x x x x              2 x .
                               3 x x
"""

import torch


def causal_mask(Sq: int, Skv: int, device: torch.device | str) -> torch.Tensor:
    """Boolean [Sq, Skv], True where query i may read key j."""
    i = torch.arange(Sq, device=device)[:, None]
    j = torch.arange(Skv, device=device)[None, :]
    return j <= i + (Skv - Sq)


def _exp_normalised(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row softmax and natural-log sum of exponentials; a row of -inf alone gives 0 and -inf."""
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1) - float("inf")  # a constant that autograd can follow
    # The maximum only shifts the exponent, so it takes no part in the derivative.
    row_max = scores.detach().amax(-1, keepdim=True)
    shift = row_max.masked_fill(row_max == float("-inf"), 0.0)
    p = (scores - shift).exp()
    row_sum = p.sum(-1, keepdim=True)
    is_empty = row_sum == 0
    lse = row_sum.masked_fill(is_empty, 1.0).log() + shift
    lse = lse.masked_fill(is_empty, float("-inf"))
    return p / row_sum.masked_fill(is_empty, 1.0), lse.squeeze(-1)


def softmax_reference(x: torch.Tensor, *, is_causal: bool = False) -> torch.Tensor:
    """softmax over the last dim of x in float64, rounded by nobody.

    x: [..., N]; with `is_causal`, [..., Sq, Skv] scores under the rule above. Returns float64, x's
    shape.
    """
    scores = x.double()
    if is_causal:
        mask = causal_mask(x.shape[-2], x.shape[-1], x.device)
        scores = scores.masked_fill(~mask, float("-inf"))
    return _exp_normalised(scores)[0]


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64.

    q: [B, Hq, Sq, D]; k, v: [B, Hkv, Skv, D], Hq a multiple of Hkv: query head h reads key head
    h // (Hq // Hkv). Returns out [B, Hq, Sq, D] and lse [B, Hq, Sq] (natural log), both float64.
    """
    Hq, Hkv = q.shape[1], k.shape[1]
    group = Hq // Hkv if Hkv else 1
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scores = (q.double() @ k.transpose(-1, -2)) * scale
    if is_causal:
        mask = causal_mask(q.shape[2], k.shape[2], q.device)
        scores = scores.masked_fill(~mask, float("-inf"))
    p, lse = _exp_normalised(scores)
    return p @ v, lse
