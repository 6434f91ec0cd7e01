"""What every attention kernel must compute: values, extremes, strides; once for each.

Expected values are the float64 reference's, or written out where they can be worked out by hand.
The causal rule is aligned bottom-right: query i sees key j when j <= i + Skv - Sq.
"""

import itertools
import math

import pytest
import torch
from attention_contract import INF, NAN, check, column, constant

from minitx.kernels import attention
from minitx.testing import (
    make_qkv,
    oracle_attention,
    run_attention,
)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


# Values

# (B, Hq, Hkv, Sq, Skv, D) and what it is there to catch
SHAPES = [
    pytest.param(2, 4, 4, 64, 64, 32, id="square"),  # the plain case
    pytest.param(2, 4, 2, 70, 70, 40, id="ragged-gqa"),  # tails, group heads, padded head dim
    pytest.param(1, 6, 1, 37, 133, 24, id="more-keys"),  # bottom-right, one key head for all
    pytest.param(1, 4, 2, 133, 37, 24, id="more-queries"),  # rows without keys
    pytest.param(3, 4, 2, 1, 67, 32, id="decode"),  # one query: the last
]


@pytest.mark.contract("shapes and grouped heads")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("B", "Hq", "Hkv", "Sq", "Skv", "D"), SHAPES)
def test_out_lse_and_gradients(kernel, has_lse, device, B, Hq, Hkv, Sq, Skv, D, is_causal):
    q, k, v = make_qkv(B, Hq, Hkv, Sq, Skv, D, device=device)
    check(kernel, has_lse, q, k, v, is_causal=is_causal)


@pytest.mark.contract("dtypes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision(kernel, has_lse, device, dtype):
    q, k, v = make_qkv(1, 4, 2, 70, 70, 32, dtype=dtype, device=device)
    result = check(kernel, has_lse, q, k, v, is_causal=True)
    assert result.out.dtype == result.dq.dtype == result.dv.dtype == dtype
    assert not has_lse or result.lse.dtype == torch.float32


@pytest.mark.contract("head dims")
@pytest.mark.parametrize("D", [1, 8, 31, 80, 96, 128, 160, 192, 256])
def test_every_head_dim(kernel, has_lse, device, D):
    # Below 16, between powers of two, odd, and the largest. In float16, where eager attention's own
    # error leaves room for the order in which 256 products are summed.
    q, k, v = make_qkv(1, 2, 2, 20, 20, D, device=device, dtype=torch.float16)
    check(kernel, has_lse, q, k, v, is_causal=True)


@pytest.mark.contract("scale")
@pytest.mark.parametrize("Skv", [40, 70], ids=["square", "more-keys"])
@pytest.mark.parametrize(
    "scale", [0.0, -0.3, 1.7, 1e-50], ids=["zero", "negative", "large", "tiny"]
)
def test_any_finite_scale(kernel, has_lse, device, scale, Skv):
    # Causal, as a scale of 0 (1e-50 is, in float32) times a masked score of -inf is NaN, and square
    # as it is there that PyTorch makes the mask itself; negative turns max into min.
    q, k, v = make_qkv(2, 8, 4, 40, Skv, 16, device=device)
    check(kernel, has_lse, q, k, v, is_causal=True, scale=scale)


@pytest.mark.contract("scale")
def test_default_scale_is_one_over_the_root_of_the_head_dim(kernel, device):
    q, k, v = make_qkv(D=40, device=device)
    given = attention(q, k, v, scale=40**-0.5, kernel=kernel)
    assert torch.equal(attention(q, k, v, kernel=kernel), given)


@pytest.mark.contract("sizes")
@pytest.mark.parametrize("n_keys", [1, 15, 16, 17, 63, 64, 65, 127, 129, 200])
def test_keys_past_the_end_count_for_nothing(kernel, has_lse, device, n_keys):
    # Equal scores and v = 1: any phantom key in the denominator shows in out.
    q, k, v = constant(0.0, 3, device=device), constant(0.0, n_keys, device=device), None
    v = torch.ones_like(k)
    result = attention(q, k, v, is_causal=False, kernel=kernel, return_lse=has_lse)
    out, lse = result if has_lse else (result, None)
    torch.testing.assert_close(out, torch.ones_like(q), rtol=0, atol=1e-6)
    if has_lse:  # natural logarithm: ln 5 is 1.609, log2 5 is 2.322
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(n_keys)), rtol=0, atol=2e-6)


