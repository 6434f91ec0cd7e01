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
INF, NAN = math.inf, math.nan


def check(kernel: str, has_lse: bool, q, k, v, *, is_causal: bool, **kwargs) -> AttentionResult:
    """check_attention, but what PyTorch's own arithmetic rounds is not held to the budget."""
    if kernel != "sdpa":
        return check_attention(kernel, q, k, v, is_causal=is_causal, return_lse=has_lse, **kwargs)
    dout = torch.randn_like(q)
    truth = oracle_attention(q, k, v, dout, is_causal=is_causal, **kwargs)
    actual = run_attention(kernel, q, k, v, dout, is_causal=is_causal, return_lse=False, **kwargs)
    check_sdpa(actual, truth, q.dtype)
    return actual


def check_sdpa(actual: AttentionResult, truth: AttentionResult, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 32 * torch.finfo(dtype).eps
    for name in ("out", "dq", "dk", "dv"):
        got, want = getattr(actual, name), getattr(truth, name)
        size = want.abs().max().item() if want.numel() else 0.0
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
