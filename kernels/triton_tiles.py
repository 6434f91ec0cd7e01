"""Pieces that the Triton attention kernels share: which tile is whose, reading tiles, the mask.

A tile is BLOCK rows of one head, [BLOCK, HEAD_DIM]: the D columns are padded to the power of two
HEAD_DIM. `strides` are a tensor's four, of [B, H, S, D], in elements. A head's first element and a
tile's first row are found in 64 bits; within a tile offsets have 32 bits, unless the strides are so
large (WIDE) that 256 rows or columns would exceed them.
"""

import triton.language as tl
from triton.language.extra import libdevice

from minitx.kernels.triton_runtime import IS_INTERPRETED, device_function

LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("ieee")  # of float32 products: never TF32, whatever PyTorch is allowed
INTERPRETED = tl.constexpr(IS_INTERPRETED)


@device_function
def tile_and_head(n_tiles, n_heads, heads_per_wave):
    """(tile, head) of this program: heads_per_wave heads at a time, and of those tile 0 first.

    The grid is n_tiles * n_heads in x alone, as y and z end at 65535. Heads go in waves so that
    the keys and values of those in flight stay in the L2 cache.
    """
    pid = tl.program_id(0)
    first_head = pid // (n_tiles * heads_per_wave) * heads_per_wave
    wave = tl.minimum(heads_per_wave, n_heads - first_head)
    rank = pid - first_head * n_tiles
    return rank // wave, first_head + rank % wave


@device_function
def head_start(ptr, head, n_heads, strides):
    """Where head `head` of all B * n_heads begins."""
    b = tl.cast(head // n_heads, tl.int64)
    h = tl.cast(head % n_heads, tl.int64)
    return ptr + b * strides[0] + h * strides[1]


@device_function
def rows_offset(rows, strides):
    """64-bit offset of a number of rows."""
    return tl.cast(rows, tl.int64) * strides[2]


@device_function
def tile_offsets(strides, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr):
    """Offsets within a tile, [BLOCK, HEAD_DIM]."""
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows * strides[2] + columns * strides[3]


@device_function
def load_tile(ptr, offsets, n_rows, D: tl.constexpr, RAGGED: tl.constexpr):
    """The tile [BLOCK, HEAD_DIM] at ptr: 0 past D columns and, if RAGGED, past n_rows rows."""
    BLOCK: tl.constexpr = offsets.shape[0]
    HEAD_DIM: tl.constexpr = offsets.shape[1]
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    if RAGGED:
        if D == HEAD_DIM:
            tile = tl.load(ptr + offsets, mask=rows < n_rows, other=0.0)
        else:
            tile = tl.load(ptr + offsets, mask=(rows < n_rows) & (columns < D), other=0.0)
    else:
        if D == HEAD_DIM:
            tile = tl.load(ptr + offsets)
        else:
            tile = tl.load(ptr + offsets, mask=columns < D, other=0.0)
    return tile


@device_function
def store_tile(ptr, offsets, tile, n_rows, D: tl.constexpr):
    """Stores those of the tile's first n_rows rows and D columns that exist, in ptr's dtype."""
    BLOCK: tl.constexpr = offsets.shape[0]
    HEAD_DIM: tl.constexpr = offsets.shape[1]
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    tl.store(ptr + offsets, tile.to(ptr.dtype.element_ty), mask=(rows < n_rows) & (columns < D))


@device_function
def signed(tile, scale, SCALE_SIGN: tl.constexpr):
    """(tile, scale) with a scale above 0 and the same products: tile * scale, whatever its sign.

    With a positive scale the largest score is also the largest scaled one, and -inf stays -inf.
    """
    if SCALE_SIGN == 1:
        positive = scale
    elif SCALE_SIGN == -1:
        positive = -scale
        tile = -tile
    else:
        positive = scale + 1.0
        tile = tile * 0.0
    return tile, positive


@device_function
def exact_exp(x):
    """exp(x), right to the last bits of float32. On a GPU tl.exp is tl.exp2(x * log2(e)), which is
    off by some |x| roundings: good enough for results of 16 bits."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@device_function
def probabilities(scores, scale, exponent, EXACT: tl.constexpr):
    """p = exp(scale * scores - lse), for an exponent that broadcasts: lse, or lse * log2(e).

    If EXACT it is compiled without fused multiply-adds: lse is the rounded product of the scale and
    the largest score, and where logits are huge both must be rounded alike to give exp(0).
    """
    if EXACT:
        p = exact_exp(scores * scale - exponent)
    else:
        p = tl.exp2(scores * (scale * LOG2E) - exponent)
    return p


@device_function
def next_power_of_2(x):
    """The power of two that is x, a normal float32 above 0, or next above it."""
    bits = tl.cast(tl.cast(x, tl.float32), tl.int32, bitcast=True)  # plain Python if interpreted
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@device_function
def key_range(
    start_m, Sq, Skv, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(full, end) for the queries from start_m: every one of them sees all keys below `full`, a
    multiple of BLOCK_N, and none sees a key from `end` on."""
    end = Skv
    full = Skv
    if IS_CAUSAL:
        # Query i sees keys j <= i + Skv - Sq.
        end = tl.minimum(end, start_m + BLOCK_M + (Skv - Sq))
        full = tl.minimum(full, tl.maximum(start_m + 1 + (Skv - Sq), 0))
    return full // BLOCK_N * BLOCK_N, end


@device_function
def query_range(
    start_n, Sq, Skv, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(first, bulk_start, bulk_end) for the keys from start_n, all multiples of BLOCK_M: no query
    below `first` sees any of them; those from bulk_start to bulk_end exist and see them all."""
    first = 0
    bulk_start = 0
    bulk_end = Sq // BLOCK_M * BLOCK_M
    if IS_CAUSAL:
        # Key j is seen by the queries i >= j - (Skv - Sq).
        first = tl.maximum(start_n - (Skv - Sq), 0) // BLOCK_M * BLOCK_M
        last_key = tl.minimum(start_n + BLOCK_N, Skv) - 1
        bulk_start = (tl.maximum(last_key - (Skv - Sq), 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    return first, tl.minimum(bulk_start, bulk_end), bulk_end


@device_function
def visible_keys(queries, start_n, Sq, Skv, IS_CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Boolean mask [BLOCK_M, BLOCK_N]: may queries[i] read key start_n + j, and does it exist?

    Of queries past Sq nothing is said: no one reads what they get.
    """
    keys = start_n + tl.arange(0, BLOCK_N)[None, :]
    if IS_CAUSAL:
        visible = keys <= queries[:, None] + (Skv - Sq)  # so that keys < Skv too
    else:
        visible = (keys < Skv) & (queries[:, None] >= 0)
    return visible


@device_function
def visible_queries(queries, start_n, Sq, Skv, IS_CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Boolean mask [BLOCK_N, BLOCK_M]: may queries[i] read key start_n + j, and does it exist?

    Of keys past Skv nothing is said: no one reads what they get.
    """
    keys = start_n + tl.arange(0, BLOCK_N)[:, None]
    # One comparison an element: a query that does not exist sees no key, as if it were long before.
    last_key = tl.where(queries < Sq, queries + (Skv - Sq) if IS_CAUSAL else Skv, -1)
    return keys <= last_key[None, :]
