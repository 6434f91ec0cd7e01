"""What every row-softmax kernel promises autograd, streams, devices and CUDA graphs."""

import pytest
import torch
from softmax_oracle import (
    KERNELS,
    check,
    forward_backward,
    normal,
    oracle,
    skip_unless_supported,
)
from torch.utils.checkpoint import checkpoint

from minitx.kernels import softmax, softmax_reference
from minitx.testing import max_error


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, device: str) -> str:
    return skip_unless_supported(request.param, device)


def test_gradients_that_are_expanded_or_strided(kernel, device):
    x = normal(6, 33).to(device)
    outgoing = {
        "sum": lambda y: y.sum(),
        "mean": lambda y: y.mean(),
        "one column": lambda y: y[..., 0].sum(),
        "cat": lambda y: (torch.cat([y, y * 2], -1) @ normal(66, 5).to(device)).square().sum(),
        "transpose": lambda y: (y.t().reshape(11, 18) @ normal(18, 5).to(device)).square().sum(),
    }
    for name, loss in outgoing.items():
        grads = []
        for run, dtype in (("kernel", torch.float32), ("oracle", torch.float64)):
            leaf = x.to(dtype).requires_grad_()
            y = softmax(leaf, kernel=kernel) if run == "kernel" else softmax_reference(leaf)
            value = loss(y.float() if run == "oracle" else y)
            grads.append(torch.autograd.grad(value, leaf)[0])
        assert max_error(*grads) < 1e-5, name


def test_a_second_derivative_is_right_or_raises(kernel, device):
    def second(function, x):
        (g,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    x = normal(3, 5).to(device).requires_grad_()
    if kernel == "eager":
        truth = second(softmax_reference, x.detach().double().requires_grad_())
        assert max_error(second(lambda x: softmax(x, kernel=kernel), x), truth) < 1e-5
    else:
        with pytest.raises(RuntimeError, match=r"second derivative|no autograd formula"):
            second(lambda x: softmax(x, kernel=kernel), x)


def test_grad_modes(kernel, device):
    x = normal(3, 5).to(device)
    assert not softmax(x, kernel=kernel).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not softmax(x, kernel=kernel).requires_grad
    with torch.inference_mode():
        y = softmax(x, kernel=kernel)
    assert max_error(y, oracle(x, x)[0]) < 1e-6


def test_inputs_are_never_written(kernel, device):
    x, dy = normal(9, 70).to(device), normal(9, 70, seed=1).to(device)
    kept = x.clone(), dy.clone()
    forward_backward(kernel, x, dy)
    assert torch.equal(x, kept[0])
    assert torch.equal(dy, kept[1])


def test_changing_the_output_in_place_is_right_or_raises(kernel, device):
    x = normal(3, 5).to(device).requires_grad_()
    weight = normal(3, 5, seed=1).to(device)
    y = softmax(x, kernel=kernel)
    y.mul_(2)
    if kernel == "eager":
        (y * weight).sum().backward()
        assert x.grad is not None
        assert max_error(x.grad, oracle(x, 2 * weight)[1]) < 1e-6
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y * weight).sum().backward()


def test_twice_over_one_graph_and_run_to_run_bit_for_bit(kernel, device):
    x, dy = normal(5, 3000).to(device).requires_grad_(), normal(5, 3000, seed=1).to(device)
    y = softmax(x, kernel=kernel)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    again = torch.autograd.grad(y, x, dy)[0]
    assert torch.equal(first, again)
    assert torch.equal(softmax(x, kernel=kernel), y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(kernel, device, use_reentrant):
    x, dy = normal(4, 50).to(device).requires_grad_(), normal(4, 50, seed=1).to(device)

    def block(x):
        return softmax(x * 3, kernel=kernel)

    (plain,) = torch.autograd.grad(block(x), x, dy)
    checkpoint(block, x, use_reentrant=use_reentrant).backward(dy)
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_the_tensors_own_device(kernel):
    torch.cuda.set_device(0)
    x = torch.randn(5, 300, device="cuda:1")
    check(kernel, x)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_the_current_stream(kernel):
    x = torch.zeros(512, 4096, device="cuda")
    softmax(x, kernel=kernel)  # compiled by now
    a = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            a = a @ a.clamp(-1, 1)  # keeps the stream busy
        x[:, 0] = 50.0
        y = softmax(x, kernel=kernel)
    stream.synchronize()
    assert max_error(y[:, 0], torch.ones(512, device="cuda")) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 1000), (4, 200_000)])
def test_cuda_graphs_once_warm(kernel, shape):
    x = torch.randn(shape, device="cuda")
    softmax(x, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x, kernel=kernel)
    for seed in (1, 2):
        x.copy_(normal(*shape, seed=seed))
        graph.replay()
        assert max_error(y, torch.softmax(x, -1)) < 1e-6