@pytest.mark.contract("causal, aligned bottom-right", "empty rows")
@pytest.mark.parametrize(
    ("Sq", "n_keys", "expected", "expected_lse"),
    [
        (2, 5, [2.5, 3.0], [math.log(4), math.log(5)]),
        (1, 5, [3.0], [math.log(5)]),
        (5, 2, [0.0, 0.0, 0.0, 1.0, 1.5], [-INF, -INF, -INF, 0.0, math.log(2)]),
        (3, 0, [0.0, 0.0, 0.0], [-INF, -INF, -INF]),
    ],
    ids=["more-keys", "one-query", "more-queries", "no-keys"],
)
def test_causal_is_aligned_bottom_right(
    kernel, has_lse, device, Sq, n_keys, expected, expected_lse
):
    q = constant(0.0, Sq, device=device).requires_grad_()
    k = constant(0.0, n_keys, device=device).requires_grad_()
    v = column([1.0 + j for j in range(n_keys)], device=device).requires_grad_()
    result = attention(q, k, v, kernel=kernel, return_lse=has_lse)
    out, lse = result if has_lse else (result, None)
    torch.testing.assert_close(out[0, 0, :, 0].tolist(), expected, rtol=0, atol=1e-6)
    if has_lse:
        torch.testing.assert_close(lse[0, 0].tolist(), expected_lse, rtol=0, atol=1e-6)
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    n_empty = max(0, Sq - n_keys)
    assert not q.grad[:, :, :n_empty].any()


@pytest.mark.contract("sizes")
@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((0, 2, 4, 16), (0, 2, 4, 16)),
        ((1, 0, 4, 16), (1, 0, 4, 16)),
        ((1, 2, 0, 16), (1, 2, 0, 16)),
        ((1, 2, 0, 16), (1, 1, 5, 16)),
        ((1, 2, 4, 16), (1, 2, 0, 16)),
    ],
    ids=["B", "H", "S", "Sq", "Skv"],
)
def test_empty_dims(kernel, has_lse, device, q_shape, kv_shape):
    q = torch.randn(q_shape, device=device, requires_grad=True)
    k, v = (torch.randn(kv_shape, device=device, requires_grad=True) for _ in range(2))
    result = attention(q, k, v, kernel=kernel, return_lse=has_lse)
    out, lse = result if has_lse else (result, None)
    assert out.shape == q.shape
    assert not out.any()
    assert lse is None or (lse.shape == q.shape[:-1] and (lse == -INF).all())
    out.sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in (q, k, v))


# Extremes


