"""Row softmax in TileLang: an online log-sum-exp over tiles of columns, then a scan that writes.

    y_j  = 2^(x_j log2(e) - lse)        lse = log2(sum_k 2^(x_k log2(e)))
    dx_j = y_j (dy_j - sum_k y_k dy_k)

A block takes BLOCK_N rows and walks their columns in tiles of BLOCK_M, twice. The first scan
carries the log-sum-exp of the columns seen so far, in base 2 because that is the exponential that
hardware has; the second writes. Only a tile is ever on chip, so a row may have any length.
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3, with the
logarithm of their sum.) Each of a row's LANES carries the log-sum-exp of the columns that it holds;
they become the row's between the scans, so that no thread waits for another within one.

The second scan reads again what the first has read. While the rows in flight fit into the L2 cache
it finds them there, and the limit is how fast that cache is; from some 100,000 columns on they no
longer do, and three transfers take the place of two (in the backward, five of three). Measured on
an H200 (benchmarks/h200/softmax.csv): 66 to 87 % of a copy forward from 1,024 columns on, and at
131,072 the two thirds that this makes.

How the log-sum-exp is carried decides whether this is stable. The update that comes to mind,
lse' = m + log2(2^(lse - m) + s) with the tile's maximum m and sum s, overflows once m lies 128
below lse, and the whole row comes out 0. So:

- Two log-sum-exps are merged around the larger (`log2_of_sum`): 2^ is taken of nothing above 0.
- It is carried in two numbers, as maximum log2(e) + lse: where scores are about 1000, one float32
  could tell probabilities apart to four digits.
- Where nothing was seen yet, lse is -inf, and where the maximum is, 0 is subtracted in its place:
  -inf minus -inf would be NaN.

A row that ends as it began, all -inf, gives zeros. A NaN, or +inf, makes the sum NaN (the maximum
may drop it: tile-ai/tilelang#3270), and with it the row.

A kernel is compiled for each dtype, tile (by length of row, `choose_tile`) and `vector_width`;
sizes and strides are run-time arguments, and so is the causal rule. Any strides are read and
written without a copy; where more than three leading dims do not merge, each index of the first
takes a launch. On a CPU (`c` target), float16 and bfloat16 are computed through a float32 copy.
"""

import torch

from minitx.kernels.softmax_ops import define_softmax
from minitx.kernels.tilelang_rows import (
    NEG_INF,
    Rows,
    Tile,
    as_matrices,
    choose_tile,
    columns_seen,
    vector_width,
)
from minitx.kernels.tilelang_runtime import Language, get_kernel

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false

LOG2E = 1.4426950408889634
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def build_softmax_fwd(lang: Language, *, dtype: str, tile: Tile, vector: int):
    import tilelang.language as T

    BLOCK_N, LANES, WIDTH = tile
    rows = Rows(lang, tile=tile, vector=vector)

    def finite(maximum):
        return T.if_then_else(maximum == NEG_INF, 0.0, maximum)

    def log2_of_sum(a, b):
        """log2(2^a + 2^b) of float64 a and b: -inf if both are, NaN if either is."""
        ratio = T.exp2(T.cast(T.min(a - b, b - a), "float32"))  # the smaller over the larger
        larger = T.max(a, b) + T.cast(T.log1p(ratio) * LOG2E, "float64")
        return T.if_then_else(a == b, a + 1.0, larger)

    @T.prim_func
    def softmax_fwd(x: rows.tensor("x", dtype), y: rows.tensor("y", dtype), seen: rows.seen):
        with T.Kernel(rows.n_blocks, threads=tile.threads) as block:
            rows.set_options()
            place = rows.locate(block)
            raw = lang.tile((BLOCK_N, LANES, WIDTH), dtype)
            scores = lang.tile((BLOCK_N, LANES, WIDTH), "float32")
            rows.lay_out(raw, scores)
            lane_max = lang.tile((BLOCK_N, LANES), "float32")
            shift = lang.tile((BLOCK_N, LANES), "float32")  # lane_max, or 0 where that is -inf
            old_shift = lang.tile((BLOCK_N, LANES), "float32")
            tile_sum = lang.tile((BLOCK_N, LANES), "float32")
            lse = lang.tile((BLOCK_N, LANES), "float64")  # thousands of tiles, and no drift
            lane_sum = lang.tile((BLOCK_N, LANES), "float32")
            row_max = lang.tile((BLOCK_N,), "float32")
            row_sum = lang.tile((BLOCK_N,), "float32")
            row_lse = lang.tile((BLOCK_N,), "float32")

            for i, j in lang.each(BLOCK_N, LANES):
                lane_max[i, j] = NEG_INF
                shift[i, j] = 0.0
                lse[i, j] = T.cast(NEG_INF, "float64")
            for t in T.serial(rows.tiles_seen(place)):
                rows.load(x, place, t * tile.BLOCK_M, raw, scores, NEG_INF)
                T.reduce_max(scores, lane_max, dim=2, clear=False)
                for i, j in lang.each(BLOCK_N, LANES):
                    old_shift[i, j] = shift[i, j]
                    shift[i, j] = finite(lane_max[i, j])
                for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                    scores[i, j, k] = T.exp2((scores[i, j, k] - shift[i, j]) * LOG2E)
                T.reduce_sum(scores, tile_sum, dim=2)
                for i, j in lang.each(BLOCK_N, LANES):
                    lse[i, j] = log2_of_sum(
                        lse[i, j] + T.cast(old_shift[i, j] - shift[i, j], "float64") * LOG2E,
                        T.cast(T.log2(tile_sum[i, j]), "float64"),
                    )

            # The lanes of a row become one.
            T.reduce_max(lane_max, row_max, dim=1)
            for i in lang.each(BLOCK_N):
                row_max[i] = finite(row_max[i])
            for i, j in lang.each(BLOCK_N, LANES):
                lane_sum[i, j] = T.exp2(
                    (lane_max[i, j] - row_max[i]) * LOG2E + T.cast(lse[i, j], "float32")
                )
            T.reduce_sum(lane_sum, row_sum, dim=1)
            for i in lang.each(BLOCK_N):
                row_lse[i] = finite(T.log2(row_sum[i]))

            # Backwards: what was read last is the likeliest to be in cache still.
            for t in T.serial(rows.n_tiles):
                first_col = (rows.n_tiles - 1 - t) * tile.BLOCK_M
                rows.load(x, place, first_col, raw, scores, NEG_INF)
                for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                    scores[i, j, k] = T.exp2((scores[i, j, k] - row_max[i]) * LOG2E - row_lse[i])
                rows.store(scores, raw, y, place, first_col)

    return softmax_fwd


