"""What Hopper's attention forward does to a tile of scores where wgmma left it, in registers.

Per query the scores become probabilities relative to a maximum m,

    p = 2^(c s - c m)

with c = |qk_scale|. Any m gives the same output: it divides the sum of p v by the sum of p. So m
may lag behind the maximum of the scores so far, as long as nothing becomes too large: it stays
while no score exceeds it by more than `GROWTH`, in powers of two, and then p stays within 2^GROWTH.
Where one does, its query takes the maximum of its scores so far, and what was summed up relative to
the old one is multiplied by 2^(c m - c m'). Few tiles do after a query's first; in the others the
threads of a row have nothing to tell each other, and nothing is rescaled. The warp decides that for
its queries together, but each takes a new maximum for scores of its own alone: its bits do not hang
on which queries are its neighbours.

Whether a score grew is asked of its bits. As integers floats of 0 and more are in order, and every
negative one is below them; a NaN, as products make it, is above. So a limit of 0 or more is
compared with the maximum of integers, of which Hopper takes three at once; one below 0 counts as
exceeded.
"""

from typing import Any, NamedTuple

# A maximum lags by so much at most, in powers of two: probabilities stay in float16's range.
GROWTH = 8
# Scaled scores below this are rounded to 2^-8 and less; above it no maximum lags.
NEAR = 2.0**16
# Scaled scores of this size that differ at all differ by 2^4 and more: all but the largest have
# exponentials near 0, and keep them if the scale is up to twice what it should be.
HUGE = 2.0**28
SMALLEST = 2.0**-126  # normal float32: a masked score of -inf must stay so when it is scaled by 0
LARGEST = 3.4e38  # float32, nearly: an infinite score exceeds it
LOWEST_INT = -(2**31)
PART = 8  # columns. Of every 8 of wgmma's results in a row a thread has two neighbours


class Scale(NamedTuple):
    """Of the scores, in a prim_func."""

    size: Any  # c, but at least SMALLEST
    power: Any  # the next power of two
    slack: Any  # GROWTH / c


class Stats(NamedTuple):
    """What a block knows of its queries: fragments [BLOCK_M], or [BLOCK_M, PART] with something of
    each thread's own columns."""

    row_max: Any  # m
    row_sum: Any  # of p, over a thread's own columns: [BLOCK_M, PART]
    factor: Any  # c, or the next power of two
    shift: Any  # c m; 0 while m is -inf
    limit: Any  # int32: scores with these bits or higher ones exceed m by too much
    rescale: Any  # 2^(c m - c m') of the last growth
    top: Any
    bound: Any  # what no score may exceed while m stays
    peak: Any  # int32 [BLOCK_M, PART]
    other: Any  # int32 [BLOCK_M, PART]
    grew: Any  # int32 [1], of each thread: whether a score of its own reaches its limit


class Macros(NamedTuple):
    """For use in a prim_func."""

    reset: Any  # (stats): no key seen
    mask: Any  # (scores, stats, m_start, n_start, end_of_keys)
    look: Any  # (scores, stats): sets stats.grew
    take_maximum: Any  # (scores, stats, scale)
    exponentiate: Any  # (scores, stats, first, end): some parts of the scores


def make_scale(qk_scale: Any) -> Scale:
    import tilelang.language as T

    size = T.max(T.abs(qk_scale), SMALLEST)
    bits: Any = T.reinterpret(size, "int32")
    power = T.reinterpret((bits + 0x7FFFFF) & -0x800000, "float32")
    return Scale(size, power, GROWTH / size)


def alloc_stats(BLOCK_M: int) -> Stats:
    import tilelang.language as T

    def per_query(dtype: str = "float32") -> Any:
        return T.alloc_fragment((BLOCK_M,), dtype)

    def per_thread(dtype: str) -> Any:
        return T.alloc_fragment((BLOCK_M, PART), dtype)

    return Stats(
        row_max=per_query(),
        row_sum=per_thread("float32"),
        factor=per_query(),
        shift=per_query(),
        limit=per_query("int32"),
        rescale=per_query(),
        top=per_query(),
        bound=per_query(),
        peak=per_thread("int32"),
        other=per_thread("int32"),
        grew=T.alloc_local((1,), "int32"),
    )


