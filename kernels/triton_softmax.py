"""Row softmax in Triton: a program holds whole rows on chip, reads once and writes once.

    y_j  = exp(x_j - max x) / sum_k exp(x_k - max x)
    dx_j = y_j (dy_j - sum_k y_k dy_k)

The forward keeps a tile of BLOCK_M rows and BLOCK_N columns in registers, BLOCK_N being the row's
length rounded up to a power of two: short rows share a program, long ones have one each. Padding
lanes hold -inf, the identity of the maximum, whose exponential is 0. With `is_causal` the rule
"query i sees key j when j <= i + Skv - Sq" is the load's mask: what is masked is not read, but for
what shares its 16 bytes with the last visible key, and that is put aside.
The backward needs y alone: that is 0 where a score is masked, and so is dx.

Of a causal row that sees no more than half of the tile, half a tile is worked on, and zeros are
written to the rest.

Rows of more than MAX_COLUMNS, MAX_BYTES or, if causal, MAX_CAUSAL_COLUMNS are split over programs
by triton_softmax_wide.py: one program cannot hold them, or is slower.

Any strides are read as they are, without a copy. One kernel is compiled for each BLOCK_N, dtype,
`is_causal` and number of leading dims that cannot be merged; lengths and strides are run-time
arguments (apart from Triton's own specialisation on 1 and on multiples of 16).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from minitx.kernels.softmax_ops import define_softmax
from minitx.kernels.triton_launch import Launch, remember, remembered
from minitx.kernels.triton_rows import (
    VECTOR_BYTES,
    can_shift,
    edge_columns,
    exp_below,
    gradient,
    in_float32,
    load_output,
    load_visible,
    merge_leading_dims,
    row_offsets,
    row_pointers,
    store_whole_vectors,
    store_zeros,
    vector_of,
    visible_columns,
)
from minitx.kernels.triton_runtime import device_function
from minitx.kernels.triton_softmax_wide import launch_wide_bwd, launch_wide_fwd

# Kernels are not Python to a type checker:
# pyright: reportCallIssue=false

# Measured on an H200: see benchmarks/NOTES.md.
MAX_COLUMNS, MAX_BYTES = 32768, 2**17  # of what is read, that one program holds faster than a group
MAX_CAUSAL_COLUMNS = 16384  # where a group passes over chunks that a row does not see
TILE = {2: 1024, 4: 512}  # elements that a program takes at least, by bytes of each
STRIDED_TILE = 16384  # the same where a row's columns are not adjacent in memory
VALUES_PER_THREAD = 16
# Of a causal row's values half are not read, and 16 bits are half as much to read: more of them
# make up for it.
CAUSAL_VALUES_PER_THREAD = {2: 64, 4: 16}
MIN_SHIFTED = 128  # columns; in shorter rows the edges are much of it
MIN_WARPS, MAX_WARPS = 2, 16  # from there on a thread holds more values


@device_function
def _fwd_tile(
    x_rows,
    y_rows,
    x_step,
    y_step,
    shift,
    visible,
    written,
    n_cols,
    IS_CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows whose `visible` columns lie within BLOCK_N lanes, of which `written` exist."""
    EXACT: tl.constexpr = x_rows.dtype.element_ty == tl.float32
    lanes = tl.arange(0, BLOCK_N)[None, :]
    x = load_visible(  # [BLOCK_M, BLOCK_N]
        x_rows + lanes.to(tl.int64) * x_step,
        lanes,
        shift,
        visible,
        n_cols,
        -float("inf"),
        IS_CAUSAL,
        SHIFTED,
    )

    row_max = tl.max(in_float32(x), axis=1, keep_dims=True)
    p = exp_below(in_float32(x), row_max, EXACT)
    row_sum = tl.sum(p, axis=1, keep_dims=True)  # tl.max may pass over a NaN, the sum never does
    if not EXACT:  # 16 bits are held, and the exponential taken again
        p = exp_below(in_float32(x), row_max, EXACT)
    scale = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)

    store_whole_vectors(
        y_rows + lanes.to(tl.int64) * y_step, lanes, shift, written, p * scale, SHIFTED
    )
    if SHIFTED:
        VECTOR: tl.constexpr = VECTOR_BYTES * 8 // x_rows.dtype.element_ty.primitive_bitwidth
        cols, mask = edge_columns(shift, written, VECTOR)
        edge_x = tl.load(x_rows + shift + cols, mask=mask & (cols < visible), other=-float("inf"))
        edge_y = exp_below(edge_x.to(tl.float32), row_max, EXACT) * scale
        tl.store(y_rows + shift + cols, edge_y.to(y_rows.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_fwd_kernel(
    x_ptr,
    y_ptr,
    sizes,
    x_strides,
    y_strides,
    x_step,
    y_step,
    n_rows,
    n_cols,
    Sq,
    IS_CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    INDEX: tl.constexpr,
    HALVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    visible = visible_columns(rows, n_rows, n_cols, Sq, IS_CAUSAL)  # [BLOCK_M, 1]
    written = tl.where(rows < n_rows, n_cols, 0)
    x_rows, shift = row_pointers(x_ptr, row_offsets(rows, sizes, x_strides), SHIFTED)
    y_rows, _ = row_pointers(y_ptr, row_offsets(rows, sizes, y_strides), SHIFTED)
    steps = (x_step, y_step)
    HALF: tl.constexpr = BLOCK_N // 2
    if HALVED and tl.max(shift + visible) <= HALF:
        _fwd_tile(x_rows, y_rows, *steps, shift, visible, written, n_cols, IS_CAUSAL, SHIFTED, HALF)
        store_zeros(y_rows, y_step, shift, written, SHIFTED, HALF)
    else:
        _fwd_tile(
            x_rows, y_rows, *steps, shift, visible, written, n_cols, IS_CAUSAL, SHIFTED, BLOCK_N
        )


@device_function
def _bwd_tile(
    y_rows,
    dy_rows,
    dx_rows,
    y_step,
    dy_step,
    dx_step,
    shift,
    visible,
    written,
    n_cols,
    IS_CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows whose `visible` columns lie within BLOCK_N lanes, of which `written` exist."""
    lanes = tl.arange(0, BLOCK_N)[None, :]
    y = load_output(  # [BLOCK_M, BLOCK_N]
        y_rows + lanes.to(tl.int64) * y_step, lanes, shift, visible, n_cols, IS_CAUSAL, SHIFTED
    )
    dy = load_visible(  # [BLOCK_M, BLOCK_N]
        dy_rows + lanes.to(tl.int64) * dy_step,
        lanes,
        shift,
        visible,
        n_cols,
        0.0,
        IS_CAUSAL,
        SHIFTED,
    )

    delta = tl.sum(in_float32(y) * in_float32(dy), axis=1, keep_dims=True)
    dx = gradient(in_float32(y), in_float32(dy), delta)

    store_whole_vectors(dx_rows + lanes.to(tl.int64) * dx_step, lanes, shift, written, dx, SHIFTED)
    if SHIFTED:
        VECTOR: tl.constexpr = VECTOR_BYTES * 8 // y_rows.dtype.element_ty.primitive_bitwidth
        cols, mask = edge_columns(shift, written, VECTOR)
        seen = mask & (cols < visible)
        edge_y = tl.load(y_rows + shift + cols, mask=seen, other=0.0).to(tl.float32)
        edge_dy = tl.load(dy_rows + shift + cols, mask=seen, other=0.0).to(tl.float32)
        edge_dx = gradient(edge_y, edge_dy, delta)
        tl.store(dx_rows + shift + cols, edge_dx.to(dx_rows.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_bwd_kernel(
    y_ptr,
    dy_ptr,
    dx_ptr,
    sizes,
    y_strides,
    dy_strides,
    dx_strides,
    y_step,
    dy_step,
    dx_step,
    n_rows,
    n_cols,
    Sq,
    IS_CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    INDEX: tl.constexpr,
    HALVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    visible = visible_columns(rows, n_rows, n_cols, Sq, IS_CAUSAL)  # [BLOCK_M, 1]
    written = tl.where(rows < n_rows, n_cols, 0)
    y_rows, shift = row_pointers(y_ptr, row_offsets(rows, sizes, y_strides), SHIFTED)
    dy_rows, _ = row_pointers(dy_ptr, row_offsets(rows, sizes, dy_strides), SHIFTED)
    dx_rows, _ = row_pointers(dx_ptr, row_offsets(rows, sizes, dx_strides), SHIFTED)
    rows_and_steps = (y_rows, dy_rows, dx_rows, y_step, dy_step, dx_step)
    HALF: tl.constexpr = BLOCK_N // 2
    if HALVED and tl.max(shift + visible) <= HALF:
        _bwd_tile(*rows_and_steps, shift, visible, written, n_cols, IS_CAUSAL, SHIFTED, HALF)
        store_zeros(dx_rows, dx_step, shift, written, SHIFTED, HALF)
    else:
        _bwd_tile(*rows_and_steps, shift, visible, written, n_cols, IS_CAUSAL, SHIFTED, BLOCK_N)


def _fits(rows: torch.Tensor, n_read: int, is_causal: bool) -> bool:
    """Whether one program takes a row of each of the tensors that are read."""
    n_cols = rows.shape[-1]
    longest = MAX_CAUSAL_COLUMNS if is_causal else MAX_COLUMNS
    return n_cols <= longest and n_read * n_cols * rows.element_size() <= MAX_BYTES


def _choose_tile(
    n_cols: int, itemsize: int, columns_adjacent: bool, half_is_read: bool
) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and num_warps for rows of `n_cols` columns."""
    block_n = triton.next_power_of_2(n_cols)
    values = CAUSAL_VALUES_PER_THREAD[itemsize] if half_is_read else VALUES_PER_THREAD
    # Where rows are adjacent in memory and columns are not (softmax over another dim than the
    # last), a program takes as many rows as it can hold, so that what it loads is adjacent too.
    elements = max(TILE[itemsize] if columns_adjacent else STRIDED_TILE, block_n)
    num_warps = max(MIN_WARPS, min(elements // (32 * values), MAX_WARPS))
    return elements // block_n, block_n, num_warps


def _shifts(tensors: tuple[torch.Tensor, ...], strides: list[tuple[int, ...]]) -> bool:
    """Whether rows are shifted. Not if they are short, or the shift would double the tile; nor in
    float32, where single accesses are as fast (98 % of a copy at 1,000 columns)."""
    n_cols = tensors[0].shape[-1]
    has_room = triton.next_power_of_2(n_cols) - n_cols >= vector_of(tensors[0]) - 1
    is_worthwhile = tensors[0].element_size() == 2 and n_cols >= MIN_SHIFTED
    return is_worthwhile and has_room and can_shift(tensors, strides)


def _options(
    tensors: tuple[torch.Tensor, ...], strides: list[tuple[int, ...]], is_causal: bool
) -> dict[str, Any]:
    """How to compile the kernel for rows of these tensors, all but the last of them read."""
    rows, n_read = tensors[0], len(tensors) - 1
    n_cols, itemsize = rows.shape[-1], rows.element_size()
    is_shifted = _shifts(tensors, strides)
    is_masked_twice = is_causal and is_shifted  # which takes registers of its own
    half_is_read = is_causal and not is_masked_twice
    block_m, block_n, num_warps = _choose_tile(n_cols, itemsize, rows.stride(-1) == 1, half_is_read)
    n_rows = rows.numel() // n_cols
    is_limited = block_m == 1 and rows.stride(-1) == 1 and not is_masked_twice
    return {
        "IS_CAUSAL": is_causal,
        "SHIFTED": is_shifted,
        "INDEX": tl.int32 if n_rows + block_m < 2**31 else tl.int64,
        "HALVED": is_causal and block_n > 1,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "maxnreg": _max_registers(n_read * block_n * itemsize, num_warps) if is_limited else None,
    }


def _max_registers(held: int, num_warps: int) -> int | None:
    """A thread's, in a program that reads `held` bytes; None for no limit.

    So limited, two programs of 16 warps fit on an SM, or three of 8, of which a thread holds 32
    registers. Where it holds 64, one fits in any case, but told so the compiler issues all loads
    before it uses what the first brings, which it else does not.
    """
    data = held // (4 * 32 * num_warps)
    if data == 32:
        return 64 if num_warps == MAX_WARPS else 80
    return 128 if data == 64 else None


def _launch_fwd(x: torch.Tensor, y: torch.Tensor, is_causal: bool) -> None:
    key = (
        "softmax fwd", x.dtype, x.device, is_causal, x.shape, x.stride(), y.stride(),
        x.data_ptr() % VECTOR_BYTES.value, y.data_ptr() % VECTOR_BYTES.value,
    )  # fmt: skip
    launch = remembered(key)
    if launch is None:
        launch = remember(key, _fwd_launch(x, y, is_causal))
    launch(x, y)


def _fwd_launch(x: torch.Tensor, y: torch.Tensor, is_causal: bool) -> Launch:
    n_cols = x.shape[-1]
    sizes, (x_strides, y_strides) = merge_leading_dims(x, y)
    n_rows = x.numel() // n_cols
    options = _options((x, y), [x_strides, y_strides], is_causal)
    return Launch(
        _softmax_fwd_kernel,
        x.device,
        triton.cdiv(n_rows, options["BLOCK_M"]),
        (
            sizes,
            x_strides,
            y_strides,
            x.stride(-1),
            y.stride(-1),
            n_rows,
            n_cols,
            x.shape[-2] if is_causal else 1,
        ),
        **options,
    )


def _launch_bwd(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, is_causal: bool) -> None:
    key = (
        "softmax bwd", y.dtype, dy.dtype, y.device, is_causal, y.shape,
        y.stride(), dy.stride(), dx.stride(),
        *[t.data_ptr() % VECTOR_BYTES.value for t in (y, dy, dx)],
    )  # fmt: skip
    launch = remembered(key)
    if launch is None:
        launch = remember(key, _bwd_launch(y, dy, dx, is_causal))
    launch(y, dy, dx)


def _bwd_launch(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, is_causal: bool) -> Launch:
    n_cols = y.shape[-1]
    sizes, (y_strides, dy_strides, dx_strides) = merge_leading_dims(y, dy, dx)
    n_rows = y.numel() // n_cols
    options = _options((y, dy, dx), [y_strides, dy_strides, dx_strides], is_causal)
    return Launch(
        _softmax_bwd_kernel,
        y.device,
        triton.cdiv(n_rows, options["BLOCK_M"]),
        (
            sizes,
            y_strides,
            dy_strides,
            dx_strides,
            y.stride(-1),
            dy.stride(-1),
            dx.stride(-1),
            n_rows,
            n_cols,
            y.shape[-2] if is_causal else 1,
        ),
        **options,
    )


def _fwd(x: torch.Tensor, is_causal: bool) -> torch.Tensor:
    y = torch.empty_like(x)
    if x.numel() > 0:
        launch = _launch_fwd if _fits(x, 1, is_causal) else launch_wide_fwd
        launch(x, y, is_causal)
    return y


def _bwd(y: torch.Tensor, dy: torch.Tensor, is_causal: bool) -> torch.Tensor:
    dx = torch.empty_like(y)
    if y.numel() > 0:
        launch = _launch_bwd if _fits(y, 2, is_causal) else launch_wide_bwd
        launch(y, dy, dx, is_causal)
    return dx


_softmax = define_softmax("triton", _fwd, _bwd)


def triton_softmax(rows: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Softmax over the last dim of rows [..., N] of any strides, in their dtype (float32, float16
    or bfloat16) and layout, computed in float32.

    With `is_causal` rows are scores [..., Sq, Skv]. Differentiable once; a second derivative
    raises.
    """
    return _softmax(rows, is_causal)
