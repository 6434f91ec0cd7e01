"""The Triton attention's own kernels for Hopper: that they run where they should, and are right.

They run where `hopper_takes` says so: 16-bit inputs, head dim 64 or 128. The forward's tiles are
256 queries by 64 keys, with many keys 192 by 128 (at a head dim of 128, 128 by 64 or by 128); the
backward's 128 by 128, and 128 keys by 64 queries. A warpgroup has 64 rows: lengths cross those.
Whatever they do not take must run on the portable kernels, and be right too.
"""

import math

import pytest
import torch
from triton_hopper import both, causal_or_not, each_dtype, each_head_dim, on_hopper

from minitx.kernels import attention
from minitx.testing import check_attention, make_qkv, run_attention

INF, NAN = math.inf, math.nan


def constant(value: float, S: int, D: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((1, 1, S, D), value, dtype=dtype, device="cuda")


# Values

# (B, Hq, Hkv, Sq, Skv) and what it is there to catch
SHAPES = [
    pytest.param(2, 3, 3, 256, 256, id="whole-tiles"),
    pytest.param(1, 4, 2, 300, 300, id="ragged-gqa"),
    pytest.param(1, 4, 1, 129, 1000, id="more-keys"),  # bulk, diagonal and ragged end apart
    pytest.param(2, 2, 2, 700, 333, id="more-queries"),  # blocks of rows without keys
    pytest.param(1, 2, 1, 17, 40, id="one-warpgroup"),  # the other has no query and no key
    pytest.param(1, 2, 2, 193, 65, id="just-past-a-tile"),
    pytest.param(1, 2, 2, 64, 1, id="one-key"),
    pytest.param(1, 6, 2, 1500, 1500, id="many-tiles"),  # rings go round
    pytest.param(1, 2, 1, 200, 8300, id="many-keys"),  # other tiles
]


@pytest.mark.contract("shapes and grouped heads", "dtypes", "lse", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_dtype
@causal_or_not
@pytest.mark.parametrize(("B", "Hq", "Hkv", "Sq", "Skv"), SHAPES)
@each_head_dim
def test_out_lse_and_gradients(launches, B, Hq, Hkv, Sq, Skv, is_causal, dtype, D):
    q, k, v = make_qkv(B, Hq, Hkv, Sq, Skv, D, dtype=dtype, device="cuda")
    for with_dlse in (False, True):
        result = check_attention("triton", q, k, v, is_causal=is_causal, with_dlse=with_dlse)
    assert launches == both(D) * 2
    n_empty = max(0, Sq - Skv) if is_causal else 0
    assert not result.out[:, :, :n_empty].any()
    assert not result.dq[:, :, :n_empty].any()
    assert (result.lse[:, :, :n_empty] == -INF).all()


@pytest.mark.contract("strides", kernel="triton")
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("layout", "is_taken"),
    [("bshd", True), ("qkv", True), ("offset", False), ("step2", False), ("expanded", False)],
)
@each_head_dim
def test_layouts(launches, layout, is_taken, D):
    plain = "bhsd" if layout == "expanded" else layout
    q, k, v = make_qkv(2, 4, 4, 200, 200, D, dtype=torch.bfloat16, device="cuda", layout=plain)
    if layout == "expanded":
        k, v = (t[:1, :1].expand(2, 4, -1, -1) for t in (k, v))
    result = check_attention("triton", q, k, v, is_causal=True)
    assert launches == (both(D) if is_taken else [])
    if is_taken:
        assert result.dq.stride() == torch.empty_like(q).stride()


@pytest.mark.contract("strides", "gradients", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_dout_and_dlse_of_any_strides(launches, D):
    q, k, v = (
        t.requires_grad_() for t in make_qkv(2, 4, 2, 200, 300, D, device="cuda", dtype=torch.half)
    )
    out, lse = attention(q, k, v, kernel="triton", return_lse=True)
    transposed = torch.randn(2, 200, 4, D, device="cuda").half().transpose(1, 2)
    expanded = torch.randn(2, 4, 200, 1, device="cuda").half().expand_as(out)
    shared = torch.randn(200, 2, device="cuda").t()[:, None].expand_as(lse)
    for dout, dlse, expected in (
        (transposed, torch.zeros_like(lse), both(D)[1:]),
        (expanded, torch.zeros_like(lse), []),
        (torch.randn_like(out), shared, both(D)[1:]),
    ):
        launches.clear()
        grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
        assert launches == expected
        same = (dout.contiguous(), dlse.contiguous())
        wanted = torch.autograd.grad((out, lse), (q, k, v), same, retain_graph=True)
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=4e-3, atol=4e-3)


@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_only_the_gradients_asked_for(launches, D):
    inputs = make_qkv(1, 4, 2, 200, 200, D, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn_like(inputs[0])
    full = run_attention("triton", *inputs, dout, is_causal=True)
    for i, name in enumerate(("dq", "dk", "dv")):
        leaves = [t.clone().requires_grad_(i == n) for n, t in enumerate(inputs)]
        (grad,) = torch.autograd.grad(attention(*leaves, kernel="triton"), leaves[i], dout)
        torch.testing.assert_close(grad, getattr(full, name), rtol=2e-2, atol=2e-2)
    assert launches == both(D) + both(D)[:1] * 3


@pytest.mark.contract("scale", kernel="triton")
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("scale", [1.7, 1e-30, 0.0, -0.3])
@each_head_dim
def test_any_scale(launches, scale, D):
    q, k, v = make_qkv(1, 4, 2, 200, 270, D, device="cuda", dtype=torch.bfloat16)
    check_attention("triton", q, k, v, is_causal=True, scale=scale)
    assert launches == (both(D) if scale > 0 else [])


# Extremes


@pytest.mark.contract("NaN, inf and huge logits", "lse", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_huge_equal_logits_of_any_size(launches, D):
    # Head after head from 2^17 to 2^125: a product's rounding must not reach the exponent.
    size = 2.0 ** torch.arange(5, 60, device="cuda").view(1, -1, 1, 1)
    q, k = (size.expand(1, -1, 300, D).bfloat16().requires_grad_() for _ in range(2))
    v = torch.randn(1, 55, 300, D, device="cuda").bfloat16().requires_grad_()
    q, k = (t.detach().contiguous().requires_grad_() for t in (q, k))
    out, lse = attention(q, k, v, is_causal=False, scale=0.7, kernel="triton", return_lse=True)
    mean = v.float().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.float(), mean, rtol=1e-2, atol=1e-3)
    expected = (0.7 * D * size.double() ** 2 + math.log(300)).float().squeeze(3).expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=0)
    out.backward(torch.ones_like(out))
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert launches == both(D)


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_huge_equal_logits_under_the_causal_rule(launches, D):
    q, k = (constant(133120.0, 300, D).requires_grad_() for _ in range(2))  # logits of 2e11
    v = (torch.arange(300, device="cuda") % 2).view(1, 1, 300, 1).expand(1, 1, 300, D)
    v = v.bfloat16().contiguous().requires_grad_()
    out = attention(q, k, v, kernel="triton")
    mean = (v.float().cumsum(2) / torch.arange(1, 301, device="cuda").view(-1, 1)).bfloat16()
    torch.testing.assert_close(out, mean, rtol=2**-7, atol=0)
    out.backward(torch.ones_like(out))
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert launches == both(D)


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("reverse", [False, True])
@each_head_dim
def test_a_maximum_that_grows_by_hundreds_from_tile_to_tile(launches, reverse, D):
    # Rescaling by 2^-hundreds in one direction, and in the other by 1, in either order of tiles.
    steps = torch.tensor([-600.0, -300.0, 0.0, 300.0], device="cuda")
    column = (steps.flip(0) if reverse else steps).repeat_interleave(128)
    q, k = torch.zeros(1, 1, 200, D, device="cuda"), torch.zeros(1, 1, 512, D, device="cuda")
    q[..., 0], k[..., 0] = 1.0, column
    v = torch.randn(1, 1, 512, D, device="cuda").bfloat16()
    out, lse = attention(
        q.bfloat16(), k.bfloat16(), v, is_causal=False, scale=1.0, kernel="triton", return_lse=True
    )
    mean = v.float()[:, :, column == 300.0].mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.float(), mean, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, 300 + math.log(128)))
    assert launches == both(D)[:1]


