"""What the Triton row-softmax kernels share: where rows lie in memory, and what is read of them.

A tensor [..., N] is R rows of N columns. Its leading dims are passed to a kernel as two tuples,
`sizes` and `strides`, after merging those that every tensor of the call allows: a contiguous tensor
arrives as one leading dim (R,), whatever its shape was.

A GPU moves 16 bytes at a time where the compiler can prove that an access starts, and its mask
ends, at a multiple of 16 bytes. Rows of any width start anywhere, so their lanes are shifted: lane
0 is at the boundary at or below the row's start, `shift` elements before column 0,

    lane     0  1  2  3 | 4  5  6  7 | 8  9 10 11      shift = 2, n_cols = 8, VECTOR = 4
    column   .  .  0  1 | 2  3  4  5 | 6  7  .  .

and reads are of whole vectors: what a vector holds beside the row is read and put aside. Writes are
of the vectors that lie in the row, and of the columns at its edges one by one.
"""

import torch
import triton.language as tl

from minitx.kernels.triton_runtime import device_function
from minitx.kernels.triton_tiles import INTERPRETED, LOG2E, exact_exp

# Kernels are not Python to a type checker:
# pyright: reportGeneralTypeIssues=false

VECTOR_BYTES = tl.constexpr(16)


def merge_leading_dims(
    *tensors: torch.Tensor,
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes of the leading dims (all but the last) of non-empty tensors of one shape, and each
    tensor's strides.

    Two neighbours become one where in every tensor the outer one steps over exactly the inner one;
    dims of size 1 vanish. There is always at least one dim left.
    """
    shape = tensors[0].shape
    if all(t.is_contiguous() for t in tensors):
        return (tensors[0].numel() // shape[-1],), [(shape[-1],) for _ in tensors]
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []  # an entry a dim, holding one stride a tensor
    for dim, size in enumerate(shape[:-1]):
        inner = tuple(t.stride(dim) for t in tensors)
        if size == 1:
            continue
        if sizes and strides[-1] == tuple(step * size for step in inner):
            sizes[-1] *= size
            strides[-1] = inner
        else:
            sizes.append(size)
            strides.append(inner)
    if not sizes:
        return (1,), [(shape[-1],) for _ in tensors]
    return tuple(sizes), list(zip(*strides, strict=True))


def vector_of(tensor: torch.Tensor) -> int:
    """Elements in a vector."""
    return VECTOR_BYTES.value // tensor.element_size()


def can_shift(tensors: tuple[torch.Tensor, ...], strides: list[tuple[int, ...]]) -> bool:
    """Whether a shift would help, and one does for all tensors, with the strides of their merged
    leading dims: a row must lie equally far beyond a vector's start in each."""
    if any(t.stride(-1) != 1 for t in tensors):
        return False
    vector, known = vector_of(tensors[0]), 16  # what Triton finds out about integers by itself
    beyond = [t.data_ptr() % VECTOR_BYTES.value for t in tensors]
    is_aligned = not any(beyond) and not any(s % known for dims in strides for s in dims)
    if is_aligned and tensors[0].shape[-1] % known == 0:
        return False
    steps = [tuple(s % vector for s in dims) for dims in strides]
    return beyond.count(beyond[0]) == len(beyond) and steps.count(steps[0]) == len(steps)


@device_function
def row_offsets(rows, sizes, strides):
    """Elements (int64) from a tensor's start to the start of each row; rows count in row-major
    order, in 32 bits where they can: dividing 64 bits takes longer than a short row does."""
    offsets = tl.cast(rows, tl.int64) * 0
    for d in tl.static_range(len(sizes) - 1, 0, -1):
        offsets += tl.cast(rows % sizes[d], tl.int64) * strides[d]
        rows = rows // sizes[d]
    return offsets + tl.cast(rows, tl.int64) * strides[0]


@device_function
def visible_columns(rows, n_rows, n_cols, Sq, IS_CAUSAL: tl.constexpr):
    """How many columns of each row take part: none in a row past the last.

    Causal rows are queries 0 to Sq - 1 of matrix after matrix, aligned bottom-right: query i sees
    columns 0 to i + n_cols - Sq.
    """
    visible = tl.where(rows < n_rows, n_cols, 0)
    if IS_CAUSAL:
        visible = tl.minimum(visible, tl.maximum(rows % Sq + 1 + (n_cols - Sq), 0))
    return visible


@device_function
def row_pointers(pointer, offsets, SHIFTED: tl.constexpr):
    """Pointers to lane 0 of rows that start at `offsets`, and the rows' shifts: 0 unless
    SHIFTED."""
    shift = 0
    if SHIFTED:
        VECTOR: tl.constexpr = VECTOR_BYTES * 8 // pointer.dtype.element_ty.primitive_bitwidth
        beyond = pointer.to(tl.int64) % VECTOR_BYTES // (VECTOR_BYTES // VECTOR)
        pointer = tl.multiple_of(pointer - beyond, VECTOR_BYTES)
        starts = offsets + beyond
        offsets = starts // VECTOR * VECTOR
        shift = starts - offsets
        if len(offsets.shape) == 0:  # else the compiler folds the offset into the pointer above
            return tl.multiple_of(pointer + offsets, VECTOR_BYTES), shift
    return pointer + offsets, shift


@device_function
def lane_bound(x):
    """x in 32 bits, as a bound of a tile's lanes: they are fewer than 65536."""
    return tl.cast(tl.where(x < 0, 0, tl.where(x < 65536, x, 65536)), tl.int32)


@device_function
def load_vectors(pointers, lanes, origin, visible, n_cols, other, SHIFTED: tl.constexpr):
    """Whole vectors, those that hold columns 0 to visible - 1, whatever else they hold; `other` in
    place of the rest.

    A mask that may end inside a vector would make every load of the row a scalar one.
    """
    VECTOR: tl.constexpr = VECTOR_BYTES * 8 // pointers.dtype.element_ty.primitive_bitwidth
    end = (lane_bound(origin + visible) + VECTOR - 1) // VECTOR * VECTOR
    if SHIFTED:
        end = tl.where(visible > 0, end, 0)  # past the last row there is nothing to read
    else:
        row_end = lane_bound(origin + n_cols)
        end = tl.where(end < row_end, end, row_end)
    return tl.load(pointers, mask=lanes < end, other=other)


@device_function
def load_visible(
    pointers, lanes, origin, visible, n_cols, other, IS_CAUSAL: tl.constexpr, SHIFTED: tl.constexpr
):
    """Columns 0 to visible - 1; `other` in place of the rest, whatever memory holds there.

    Column 0 is in lane `origin`, which is below 0 in the later tiles of a row.
    """
    end = lane_bound(origin + visible)
    if IS_CAUSAL or SHIFTED:
        values = load_vectors(pointers, lanes, origin, visible, n_cols, other, SHIFTED)
        is_visible = lanes < end
        if SHIFTED:
            is_visible &= lanes >= lane_bound(origin)
        values = tl.where(is_visible, values, other)
    else:
        values = tl.load(pointers, mask=lanes < end, other=other)
    return values


@device_function
def load_output(
    pointers, lanes, origin, visible, n_cols, IS_CAUSAL: tl.constexpr, SHIFTED: tl.constexpr
):
    """As load_visible, of softmax's own output: what is masked is 0 in memory already."""
    if IS_CAUSAL and not SHIFTED:
        y = load_vectors(pointers, lanes, origin, visible, n_cols, 0.0, SHIFTED)
    else:
        y = load_visible(pointers, lanes, origin, visible, n_cols, 0.0, IS_CAUSAL, SHIFTED)
    return y


@device_function
def store_whole_vectors(pointers, lanes, origin, n_cols, values, SHIFTED: tl.constexpr):
    """Writes columns 0 to n_cols - 1; where SHIFTED all but those that edge_columns gives."""
    end = lane_bound(origin + n_cols)
    if SHIFTED:
        VECTOR: tl.constexpr = VECTOR_BYTES * 8 // pointers.dtype.element_ty.primitive_bitwidth
        first = (lane_bound(origin) + VECTOR - 1) // VECTOR * VECTOR
        mask = (lanes >= first) & (lanes < end // VECTOR * VECTOR)
    else:
        mask = lanes < end
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@device_function
def store_zeros(pointers, step, origin, n_cols, SHIFTED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros as store_whole_vectors writes values, to lanes BLOCK_N to 2 BLOCK_N - 1 of rows at
    `pointers` [M, 1]."""
    lanes = tl.arange(0, BLOCK_N)[None, :]
    zeros = tl.zeros((pointers.shape[0], BLOCK_N), dtype=tl.float32)
    beyond = pointers + (lanes + BLOCK_N).to(tl.int64) * step
    store_whole_vectors(beyond, lanes, origin - BLOCK_N, n_cols, zeros, SHIFTED)


@device_function
def edge_columns(shift, n_cols, VECTOR: tl.constexpr):
    """Columns of shifted rows, [2 VECTOR] or [M, 2 VECTOR], that share their vector with what is
    before or after the row; and a mask of those that are ones."""
    edge = tl.arange(0, 2 * VECTOR)
    if len(shift.shape) == 2:
        edge = edge[None, :]
    first = (shift + VECTOR - 1) // VECTOR * VECTOR - shift  # column of the first whole vector
    end = tl.maximum((shift + n_cols) // VECTOR * VECTOR - shift, first)
    cols = tl.where(edge < VECTOR, edge, end + edge - VECTOR)
    return cols, (cols < n_cols) & ((edge >= VECTOR) | (edge < first))


@device_function
def in_float32(x):
    """x in float32, to be used once: where x is used again, it is converted again.

    Left to itself the compiler converts 16-bit values once and holds them as float32 from then on,
    in twice the registers, so that fewer of them are in flight. What assembly returns is new to it.
    """
    if not INTERPRETED and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x.to(tl.float32)


@device_function
def exp_below(x, maximum, EXACT: tl.constexpr):
    """exp(x - maximum), and 0 where both are -inf: their difference would be NaN.

    The maximum is subtracted first and the difference scaled: x * log2(e) - maximum * log2(e) as
    one fused multiply-add would leave a product's rounding error, which is large where x is.
    EXACT is for float32 rows; rounded to 16 bits the faster exponential gives the same.
    """
    below = x - tl.where(maximum == -float("inf"), 0.0, maximum)
    result = exact_exp(below) if EXACT else tl.exp2(below * LOG2E)
    return result


@device_function
def gradient(y, dy, delta):
    """dx = y (dy - delta), and 0 where y is: a masked column, or a row of -inf, has no gradient,
    whatever dy is."""
    return tl.where(y == 0.0, 0.0, y * (dy - delta))
