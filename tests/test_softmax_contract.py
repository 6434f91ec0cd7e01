"""What every row-softmax kernel promises about values, shapes and strides, against float64.

Each case is the smallest input on which some softmax kernel is known to have gone wrong; its name
or comment says how. To try one kernel alone: pytest -k triton. What autograd and the GPU ask of a
kernel is in test_softmax_autograd.py.
"""

import math

import pytest
import torch
from softmax_oracle import (
    DTYPES,
    INF,
    KERNELS,
    NAN,
    check,
    forward_backward,
    normal,
    oracle,
    relative_error,
    skip_unless_supported,
)

from minitx.kernels import softmax
from minitx.kernels.reference import causal_mask
from minitx.testing import max_error


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, device: str) -> str:
    return skip_unless_supported(request.param, device)


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),  # a single score
        (2, 7),  # shorter than any block
        (4, 100),  # a padded tail
        (8, 256),  # no tail at all
        (17, 513),  # one column beyond a power of two, and rows beyond one
        (2, 3, 5, 40),  # leading dims
    ],
)
def test_matches_the_oracle(kernel, device, dtype, shape):
    check(kernel, normal(*shape, std=20).to(device, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 5),  # more keys than queries: bottom-right, not top-left
        (5, 3),  # queries without any key
        (1, 6),  # decoding: one query sees every key
        (2, 3, 40, 40),  # a mask that starts anew with each matrix
        (33, 300),
    ],
)
def test_causal_matches_the_oracle(kernel, device, dtype, shape):
    x = normal(*shape, std=5).to(device, dtype)
    y, dx = check(kernel, x, is_causal=True)
    masked = ~causal_mask(*shape[-2:], device).expand(shape)
    assert (y[masked] == 0).all()
    assert (dx[masked] == 0).all()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # Padding of 0 would win the maximum, and the true probabilities underflow.
        ([-200.0, -201.0, -202.0], [0.66524, 0.24473, 0.09003]),
        ([-10.0, -20.0], [0.9999546, 0.0000454]),
        ([-1000.0, 0.0, 1000.0, 1.0], [0.0, 0.0, 1.0, 0.0]),
        # A maximum that starts at a finite "minus infinity" is never raised by these.
        ([-160000.0, -161600.0], [1.0, 0.0]),
        ([torch.finfo(torch.float32).min] * 4, [0.25] * 4),
        # The difference of these is beyond float32.
        ([torch.finfo(torch.float32).min, torch.finfo(torch.float32).max], [0.0, 1.0]),
        # x * log2(e) - max * log2(e) in one multiply-add leaves thousands here.
        ([133120.0**2 * 8] * 4, [0.25] * 4),
        ([65504.0, 65504.0, -65504.0], [0.5, 0.5, 0.0]),
        # Probabilities below the smallest normal number: 0 or their value, never NaN.
        ([0.0, -88.0, -95.0, -100.0, -104.0], [1.0, 0.0, 0.0, 0.0, 0.0]),
        ([0.0, -INF, 0.0, -INF], [0.5, 0.0, 0.5, 0.0]),
        ([[0.0, 2.0], [3.0, 1.0]], [[0.1192, 0.8808], [0.8808, 0.1192]]),
    ],
)
def test_known_values(kernel, device, row, expected):
    x = torch.tensor(row, device=device)
    y, dx = forward_backward(kernel, x, torch.ones_like(x))
    assert (
        y.cpu().tolist() == pytest.approx(torch.tensor(expected).tolist(), abs=1e-5)
        if (x.dim() == 1)
        else torch.allclose(y.cpu(), torch.tensor(expected), atol=1e-4)
    )
    assert dx.abs().max() < 1e-6  # a row's probabilities sum to 1, whatever x is


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_extremes_of_a_dtype_are_ordinary_numbers(kernel, device, dtype):
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
    x = torch.tensor([[low, low], [high, high], [low, high]], device=device, dtype=dtype)
    y = softmax(x, kernel=kernel)
    assert y.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lanes_past_the_row_take_no_part(kernel, device, dtype):
    for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 200):
        y = softmax(torch.zeros(3, n, device=device, dtype=dtype), kernel=kernel)
        assert max_error(y * n, torch.ones_like(y)) <= relative_error(dtype), n


def test_every_short_width(kernel, device):
    for n in [*range(1, 131), 144, 160, 192, 256]:
        x = normal(3, n).to(device)
        y, dx = forward_backward(kernel, x, dy := normal(3, n, seed=1).to(device))
        y_true, dx_true = oracle(x, dy)
        assert max_error(y, y_true) < 1e-6, n
        assert max_error(dx, dx_true) < 2e-6, n
        assert max_error(y.sum(-1), torch.ones(3, device=device)) < 1e-6, n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 20_000), (2, 32_768), (1, 65_537)])
def test_wide_rows_match_the_oracle(kernel, device, dtype, shape):
    check(kernel, normal(*shape, std=3).to(device, dtype))


