"""What the tests of the attention contract share: the kernels, and the check against the reference.

The fixtures `kernel`, `has_lse` and `lse_kernel`, which run a test once for each kernel, are in
conftest.py.
"""

import math

import torch

from minitx.testing import (
    AttentionResult,
    check_attention,
    max_error,
    oracle_attention,
    run_attention,
)

KERNELS = ("eager", "sdpa", "triton", "tilelang")
PYTORCH_KERNELS = ("eager", "sdpa")
INF, NAN = math.inf, math.nan


def check(
    kernel: str,
    has_lse: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    with_dlse: bool = False,
) -> AttentionResult:
    """check_attention, but PyTorch's own arithmetic is held to `check_pytorch`."""
    kwargs: dict = {"is_causal": is_causal, "scale": scale}
    if kernel not in PYTORCH_KERNELS:
        return check_attention(
            kernel, q, k, v, return_lse=has_lse, with_dlse=with_dlse and has_lse, **kwargs
        )
    dout = torch.randn_like(q)
    if with_dlse and has_lse:
        kwargs["dlse"] = torch.randn(q.shape[:3], device=q.device)
    truth = oracle_attention(q, k, v, dout, **kwargs)
    actual = run_attention(kernel, q, k, v, dout, return_lse=has_lse, **kwargs)
    check_pytorch(actual, truth, q.dtype)
    return actual


def check_pytorch(actual: AttentionResult, truth: AttentionResult, dtype: torch.dtype) -> None:
    """The budget is made of what eager attention rounds: eager itself would always be within it,
    and sdpa is made of other kernels that we do not write."""
    tolerance = 1e-4 if dtype == torch.float32 else 32 * torch.finfo(dtype).eps
    for name in ("out", "lse", "dq", "dk", "dv"):
        got, want = getattr(actual, name), getattr(truth, name)
        if got is None:
            continue
        finite = want[want.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
        assert got.shape == want.shape, name
        assert max_error(got, want) <= tolerance * max(1.0, size), name


def constant(value: float, S: int, D: int = 16, **kwargs) -> torch.Tensor:
    """[1, 1, S, D] of one value."""
    return torch.full((1, 1, S, D), value, **kwargs)


def column(values: list[float], D: int = 16, **kwargs) -> torch.Tensor:
    """[1, 1, S, D] with the values in column 0 and zeros after it."""
    x = torch.zeros(1, 1, len(values), D, **kwargs)
    x[0, 0, :, 0] = torch.tensor(values)
    return x
