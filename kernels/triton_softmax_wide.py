"""Row softmax in Triton for rows too wide for one program: chunks, and a merge by log-sum-exp.

A row is cut into chunks of BLOCK_N columns, and each chunk is visited by two programs. A *reader*
reduces it to a partial result: its maximum m_c and s_c = sum exp(x - m_c). A *writer* merges the
partial results of the whole row,

    m = max_c m_c,   s = sum_c s_c exp(m_c - m),

reads its chunk again and writes exp(x - m) / s. Readers run ahead of writers by `lead` rows,
which is far enough that a writer hardly ever waits for them, and near enough that what it reads a
second time is still in L2: memory is read once and written once, and neither the width of a row nor
the number of rows leaves the GPU idle.

    ticket      0           1          2           3         ...
    reader  row 0, c 0             row 0, c 1                       (row, chunk)
    writer               row -lead, c 0         row -lead, c 1      (rows before 0 or past the
                                                                     last: nothing to do)

A writer waits for readers only, readers wait for nobody, and every reader that a writer needs drew
an earlier ticket, so it is running already or done: no order of execution can lock up. A program
draws its ticket when it starts, for a GPU promises nothing about the order of program ids.

A partial result is two float32 in one 64-bit word, so it is seen whole or not at all, and no fence
is needed. 0 means not there yet, and is not the word of any partial result: s_c of 0 goes with an
m_c of -inf. Partial results are merged in the same order every time, so results do not vary from
run to run.

The backward is the same with dx_j = y_j (dy_j - sum_k y_k dy_k): its sum is what is merged.
"""

import torch
import triton
import triton.language as tl

from minitx.kernels.triton_rows import (
    exp_below,
    load_visible,
    merge_leading_dims,
    row_offsets,
    visible_columns,
)
from minitx.kernels.triton_runtime import device_function, launching_on

# Kernels are not Python to a type checker:
# pyright: reportCallIssue=false, reportOperatorIssue=false

BLOCK_N_FWD = 8192
BLOCK_N_BWD = 4096
NUM_WARPS = 8
LEAD_BYTES = 16 * 2**20  # how far readers run ahead, in bytes read: a third of an H200's L2

# Partial results that a writer merges at a time. At least one for each of its threads: in a smaller
# tensor several threads load the same word, and they may not see it change at the same time.
MERGE = 1024


@device_function
def _draw_ticket(words_ptr, n_rows, n_chunks, lead):
    """This program's (is_writer, row, chunk); the row may lie outside of 0 to n_rows - 1."""
    ticket = tl.atomic_add(words_ptr + n_rows * n_chunks, 1, sem="relaxed")
    is_writer = ticket % 2 == 1
    row = ticket // 2 // n_chunks
    return is_writer, tl.where(is_writer, row - lead, row), ticket // 2 % n_chunks


@device_function
def _publish(word_ptr, a, b):
    """Stores two float32 scalars as one word."""
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(word_ptr, high | low, sem="relaxed")