def build_softmax_bwd(lang: Language, *, dtype: str, tile: Tile, vector: int):
    import tilelang.language as T

    BLOCK_N, LANES, WIDTH = tile
    rows = Rows(lang, tile=tile, vector=vector)

    @T.prim_func
    def softmax_bwd(
        y: rows.tensor("y", dtype),
        dy: rows.tensor("dy", dtype),
        dx: rows.tensor("dx", dtype),
        seen: rows.seen,
    ):
        with T.Kernel(rows.n_blocks, threads=tile.threads) as block:
            rows.set_options()
            place = rows.locate(block)
            raw = lang.tile((BLOCK_N, LANES, WIDTH), dtype)
            p = lang.tile((BLOCK_N, LANES, WIDTH), "float32")
            grad = lang.tile((BLOCK_N, LANES, WIDTH), "float32")
            acc = lang.tile((BLOCK_N, LANES, WIDTH), "float32")
            rows.lay_out(raw, p, grad, acc)
            lane_sum = lang.tile((BLOCK_N, LANES), "float32")
            delta = lang.tile((BLOCK_N,), "float32")

            for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                acc[i, j, k] = 0.0
            for t in T.serial(rows.tiles_seen(place)):
                rows.load(y, place, t * tile.BLOCK_M, raw, p, 0.0)
                rows.load(dy, place, t * tile.BLOCK_M, raw, grad, 0.0)
                for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                    acc[i, j, k] += p[i, j, k] * grad[i, j, k]
            T.reduce_sum(acc, lane_sum, dim=2)
            T.reduce_sum(lane_sum, delta, dim=1)

            for t in T.serial(rows.n_tiles):
                first_col = (rows.n_tiles - 1 - t) * tile.BLOCK_M
                rows.load(y, place, first_col, raw, p, 0.0)
                rows.load(dy, place, first_col, raw, grad, 0.0)
                for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                    # A row of zeros has no gradient, whatever dy is.
                    grad[i, j, k] = T.if_then_else(
                        p[i, j, k] == 0.0, 0.0, p[i, j, k] * (grad[i, j, k] - delta[i])
                    )
                rows.store(grad, raw, dx, place, first_col)

    return softmax_bwd


def _launch(build, *tensors: torch.Tensor, is_causal: bool) -> None:
    """Runs `build`'s kernel on non-empty tensors of one shape and dtype."""
    device, dtype = tensors[0].device, tensors[0].dtype
    for views in as_matrices(*tensors, is_causal=is_causal):
        n_rows, n_cols = views[0].shape[-2:]
        kernel = get_kernel(
            build,
            device,
            dtype=DTYPE_NAMES[dtype],
            tile=choose_tile(views, n_read=len(views) - 1),
            vector=vector_width(views),
        )
        kernel(*views, columns_seen(n_rows, n_cols, is_causal))


def _computed(t: torch.Tensor) -> torch.Tensor:
    """The tensor that a kernel reads: on a CPU, float32 alone."""
    return t.float() if t.device.type == "cpu" else t


def _fwd(x: torch.Tensor, is_causal: bool) -> torch.Tensor:
    inner = _computed(x)
    y = torch.empty_like(inner)
    if x.numel() > 0:
        _launch(build_softmax_fwd, inner, y, is_causal=is_causal)
    return y.to(x.dtype)


def _bwd(y: torch.Tensor, dy: torch.Tensor, is_causal: bool) -> torch.Tensor:
    inner = _computed(y)
    dx = torch.empty_like(inner)
    if y.numel() > 0:
        _launch(build_softmax_bwd, inner, _computed(dy), dx, is_causal=is_causal)
    return dx.to(y.dtype)


_softmax = define_softmax("tilelang", _fwd, _bwd)


def tilelang_softmax(rows: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Softmax over the last dim of rows [..., N] of any strides, in their dtype (float32, float16
    or bfloat16) and layout, computed in float32.

    With `is_causal` rows are scores [..., Sq, Skv]. Differentiable once; a second derivative
    raises.
    """
    return _softmax(rows, is_causal)
