"""Builder of the online-LSE attention forward kernel in TileLang.

One block owns BLOCK_M queries of one head and streams the visible keys and values past them in
tiles of BLOCK_N. It carries, per query, the maximum of the scaled scores so far, the sum of
exponentials relative to it, and the output relative to it; a new maximum rescales the other two
(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
"FlashAttention", algorithm 1).

    s = (q k^T) * qk_scale                 rounded before anything is subtracted
    m' = max(m, max_j s)                   -inf while no key was seen
    acc' = acc * b^(m - m') + b^(s - m') v
    sum' = sum * b^(m - m') + sum_j b^(s - m')
    out = acc / sum,  lse = (m + log_b(sum)) / log_b(e)

b is 2 for 16-bit inputs, with qk_scale = scale * log2(e), and e for float32.

Causal blocks stop at the last key that their last query sees. Only tiles that cross the diagonal,
or the end of the keys, run the mask. The blocks with most keys start first.
"""

import operator
from typing import Any

from minitx.kernels.tilelang_products import make_base, make_gemm, tile_strides
from minitx.kernels.tilelang_runtime import Language


def build_attention_fwd(
    lang: Language,
    *,
    dtype: str,
    HEAD_DIM: int,
    IS_CAUSAL: bool,
    BLOCK_M: int,
    BLOCK_N: int,
    num_stages: int,
    threads: int,
) -> Any:
    """q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D], out [B, Hq, Sq, D], lse [B, Hq, Sq] float32.

    HEAD_DIM is D rounded up to a width that the tiles come in: columns from D on are read as 0 and
    not written. qk_scale is `scale * make_base(dtype).log_e`.
    """
    import tilelang.language as T

    gemm = make_gemm(lang, dtype)
    base = make_base(dtype)
    B, Hq, Hkv, Sq, Skv, D = (T.dynamic(n, "int32") for n in ("B", "Hq", "Hkv", "Sq", "Skv", "D"))
    strides = {name: tile_strides(lang, name) for name in ("q", "k", "v", "out")}
    lse_strides = [T.dynamic(f"lse_{dim}", "int64") for dim in "bhs"]
    minus_inf = -T.infinity("float32")
    # nvcc would fuse a product with the subtraction of the maximum that follows, and leave in the
    # exponent what the rounding of the maximum lost: thousands, for scores of 1e11.
    rounded_product = operator.mul if lang.on_cpu else T.ieee_mul

    @T.prim_func
    def attention_fwd(
        q: T.StridedTensor((B, Hq, Sq, D), strides["q"], dtype),
        k: T.StridedTensor((B, Hkv, Skv, D), strides["k"], dtype),
        v: T.StridedTensor((B, Hkv, Skv, D), strides["v"], dtype),
        out: T.StridedTensor((B, Hq, Sq, D), strides["out"], dtype),
        lse: T.StridedTensor((B, Hq, Sq), lse_strides, "float32"),
        qk_scale: T.float32,
    ):
        with T.Kernel(B * Hq * T.ceildiv(Sq, BLOCK_M), threads=threads) as block:
            q_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            k_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            v_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            scores = lang.tile((BLOCK_M, BLOCK_N), "float32")
            p = lang.tile((BLOCK_M, BLOCK_N), dtype)
            acc = lang.tile((BLOCK_M, HEAD_DIM), "float32")
            row_max = lang.tile((BLOCK_M,), "float32")
            row_sum = lang.tile((BLOCK_M,), "float32")
            tile_max = lang.tile((BLOCK_M,), "float32")
            tile_sum = lang.tile((BLOCK_M,), "float32")
            shift = lang.tile((BLOCK_M,), "float32")
            rescale = lang.tile((BLOCK_M,), "float32")

            num_m = T.ceildiv(Sq, BLOCK_M)
            m_start = (num_m - 1 - T.truncmod(block, num_m)) * BLOCK_M  # most keys first
            head = T.truncmod(T.truncdiv(block, num_m), Hq)
            batch = T.truncdiv(T.truncdiv(block, num_m), Hq)
            kv_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))

            # Keys that the tile's last query, and its first, may read.
            diagonal = Skv - Sq + 1
            last_end = T.min(m_start + BLOCK_M - 1 + diagonal, Skv) if IS_CAUSAL else Skv
            first_end = T.min(m_start + diagonal, Skv) if IS_CAUSAL else Skv

            T.copy(q[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], q_tile)
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, minus_inf)
            # One tile at least: a block that left at once would leave q_tile's copy in flight.
            for n in T.Pipelined(T.max(T.ceildiv(last_end, BLOCK_N), 1), num_stages=num_stages):
                n_start = n * BLOCK_N
                T.copy(k[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], k_tile)
                gemm(q_tile, k_tile, scores, transpose_B=True, clear=True)
                for i, j in lang.each(BLOCK_M, BLOCK_N):
                    scores[i, j] = rounded_product(scores[i, j], qk_scale)
                if n_start + BLOCK_N > first_end:
                    for i, j in lang.each(BLOCK_M, BLOCK_N):
                        end = T.min(m_start + i + diagonal, Skv) if IS_CAUSAL else Skv
                        scores[i, j] = T.if_then_else(n_start + j < end, scores[i, j], minus_inf)
                T.reduce_max(scores, tile_max, dim=1)
                for i in lang.each(BLOCK_M):
                    tile_max[i] = T.max(row_max[i], tile_max[i])
                    # With no key seen yet, -inf - -inf would be NaN.
                    shift[i] = T.if_then_else(tile_max[i] == minus_inf, 0.0, tile_max[i])
                    rescale[i] = base.exp(row_max[i] - shift[i])
                    row_max[i] = tile_max[i]
                for i, j in lang.each(BLOCK_M, BLOCK_N):
                    scores[i, j] = base.exp(scores[i, j] - shift[i])
                T.reduce_sum(scores, tile_sum, dim=1)
                for i in lang.each(BLOCK_M):
                    row_sum[i] = row_sum[i] * rescale[i] + tile_sum[i]
                for i, d in lang.each(BLOCK_M, HEAD_DIM):
                    acc[i, d] *= rescale[i]
                T.copy(scores, p)
                T.copy(v[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], v_tile)
                gemm(p, v_tile, acc)
            for i, d in lang.each(BLOCK_M, HEAD_DIM):
                acc[i, d] = T.if_then_else(row_sum[i] == 0.0, 0.0, acc[i, d] / row_sum[i])
            T.copy(acc, q_tile)
            T.copy(q_tile, out[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM])
            for i in lang.each(BLOCK_M):
                row_max[i] = (row_max[i] + base.log(row_sum[i])) / base.log_e
            T.copy(row_max, lse[batch, head, m_start : m_start + BLOCK_M])

    return attention_fwd
