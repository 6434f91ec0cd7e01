"""What the tests of the TileLang forward for Hopper share."""

import pytest
import torch

from minitx.kernels import attention, attention_reference
from minitx.kernels.tilelang_attention_tiles import takes_hopper_kernels
from minitx.testing import error_budget, max_error


def on_hopper(test):
    """Runs where the kernels are those that `tilelang` takes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    elsewhere = not takes_hopper_kernels(torch.bfloat16, device)
    skip = pytest.mark.skipif(elsewhere, reason="needs a GPU of compute capability 9.0")
    return pytest.mark.gpu(skip(test))


def check_forward(q, k, v, *, is_causal: bool, scale: float | None = None):
    """out and lse, held to the budget and to be the same bits twice."""
    kwargs = {"is_causal": is_causal, "scale": scale}
    actual, again = (attention(q, k, v, kernel="tilelang", return_lse=True, **kwargs) for _ in "12")
    eager = attention(q, k, v, kernel="eager", return_lse=True, **kwargs)
    kwargs["scale"] = q.shape[3] ** -0.5 if scale is None else scale
    truth = attention_reference(q, k, v, **kwargs)
    for name, got, other, base, want in zip(
        ("out", "lse"), actual, again, eager, truth, strict=True
    ):
        error, budget = max_error(got, want), error_budget(base, want, q.dtype)
        assert error <= budget, f"{name}: error {error:.3e} beyond its budget {budget:.3e}"
        bits = torch.int16 if got.element_size() == 2 else torch.int32
        assert torch.equal(got.view(bits), other.view(bits)), f"{name} differs from run to run"
    return actual
