"""Attention over one tensor of queries, keys and values: as over three, with one gradient."""

import importlib

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from minitx.kernels import KernelUnavailableError, attention, packed_attention
from minitx.kernels.attention_ops import PACKED, unpack

FUSED = ["triton", "tilelang"]


def make(Hq=4, Hkv=2, S=20, D=16, dtype=torch.float32, device="cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, S, Hq + 2 * Hkv, D, generator=generator)
    return qkv.to(device, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("Hq", "Hkv", "D"),
    [
        (2, 2, 16),  # q, k and v of equal parts
        (4, 1, 16),  # a split in the wrong places would show
        (3, 3, 20),  # heads that are padded inside
    ],
)
def test_it_is_attention_over_the_three_views(kernel, Hq, Hkv, D, dtype, device):
    """out and gradient to the bit: the same kernels read and write the same numbers."""
    qkv = make(Hq, Hkv, 20, D, dtype, device)
    dout = torch.randn(2, Hq, 20, D, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    out = packed_attention(qkv, Hq, scale=0.3, kernel=kernel)
    (got,) = torch.autograd.grad(out, qkv, dout)
    want_out = attention(*unpack(qkv, Hq), scale=0.3, kernel=kernel)
    (want,) = torch.autograd.grad(want_out, qkv, dout)
    assert torch.equal(out, want_out)
    assert out.stride() == want_out.stride()
    assert torch.equal(got, want)
    assert got.is_contiguous()


@pytest.mark.parametrize("kernel", FUSED)
def test_the_gradient_is_written_where_it_belongs(kernel, device):
    """Compiled, no cat and no copy follow the backward's op, whose one result is the gradient."""
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    qkv = make(device=device)
    compiled = torch.compile(
        lambda qkv: packed_attention(qkv, 4, kernel=kernel),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
    )
    out = compiled(qkv)
    out.sum().backward()
    (result,) = graphs[1].graph.output_node().args[0]
    assert str(result.target) == f"minitx.{kernel}_packed_attention_bwd.default"
    (want,) = torch.autograd.grad(packed_attention(qkv, 4, kernel=kernel).sum(), qkv)
    # Not to the bit: the gradient of a sum is one number with strides of 0, or as many in memory.
    torch.testing.assert_close(qkv.grad, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", FUSED)
def test_the_kernels_fill_the_memory_they_are_given(kernel, device):
    """And return it: what they return instead would be copied there."""
    qkv, dqkv = make(device=device).detach(), make(device=device).detach().fill_(float("nan"))
    packed_attention(qkv, 4, kernel=kernel)  # makes the ops
    out, lse = PACKED[kernel](qkv, 4, True, 0.25)
    backward = importlib.import_module(f"minitx.kernels.{kernel}_attention")._bwd
    into = unpack(dqkv, 4)
    needs = [True] * 3
    saved = (*unpack(qkv, 4), out, lse)
    grads = backward(torch.ones_like(out), None, *saved, True, 0.25, needs, into)
    assert all(grad is place for grad, place in zip(grads, into, strict=True))
    assert not dqkv.isnan().any()


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("layout", ["heads first", "a slice"])
def test_any_strides(kernel, layout, device):
    qkv = make(device=device).detach()
    if layout == "heads first":
        strided = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        strided = torch.cat((qkv, qkv), dim=-1)[..., :16]
    strided, qkv = strided.requires_grad_(), qkv.requires_grad_()
    assert not strided.is_contiguous()
    outs = [packed_attention(t, 4, kernel=kernel) for t in (strided, qkv)]
    grads = [
        torch.autograd.grad(o.sin().sum(), t)[0] for o, t in zip(outs, (strided, qkv), strict=True)
    ]
    assert torch.equal(*outs)
    assert torch.equal(*grads)


@pytest.mark.parametrize("kernel", FUSED)
def test_opcheck(kernel, device):
    packed_attention(make(device=device), 4, kernel=kernel)  # makes the op
    op = getattr(torch.ops.minitx, f"{kernel}_packed_attention_fwd").default
    torch.library.opcheck(op, (make(device=device), 4, True, 0.25))


@pytest.mark.parametrize("kernel", FUSED)
def test_vmap_and_per_sample_gradients(kernel, device):
    def loss(qkv):
        return packed_attention(qkv[None], 4, kernel=kernel).square().sum()

    qkv = make(device=device).detach()
    got = torch.func.vmap(torch.func.grad(loss))(qkv)
    for i in range(2):
        torch.testing.assert_close(got[i], torch.func.grad(loss)(qkv[i]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", [*FUSED, "eager"])
def test_heads_may_be_counted_by_other_integers(kernel, device):
    qkv = make(device=device).detach()
    want = packed_attention(qkv, 4, kernel=kernel)
    for n_head in (np.int64(4), torch.tensor(4)):  # the latter is what torch.jit.trace reads
        assert torch.equal(packed_attention(qkv, n_head, kernel=kernel), want)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", FUSED)
def test_an_lse_that_was_used_reaches_the_gradient(kernel, device):
    """The ops give lse, too, though packed_attention does not ask for it."""
    qkv = make(device=device)
    packed_attention(qkv, 4, kernel=kernel)
    _, lse = PACKED[kernel](qkv, 4, True, 0.25)
    (got,) = torch.autograd.grad(lse.sum(), qkv)
    _, want_lse = attention(*unpack(qkv, 4), scale=0.25, kernel="reference", return_lse=True)
    (want,) = torch.autograd.grad(want_lse.sum(), qkv)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_mistakes_are_refused(device):
    qkv = make(device=device)
    for bad, heads in ((qkv[0], 4), (qkv, 3), (qkv, 10), (qkv, -2)):
        with pytest.raises(ValueError, match=r"qkv must be \[B, S, n_head \+ 2 n_kv_head, D\]"):
            packed_attention(bad, heads)
    with pytest.raises(TypeError, match=r"n_head must be an int, got 2\.0"):
        packed_attention(torch.ones(1, 8, 4, 16, device=device), 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="query heads must be a multiple of key heads"):
        packed_attention(make(Hq=3, Hkv=2, device=device), 3)
    with pytest.raises(KernelUnavailableError, match="not float64"):
        packed_attention(qkv.double(), 4, kernel="triton")
    packed_attention(qkv, 4, kernel="triton")
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient_twice(qkv)


def gradient_twice(qkv: torch.Tensor) -> None:
    out = packed_attention(qkv, 4, kernel="triton")
    (grad,) = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
    torch.autograd.grad(grad.sum(), qkv)