def test_wide_causal_rows_match_the_oracle(kernel, device):
    # Rows whose last visible column lies in the first, an inner and the last part of a split row.
    x = normal(3, 33_001).to(device)
    check(kernel, x, is_causal=True)
    short = x.t()[:, :3].contiguous()[:5]  # [5, 3]: two rows that see nothing
    check(kernel, short, is_causal=True)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (65_535, torch.float32),
        (65_536, torch.bfloat16),
        (102_400, torch.float32),
        (1_000_000, torch.bfloat16),
    ],
)
def test_wide_rows_of_zeros_and_one_peak(kernel, device, n, dtype):
    x = torch.zeros(2, n, device=device, dtype=dtype)
    x[1, -1] = 20.0
    y = softmax(x, kernel=kernel).double()
    rest = 1 / (math.exp(20) + n - 1)
    assert max_error(y[0] * n, torch.ones_like(y[0])) <= relative_error(dtype)
    assert max_error(y[1, :-1] / rest, torch.ones_like(y[1, :-1])) <= relative_error(dtype)
    assert y[1, -1].item() == pytest.approx(math.exp(20) * rest, rel=relative_error(dtype))


def test_a_single_finite_score_wherever_it_stands(kernel, device):
    # exp(-inf - -inf) is NaN, in the parts of the row before it or in those after it.
    places = (0, 1, 4095, 4096, 50_000, 99_999)
    x = torch.full((len(places), 100_000), -INF, device=device)
    for row, place in enumerate(places):
        x[row, place] = 10.0
    y, dx = forward_backward(kernel, x, normal(*x.shape).to(device))
    expected = torch.zeros_like(x)
    for row, place in enumerate(places):
        expected[row, place] = 1.0
    assert torch.equal(y, expected)
    assert (dx == 0).all()


