"""Row softmax in Triton for rows too wide for one program: each holds a chunk, all share the sums.

A row is cut into chunks of BLOCK_N columns. A program loads its chunk, reduces it to a partial
result, its maximum m_c and s_c = sum exp(x - m_c), and publishes that; waits for those of the other
chunks (triton_groups.py) and merges them,

    m = max_c m_c,   s = sum_c s_c exp(m_c - m);

and writes exp(x - m) / s, having kept x in registers. Memory is read once and written once. Chunks
past what a causal row sees are zeros, and wait for no one.

Where a row has more chunks than programs fit on the GPU (with 132 SMs: beyond 4.3 million columns,
3.2 million in float32's backward), and in Triton's interpreter, the same kernel is launched twice:
first to publish, then to merge and write. Then memory is read twice.

The backward is the same with dx_j = y_j (dy_j - sum_k y_k dy_k): its sum is what is merged.
"""

import torch
import triton
import triton.language as tl

from minitx.kernels.triton_groups import (
    Chunks,
    await_partials,
    chunk_of,
    launch_groups,
    merge_partials,
    publish,
)
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
    vector_of,
    visible_columns,
)
from minitx.kernels.triton_runtime import device_function

# Kernels are not Python to a type checker:
# pyright: reportCallIssue=false, reportOperatorIssue=false


@device_function
def _chunks_awaited(chunk, shift, visible, BLOCK_N: tl.constexpr):
    """How many partial results this chunk depends on: none if it is past the visible columns."""
    end = tl.where(visible > 0, shift + visible, 0)
    return tl.where(chunk * BLOCK_N < end, tl.cdiv(end, BLOCK_N), 0)


@device_function
def _sees_nothing(chunk, awaited):
    """Whether a causal row's chunk is zeros alone. The first is not asked: it has the row's
    edges."""
    return (chunk > 0) & (awaited == 0)


@device_function
def _load_chunk(
    pointers, lanes, origin, visible, n_cols, other, IS_CAUSAL: tl.constexpr, SHIFTED: tl.constexpr
):
    """As load_visible. Most chunks are visible from end to end, and so need no masks, which take
    registers."""
    if (IS_CAUSAL or SHIFTED) and (origin <= 0) & (lanes.shape[0] <= origin + visible):
        x = tl.load(pointers)
    else:
        x = load_visible(pointers, lanes, origin, visible, n_cols, other, IS_CAUSAL, SHIFTED)
    return x