def make_macros(BLOCK_M: int, BLOCK_N: int) -> Macros:
    """For tiles of scores [BLOCK_M, BLOCK_N], BLOCK_N a multiple of 16."""
    import tilelang.language as T

    minus_inf = -T.infinity("float32")
    parts = BLOCK_N // PART

    def bits(x: Any) -> Any:
        return T.reinterpret(x, "int32")

    @T.macro
    def reset(stats):
        T.fill(stats.row_sum, 0)
        T.fill(stats.row_max, minus_inf)
        T.fill(stats.factor, 1)
        T.fill(stats.limit, LOWEST_INT)

    @T.macro
    def mask(scores, stats, m_start, n_start, end_of_keys):
        """Scores of keys from end_of_keys(query) on to -inf."""
        room = stats.other
        for i, c in T.Parallel(BLOCK_M, PART):
            room[i, c] = end_of_keys(m_start + i) - n_start - c
        for g in T.unroll(parts):
            for i, c in T.Parallel(BLOCK_M, PART):
                scores[i, g * PART + c] = T.if_then_else(
                    g * PART < room[i, c], scores[i, g * PART + c], minus_inf
                )

    @T.macro
    def look(scores, stats):
        peak, other = stats.peak, stats.other
        for i, c in T.Parallel(BLOCK_M, PART):
            peak[i, c] = LOWEST_INT
        for g in T.unroll(parts // 2):
            for i, c in T.Parallel(BLOCK_M, PART):
                other[i, c] = bits(scores[i, 2 * g * PART + c])
            for i, c in T.Parallel(BLOCK_M, PART):
                peak[i, c] = T.call_pure_extern(  # pyright: ignore[reportAttributeAccessIssue]
                    "int32",
                    "__vimax3_s32",
                    peak[i, c],
                    other[i, c],
                    bits(scores[i, (2 * g + 1) * PART + c]),
                )
        stats.grew[0] = 0
        for i, c in T.Parallel(BLOCK_M, PART):
            stats.grew[0] = stats.grew[0] | T.cast(peak[i, c] >= stats.limit[i], "int32")

    @T.macro
    def take_maximum(scores, stats, scale):
        row_max, row_sum, factor, shift, limit, rescale, top, bound = stats[:8]
        T.reduce_max(scores, top, dim=1)
        for i in T.Parallel(BLOCK_M):
            rescale[i] = row_max[i] * factor[i]
            row_max[i] = T.if_then_else(
                bits(top[i]) >= limit[i], T.max(row_max[i], top[i]), row_max[i]
            )
            # The product is exact in the multiply-add below, and rounded in the maximum: with huge
            # scores thousands would be left in the exponent. A power of two rounds neither.
            factor[i] = T.if_then_else(
                T.abs(row_max[i] * scale.size) < HUGE, scale.size, scale.power
            )
            top[i] = row_max[i] * factor[i]
            # With no key seen yet, -inf - -inf would be NaN.
            shift[i] = T.if_then_else(top[i] == minus_inf, 0.0, top[i])
            rescale[i] = T.exp2(rescale[i] - shift[i])
            # Not in top again: TileLang takes the bits of what it held above for its bits here.
            bound[i] = T.if_then_else(
                T.abs(top[i]) < NEAR, T.min(row_max[i] + scale.slack, LARGEST), row_max[i]
            )
            limit[i] = T.if_then_else(bound[i] >= 0.0, bits(bound[i]) + 1, LOWEST_INT)
        for i, c in T.Parallel(BLOCK_M, PART):
            row_sum[i, c] *= rescale[i]

    @T.macro
    def exponentiate(scores, stats, first, end):
        row_sum, factor, shift = stats.row_sum, stats.factor, stats.shift
        for g in T.unroll(end - first):
            for i, c in T.Parallel(BLOCK_M, PART):
                scores[i, (first + g) * PART + c] = T.exp2(
                    scores[i, (first + g) * PART + c] * factor[i] - shift[i]
                )
        # Added up over a thread's own columns; over the threads of a row once, at the end.
        for g in T.unroll(end - first):
            for i, c in T.Parallel(BLOCK_M, PART):
                row_sum[i, c] += scores[i, (first + g) * PART + c]

    return Macros(reset, mask, look, take_maximum, exponentiate)
