"""Calls of attention that differ in one thing: what is kept of one must not serve another."""

import torch

from minitx.kernels import attention
from minitx.testing import make_qkv


def other_strides(t: torch.Tensor) -> torch.Tensor:
    """t's values, with its last dim the outermost in memory."""
    return t.detach().movedim(-1, 0).contiguous().movedim(0, -1)


def results_of(kernel, q, k, v, dout, dlse, needs, **settings) -> list[torch.Tensor]:
    """out, lse, and the gradients that are needed."""
    leaves = [t.detach().requires_grad_(need) for t, need in zip((q, k, v), needs, strict=True)]
    out, lse = attention(*leaves, kernel=kernel, return_lse=True, **settings)
    results, grads = ((out, lse), (dout, dlse)) if dlse is not None else ((out,), (dout,))
    wanted = [t for t in leaves if t.requires_grad]
    return [out, lse, *torch.autograd.grad(results, wanted, grads)]


def calls_that_differ(device: str) -> dict[str, dict]:
    """By what they differ in from the first, "nothing": the arguments of `results_of`."""
    # Cut out of longer ones, so that their lengths can change and their strides stay.
    long_q, long_k, long_v = make_qkv(2, 2, 1, 12, 12, 16, device=device)
    q, k, v = long_q[:, :, :8], long_k[:, :, :8], long_v[:, :, :8]
    dout, dlse = torch.randn(2, 2, 8, 16, device=device), torch.randn(2, 2, 8, device=device)
    first = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, "needs": (True, True, True)}
    others: dict[str, dict] = {
        "nothing": {},
        "q's strides": {"q": other_strides(q)},
        "heads of q that are one": {"q": q[:, :1].expand(2, 2, 8, 16)},  # whose out is as before
        "k's strides": {"k": other_strides(k)},
        "v's strides": {"v": other_strides(v)},
        "keys that are repeated": {"k": k[:1].expand_as(k)},
        "values that are repeated": {"v": v[:1].expand_as(v)},
        "dout's strides": {"dout": other_strides(dout)},
        "dlse's strides": {"dlse": dlse.mT.contiguous().mT},
        "dlse": {"dlse": None},
        "Skv": {"k": long_k, "v": long_v},
        "Hkv": {"k": k.repeat(1, 2, 1, 1), "v": v.repeat(1, 2, 1, 1)},
        "D": {"q": q[..., :12], "k": k[..., :12], "v": v[..., :12], "dout": dout[..., :12]},
        "scale": {"scale": 0.7},
        "no causal rule": {"is_causal": False},
        "no dq": {"needs": (False, True, True)},
        "no dk": {"needs": (True, False, True)},
        "no dv": {"needs": (True, True, False)},
        "Sq": {"q": q[:, :, :5], "dout": dout[:, :, :5], "dlse": dlse[..., :5]},
        "B": {name: first[name][:1] for name in ("q", "k", "v", "dout", "dlse")},
    }
    return {name: first | other for name, other in others.items()}
