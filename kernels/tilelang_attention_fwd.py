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

from minitx.kernels.tilelang_products import (
    compiler_options,
    count_share,
    lay_out,
    make_base,
    make_gemm,
    make_tensor,
    part_tensors,
    place,
    row_tensor,
    sizes,
)
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false


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
    IS_SHARED: bool = False,
) -> Any:
    """out [B, Hq, Sq, D] and lse [B, Hq, Sq] from q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D].

    k and v may have one batch or one head for all: Bk, Hk, Bv or Hv is then 1. group is Hq // Hkv,
    qk_scale `exponent_scale(scale, dtype)`. HEAD_DIM is D or more: columns from D on are read as 0
    and not written.

    IS_SHARED: each block reads a share of the keys, and in place of out and lse come the parts and
    stats that `tilelang_attention_merge.py` makes them of. A part is 0 for a query that sees no key
    of the share, whatever is among its values.
    """
    import tilelang.language as T

    gemm = make_gemm(lang, dtype)
    base = make_base(dtype)
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, Skv = sizes("B", "Hq", "Sq", "Skv")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")
    P = sizes("P")[0] if IS_SHARED else B
    parts, stats = part_tensors(P, Hq, Sq, HEAD_DIM)
    minus_inf = -T.infinity("float32")
    # nvcc would fuse a product with the subtraction of the maximum that follows, and leave in the
    # exponent what the rounding of the maximum lost: thousands, for scores of 1e11.
    rounded_product = operator.mul if lang.on_cpu else T.ieee_mul

    @T.prim_func
    def attention_fwd(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        out: parts if IS_SHARED else tensor("out", B, Hq, Sq),
        lse: stats if IS_SHARED else row_tensor("lse", B, Hq, Sq),
        group: T.int32,
        qk_scale: T.float32,
    ):
        T.annotate_pass_configs(compiler_options(dtype, num_stages))
        with T.Kernel(P * Hq * T.ceildiv(Sq, BLOCK_M), threads=threads) as block:
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
            lay_out(lang, dtype, threads, scores, acc)

            num_m = T.ceildiv(Sq, BLOCK_M)
            tile, head, part = place(block, num_m, Hq)
            share = count_share(T.ceildiv(Skv, BLOCK_N), P, B) if IS_SHARED else 0
            batch = T.truncmod(part, B) if IS_SHARED else part
            first_n = T.truncdiv(part, B) * share if IS_SHARED else 0
            m_start = (num_m - 1 - tile) * BLOCK_M  # the last queries have most keys: they go first
            kv_head = T.truncdiv(head, group)
            k_batch, k_head = T.min(batch, Bk - 1), T.min(kv_head, Hk - 1)
            v_batch, v_head = T.min(batch, Bv - 1), T.min(kv_head, Hv - 1)
            # Keys that the tile's last query, and its first, may read.
            diagonal = Skv - Sq + 1
            last_end = T.min(m_start + BLOCK_M - 1 + diagonal, Skv) if IS_CAUSAL else Skv
            first_end = T.min(m_start + diagonal, Skv) if IS_CAUSAL else Skv

            T.copy(q[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], q_tile)
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, minus_inf)
            num_n = T.ceildiv(last_end, BLOCK_N)
            if IS_SHARED:
                num_n = T.min(num_n - first_n, share)
            # One tile at least: a block that left at once would leave q_tile's copy in flight.
            for n in T.Pipelined(T.max(num_n, 1), num_stages=num_stages):
                n_start = (first_n + n) * BLOCK_N
                T.copy(k[k_batch, k_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], k_tile)
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
                T.copy(v[v_batch, v_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], v_tile)
                gemm(p, v_tile, acc)
            if IS_SHARED:
                if IS_CAUSAL:
                    # Of a query without keys here: masked NaN among the values may have made NaN.
                    for i, d in lang.each(BLOCK_M, HEAD_DIM):
                        sees_key = first_n * BLOCK_N < m_start + i + diagonal
                        acc[i, d] = T.if_then_else(sees_key, acc[i, d], 0.0)
                T.copy(acc, out[part, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM])
                T.copy(row_max, lse[part, head, m_start : m_start + BLOCK_M, 0])
                T.copy(row_sum, lse[part, head, m_start : m_start + BLOCK_M, 1])
            else:
                for i, d in lang.each(BLOCK_M, HEAD_DIM):
                    acc[i, d] = T.if_then_else(row_sum[i] == 0.0, 0.0, acc[i, d] / row_sum[i])
                T.copy(acc, q_tile)
                T.copy(q_tile, out[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM])
                for i in lang.each(BLOCK_M):
                    row_max[i] = (row_max[i] + base.log(row_sum[i])) / base.log_e
                T.copy(row_max, lse[batch, head, m_start : m_start + BLOCK_M])

    return attention_fwd
