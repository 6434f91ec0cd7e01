"""What the Triton row-softmax kernels share: where rows lie in memory, and what is read of them.

A tensor [..., N] is R rows of N columns. Its leading dims are passed to a kernel as two tuples,
`sizes` and `strides`, after merging those that every tensor of the call allows: a contiguous tensor
arrives as one leading dim (R,), whatever its shape was.
"""

import torch
import triton.language as tl

from minitx.kernels.triton_runtime import device_function
from minitx.kernels.triton_tiles import INTERPRETED, LOG2E, exact_exp

# Kernels are not Python to a type checker:
# pyright: reportGeneralTypeIssues=false

# Loads are 16 bytes wide where the compiler can prove that rows, and masks, start and end at
# multiples of 16 elements: the granularity of its own specialisation on integer arguments.
VECTOR = tl.constexpr(16)


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


@device_function
def row_offsets(rows, sizes, strides):
    """Elements from a tensor's start to the start of each row; rows (int64) count in row-major
    order."""
    offsets = rows * 0
    for d in tl.static_range(len(sizes) - 1, 0, -1):
        offsets += (rows % sizes[d]) * strides[d]
        rows = rows // sizes[d]
    return offsets + rows * strides[0]


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
def load_visible(pointers, cols, visible, other, IS_CAUSAL: tl.constexpr):
    """Columns 0 to visible - 1; `other` in place of the rest, which is never read."""
    if IS_CAUSAL:
        # A causal row ends anywhere, and a mask that may end inside a vector would make every load
        # of the row a scalar one. So: whole vectors first, then the few columns left over.
        whole = visible // VECTOR * VECTOR
        head = tl.load(pointers, mask=cols < whole, other=other)
        values = tl.load(pointers, mask=(cols >= whole) & (cols < visible), other=head)
    else:
        values = tl.load(pointers, mask=cols < visible, other=other)
    return values


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
