"""Softmax and cross-entropy written out in float64, and what a kernel is held to beside it."""

import torch

from minitx.kernels import linear_cross_entropy
from minitx.testing import error_budget, max_error

KERNELS = ("chunked", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("sum", "mean", "none")


def make(N=37, E=16, V=53, *, dtype=torch.float32, device="cpu", seed=0, ignored=(3, -1)):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, E, generator=generator).to(device, dtype)
    weight = torch.randn(V, E, generator=generator).to(device, dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[list(ignored)] = -100
    return hidden, weight, targets.to(device)


def oracle(hidden, weight, targets, reduction, dnll):
    """Loss, dhidden and dweight in float64, the gradients by the formula and not by autograd."""
    h, w = hidden.double(), weight.double()
    z = h @ w.T
    kept = (targets != -100).double()
    index = targets.clamp(min=0)[:, None]
    lse = z.amax(-1) + (z - z.amax(-1, keepdim=True)).exp().sum(-1).log()
    nll = (lse - z.gather(1, index)[:, 0]) * kept
    loss = {"none": nll, "sum": nll.sum(), "mean": nll.sum() / kept.sum()}[reduction]
    g = dnll.double() * kept / (kept.sum() if reduction == "mean" else 1.0)
    dz = (z - lse[:, None]).exp()
    dz = dz.scatter_add(1, index, -torch.ones_like(lse)[:, None]) * g[:, None]
    return loss, dz @ w, dz.T @ h


def run(kernel, hidden, weight, targets, reduction="sum", dnll=None, **settings):
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
    loss = linear_cross_entropy(
        hidden, weight, targets, reduction=reduction, kernel=kernel, **settings
    )
    loss.backward(torch.ones_like(loss) if dnll is None else dnll)
    return loss.detach(), hidden.grad, weight.grad


def assert_within_budget(results, baseline, truth, dtype):
    for name, got, eager, want in zip(
        ("loss", "dhidden", "dweight"), results, baseline, truth, strict=True
    ):
        assert got.shape == want.shape, name
        error, budget = max_error(got, want), error_budget(eager, want, dtype)
        assert error <= budget, f"{name}: error {error:.3e} beyond its budget {budget:.3e}"