@triton.jit
def _wide_fwd_kernel(
    x_ptr,
    y_ptr,
    words_ptr,
    sizes,
    x_strides,
    y_strides,
    x_step,
    y_step,
    n_rows,
    n_cols,
    Sq,
    n_chunks,
    IS_CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    PUBLISH: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,
):
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    VECTOR: tl.constexpr = VECTOR_BYTES * 8 // x_ptr.dtype.element_ty.primitive_bitwidth
    for r in range(tl.program_id(0) // n_chunks, n_rows, tl.num_programs(0) // n_chunks):
        chunk = chunk_of(r, n_chunks)
        row = tl.cast(r, tl.int64)
        start = chunk * BLOCK_N
        lanes = tl.arange(0, BLOCK_N)
        visible = visible_columns(row, n_rows, n_cols, Sq, IS_CAUSAL)
        partials = words_ptr + row * n_chunks

        x_row, shift = row_pointers(x_ptr, row_offsets(row, sizes, x_strides), SHIFTED)
        awaited = _chunks_awaited(chunk, shift, visible, BLOCK_N)
        if IS_CAUSAL and _sees_nothing(chunk, awaited):
            if WRITE:
                y_row, _ = row_pointers(y_ptr, row_offsets(row, sizes, y_strides), SHIFTED)
                y_ptrs = y_row + (start + lanes) * y_step
                zeros = tl.zeros((BLOCK_N,), dtype=tl.float32)
                store_whole_vectors(y_ptrs, lanes, shift - start, n_cols, zeros, SHIFTED)
        else:
            x = _load_chunk(  # [BLOCK_N]
                x_row + (start + lanes) * x_step,
                lanes,
                shift - start,
                visible,
                n_cols,
                -float("inf"),
                IS_CAUSAL,
                SHIFTED,
            )
            chunk_max = tl.max(in_float32(x))
            p = exp_below(in_float32(x), chunk_max, EXACT)
            if PUBLISH:
                publish(partials + chunk, chunk_max, tl.sum(p))

            if WRITE:
                row_max, row_sum = merge_partials(partials, awaited, MERGE, EXACT)

                scale = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
                p = exp_below(in_float32(x), row_max, EXACT)
                y_row, _ = row_pointers(y_ptr, row_offsets(row, sizes, y_strides), SHIFTED)
                y_ptrs = y_row + (start + lanes) * y_step
                store_whole_vectors(y_ptrs, lanes, shift - start, n_cols, p * scale, SHIFTED)
                if SHIFTED and chunk == 0:  # whose program writes both of the row's edges
                    cols, mask = edge_columns(shift, n_cols, VECTOR)
                    seen = mask & (cols < visible)
                    edge_x = tl.load(x_row + shift + cols, mask=seen, other=-float("inf"))
                    edge_y = exp_below(edge_x.to(tl.float32), row_max, EXACT) * scale
                    tl.store(y_row + shift + cols, edge_y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _wide_bwd_kernel(
    y_ptr,
    dy_ptr,
    dx_ptr,
    words_ptr,
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
    n_chunks,
    IS_CAUSAL: tl.constexpr,
    SHIFTED: tl.constexpr,
    PUBLISH: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,
):
    VECTOR: tl.constexpr = VECTOR_BYTES * 8 // y_ptr.dtype.element_ty.primitive_bitwidth
    for r in range(tl.program_id(0) // n_chunks, n_rows, tl.num_programs(0) // n_chunks):
        chunk = chunk_of(r, n_chunks)
        row = tl.cast(r, tl.int64)
        start = chunk * BLOCK_N
        lanes = tl.arange(0, BLOCK_N)
        visible = visible_columns(row, n_rows, n_cols, Sq, IS_CAUSAL)
        partials = words_ptr + row * n_chunks

        y_row, shift = row_pointers(y_ptr, row_offsets(row, sizes, y_strides), SHIFTED)
        dy_row, _ = row_pointers(dy_ptr, row_offsets(row, sizes, dy_strides), SHIFTED)
        awaited = _chunks_awaited(chunk, shift, visible, BLOCK_N)
        if IS_CAUSAL and _sees_nothing(chunk, awaited):
            if WRITE:
                dx_row, _ = row_pointers(dx_ptr, row_offsets(row, sizes, dx_strides), SHIFTED)
                dx_ptrs = dx_row + (start + lanes) * dx_step
                zeros = tl.zeros((BLOCK_N,), dtype=tl.float32)
                store_whole_vectors(dx_ptrs, lanes, shift - start, n_cols, zeros, SHIFTED)
        else:
            y_ptrs, dy_ptrs = y_row + (start + lanes) * y_step, dy_row + (start + lanes) * dy_step
            y = load_output(y_ptrs, lanes, shift - start, visible, n_cols, IS_CAUSAL, SHIFTED)
            dy = load_visible(
                dy_ptrs, lanes, shift - start, visible, n_cols, 0.0, IS_CAUSAL, SHIFTED
            )
            if PUBLISH:
                dot = tl.sum(in_float32(y) * in_float32(dy))
                publish(partials + chunk, dot, tl.full((), 1.0, tl.float32))  # a word but 0

            if WRITE:
                delta = 0.0
                for first in range(0, awaited, MERGE):
                    dots, _ones = await_partials(partials, first, awaited, 0.0, 1.0, MERGE)
                    delta += tl.sum(dots)

                dx = gradient(in_float32(y), in_float32(dy), delta)
                dx_row, _ = row_pointers(dx_ptr, row_offsets(row, sizes, dx_strides), SHIFTED)
                dx_ptrs = dx_row + (start + lanes) * dx_step
                store_whole_vectors(dx_ptrs, lanes, shift - start, n_cols, dx, SHIFTED)
                if SHIFTED and chunk == 0:  # whose program writes both of the row's edges
                    cols, mask = edge_columns(shift, n_cols, VECTOR)
                    seen = mask & (cols < visible)
                    edge_y = tl.load(y_row + shift + cols, mask=seen, other=0.0).to(tl.float32)
                    edge_dy = tl.load(dy_row + shift + cols, mask=seen, other=0.0).to(tl.float32)
                    edge_dx = gradient(edge_y, edge_dy, delta)
                    tl.store(dx_row + shift + cols, edge_dx.to(dx_ptr.dtype.element_ty), mask=mask)


# By bytes of an element, and whether causal: that takes more registers. Measured on an H200: see
# benchmarks/NOTES.md.
FWD = {
    (2, False): Chunks(BLOCK_N=8192, num_warps=4, programs_per_sm=7),
    (2, True): Chunks(BLOCK_N=8192, num_warps=4, programs_per_sm=6),
    (4, False): Chunks(BLOCK_N=8192, num_warps=8, programs_per_sm=4),
    (4, True): Chunks(BLOCK_N=4096, num_warps=4, programs_per_sm=7),
}
BWD = {
    (2, False): Chunks(BLOCK_N=8192, num_warps=4, programs_per_sm=4),
    (2, True): Chunks(BLOCK_N=8192, num_warps=4, programs_per_sm=4),
    (4, False): Chunks(BLOCK_N=8192, num_warps=8, programs_per_sm=3),
    (4, True): Chunks(BLOCK_N=4096, num_warps=4, programs_per_sm=5),
}


def _launch(
    kernel: triton.JITFunction, tensors: tuple[torch.Tensor, ...], chunks: Chunks, is_causal: bool
) -> None:
    rows = tensors[0]
    n_cols = rows.shape[-1]
    sizes, strides = merge_leading_dims(*tensors)
    is_shifted = can_shift(tensors, strides)
    n_lanes = n_cols + (vector_of(rows) - 1 if is_shifted else 0)
    n_rows, n_chunks = rows.numel() // n_cols, triton.cdiv(n_lanes, chunks.BLOCK_N)
    words = torch.zeros(n_rows * n_chunks, dtype=torch.int64, device=rows.device)

    def launch(n_groups: int, **options) -> None:
        kernel[(n_groups * n_chunks,)](
            *tensors,
            words,
            sizes,
            *strides,
            *(t.stride(-1) for t in tensors),
            n_rows,
            n_cols,
            rows.shape[-2] if is_causal else 1,
            n_chunks,
            IS_CAUSAL=is_causal,
            SHIFTED=is_shifted,
            **options,
        )

    launch_groups(launch, n_rows, n_chunks, chunks, rows.device)


def launch_wide_fwd(x: torch.Tensor, y: torch.Tensor, is_causal: bool) -> None:
    """Writes softmax(x) to y; both [..., N], not empty, of any strides."""
    _launch(_wide_fwd_kernel, (x, y), FWD[x.element_size(), is_causal], is_causal)


def launch_wide_bwd(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, is_causal: bool) -> None:
    """Writes the gradient of softmax's input to dx; all [..., N], not empty, of any strides."""
    _launch(_wide_bwd_kernel, (y, dy, dx), BWD[y.element_size(), is_causal], is_causal)
