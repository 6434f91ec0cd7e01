"""Where rows lie in memory: shared by the Triton kernels that work on rows of any strides.

A tensor [..., N] is R rows of N columns. Its leading dims are passed to a kernel as two tuples,
`sizes` and `strides`, after merging those that every tensor of the call allows: a contiguous tensor
arrives as one leading dim (R,), whatever its shape was.
"""

import torch
import triton
import triton.language as tl

# Loads are 16 bytes wide when the compiler can prove that they start and end at multiples of 16
# elements, the granularity of its own specialisation on integer arguments.
VECTOR = tl.constexpr(16)


def merge_leading_dims(
    *tensors: torch.Tensor,
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes of the leading dims (all but the last) of tensors of one shape, and each tensor's
    strides.

    Two neighbours become one where in every tensor the outer one steps over exactly the inner one;
    dims of size 1 vanish. There is always at least one dim left.
    """
    n_rows = tensors[0].numel() // max(tensors[0].shape[-1], 1)
    if all(t.is_contiguous() for t in tensors):
        return (n_rows,), [(t.shape[-1],) for t in tensors]
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []  # a dim each: one stride a tensor
    for dim in range(tensors[0].dim() - 1):
        size = tensors[0].shape[dim]
        step = tuple(t.stride(dim) for t in tensors)
        if size == 1:
            continue
        if sizes and all(
            outer == inner * size for outer, inner in zip(strides[-1], step, strict=True)
        ):
            sizes[-1] *= size
            strides[-1] = step
        else:
            sizes.append(size)
            strides.append(step)
    if not sizes:
        return (1,), [(t.shape[-1],) for t in tensors]
    return tuple(sizes), list(zip(*strides, strict=True))


@triton.jit
def row_offsets(rows, sizes, strides):
    """Elements from a tensor's start to each row's; rows are int64 and counted in row-major
    order."""
    offsets = rows * 0
    for d in tl.static_range(len(sizes) - 1, 0, -1):
        offsets += (rows % sizes[d]) * strides[d]
        rows = rows // sizes[d]
    return offsets + rows * strides[0]


@triton.jit
def visible_columns(rows, n_rows, n_cols, Sq, IS_CAUSAL: tl.constexpr):
    """How many of a row's columns take part: a row past the last has none.

    Causal rows are queries 0 to Sq - 1 of matrix after matrix, aligned bottom-right: query i sees
    columns 0 to i + n_cols - Sq.
    """
    visible = tl.where(rows < n_rows, n_cols, 0)
    if IS_CAUSAL:
        visible = tl.minimum(visible, tl.maximum(rows % Sq + 1 + (n_cols - Sq), 0))
    return visible


@triton.jit
def load_visible(pointers, cols, visible, other, IS_CAUSAL: tl.constexpr):
    """The columns before `visible` in float32, `other` in place of the rest, which is not read."""
    if IS_CAUSAL:
        # A causal row ends anywhere, and a mask that may end inside a vector makes every load of
        # the row a scalar one. So: whole vectors first, then the few columns left over.
        whole = visible // VECTOR * VECTOR
        values = tl.load(pointers, mask=cols < whole, other=other)
        values = tl.load(pointers, mask=(cols >= whole) & (cols < visible), other=values)
    else:
        values = tl.load(pointers, mask=cols < visible, other=other)
    return values.to(tl.float32)
