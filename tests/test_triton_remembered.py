"""What is remembered of calls of the Triton kernels, and which calls are told apart."""

import weakref

import pytest
import torch

from minitx.kernels import attention, softmax, supports

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import kept, triton_attention, triton_launch  # noqa: E402
from minitx.kernels.triton_launch import remember, remembered  # noqa: E402
from minitx.testing import make_qkv  # noqa: E402


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, where a launch told apart too little has the wrong strides."""
    monkeypatch.setattr(kept, "_remembered", {})
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", False)


def other_strides(t: torch.Tensor) -> torch.Tensor:
    """t's values, with its last dim the outermost in memory."""
    return t.detach().movedim(-1, 0).contiguous().movedim(0, -1)


def attention_results(kernel, q, k, v, dout, dlse, needs, **settings) -> list[torch.Tensor]:
    """out, lse, and the gradients that are needed."""
    leaves = [t.detach().requires_grad_(need) for t, need in zip((q, k, v), needs, strict=True)]
    out, lse = attention(*leaves, kernel=kernel, return_lse=True, **settings)
    results, grads = ((out, lse), (dout, dlse)) if dlse is not None else ((out,), (dout,))
    wanted = [t for t in leaves if t.requires_grad]
    return [out, lse, *torch.autograd.grad(results, wanted, grads)]


def _calls() -> dict[str, dict]:
    """By what they differ in from the first: the arguments of attention_results."""
    device = _probe.device.type
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
        "dout's strides": {"dout": other_strides(dout)},
        "dlse's strides": {"dlse": dlse.mT.contiguous().mT},
        "dlse": {"dlse": None},
        "Skv": {"k": long_k, "v": long_v},
        "scale": {"scale": 0.7},
        "no causal rule": {"is_causal": False},
        "no dq": {"needs": (False, True, True)},
        "no dk": {"needs": (True, False, True)},
        "no dv": {"needs": (True, True, False)},
        "Sq": {"q": q[:, :, :5], "dout": dout[:, :, :5], "dlse": dlse[..., :5]},
    }
    return {name: first | other for name, other in others.items()}


def test_what_is_remembered_of_attention_keeps_no_tensor_alive(remembering):
    calls = _calls()
    attention_results("triton", **calls["nothing"])
    references = [weakref.ref(calls["nothing"][name]) for name in "qkv"]
    calls.clear()
    assert kept._remembered
    assert [reference() for reference in references] == [None] * 3


def test_calls_of_attention_that_differ_are_told_apart(remembering):
    calls = _calls()
    for name, call in calls.items():
        attention_results("triton", **calls["nothing"])
        actual = attention_results("triton", **call)
        expected = attention_results("reference", **call)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    number = len(kept._remembered)
    attention_results("triton", **calls["nothing"])
    assert len(kept._remembered) == number > len(calls)


def test_gradients_that_lie_otherwise_are_told_apart(remembering, monkeypatch):
    call = _calls()["nothing"]

    def apart(q, k, v, needs):
        return tuple(other_strides(torch.empty_like(t)) for t in (q, k, v))

    expected = attention_results("triton", **call)
    monkeypatch.setattr(triton_attention, "empty_grads", apart)
    actual = attention_results("triton", **call)
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