@device_function
def _await_partials(words_ptr, first, n_chunks, a_padding, b_padding, MERGE: tl.constexpr):
    """The partial results of chunks `first` and on, two float32 tensors of [MERGE]."""
    chunks = first + tl.arange(0, MERGE)
    mask = chunks < n_chunks
    words = tl.load(words_ptr + chunks, mask=mask, other=1, volatile=True)
    while tl.min(tl.where(words == 0, 0, 1)) == 0:
        words = tl.load(words_ptr + chunks, mask=mask, other=1, volatile=True)
    a = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b = words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(mask, a, a_padding), tl.where(mask, b, b_padding)


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
    lead,
    IS_CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,
):
    is_writer, row, chunk = _draw_ticket(words_ptr, n_rows, n_chunks, lead)
    if row < 0 or row >= n_rows:
        return
    words_ptr += row * n_chunks
    cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    visible = visible_columns(row, n_rows, n_cols, Sq, IS_CAUSAL)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32

    x_ptrs = x_ptr + row_offsets(row, sizes, x_strides) + cols * x_step
    x = load_visible(x_ptrs, cols, visible, -float("inf"), IS_CAUSAL)  # [BLOCK_N]

    if not is_writer:
        chunk_max = tl.max(x)
        _publish(words_ptr + chunk, chunk_max, tl.sum(exp_below(x, chunk_max, EXACT)))
        return

    row_max = -float("inf")
    row_sum = 0.0
    for first in range(0, n_chunks, MERGE):
        chunk_max, chunk_sum = _await_partials(
            words_ptr, first, n_chunks, -float("inf"), 0.0, MERGE
        )
        larger = tl.maximum(row_max, tl.max(chunk_max))
        row_sum *= exp_below(row_max, larger, EXACT)
        row_sum += tl.sum(chunk_sum * exp_below(chunk_max, larger, EXACT))
        row_max = larger

    y = exp_below(x, row_max, EXACT) * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))
    y_ptrs = y_ptr + row_offsets(row, sizes, y_strides) + cols * y_step
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


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
    lead,
    IS_CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,
):
    is_writer, row, chunk = _draw_ticket(words_ptr, n_rows, n_chunks, lead)
    if row < 0 or row >= n_rows:
        return
    words_ptr += row * n_chunks
    cols = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    visible = visible_columns(row, n_rows, n_cols, Sq, IS_CAUSAL)

    y_ptrs = y_ptr + row_offsets(row, sizes, y_strides) + cols * y_step
    dy_ptrs = dy_ptr + row_offsets(row, sizes, dy_strides) + cols * dy_step
    y = load_visible(y_ptrs, cols, visible, 0.0, IS_CAUSAL)  # [BLOCK_N]
    dy = load_visible(dy_ptrs, cols, visible, 0.0, IS_CAUSAL)  # [BLOCK_N]

    if not is_writer:
        # 1 or 2, never 0: whether all of y is 0 here, in a word that is never 0.
        _publish(words_ptr + chunk, tl.sum(y * dy), tl.where(tl.sum(y) == 0.0, 1.0, 2.0))
        return

    delta = 0.0
    some_or_none = 1.0
    for first in range(0, n_chunks, MERGE):
        chunk_delta, chunk_some = _await_partials(words_ptr, first, n_chunks, 0.0, 1.0, MERGE)
        delta += tl.sum(chunk_delta)
        some_or_none = tl.maximum(some_or_none, tl.max(chunk_some))

    # A row of zeros is one of -inf alone: its gradient is 0, whatever dy is.
    visible = tl.where(some_or_none == 1.0, 0, visible)
    dx = tl.where(cols < visible, y * (dy - delta), 0.0)
    dx_ptrs = dx_ptr + row_offsets(row, sizes, dx_strides) + cols * dx_step
    tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=cols < n_cols)


def _split(rows: torch.Tensor, block_n: int, tensors_read: int) -> tuple[int, int, torch.Tensor]:
    """Chunks a row, rows that readers are ahead, and a zeroed word a chunk with one for tickets."""
    n_rows, n_chunks = rows.numel() // rows.shape[-1], triton.cdiv(rows.shape[-1], block_n)
    bytes_a_row = rows.shape[-1] * rows.element_size() * tensors_read
    lead = min(triton.cdiv(LEAD_BYTES, bytes_a_row), n_rows)
    words = torch.zeros(n_rows * n_chunks + 1, dtype=torch.int64, device=rows.device)
    return n_chunks, lead, words


def launch_wide_fwd(x: torch.Tensor, y: torch.Tensor, is_causal: bool) -> None:
    """Writes softmax(x) to y; both [..., N], not empty, of any strides."""
    n_chunks, lead, words = _split(x, BLOCK_N_FWD, 1)
    sizes, (x_strides, y_strides) = merge_leading_dims(x, y)
    n_rows, n_cols = x.numel() // x.shape[-1], x.shape[-1]
    with launching_on(x.device):
        _wide_fwd_kernel[(2 * (n_rows + lead) * n_chunks,)](
            x,
            y,
            words,
            sizes,
            x_strides,
            y_strides,
            x.stride(-1),
            y.stride(-1),
            n_rows,
            n_cols,
            x.shape[-2] if is_causal else 1,
            n_chunks,
            lead,
            IS_CAUSAL=is_causal,
            BLOCK_N=BLOCK_N_FWD,
            MERGE=MERGE,
            num_warps=NUM_WARPS,
        )


def launch_wide_bwd(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, is_causal: bool) -> None:
    """Writes the gradient of softmax's input to dx; all [..., N], not empty, of any strides."""
    n_chunks, lead, words = _split(y, BLOCK_N_BWD, 2)
    sizes, (y_strides, dy_strides, dx_strides) = merge_leading_dims(y, dy, dx)
    n_rows, n_cols = y.numel() // y.shape[-1], y.shape[-1]
    with launching_on(y.device):
        _wide_bwd_kernel[(2 * (n_rows + lead) * n_chunks,)](
            y,
            dy,
            dx,
            words,
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
            n_chunks,
            lead,
            IS_CAUSAL=is_causal,
            BLOCK_N=BLOCK_N_BWD,
            MERGE=MERGE,
            num_warps=NUM_WARPS,
        )