@pytest.mark.contract("NaN, inf and huge logits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_far_below_any_finite_start_of_the_maximum(kernel, has_lse, device, dtype):
    q = column([100.0], device=device, dtype=dtype)
    k = column([-400.0, -404.0], device=device, dtype=dtype).expand(1, 1, 2, 16)
    q, k = q * 10, k * 4  # logits -1.6e6 and -1.616e6, exact in bfloat16
    v = column([1.0, 2.0], device=device, dtype=dtype)
    result = attention(q, k, v, is_causal=False, scale=1.0, kernel=kernel, return_lse=has_lse)
    out, lse = result if has_lse else (result, None)
    assert out[0, 0, 0, 0].item() == 1.0
    if has_lse:
        rtol = torch.finfo(dtype).eps if kernel == "eager" else 1e-6  # eager rounds its scores
        torch.testing.assert_close(lse.item(), -1.6e6, rtol=rtol, atol=0)


@pytest.mark.contract("NaN, inf and huge logits")
def test_rows_of_negative_logits_ignore_the_padding(kernel, device):
    # A tail padded with scores of 0 would win the maximum, and every probability would underflow.
    q, k = constant(1.0, 1, D=1, device=device), constant(-200.0, 65, D=1, device=device)
    v = torch.arange(65.0, device=device).view(1, 1, 65, 1)
    out = attention(q, k, v, is_causal=False, scale=1.0, kernel=kernel)
    torch.testing.assert_close(out.item(), 32.0, rtol=1e-6, atol=0)


@pytest.mark.contract("NaN, inf and huge logits")
def test_huge_equal_logits(kernel, device):
    # Logits of 1.4e11: the rounding of a product is thousands, and 2^thousands inf.
    q, k = (constant(133120.0, 4, D=64, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = column([0.0, 1.0, 2.0, 3.0], D=64, device=device, dtype=torch.bfloat16)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, kernel=kernel)
    assert out[0, 0, :, 0].tolist() == [0.0, 0.5, 1.0, 1.5]
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.contract("NaN, inf and huge logits", "lse")
def test_a_huge_single_logit(lse_kernel, device):
    q = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16, device=device)
    out, lse = attention(q, q, q, kernel=lse_kernel, return_lse=True)
    assert (out == 133120.0).all()
    rtol = 2**-8 if lse_kernel == "eager" else 1e-6  # eager rounds its scores
    torch.testing.assert_close(lse.item(), 64 * 133120.0**2 / 8, rtol=rtol, atol=0)


@pytest.mark.contract("lse", "dtypes")
def test_lse_keeps_its_digits_on_the_way_to_the_backward(lse_kernel, device):
    """Of two equal logits of 100.5 it is 101.193, of which bfloat16 keeps 101.0 and float16 101.19:
    probabilities made of that would be 0.6 and 0.503."""
    q, k, v = (constant(1.0, n, device=device, dtype=torch.bfloat16) for n in (1, 2, 2))
    dout = torch.ones_like(q)
    result = run_attention(lse_kernel, q, k, v, dout, is_causal=False, scale=100.5 / 16)
    assert result.lse.item() == pytest.approx(100.5 + math.log(2), abs=1e-3)  # not 101.1875
    assert (result.dv == 0.5).all()


@pytest.mark.contract("NaN, inf and huge logits")
def test_float16_scores_may_exceed_float16(kernel, device):
    q, k = (constant(40.0, 2, D=64, device=device, dtype=torch.float16) for _ in range(2))
    v = column([0.0, 1.0], D=64, device=device, dtype=torch.float16)  # q k^T is 102400
    out = attention(q, k, v, is_causal=False, kernel=kernel)
    assert out[0, 0, :, 0].tolist() == [0.5, 0.5]


@pytest.mark.contract("NaN, inf and huge logits")
def test_nan_stays_in_its_own_row(kernel, has_lse, device):
    q, k, v = make_qkv(1, 2, 2, 40, 40, 16, device=device)
    clean = attention(q, k, v, is_causal=False, kernel=kernel)
    q[:, :, 2] = NAN
    result = attention(q, k, v, is_causal=False, kernel=kernel, return_lse=has_lse)
    out, lse = result if has_lse else (result, None)
    others = [i for i in range(40) if i != 2]
    assert out[:, :, 2].isnan().all()
    torch.testing.assert_close(out[:, :, others], clean[:, :, others])
    if has_lse:
        assert lse[:, :, 2].isnan().all()
        assert lse[:, :, others].isfinite().all()


@pytest.mark.contract("NaN, inf and huge logits")
@pytest.mark.parametrize("Skv", [1, 2, 7, 15, 16])
def test_nan_shows_in_the_shortest_rows_too(kernel, device, Skv):
    """Whose maximum a kernel may find in another way than a whole vector's."""
    q, k, v = make_qkv(1, 2, 2, Skv, Skv, 16, device=device)
    q[:, 1] = NAN
    out = attention(q, k, v, kernel=kernel)
    assert out[:, 1].isnan().all()
    assert out[:, 0].isfinite().all()


@pytest.mark.contract("NaN, inf and huge logits", "causal, aligned bottom-right")
@pytest.mark.parametrize(
    ("S", "layout"),
    [
        pytest.param(40, "bhsd", id="rows"),
        pytest.param(2, "bhsd", id="shortest"),  # PyTorch's math takes what its other kernels
        pytest.param(15, "bshd", id="short"),  # cannot, and adds -inf to masked scores
        pytest.param(40, "step2", id="step2"),
    ],
)
def test_a_nan_key_reaches_only_the_queries_that_see_it(kernel, device, S, layout):
    q, k, v = make_qkv(1, 1, 1, S, S, 16, device=device, layout=layout)
    clean = attention(q, k, v, kernel=kernel)
    k[:, :, S // 2] = NAN
    out = attention(q, k, v, kernel=kernel)
    torch.testing.assert_close(out[:, :, : S // 2], clean[:, :, : S // 2])
    assert out[:, :, S // 2 :].isnan().all()


@pytest.mark.contract("NaN, inf and huge logits")
def test_infinite_logits_are_what_the_reference_says(kernel, device):
    q = torch.ones(1, 1, 3, 16, device=device)
    k = torch.ones(1, 1, 40, 16, device=device)
    v = torch.randn(1, 1, 40, 16, device=device)
    for value in (INF, -INF):
        k[0, 0, 7] = value
        out = attention(q, k, v, is_causal=False, kernel=kernel)
        expected = attention(q, k, v, is_causal=False, kernel="reference")
        if kernel == "sdpa" and device == "cuda":
            # PyTorch's float32 splits an element in two, and inf - inf is NaN: that, or right.
            expected = torch.where(out.isnan(), out, expected)
        torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.contract("NaN, inf and huge logits", "strides")
def test_memory_past_the_keys_is_never_seen(kernel, device):
    # k, v and q are slices of buffers that hold NaN after them, in rows and in columns.
    buffers = torch.full((3, 1, 2, 64, 64), NAN, device=device)
    q, k, v = buffers[..., :40, :40]
    values = make_qkv(1, 2, 2, 40, 40, 40, device=device)
    for view, value in zip((q, k, v), values, strict=True):
        view.copy_(value)
    for is_causal in (True, False):
        dout = torch.ones_like(q)
        actual = run_attention(kernel, q, k, v, dout, is_causal=is_causal, return_lse=False)
        expected = run_attention(
            kernel, *values, torch.ones_like(values[0]), is_causal=is_causal, return_lse=False
        )
        for name in ("out", "dq", "dk", "dv"):
            torch.testing.assert_close(getattr(actual, name), getattr(expected, name))


# Strides


@pytest.mark.contract("strides")
@pytest.mark.parametrize("layout", ["bshd", "qkv", "step2", "offset"])
def test_layouts(kernel, has_lse, device, layout):
    q, k, v = make_qkv(2, 4, 4, 40, 40, 16, device=device, layout=layout)
    check(kernel, has_lse, q, k, v, is_causal=True)


@pytest.mark.contract("strides")
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=3)))
def test_q_k_and_v_have_strides_of_their_own(kernel, device, transposed):
    plain = make_qkv(2, 2, 2, 20, 20, 16, device=device)
    strided = [
        t.transpose(2, 3).contiguous().transpose(2, 3) if flag else t
        for t, flag in zip(plain, transposed, strict=True)
    ]
    # For some strides PyTorch takes another of its backends, which rounds otherwise.
    atol = 1e-5 if kernel == "sdpa" and device == "cuda" else 1e-6
    torch.testing.assert_close(
        attention(*strided, kernel=kernel), attention(*plain, kernel=kernel), rtol=0, atol=atol
    )


ONES = [ones for ones in itertools.product([False, True], repeat=3) if any(ones)]


@pytest.mark.contract("strides", "sizes")
@pytest.mark.parametrize("odd", [0, 7])
@pytest.mark.parametrize("ones", ONES)
def test_dims_of_one(kernel, device, ones, odd):
    """A stride of such a dim means nothing, and may be any number."""
    B, H, S = (1 if is_one else n for is_one, n in zip(ones, (2, 3, 5), strict=True))

    def make() -> torch.Tensor:
        t = torch.randn(B, S, H, 16, device=device).transpose(1, 2)
        outer = [odd if is_one else t.stride(dim) for dim, is_one in enumerate(ones)]
        return t.as_strided(t.shape, (*outer, 1))

    q, k, v, dout = (make() for _ in range(4))
    actual = run_attention(kernel, q, k, v, dout, is_causal=True, return_lse=False)
    expected = oracle_attention(q, k, v, dout, is_causal=True)
    for name in ("out", "dq", "dk", "dv"):
        got, want = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(got, want.float(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.contract("strides", "shapes and grouped heads")
def test_expanded_keys_and_values(kernel, has_lse, device):
    q, k, v = make_qkv(2, 4, 1, 40, 40, 16, device=device)
    k, v = k[:1].expand(2, 4, -1, -1), v[:1].expand(2, 4, -1, -1)
    check(kernel, has_lse, q, k, v, is_causal=True)


@pytest.mark.contract("strides")
def test_results_keep_the_inputs_layout(kernel, device):
    leaves = [torch.randn(2, 20, 4, 16, device=device, requires_grad=True) for _ in range(3)]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    out = attention(q, k, v, kernel=kernel)
    assert out.shape == q.shape
    if kernel not in ("eager", "sdpa"):  # PyTorch's own choose for themselves
        assert out.stride() == q.stride()
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(grad.stride() == q.stride() for grad in grads)
