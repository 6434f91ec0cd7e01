"""Rows of the Triton softmax that start anywhere in memory: their lanes are shifted, so that they
are read and written 16 bytes at a time all the same."""

import pytest
import torch
from softmax_oracle import check, normal

from minitx.kernels import softmax_reference, supports_softmax
from minitx.testing import max_error

if not supports_softmax("triton", torch.zeros(1)).ok and not torch.cuda.is_available():
    pytest.skip(supports_softmax("triton", torch.zeros(1)).reason, allow_module_level=True)

from minitx.kernels import triton_rows, triton_softmax
from minitx.kernels import triton_softmax_wide as wide

SENTINEL = 7.0
CHUNKS = wide.Chunks(BLOCK_N=32, num_warps=1, programs_per_sm=16)


@pytest.fixture(params=["on chip", "split"])
def launches(request, monkeypatch, nothing_remembered):
    """The forward's launch and the backward's, of rows in one program or in chunks of 32."""
    if request.param == "on chip":
        monkeypatch.setattr(triton_softmax, "MIN_SHIFTED", 1)
        return triton_softmax._launch_fwd, triton_softmax._launch_bwd
    monkeypatch.setattr(wide, "FWD", dict.fromkeys(wide.FWD, CHUNKS))
    monkeypatch.setattr(wide, "BWD", dict.fromkeys(wide.BWD, CHUNKS))
    return wide.launch_wide_fwd, wide.launch_wide_bwd


def within(values, pitch, offset, filler):
    """The values [R, N] as rows of a larger buffer, `offset` elements after its start."""
    rows, n_cols = values.shape
    buffer = torch.full((rows * pitch + offset + 32,), filler, dtype=values.dtype)
    buffer = buffer.to(values.device)
    view = buffer[offset : offset + rows * pitch].view(rows, pitch)[:, :n_cols]
    view.copy_(values)
    return buffer, view


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("n", "pitch", "offset", "dtype"),
    [
        (101, 101, 0, torch.float32),  # each row's shift is another
        (101, 103, 3, torch.float32),
        (101, 103, 3, torch.float16),
        (32, 37, 1, torch.bfloat16),  # as many columns as a chunk has lanes
        (55, 56, 5, torch.bfloat16),  # one shift for all rows, both edges
        (50, 64, 0, torch.float16),  # no shift, a right edge
        (9, 11, 6, torch.bfloat16),  # no whole vector in some rows
        (5, 7, 2, torch.float32),
    ],
)
def test_nothing_beside_the_rows_is_written_or_matters(
    launches, device, n, pitch, offset, dtype, is_causal
):
    rows = 9
    x, dy = (normal(rows, n, seed=seed).to(device, dtype) for seed in (0, 1))
    y_true = softmax_reference(x.double(), is_causal=is_causal)
    y = y_true.to(dtype)
    product = y.double() * dy.double()
    dx_true = product - y.double() * product.sum(-1, keepdim=True)
    for launch, inputs, truth in (
        (launches[0], (x,), y_true),
        (launches[1], (y, dy), dx_true),
    ):
        views = [within(t, pitch, offset, float("nan"))[1] for t in inputs]
        buffer, result = within(torch.full_like(x, SENTINEL), pitch, offset, SENTINEL)
        strides = triton_rows.merge_leading_dims(*views, result)[1]
        assert triton_rows.can_shift((*views, result), strides)
        launch(*views, result, is_causal)
        assert max_error(result, truth) <= torch.finfo(dtype).eps
        result.fill_(SENTINEL)
        assert (buffer == SENTINEL).all()


def test_rows_shift_where_every_tensor_lies_alike():
    def shifts(*tensors):
        return triton_rows.can_shift(tensors, triton_rows.merge_leading_dims(*tensors)[1])

    x = torch.zeros(65)[1:].view(4, 16)
    assert not shifts(torch.zeros(4, 16), torch.zeros(4, 16))  # nothing to gain
    assert shifts(torch.zeros(4, 15), torch.zeros(4, 15))
    assert shifts(x, x)
    assert not shifts(x, torch.zeros(4, 16))  # a base that differs
    assert not shifts(torch.zeros(4, 15), torch.zeros(4, 16)[:, :15])  # a pitch that differs
    assert shifts(torch.zeros(4, 19)[:, :15], torch.zeros(4, 15))  # by whole vectors
    assert not shifts(torch.zeros(4, 30)[:, ::2], torch.zeros(4, 30)[:, ::2])


@pytest.mark.parametrize("n", [129, 255, 256, 1001])
def test_odd_widths(device, n):
    # 255 columns and 3 lanes of shift would not fit a tile of 256.
    check("triton", normal(5, n, std=9).to(device))
    check("triton", normal(5, n).to(device, torch.bfloat16), is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1000, 1001, 1003, 20001, 100003])
def test_odd_widths_on_a_gpu(n, dtype):
    check("triton", torch.randn(300, n, device="cuda", dtype=dtype))
    if n < 4096:
        check("triton", torch.randn(n, n, device="cuda", dtype=dtype), is_causal=True)
