"""What is remembered of calls of the Triton kernels, and which calls are told apart."""

import weakref

import pytest
import torch
from attention_calls import calls_that_differ, other_strides, results_of

from minitx.kernels import softmax, supports

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import kept, triton_attention, triton_launch  # noqa: E402
from minitx.kernels.triton_launch import remember, remembered  # noqa: E402


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, where a launch told apart too little has the wrong strides."""
    monkeypatch.setattr(kept, "_remembered", {})
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", False)


def test_what_is_remembered_of_attention_keeps_no_tensor_alive(remembering):
    calls = calls_that_differ(_probe.device.type)
    results_of("triton", **calls["nothing"])
    references = [weakref.ref(calls["nothing"][name]) for name in "qkv"]
    calls.clear()
    assert kept._remembered
    assert [reference() for reference in references] == [None] * 3


def test_calls_of_attention_that_differ_are_told_apart(remembering):
    calls = calls_that_differ(_probe.device.type)
    for name, call in calls.items():
        results_of("triton", **calls["nothing"])
        actual = results_of("triton", **call)
        expected = results_of("reference", **call)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    number = len(kept._remembered)
    results_of("triton", **calls["nothing"])
    assert len(kept._remembered) == number > len(calls)


def test_gradients_that_lie_otherwise_are_told_apart(remembering, monkeypatch):
    call = calls_that_differ(_probe.device.type)["nothing"]

    def apart(q, k, v, needs):
        return tuple(other_strides(torch.empty_like(t)) for t in (q, k, v))

    expected = results_of("triton", **call)
    monkeypatch.setattr(triton_attention, "empty_grads", apart)
    actual = results_of("triton", **call)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_calls_of_softmax_that_differ_are_told_apart(remembering):
    scores = torch.randn(6, 40, device=_probe.device)
    grad = torch.randn_like(scores)
    for x, dy, is_causal in (
        (scores, grad, False),
        (other_strides(scores), grad, False),
        (scores, other_strides(grad), False),
        (scores, grad, True),
        (scores[:, :30], grad[:, :30], False),
        (scores[:5], grad[:5], False),
    ):
        results = []
        for kernel in ("triton", "reference"):
            leaf = x.detach().requires_grad_()
            y = softmax(leaf, is_causal=is_causal, kernel=kernel)
            results.append((y, *torch.autograd.grad(y, leaf, dy)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


def test_not_more_is_remembered_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(kept, "_remembered", {})
    monkeypatch.setattr(kept, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", False)
    for n in range(10):
        assert remembered((n,)) is None
        assert remember((n,), str(n)) == str(n)
        assert remembered((n,)) == str(n)
        assert len(kept._remembered) <= 3
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", True)  # where tiles depend on more
    assert remember(("new",), "launch") == "launch"
    assert remembered(("new",)) is None
