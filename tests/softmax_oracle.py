"""What the row-softmax tests share: kernels, inputs, the float64 oracle and the error budget."""

import math

import pytest
import torch

from minitx.kernels import softmax, softmax_reference, supports_softmax
from minitx.testing import error_budget, max_error

KERNELS = ("eager", "triton", "tilelang")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan


def skip_unless_supported(kernel: str, device: str) -> str:
    """The kernel's name, or a skip that says why it cannot run here."""
    support = supports_softmax(kernel, torch.zeros(1, device=device))
    if not support.ok:
        pytest.skip(support.reason)
    return kernel


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def forward_backward(kernel, x, dy, dim=-1, is_causal=False):
    x = x.detach().requires_grad_()
    y = softmax(x, dim, is_causal=is_causal, kernel=kernel)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def oracle(x, dy, dim=-1, is_causal=False):
    x = x.detach().double().requires_grad_()
    y = softmax_reference(x.movedim(dim, -1), is_causal=is_causal).movedim(-1, dim)
    (dx,) = torch.autograd.grad(y, x, dy.double())
    return y.detach(), dx


def check(kernel, x, dim=-1, is_causal=False, dy=None):
    """Holds y and dx to the error budget, on eager's errors and the float64 oracle; returns
    them."""
    if dy is None:  # of unit size: the budget's rounding is that of numbers up to 1
        dy = normal(*x.shape, seed=1).clamp(-1, 1).to(x.device, x.dtype)
    results = forward_backward(kernel, x, dy, dim, is_causal)
    baselines = forward_backward("eager", x, dy, dim, is_causal)
    truths = oracle(x, dy, dim, is_causal)
    for name, result, baseline, truth in zip(("y", "dx"), results, baselines, truths, strict=True):
        assert result.dtype == x.dtype
        assert result.shape == x.shape
        error, budget = max_error(result, truth), error_budget(baseline, truth, x.dtype)
        assert error <= budget, f"{name}: error {error:.3e} beyond its budget {budget:.3e}"
    return results


def relative_error(dtype):
    """What a probability may be off by: a rounding of its dtype, and what half a unit in the last
    place of a float32 log-sum-exp of up to 32 makes of it."""
    return torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