@pytest.mark.contract("determinism", kernel="triton")
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("S", [1000, 8200])
@each_head_dim
def test_bits_hang_on_no_other_query(launches, S, D):
    # A warp decides for its queries together whether a maximum is taken; keys grow to the first.
    q, k, v = (
        t.detach() for t in make_qkv(1, 2, 2, 200, S, D, device="cuda", dtype=torch.bfloat16)
    )
    k *= torch.linspace(24, 0.1, S, device="cuda").view(-1, 1).bfloat16()
    others = q.clone()
    others[:, :, ::2] *= 37
    others[:, :, 1::4] *= -0.01
    results = [attention(x, k, v, kernel="triton", return_lse=True) for x in (q, others)]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first[:, :, 3::4], second[:, :, 3::4])
    assert launches == both(D)[:1] * 2


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("steps", [(0.0, 5.0, 9.0, 16.0), (-50.0, -45.0, -40.5, -33.0)])
@pytest.mark.parametrize("reverse", [False, True])
@each_head_dim
def test_a_maximum_that_lags(launches, reverse, steps, D):
    # By less than 2^8 in one step or two, on either side of 0: sums must stay those of one maximum.
    column = torch.tensor(steps[::-1] if reverse else steps, device="cuda").repeat_interleave(128)
    q, k = torch.zeros(1, 1, 200, D, device="cuda"), torch.zeros(1, 1, 512, D, device="cuda")
    q[..., 0], k[..., 0] = 1.0, column
    v = torch.randn(1, 1, 512, D, device="cuda").bfloat16()
    out, lse = attention(
        q.bfloat16(), k.bfloat16(), v, is_causal=False, scale=1.0, kernel="triton", return_lse=True
    )
    p = (column.double() - column.double().logsumexp(0)).exp()
    torch.testing.assert_close(
        out.double(), (p @ v.double()).unsqueeze(2).expand_as(out), rtol=2**-7, atol=1e-3
    )
    torch.testing.assert_close(lse, torch.full_like(lse, column.double().logsumexp(0).item()))
    assert launches == both(D)[:1]


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("j", [0, 127, 128, 300, 511, 519])
@each_head_dim
def test_one_finite_logit_among_tiles_of_minus_infinity(launches, j, D):
    # Whole tiles of -inf before it and after it: -inf - -inf must not be taken.
    q, k = constant(1.0, 200, D), constant(-INF, 520, D)
    v = torch.randn(1, 1, 520, D, device="cuda").bfloat16()
    k[:, :, j] = 10 / D
    out, lse = attention(q, k, v, is_causal=False, scale=1.0, kernel="triton", return_lse=True)
    assert torch.equal(out, v[:, :, j : j + 1].expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 10.0))
    assert launches == both(D)[:1]


