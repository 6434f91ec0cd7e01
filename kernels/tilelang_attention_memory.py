"""Where tensors lie that the TileLang attention kernels read and write: in place, or copied first.

TMA fetches whole rows: see `tilelang_attention.py`.
"""

import torch

ALIGNMENT = 16  # bytes, of every row that TMA fetches
MAX_STRIDE = 2**37  # elements: TMA counts to 2^40 bytes; none but that of a dim of one is larger


def is_fetchable(strides: tuple[int, ...], t: torch.Tensor) -> bool:
    """Whether TMA can fetch the rows of t [B, H, S, D], if its strides are these: contiguous,
    aligned, none repeated."""
    b, h, s, d = strides
    unit = ALIGNMENT // t.element_size()
    in_range = 0 < b < MAX_STRIDE and 0 < h < MAX_STRIDE and 0 < s < MAX_STRIDE
    # unit is a power of two: it divides each of three numbers if it divides their bits put together
    return in_range and d == 1 and (b | h | s) % unit == 0 and t.data_ptr() % ALIGNMENT == 0


def as_rows(t: torch.Tensor, *, keep: bool = True) -> torch.Tensor:
    """t as a kernel can take it: a view of it, or in its place aligned memory, with t's values if
    they are to be kept."""
    if not t.is_cuda or is_fetchable(t.stride(), t):
        return t
    *outer, D = t.shape
    unit = ALIGNMENT // t.element_size()
    width = -(-D // unit) * unit
    # A dim of one may have any stride, which TMA would check all the same.
    strides = [t.stride(dim) if size > 1 else width for dim, size in enumerate(outer)]
    strides.append(t.stride(3))
    if is_fetchable(tuple(strides), t):
        return t.as_strided(t.shape, strides)
    rows = t.new_empty((*outer, width))[..., :D]
    return rows.copy_(t) if keep else rows


def without_repeats(t: torch.Tensor) -> torch.Tensor:
    """k or v with one batch or head in place of the many of an expanded view."""
    b, h, _, _ = t.stride()
    if b == 0:
        t = t.narrow(0, 0, 1)
    if h == 0:
        t = t.narrow(1, 0, 1)
    return as_rows(t)


def is_in_place(*tensors: torch.Tensor) -> bool:
    """Whether kernels take all of these as they are: `as_rows` and `without_repeats` would give
    the same back."""
    return all(
        is_fetchable(t.stride(), t) if t.is_cuda else 0 not in t.stride()[:2] for t in tensors
    )


def bring_back(rows: torch.Tensor, t: torch.Tensor) -> None:
    """What a kernel wrote to `as_rows(t, keep=False)` to t itself, if that is elsewhere."""
    if rows is not t and rows.data_ptr() != t.data_ptr():
        t.copy_(rows)