@pytest.mark.parametrize("n", [600, 33_000])
def test_parts_of_a_row_that_differ_by_hundreds(kernel, device, n):
    # Merging partial results around the wrong maximum overflows, and the whole row comes out 0.
    x = normal(4, n).to(device)
    x[0, : n // 2] += 500.0
    x[1, n // 2 :] += 500.0
    x[2, : n // 2] -= 500.0
    x[3, -3:] += 500.0
    check(kernel, x)


# --- empty rows, NaN, infinities --------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 33_000])
@pytest.mark.parametrize("dy_value", [1.0, INF, NAN])
def test_a_row_of_minus_infinity_gives_zeros_and_zero_gradients(kernel, device, n, dy_value):
    x = torch.stack([torch.full((n,), -INF), torch.zeros(n)]).to(device)
    dy = torch.full_like(x, dy_value)
    dy[1] = 1.0
    y, dx = forward_backward(kernel, x, dy)
    assert (y[0] == 0).all()
    assert (dx[0] == 0).all()
    assert max_error(y[1], torch.full_like(y[1], 1 / n)) < 1e-6


def test_causal_queries_without_a_key(kernel, device):
    x = torch.full((5, 2), NAN, device=device)
    x[3, 0] = x[4, 0] = x[4, 1] = 0.0
    # PyTorch's own backward multiplies a masked dy by 0.
    dy = torch.full((5, 2), 1.0 if kernel == "eager" else NAN, device=device)
    dy[3, 0] = dy[4, 0] = dy[4, 1] = 1.0
    y, dx = forward_backward(kernel, x, dy, is_causal=True)
    assert y.tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [0.5, 0.5]]
    assert dx.tolist() == [[0, 0]] * 5


@pytest.mark.parametrize("n", [4, 33_000])
@pytest.mark.parametrize("row", [[NAN, INF, 0.0, 1.0], [NAN, 0.0, 1.0], [0.0, INF, 1.0], [NAN]])
def test_a_visible_nan_or_infinity_shows(kernel, device, row, n):
    # A maximum that passes over NaN must not hide it, behind -inf least of all.
    x = torch.zeros(3, n, device=device)
    x[1] = -INF
    x[1, -len(row) :] = torch.tensor(row, device=device)
    y, dx = forward_backward(kernel, x, torch.ones_like(x))
    assert y[1].isnan().all()
    assert dx[1].isnan().all()
    assert y[[0, 2]].isfinite().all()
    assert dx[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (4, 300), (2, 33_000)])
@pytest.mark.parametrize("value", [NAN, INF, 1e30])
def test_masked_scores_and_their_gradients_do_no_harm(kernel, device, shape, value):
    masked = ~causal_mask(*shape, device)
    x, dy = normal(*shape).to(device), normal(*shape, seed=1).to(device)
    clean = forward_backward(kernel, x, dy, is_causal=True)
    x = x.masked_fill(masked, value)
    if kernel != "eager":  # PyTorch's own backward multiplies a masked dy by 0
        dy = dy.masked_fill(masked, value)
    poisoned = forward_backward(kernel, x, dy, is_causal=True)
    for ours, theirs in zip(poisoned, clean, strict=True):
        assert torch.equal(ours, theirs)


def test_a_nan_that_only_later_queries_see(kernel, device):
    x = torch.zeros(3, 3, device=device)
    x[:, 2] = NAN
    y = softmax(x, is_causal=True, kernel=kernel)
    assert y[:2].isfinite().all()
    assert y[2].isnan().all()


@pytest.mark.parametrize("n", [100, 33_000])
def test_memory_past_the_row_never_matters(kernel, device, n):
    buffer = torch.full((3, n + 28), NAN, device=device)
    buffer[:, :n] = normal(3, n).to(device)
    dy = torch.full((3, n + 5), NAN, device=device)[:, :n].copy_(normal(3, n, seed=1))
    check(kernel, buffer[:, :n], dy=dy)


# --- shapes and strides -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (2, 0, 4), (0, 0), (3, 2, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_zero_sized(kernel, device, shape, is_causal):
    if is_causal and len(shape) < 2:
        pytest.skip("causal needs two dims")
    x = torch.empty(shape, device=device, dtype=torch.float16, requires_grad=True)
    y = softmax(x, is_causal=is_causal, kernel=kernel)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


VIEWS = {
    "transposed": lambda: normal(32, 64).t(),
    "every other column": lambda: normal(32, 64)[:, ::2],
    "every other row": lambda: normal(32, 64)[::2],
    "expanded": lambda: normal(32, 64).expand(3, 32, 64),
    "expanded within the row": lambda: normal(5, 1).expand(5, 9),
    "row pitch wider than the row": lambda: normal(32, 80)[:, 7:71],
    "odd storage offset": lambda: normal(32 * 64 + 1)[1:].view(32, 64),
    "heads inside": lambda: normal(2, 9, 3, 16).transpose(1, 2),
    "no two dims merge": lambda: normal(2, 3, 4, 5, 6)[::2, :, ::2, ::2].permute(3, 1, 0, 2, 4),
    "one row": lambda: normal(1, 300)[:, ::3],
    "1-D": lambda: normal(77),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides(kernel, device, view):
    host = VIEWS[view]()
    # Moved as storage, so that the strides are those of the view.
    storage = torch.empty(0).set_(host.untyped_storage()).to(device)
    x = storage.as_strided(host.shape, host.stride(), host.storage_offset())
    for dim in range(-x.dim(), x.dim()):
        check(kernel, x, dim)
    if x.dim() > 1:
        check(kernel, x, is_causal=True)


def test_the_result_keeps_the_layout(kernel, device):
    x = normal(4, 5, 6).to(device).transpose(0, 2)
    y, dx = forward_backward(kernel, x, torch.ones_like(x))
    if kernel != "eager":  # PyTorch's own softmax does not keep it
        assert y.stride() == x.stride()
        assert dx.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_misaligned_view_after_an_aligned_one(kernel, device, dtype):
    buffer = normal(16 * 64 + 1).to(device, dtype)
    aligned = softmax(buffer[1:].clone().view(16, 64), kernel=kernel)
    misaligned = softmax(buffer[1:].view(16, 64), kernel=kernel)
    assert max_error(misaligned, aligned) <= torch.finfo(dtype).eps


def test_more_rows_than_a_grid_dim_may_have(kernel, device):
    x = normal(70_000, 3).to(device)
    y = softmax(x, kernel=kernel)
    assert max_error(y, oracle(x, x)[0]) < 1e-6


def test_bad_dims_and_dtypes_are_refused_before_any_launch(kernel, device):
    x = torch.zeros(2, 3, device=device)
    with pytest.raises(ValueError, match="dim must be from -2 to 1, got 2"):
        softmax(x, 2, kernel=kernel)
    with pytest.raises(ValueError, match="needs the last dim"):
        softmax(x, 0, is_causal=True, kernel=kernel)
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch\.int64"):
        softmax(x.long(), kernel=kernel)


@pytest.mark.gpu
def test_sixteen_million_rows(kernel):
    x = torch.randn(2**24, 2, device="cuda")
    assert max_error(softmax(x, kernel=kernel), torch.softmax(x, -1)) < 1e-6


@pytest.mark.gpu
@pytest.mark.huge
def test_offsets_beyond_2_31_elements(kernel):
    x = torch.randn(2**22, 1024, device="cuda", dtype=torch.float16)
    x.requires_grad_()
    y = softmax(x, kernel=kernel)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    for row in (0, 2**21 - 1, 2**21, 2**22 - 1):
        y_true, dx_true = oracle(x[row], dy[row])
        assert max_error(y[row], y_true) < 1e-4
        assert max_error(dx[row], dx_true) < 2e-3


@pytest.mark.gpu
@pytest.mark.huge
@pytest.mark.parametrize("shape", [(2, 2**21 + 3, 600), (3, 800_000_000)])
def test_strided_and_wide_offsets_beyond_2_31(kernel, shape):
    storage = torch.randn(math.prod(shape), device="cuda", dtype=torch.bfloat16)
    x = storage.view(shape)
    y = softmax(x, kernel=kernel)
    last = (-1,) * (len(shape) - 1)
    expected = torch.softmax(x[last].float(), -1)
    assert max_error(y[last], expected) < 1e-2 * expected.max().item()
