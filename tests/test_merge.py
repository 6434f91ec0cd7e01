"""Merging partial attention: any split of the keys gives attention over all of them."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitx.kernels import attention_reference, merge_attention
from minitx.testing import make_qkv

INF = math.inf


def attend(q, k, v, scale=0.25):
    return attention_reference(q, k, v, is_causal=False, scale=scale)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 12), max_size=4), std=st.sampled_from([1.0, 30.0]))
def test_any_split_merges_to_the_whole(cuts, std):
    q, k, v = make_qkv(1, 2, 2, 3, 12, 4, dtype=torch.float64, std=std)
    edges = [0, *sorted(cuts), 12]
    parts = [attend(q, k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(edges)]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_attention(out, lse, *part)
    want_out, want_lse = attend(q, k, v)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_attention_over_all_keys():
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 2, 3, 7, 4, dtype=torch.float64))
    dout = torch.randn(q.shape, dtype=torch.float64)
    dlse = torch.randn(q.shape[:-1], dtype=torch.float64)
    merged = merge_attention(
        *attend(q, k[:, :, :3], v[:, :, :3]), *attend(q, k[:, :, 3:], v[:, :, 3:])
    )
    got = torch.autograd.grad(merged, (q, k, v), (dout, dlse))
    want = torch.autograd.grad(attend(q, k, v), (q, k, v), (dout, dlse))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_an_empty_part_leaves_the_other_bitwise_and_gradients_finite():
    out = torch.randn(1, 1, 2, 3, requires_grad=True)
    lse = torch.tensor([[[5.0, -3.0]]], requires_grad=True)
    nothing, minus_inf = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -INF)
    for merged in (
        merge_attention(out, lse, nothing, minus_inf),
        merge_attention(nothing, minus_inf, out, lse),
    ):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
        grads = torch.autograd.grad(sum(m.sum() for m in merged), (out, lse))
        torch.testing.assert_close(grads[0], torch.ones_like(out), rtol=0, atol=1e-6)
        torch.testing.assert_close(grads[1], torch.ones_like(lse), rtol=0, atol=1e-6)


def test_two_empty_parts_are_empty_with_zero_gradients():
    out = torch.zeros(1, 1, 1, 2, requires_grad=True)
    lse = torch.full((1, 1, 1), -INF, requires_grad=True)
    merged_out, merged_lse = merge_attention(out, lse, out, lse)
    assert torch.equal(merged_out, torch.zeros(1, 1, 1, 2))
    assert merged_lse.item() == -INF
    (grad,) = torch.autograd.grad(merged_out.sum(), out)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_far_apart_lse_do_not_overflow():
    one, two = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 2.0)
    high, low = torch.full((1, 1, 1), 1000.0), torch.full((1, 1, 1), -1000.0)
    assert merge_attention(one, high, two, low)[0].item() == 1.0
    assert merge_attention(one, low, two, high)[0].item() == 2.0
    assert merge_attention(one, high, two, low)[1].item() == 1000.0


def test_known_values_and_dtype():
    """Weights 1/4 and 3/4: lse 0 and ln 3."""
    a = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    b = torch.full((1, 1, 1, 2), 4.0, dtype=torch.bfloat16)
    lse_a, lse_b = torch.zeros(1, 1, 1), torch.full((1, 1, 1), math.log(3))
    out, lse = merge_attention(a, lse_a, b, lse_b)
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [3.0, 3.0]
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(out_b=torch.zeros(1, 1, 3, 3)), ValueError, "one shape"),
        (dict(lse_b=torch.zeros(1, 1, 3)), ValueError, "lse_b must have out's shape"),
        (dict(lse_a=torch.zeros(1, 1, 2).half()), TypeError, "lse_a must be float32"),
        (dict(out_b=torch.zeros(1, 1, 2, 3).half()), TypeError, "one dtype"),
        (dict(out_b=torch.zeros(1, 1, 2, 3, device="meta")), ValueError, "one device"),
    ],
)
def test_misfits_are_refused(change, error, message):
    parts = {
        "out_a": torch.zeros(1, 1, 2, 3),
        "lse_a": torch.zeros(1, 1, 2),
        "out_b": torch.zeros(1, 1, 2, 3),
        "lse_b": torch.zeros(1, 1, 2),
    }
    with pytest.raises(error, match=message):
        merge_attention(**(parts | change))
