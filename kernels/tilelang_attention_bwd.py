"""Builders of the attention backward kernels in TileLang: row statistics, dK and dV, dQ.

With p = b^(s - lse), s the scores and b the base of the forward, o the output, do its gradient and dlse the gradient of lse (Dao et al. 2022,
"FlashAttention", appendix B.4):

    delta = rowsum(do * o) - dlse
    dv = p^T do
    ds = p * (do v^T - delta)
    dk = scale * ds^T q
    dq = scale * ds k

dK and dV: a block owns BLOCK_N keys of one key head, and streams past them the queries of every
query head that reads it, so that the sum over the group stays in float32 registers. Scores are held
transposed, [keys, queries]: then p^T and ds^T are already what the next product takes from
registers. dQ: a block owns BLOCK_M queries and streams the keys, as the forward does. Nothing is
added atomically, so gradients are the same bit for bit from run to run.
"""

from typing import Any

from minitx.kernels.tilelang_products import make_base, make_gemm, make_row_dot, tile_strides
from minitx.kernels.tilelang_runtime import Language


def build_attention_bwd_stats(
    lang: Language, *, dtype: str, HEAD_DIM: int, BLOCK_M: int, threads: int
) -> Any:
    """stats [B, Hq, 2, S] float32 from out and dout [B, Hq, Sq, D] and lse and dlse [B, Hq, Sq]:
    stats[:, :, 0] is lse in base b, stats[:, :, 1] is delta. S >= Sq.

    Rows with no key, and those from Sq to S, get lse +inf and delta 0: p is 0 there whatever
    the scores are, and the kernels that read this need no mask for them.
    """
    import tilelang.language as T

    row_dot = make_row_dot(lang)
    base = make_base(dtype)
    B, Hq, Sq, D, S = (T.dynamic(name, "int32") for name in ("B", "Hq", "Sq", "D", "S"))
    lse_strides, dlse_strides = (
        [T.dynamic(f"{name}_{dim}", "int64") for dim in "bhs"] for name in ("lse", "dlse")
    )
    stats_strides = [T.dynamic(f"stats_{dim}", "int64") for dim in "bht"]
    plus_inf = T.infinity("float32")

    @T.prim_func
    def attention_bwd_stats(
        out: T.StridedTensor((B, Hq, Sq, D), tile_strides(lang, "out"), dtype),
        dout: T.StridedTensor((B, Hq, Sq, D), tile_strides(lang, "dout"), dtype),
        lse: T.StridedTensor((B, Hq, Sq), lse_strides, "float32"),
        dlse: T.StridedTensor((B, Hq, Sq), dlse_strides, "float32"),
        stats: T.StridedTensor((B, Hq, 2, S), [*stats_strides, 1], "float32"),
    ):
        with T.Kernel(B * Hq * T.ceildiv(S, BLOCK_M), threads=threads) as block:
            out_tile = lang.tile((BLOCK_M, HEAD_DIM), dtype)
            dout_tile = lang.tile((BLOCK_M, HEAD_DIM), dtype)
            delta = lang.tile((BLOCK_M,), "float32")
            row_lse = lang.tile((BLOCK_M,), "float32")
            row_dlse = lang.tile((BLOCK_M,), "float32")

            num_m = T.ceildiv(S, BLOCK_M)
            m_start = T.truncmod(block, num_m) * BLOCK_M
            head = T.truncmod(T.truncdiv(block, num_m), Hq)
            batch = T.truncdiv(T.truncdiv(block, num_m), Hq)
            T.copy(out[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], out_tile)
            T.copy(dout[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], dout_tile)
            T.copy(lse[batch, head, m_start : m_start + BLOCK_M], row_lse)
            T.copy(dlse[batch, head, m_start : m_start + BLOCK_M], row_dlse)
            row_dot(out_tile, dout_tile, delta)
            for i in lang.each(BLOCK_M):
                has_key = (m_start + i < Sq) & (row_lse[i] != -plus_inf)
                delta[i] = T.if_then_else(has_key, delta[i] - row_dlse[i], 0.0)
                row_lse[i] = T.if_then_else(has_key, row_lse[i] * base.log_e, plus_inf)
            T.copy(row_lse, stats[batch, head, 0, m_start : m_start + BLOCK_M])
            T.copy(delta, stats[batch, head, 1, m_start : m_start + BLOCK_M])

    return attention_bwd_stats