@pytest.mark.contract("empty rows", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_logits_of_minus_infinity_alone_are_an_empty_row(launches, D):
    q, k = constant(1.0, 200, D).requires_grad_(), constant(-INF, 300, D).requires_grad_()
    v = torch.randn(1, 1, 300, D, device="cuda").bfloat16().requires_grad_()
    out, lse = attention(q, k, v, is_causal=False, kernel="triton", return_lse=True)
    assert not out.any()
    assert (lse == -INF).all()
    out.backward(torch.ones_like(out))
    assert not v.grad.any()
    assert launches == both(D)


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_logits_far_below_any_finite_start_of_the_maximum(launches, D):
    q, k = constant(1000.0, 20, D), torch.cat([constant(-12.5, 1, D), constant(-12.625, 1, D)], 2)
    v = torch.cat([constant(1.0, 1, D), constant(2.0, 1, D)], 2)
    out, lse = attention(q, k, v, is_causal=False, scale=1.0, kernel="triton", return_lse=True)
    assert (out == 1.0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, -12500.0 * D), rtol=1e-6, atol=0)
    assert launches == both(D)[:1]


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_float16_scores_may_exceed_float16(launches, D):
    q, k = constant(40.0, 20, D, torch.half), constant(40.0, 2, D, torch.half)  # q k^T is 1600 D
    v = torch.cat([constant(0.0, 1, D, torch.half), constant(1.0, 1, D, torch.half)], 2)
    out = attention(q, k, v, is_causal=False, kernel="triton")
    assert (out == 0.5).all()
    assert launches == both(D)[:1]


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_nan_stays_where_it_is_seen(launches, D):
    q, k, v = make_qkv(1, 2, 2, 400, 400, D, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn_like(q)
    clean = run_attention("triton", q, k, v, dout, is_causal=True)
    others = [i for i in range(400) if i != 200]
    row, key = q.clone(), k.clone()
    row[:, :, 200] = NAN
    dirty = run_attention("triton", row, k, v, dout, is_causal=True)
    for name in ("out", "lse", "dq"):
        assert getattr(dirty, name)[:, :, 200].isnan().all()
        same = [getattr(result, name)[:, :, others] for result in (dirty, clean)]
        torch.testing.assert_close(*same)
    # Keys after 200 were never seen by query 200. (Their dk may be NaN: 0 times q.)
    assert dirty.dv[:, :, :201].isnan().all()
    assert dirty.dk[:, :, :201].isnan().all()
    torch.testing.assert_close(dirty.dv[:, :, 201:], clean.dv[:, :, 201:])
    key[:, :, 200] = NAN
    dirty = run_attention("triton", q, key, v, dout, is_causal=True)
    torch.testing.assert_close(dirty.out[:, :, :200], clean.out[:, :, :200])
    torch.testing.assert_close(dirty.lse[:, :, :200], clean.lse[:, :, :200])
    assert dirty.out[:, :, 200:].isnan().all()
    assert launches == both(D) * 3


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("value", [INF, -INF])
@each_head_dim
def test_infinite_logits_are_what_the_reference_says(launches, value, D):
    q, k = constant(1.0, 200, D), constant(1.0, 300, D)
    v = torch.randn(1, 1, 300, D, device="cuda").bfloat16()
    k[:, :, 150] = value
    out = attention(q, k, v, is_causal=False, kernel="triton")
    expected = attention(q, k, v, is_causal=False, kernel="reference")
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert launches == both(D)[:1]
