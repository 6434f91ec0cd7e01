"""How every attention kernel must behave under autograd: any dout, lse, no more than is asked."""

import itertools

import pytest
import torch
from attention_contract import check

from minitx.kernels import attention, merge_attention
from minitx.testing import assert_within_budget, make_qkv, oracle_attention, run_attention


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.mark.contract("gradients", "strides")
def test_expanded_dout_by_hand(kernel, device):
    q, k, v = (
        torch.tensor(x, device=device).view(1, 1, 2, 1).requires_grad_()
        for x in ([0.0, 0.0], [1.0, 3.0], [2.0, 4.0])
    )
    out = attention(q, k, v, scale=1.0, kernel=kernel)
    out.sum().backward()  # a gradient of stride 0
    for actual, expected in (
        (out, [2.0, 3.0]),
        (q.grad, [0.0, 1.0]),
        (k.grad, [0.0, 0.0]),
        (v.grad, [1.5, 0.5]),
    ):
        torch.testing.assert_close(actual.flatten().tolist(), expected, rtol=0, atol=1e-6)


@pytest.mark.contract("gradients", "strides")
@pytest.mark.parametrize("shape", ["expanded", "sliced", "transposed"])
def test_dout_of_any_strides(kernel, device, shape):
    q, k, v = make_qkv(2, 2, 2, 20, 20, 16, device=device)
    dout = {
        "expanded": torch.randn(2, 1, 20, 1, device=device).expand(2, 2, 20, 16),
        "sliced": torch.randn(2, 2, 20, 40, device=device)[..., 3:35:2],
        "transposed": torch.randn(2, 16, 20, 2, device=device).transpose(1, 3),
    }[shape]
    actual = run_attention(kernel, q, k, v, dout, is_causal=True, return_lse=False)
    expected = run_attention(kernel, q, k, v, dout.contiguous(), is_causal=True, return_lse=False)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=0, atol=1e-6
        )


@pytest.mark.contract("gradients", "strides")
def test_dout_from_an_odd_address(kernel, device):
    # In 16 bits, where kernels load 16 bytes at a time: misaligned, they end a process's CUDA.
    q, k, v = make_qkv(2, 2, 2, 20, 20, 16, device=device, dtype=torch.bfloat16)
    dout = torch.randn(q.numel() + 1, device=device, dtype=q.dtype)[1:].view(q.shape)
    actual = run_attention(kernel, q, k, v, dout, is_causal=True, return_lse=False)
    expected = run_attention(kernel, q, k, v, dout.clone(), is_causal=True, return_lse=False)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))


@pytest.mark.contract("lse")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_lse_is_differentiable(lse_kernel, device, is_causal):
    q, k, v = make_qkv(2, 4, 2, 70, 70, 16, device=device)
    check(lse_kernel, True, q, k, v, is_causal=is_causal, with_dlse=True)


@pytest.mark.contract("lse")
def test_a_loss_of_lse_alone(lse_kernel, device):
    q, k, v = (t.requires_grad_() for t in make_qkv(2, 2, 2, 20, 40, 16, device=device))
    grads = {}
    for name in (lse_kernel, "reference"):
        _, lse = attention(q, k, v, kernel=name, return_lse=True)
        grads[name] = torch.autograd.grad(lse.sum(), (q, k))
    for actual, expected in zip(*grads.values(), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.contract("lse")
def test_merging_two_halves_is_attention_over_the_whole(lse_kernel, device):
    # The forward and, as merge reads lse, its gradient.
    q, k, v = make_qkv(1, 4, 2, 33, 80, 16, device=device)
    dout = torch.randn_like(q)
    truth = oracle_attention(q, k, v, dout, is_causal=False)
    eager = run_attention("eager", q, k, v, dout, is_causal=False, return_lse=True)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    parts = [
        attention(q, k[:, :, s], v[:, :, s], is_causal=False, kernel=lse_kernel, return_lse=True)
        for s in (slice(0, 31), slice(31, 80))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert_within_budget(type(truth)(out, lse, *grads), eager, truth, q.dtype)


@pytest.mark.contract("gradients")
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_only_the_gradients_asked_for(kernel, device, needs):
    inputs = make_qkv(1, 4, 2, 20, 20, 16, device=device)
    dout = torch.randn_like(inputs[0])
    full = run_attention(kernel, *inputs, dout, is_causal=True, return_lse=False)
    leaves = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    out = attention(*leaves, kernel=kernel)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.backward(dout)
    for leaf, need, expected in zip(leaves, needs, (full.dq, full.dk, full.dv), strict=True):
        assert (leaf.grad is not None) == need
        if need:
            torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-6)


@pytest.mark.contract("gradients")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kernel, device, mode):
    q, k, v = (t.requires_grad_() for t in make_qkv(device=device))
    with mode():
        out = attention(q, k, v, kernel=kernel)
    assert not out.requires_grad
    assert torch.equal(out, attention(q, k, v, kernel=kernel))


@pytest.mark.contract("gradients")
def test_a_second_derivative_is_right_or_refused(kernel, device):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 1, 1, 8, 8, 16, device=device))

    def second(name: str) -> torch.Tensor:
        out = attention(q, k, v, kernel=name)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), k)[0]

    try:
        actual = second(kernel)
    except RuntimeError as error:
        assert "derivative" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(actual, second("reference"))


@pytest.mark.contract("gradients")
def test_inputs_are_left_alone_and_changes_to_them_are_noticed(kernel, device):
    q, k, v = (t.requires_grad_() for t in make_qkv(device=device))
    before = [t.detach().clone() for t in (q, k, v)]
    out = attention(q, k, v, kernel=kernel)
    out.sum().backward(retain_graph=True)
    assert all(torch.equal(t, b) for t, b in zip((q, k, v), before, strict=True))
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.contract("gradients")
def test_changing_out_is_noticed(kernel, device):
    if kernel == "eager":
        pytest.skip("it does not save its output")
    q, k, v = (t.requires_grad_() for t in make_qkv(device=device))
    out = attention(q, k, v, kernel=kernel)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.contract("gradients", "determinism")
def test_backward_twice_and_again_is_the_same(kernel, device):
    if kernel in ("eager", "sdpa") and device == "cuda":
        pytest.skip("PyTorch's own kernels make no such promise")
    q, k, v = make_qkv(2, 4, 2, 130, 130, 16, device=device)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, kernel=kernel)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    again = torch.autograd.grad(out, (q, k, v), dout)
    fresh = torch.autograd.grad(attention(q, k, v, kernel=kernel), (q, k, v), dout)
    for a, b, c in zip(first, again, fresh, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