def build_attention_bwd_dkdv(
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
    """dk and dv [B, Hkv, Skv, D] from q and dout [B, Hq, Sq, D], k and v, and stats [B, Hq, 2, S]
    (`build_attention_bwd_stats`), S a multiple of BLOCK_M. qk_scale as in the forward."""
    import tilelang.language as T

    gemm = make_gemm(lang, dtype)
    base = make_base(dtype)
    B, Hq, Hkv = (T.dynamic(name, "int32") for name in ("B", "Hq", "Hkv"))
    Sq, Skv, D, S = (T.dynamic(name, "int32") for name in ("Sq", "Skv", "D", "S"))
    stats_strides = [T.dynamic(f"stats_{dim}", "int64") for dim in "bht"]

    @T.prim_func
    def attention_bwd_dkdv(
        q: T.StridedTensor((B, Hq, Sq, D), tile_strides(lang, "q"), dtype),
        k: T.StridedTensor((B, Hkv, Skv, D), tile_strides(lang, "k"), dtype),
        v: T.StridedTensor((B, Hkv, Skv, D), tile_strides(lang, "v"), dtype),
        dout: T.StridedTensor((B, Hq, Sq, D), tile_strides(lang, "dout"), dtype),
        stats: T.StridedTensor((B, Hq, 2, S), [*stats_strides, 1], "float32"),
        dk: T.StridedTensor((B, Hkv, Skv, D), tile_strides(lang, "dk"), dtype),
        dv: T.StridedTensor((B, Hkv, Skv, D), tile_strides(lang, "dv"), dtype),
        qk_scale: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(B * Hkv * T.ceildiv(Skv, BLOCK_N), threads=threads) as block:
            k_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            v_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            q_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            dout_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            stats_tile = lang.shared((2, BLOCK_M), "float32")
            scores = lang.tile((BLOCK_N, BLOCK_M), "float32")
            dp = lang.tile((BLOCK_N, BLOCK_M), "float32")
            p = lang.tile((BLOCK_N, BLOCK_M), dtype)
            ds = lang.tile((BLOCK_N, BLOCK_M), dtype)
            dk_acc = lang.tile((BLOCK_N, HEAD_DIM), "float32")
            dv_acc = lang.tile((BLOCK_N, HEAD_DIM), "float32")

            num_n = T.ceildiv(Skv, BLOCK_N)
            n_start = T.truncmod(block, num_n) * BLOCK_N  # the first keys have most queries
            kv_head = T.truncmod(T.truncdiv(block, num_n), Hkv)
            batch = T.truncdiv(T.truncdiv(block, num_n), Hkv)
            group = T.truncdiv(Hq, Hkv)
            # Query i reads keys below i + diagonal, so key n_start has its first reader here.
            diagonal = Skv - Sq + 1
            first_m = T.truncdiv(T.max(n_start + 1 - diagonal, 0), BLOCK_M) if IS_CAUSAL else 0
            num_m = T.ceildiv(Sq, BLOCK_M) - first_m

            T.copy(k[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], k_tile)
            T.copy(v[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], v_tile)
            T.fill(dk_acc, 0)
            T.fill(dv_acc, 0)
            for step in T.Pipelined(group * num_m, num_stages=num_stages):
                head = kv_head * group + T.truncdiv(step, num_m)
                m_start = (first_m + T.truncmod(step, num_m)) * BLOCK_M
                T.copy(q[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], q_tile)
                T.copy(stats[batch, head, 0:2, m_start : m_start + BLOCK_M], stats_tile)
                gemm(k_tile, q_tile, scores, transpose_B=True, clear=True)
                for j, i in lang.each(BLOCK_N, BLOCK_M):
                    # A probability: where huge scores round apart, it must still not pass 1.
                    scores[j, i] = base.exp(at_most_0(scores[j, i] * qk_scale - stats_tile[0, i]))
                if IS_CAUSAL:
                    if m_start + diagonal < n_start + BLOCK_N:
                        for j, i in lang.each(BLOCK_N, BLOCK_M):
                            scores[j, i] = T.if_then_else(
                                n_start + j < m_start + i + diagonal, scores[j, i], 0.0
                            )
                T.copy(scores, p)
                T.copy(dout[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], dout_tile)
                gemm(p, dout_tile, dv_acc)
                gemm(v_tile, dout_tile, dp, transpose_B=True, clear=True)
                for j, i in lang.each(BLOCK_N, BLOCK_M):
                    dp[j, i] = scores[j, i] * (dp[j, i] - stats_tile[1, i])
                T.copy(dp, ds)
                gemm(ds, q_tile, dk_acc)
            for j, d in lang.each(BLOCK_N, HEAD_DIM):
                dk_acc[j, d] *= scale
            T.copy(dk_acc, k_tile)
            T.copy(k_tile, dk[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM])
            T.copy(dv_acc, v_tile)
            T.copy(v_tile, dv[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM])

    return attention_bwd_dkdv


def build_attention_bwd_dq(
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
    """dq [B, Hq, Sq, D]; arguments as in `build_attention_bwd_dkdv`."""
    import tilelang.language as T

    gemm = make_gemm(lang, dtype)
    base = make_base(dtype)
    B, Hq, Hkv = (T.dynamic(name, "int32") for name in ("B", "Hq", "Hkv"))
    Sq, Skv, D, S = (T.dynamic(name, "int32") for name in ("Sq", "Skv", "D", "S"))
    stats_strides = [T.dynamic(f"stats_{dim}", "int64") for dim in "bht"]

    @T.prim_func
    def attention_bwd_dq(
        q: T.StridedTensor((B, Hq, Sq, D), tile_strides(lang, "q"), dtype),
        k: T.StridedTensor((B, Hkv, Skv, D), tile_strides(lang, "k"), dtype),
        v: T.StridedTensor((B, Hkv, Skv, D), tile_strides(lang, "v"), dtype),
        dout: T.StridedTensor((B, Hq, Sq, D), tile_strides(lang, "dout"), dtype),
        stats: T.StridedTensor((B, Hq, 2, S), [*stats_strides, 1], "float32"),
        dq: T.StridedTensor((B, Hq, Sq, D), tile_strides(lang, "dq"), dtype),
        qk_scale: T.float32,
        scale: T.float32,
    ):
        with T.Kernel(B * Hq * T.ceildiv(Sq, BLOCK_M), threads=threads) as block:
            q_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            dout_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            k_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            v_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            scores = lang.tile((BLOCK_M, BLOCK_N), "float32")
            dp = lang.tile((BLOCK_M, BLOCK_N), "float32")
            ds = lang.tile((BLOCK_M, BLOCK_N), dtype)
            dq_acc = lang.tile((BLOCK_M, HEAD_DIM), "float32")
            row_lse = lang.tile((BLOCK_M,), "float32")
            delta = lang.tile((BLOCK_M,), "float32")

            num_m = T.ceildiv(Sq, BLOCK_M)
            m_start = (num_m - 1 - T.truncmod(block, num_m)) * BLOCK_M  # most keys first
            head = T.truncmod(T.truncdiv(block, num_m), Hq)
            batch = T.truncdiv(T.truncdiv(block, num_m), Hq)
            kv_head = T.truncdiv(head, T.truncdiv(Hq, Hkv))
            diagonal = Skv - Sq + 1
            # Keys that the tile's last query, and its first, may read.
            last_end = T.min(m_start + BLOCK_M - 1 + diagonal, Skv) if IS_CAUSAL else Skv
            first_end = T.min(m_start + diagonal, Skv) if IS_CAUSAL else Skv

            T.copy(q[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], q_tile)
            T.copy(dout[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM], dout_tile)
            T.copy(stats[batch, head, 0, m_start : m_start + BLOCK_M], row_lse)
            T.copy(stats[batch, head, 1, m_start : m_start + BLOCK_M], delta)
            T.fill(dq_acc, 0)
            for n in T.Pipelined(T.max(T.ceildiv(last_end, BLOCK_N), 1), num_stages=num_stages):
                n_start = n * BLOCK_N
                T.copy(k[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], k_tile)
                gemm(q_tile, k_tile, scores, transpose_B=True, clear=True)
                for i, j in lang.each(BLOCK_M, BLOCK_N):
                    scores[i, j] = base.exp(at_most_0(scores[i, j] * qk_scale - row_lse[i]))
                if n_start + BLOCK_N > first_end:
                    for i, j in lang.each(BLOCK_M, BLOCK_N):
                        end = T.min(m_start + i + diagonal, Skv) if IS_CAUSAL else Skv
                        scores[i, j] = T.if_then_else(n_start + j < end, scores[i, j], 0.0)
                T.copy(v[batch, kv_head, n_start : n_start + BLOCK_N, 0:HEAD_DIM], v_tile)
                gemm(dout_tile, v_tile, dp, transpose_B=True, clear=True)
                for i, j in lang.each(BLOCK_M, BLOCK_N):
                    dp[i, j] = scores[i, j] * (dp[i, j] - delta[i])
                T.copy(dp, ds)
                gemm(ds, k_tile, dq_acc)
            for i, d in lang.each(BLOCK_M, HEAD_DIM):
                dq_acc[i, d] *= scale
            T.copy(dq_acc, q_tile)
            T.copy(q_tile, dq[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM])

    return attention_bwd_dq


def at_most_0(x: Any) -> Any:
    """min(x, 0), NaN kept."""
    import tilelang.language as T

    return T.if_then_else(x > 0.0, 0.0, x)
