"""Calls that reach a kernel without PyTorch's dispatcher, and those that must not."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from minitx.kernels import attention, softmax
from minitx.testing import make_qkv

OPS = torch.ops.minitx


class Seen(TorchDispatchMode):
    """Records the ops of this project that are called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "minitx":
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_ops_and_gets_the_same(device):
    # Selective checkpointing, counting of operations and tracing live by seeing ops.
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 2, 20, 20, 16, device=device))

    def step():
        out = attention(q, k, v, kernel="triton")
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    direct = step()
    with Seen() as seen:
        through_ops = step()
    assert seen.ops == [OPS.triton_attention_fwd.default, OPS.triton_attention_bwd.default]
    assert all(torch.equal(a, b) for a, b in zip(direct, through_ops, strict=True))


def test_a_tensor_with_its_sign_still_to_change(device):
    # PyTorch negates lazily here, and only its dispatcher knows.
    x = torch.view_as_complex(torch.randn(4, 8, 2, device=device)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(softmax(x, kernel="triton"), softmax(x.clone(), kernel="eager"))
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=device)
    lazy = torch.view_as_complex(torch.stack([q, -q], -1)).conj().imag
    assert lazy.is_neg()
    out = attention(lazy, k, v, kernel="triton")
    torch.testing.assert_close(out, attention(q, k, v, kernel="triton"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of PyTorch's own
def test_forward_mode_is_refused_and_not_taken_for_zero(device):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=device)
    x = torch.randn(4, 8, device=device)
    assert attention(q, k, v, kernel="triton").isfinite().all()
    with forward_ad.dual_level():
        # Without a tangent there is nothing to lose.
        plain = attention(q, k, v, kernel="triton")
        moving_v = forward_ad.make_dual(v, torch.ones_like(v))
        moving_x = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative; use kernel"):
            attention(q, k, moving_v, kernel="triton")
        with pytest.raises(NotImplementedError, match="no forward-mode derivative; use kernel"):
            softmax(moving_x, kernel="triton")
    torch.testing.assert_close(plain, attention(q, k, v, kernel="triton"))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.autograd.functional.jacobian(
            lambda q: attention(q, k, v, kernel="triton"),
            q,
            vectorize=True,
            strategy="forward-mode",
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_graph_holds_the_op(device):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=device)
    traced = torch.jit.trace(lambda q: attention(q, k, v, kernel="triton"), (q,))
    torch.testing.assert_close(traced(2 * q), attention(2 * q, k, v, kernel="triton"))


def test_nothing_is_recorded_where_no_gradient_is_asked_for(device):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=device)
    assert attention(q, k, v, kernel="triton").grad_fn is None
    q.requires_grad_()
    assert attention(q, k, v, kernel="triton").grad_fn is not None
    with torch.no_grad():
        assert attention(q, k, v, kernel="triton").grad_fn is None
