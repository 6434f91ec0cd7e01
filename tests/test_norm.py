"""Norms folded into the linear layers behind them, as compiled code runs them: the same function
and gradients, from a result that is kept in the dtype of the layer."""

import pytest
import torch
from torch import nn

from minitx.norm import kept_of_norm, norm_linear, run_norm
from minitx.recompute import Recompute

TOKENS, WIDTH, OUT = 24, 40, 56


def make_layers(norm: str, bias: bool, scale: bool = True) -> tuple[nn.Module, nn.Linear]:
    torch.manual_seed(0)
    if norm == "layer":
        layer = nn.LayerNorm(WIDTH, eps=1e-5, bias=bias, elementwise_affine=scale)
    else:
        layer = nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=scale)
    linear = nn.Linear(WIDTH, OUT, bias=bias)
    for p in layer.parameters():
        nn.init.normal_(p, mean=1.0, std=0.5)
    return layer, linear


def run(function, layers: nn.ModuleList, x: torch.Tensor, weight: torch.Tensor):
    """The result, and the gradients of its weighted sum in x and in all parameters."""
    x = x.clone().requires_grad_()
    layers.zero_grad()
    y = function(*layers, x)
    (y * weight).sum().backward()
    return [
        y.detach(),
        x.grad,
        *(p.grad.clone() for p in layers.parameters() if p.grad is not None),
    ]


def together(norm: nn.Module, linear: nn.Linear, x: torch.Tensor, recompute: Recompute = "none"):
    return norm_linear(norm, linear, kept_of_norm(norm, x), recompute)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    ("norm", "bias", "scale"),
    [("layer", False, True), ("layer", True, True), ("rms", False, True), ("rms", True, False)],
)
def test_a_compiled_norm_and_linear_are_those_of_pytorch(norm, bias, scale, recompute):
    layers = nn.ModuleList(make_layers(norm, bias, scale))
    x = torch.randn(TOKENS, WIDTH) * 3 + 1
    weight = torch.randn(TOKENS, OUT, dtype=torch.float64)
    got = run(compiled(lambda n, w, x: together(n, w, x, recompute)), layers, x, weight.float())
    exact = nn.ModuleList(make_layers(norm, bias, scale)).double()
    want = run(lambda n, w, x: w(n(x)), exact, x.double(), weight)
    assert len(got) == len(want) == 2 + sum(1 for _ in layers.parameters())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_under_autocast_it_errs_no_more_than_pytorch_does(norm):
    """By twice, in the mean: the scale is rounded with the weights and not with what they read."""
    layers = nn.ModuleList(make_layers(norm, bias=False))
    x = torch.randn(TOKENS, WIDTH) * 3 + 1
    weight = torch.randn(TOKENS, OUT)

    def autocast(function):
        def call(*inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return function(*inputs)

        return call

    got = run(compiled(autocast(together)), layers, x, weight)
    plain = run(autocast(lambda n, w, x: w(n(x))), layers, x, weight)
    exact = nn.ModuleList(make_layers(norm, bias=False)).double()
    want = run(lambda n, w, x: w(n(x)), exact, x.double(), weight.double())
    assert got[0].dtype == plain[0].dtype == torch.bfloat16
    for g, p, w in zip(got, plain, want, strict=True):
        assert g.dtype == p.dtype
        assert (g.double() - w).abs().mean() <= 2 * (p.double() - w).abs().mean()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_what_is_kept_has_the_dtype_of_the_linear_layer(norm):
    """One tensor of the input's shape, in bfloat16, of a norm and a linear layer together."""
    kept = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    layers = make_layers(norm, bias=False)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        compiled(together)(*layers, x)
    assert [t.dtype for t in kept if t.shape == x.shape] == [torch.bfloat16]


@pytest.mark.parametrize("bias", [False, True])
def test_a_norm_by_itself_comes_in_the_autocast_dtype(bias):
    norm, _ = make_layers("layer", bias)
    x = torch.randn(TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        got = compiled(run_norm)(norm, x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), norm(x), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(compiled(run_norm)(norm, x), norm(x))
