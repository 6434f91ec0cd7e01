"""Builders of the attention backward kernels in TileLang: row statistics, dK and dV, dQ.

With p = b^(s - lse), s the scores and b the base of the forward, do the gradient of the output o
and dlse that of lse (Dao et al. 2022, "FlashAttention", appendix B.4):

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

from minitx.kernels.tilelang_products import (
    compiler_options,
    lay_out,
    make_base,
    make_gemm,
    make_row_dot,
    make_tensor,
    place,
    row_tensor,
    sizes,
)
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false


def build_attention_bwd_stats(
    lang: Language, *, dtype: str, HEAD_DIM: int, WITH_DLSE: bool, USE_TMA: bool
) -> Any:
    """stats [B, Hq, 2, S] float32 from out and dout [B, Hq, Sq, D] and lse and dlse [B, Hq, Sq]:
    stats[:, :, 0] is lse in base b, stats[:, :, 1] is delta. S >= Sq; dlse is read if WITH_DLSE.

    A row that sees nothing gets lse +inf and delta 0, so that p, and what is made of it, is 0.
    """
    import tilelang.language as T

    BLOCK_M, threads = 64 if dtype != "float32" else 32, 128
    fetch = "tma" if USE_TMA else None  # which outside a pipelined loop is not chosen by itself
    row_dot = make_row_dot(lang)
    base = make_base(dtype)
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, S = sizes("B", "Hq", "Sq", "S")
    plus_inf = T.infinity("float32")

    @T.prim_func
    def attention_bwd_stats(
        out: tensor("out", B, Hq, Sq),
        dout: tensor("dout", B, Hq, Sq),
        lse: row_tensor("lse", B, Hq, Sq),
        dlse: row_tensor("dlse", B, Hq, Sq),
        stats: stats_tensor(B, Hq, S),
    ):
        with T.Kernel(B * Hq * T.ceildiv(S, BLOCK_M), threads=threads) as block:
            out_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            dout_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            delta = lang.tile((BLOCK_M,), "float32")
            row_lse = lang.tile((BLOCK_M,), "float32")
            row_dlse = lang.tile((BLOCK_M,), "float32")

            tile, head, batch = place(block, T.ceildiv(S, BLOCK_M), Hq)
            rows = slice(tile * BLOCK_M, tile * BLOCK_M + BLOCK_M)
            T.copy(out[batch, head, rows, 0:HEAD_DIM], out_tile, prefer_instruction=fetch)
            T.copy(dout[batch, head, rows, 0:HEAD_DIM], dout_tile, prefer_instruction=fetch)
            T.copy(lse[batch, head, rows], row_lse)
            row_dot(out_tile, dout_tile, delta)
            if WITH_DLSE:
                T.copy(dlse[batch, head, rows], row_dlse)
                for i in lang.each(BLOCK_M):
                    delta[i] -= row_dlse[i]
            for i in lang.each(BLOCK_M):
                has_key = row_lse[i] != -plus_inf
                delta[i] = T.if_then_else(has_key, delta[i], 0.0)
                row_lse[i] = T.if_then_else(has_key, row_lse[i] * base.log_e, plus_inf)
            T.copy(row_lse, stats[batch, head, 0, rows])
            T.copy(delta, stats[batch, head, 1, rows])

    return attention_bwd_stats


def build_attention_bwd_dkdv(
    lang: Language,
    *,
    dtype: str,
    HEAD_DIM: int,
    IS_CAUSAL: bool,
    WITH_DK: bool,
    WITH_DV: bool,
    BLOCK_M: int,
    BLOCK_N: int,
    num_stages: int,
    threads: int,
) -> Any:
    """dk and dv [B, Hkv, Skv, D], each if it is asked for, from q and dout [B, Hq, Sq, D], k, v and
    stats (`build_attention_bwd_stats`), whose S is a multiple of BLOCK_M. The rest as in the
    forward."""
    import tilelang.language as T

    gemm = make_gemm(lang, dtype)
    base = make_base(dtype)
    tensor = make_tensor(lang, dtype)
    B, Hq, Hkv, Sq, Skv, S = sizes("B", "Hq", "Hkv", "Sq", "Skv", "S")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")
    # A tensor core takes its left operand from registers if a warp holds whole rows of it, and
    # those come 16 at a time. Else it goes through shared memory.
    whole_rows = threads * 16 <= BLOCK_N * 32
    left_operand = lang.tile if dtype == "float32" or whole_rows else lang.shared

    @T.prim_func
    def attention_bwd_dkdv(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        dout: tensor("dout", B, Hq, Sq),
        stats: stats_tensor(B, Hq, S),
        dk: tensor("dk", B, Hkv, Skv),
        dv: tensor("dv", B, Hkv, Skv),
        group: T.int32,
        qk_scale: T.float32,
        scale: T.float32,
    ):
        T.annotate_pass_configs(compiler_options(dtype, num_stages))
        with T.Kernel(B * Hkv * T.ceildiv(Skv, BLOCK_N), threads=threads) as block:
            k_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            v_tile = lang.shared((BLOCK_N, HEAD_DIM), dtype)
            q_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            dout_tile = lang.shared((BLOCK_M, HEAD_DIM), dtype)
            stats_tile = lang.shared((2, BLOCK_M), "float32")
            scores = lang.tile((BLOCK_N, BLOCK_M), "float32")
            dp = lang.tile((BLOCK_N, BLOCK_M), "float32")
            p = left_operand((BLOCK_N, BLOCK_M), dtype)
            ds = left_operand((BLOCK_N, BLOCK_M), dtype)
            dk_acc = lang.tile((BLOCK_N, HEAD_DIM), "float32")
            dv_acc = lang.tile((BLOCK_N, HEAD_DIM), "float32")
            lay_out(lang, dtype, threads, scores, dp, dk_acc, dv_acc)

            # The first keys have most queries: they go first.
            tile, kv_head, batch = place(block, T.ceildiv(Skv, BLOCK_N), Hkv)
            n_start = tile * BLOCK_N
            keys = slice(n_start, n_start + BLOCK_N)
            # Query i reads keys below i + diagonal, so key n_start has its first reader here.
            diagonal = Skv - Sq + 1
            first_m = T.truncdiv(T.max(n_start + 1 - diagonal, 0), BLOCK_M) if IS_CAUSAL else 0
            num_m = T.ceildiv(Sq, BLOCK_M) - first_m

            k_batch, k_head = T.min(batch, Bk - 1), T.min(kv_head, Hk - 1)
            v_batch, v_head = T.min(batch, Bv - 1), T.min(kv_head, Hv - 1)
            T.copy(k[k_batch, k_head, keys, 0:HEAD_DIM], k_tile)
            T.copy(v[v_batch, v_head, keys, 0:HEAD_DIM], v_tile)
            # Not the one without a product: no layout could be inferred for it.
            if WITH_DK:
                T.fill(dk_acc, 0)
            if WITH_DV:
                T.fill(dv_acc, 0)
            for step in T.Pipelined(group * num_m, num_stages=num_stages):
                head = kv_head * group + T.truncdiv(step, num_m)
                m_start = (first_m + T.truncmod(step, num_m)) * BLOCK_M
                queries = slice(m_start, m_start + BLOCK_M)
                T.copy(q[batch, head, queries, 0:HEAD_DIM], q_tile)
                T.copy(stats[batch, head, 0:2, queries], stats_tile)
                gemm(k_tile, q_tile, scores, transpose_B=True, clear=True)
                for j, i in lang.each(BLOCK_N, BLOCK_M):
                    scores[j, i] = base.exp(at_most_0(scores[j, i] * qk_scale - stats_tile[0, i]))
                # Queries past the end are zeros, and 0 times an infinite key is NaN.
                crosses_end = m_start + BLOCK_M > Sq
                crosses_diagonal = m_start + diagonal < n_start + BLOCK_N if IS_CAUSAL else False
                if crosses_end or crosses_diagonal:
                    for j, i in lang.each(BLOCK_N, BLOCK_M):
                        end = m_start + i + diagonal if IS_CAUSAL else Skv
                        is_seen = (m_start + i < Sq) & (n_start + j < end)
                        scores[j, i] = T.if_then_else(is_seen, scores[j, i], 0.0)
                T.copy(dout[batch, head, queries, 0:HEAD_DIM], dout_tile)
                if WITH_DV:
                    T.copy(scores, p)
                    gemm(p, dout_tile, dv_acc)
                if WITH_DK:
                    gemm(v_tile, dout_tile, dp, transpose_B=True, clear=True)
                    for j, i in lang.each(BLOCK_N, BLOCK_M):
                        dp[j, i] = scores[j, i] * (dp[j, i] - stats_tile[1, i])
                    T.copy(dp, ds)
                    gemm(ds, q_tile, dk_acc)
            if WITH_DK:
                for j, d in lang.each(BLOCK_N, HEAD_DIM):
                    dk_acc[j, d] *= scale
                T.copy(dk_acc, k_tile)
                T.copy(k_tile, dk[batch, kv_head, keys, 0:HEAD_DIM])
            if WITH_DV:
                T.copy(dv_acc, v_tile)
                T.copy(v_tile, dv[batch, kv_head, keys, 0:HEAD_DIM])

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
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, Skv, S = sizes("B", "Hq", "Sq", "Skv", "S")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")

    @T.prim_func
    def attention_bwd_dq(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        dout: tensor("dout", B, Hq, Sq),
        stats: stats_tensor(B, Hq, S),
        dq: tensor("dq", B, Hq, Sq),
        group: T.int32,
        qk_scale: T.float32,
        scale: T.float32,
    ):
        T.annotate_pass_configs(compiler_options(dtype, num_stages))
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
            lay_out(lang, dtype, threads, scores, dp, dq_acc)

            num_m = T.ceildiv(Sq, BLOCK_M)
            tile, head, batch = place(block, num_m, Hq)
            m_start = (num_m - 1 - tile) * BLOCK_M  # the last queries have most keys: they go first
            queries = slice(m_start, m_start + BLOCK_M)
            kv_head = T.truncdiv(head, group)
            k_batch, k_head = T.min(batch, Bk - 1), T.min(kv_head, Hk - 1)
            v_batch, v_head = T.min(batch, Bv - 1), T.min(kv_head, Hv - 1)
            # Keys that the tile's last query, and its first, may read.
            diagonal = Skv - Sq + 1
            last_end = T.min(m_start + BLOCK_M - 1 + diagonal, Skv) if IS_CAUSAL else Skv
            first_end = T.min(m_start + diagonal, Skv) if IS_CAUSAL else Skv

            T.copy(q[batch, head, queries, 0:HEAD_DIM], q_tile)
            T.copy(dout[batch, head, queries, 0:HEAD_DIM], dout_tile)
            T.copy(stats[batch, head, 0, queries], row_lse)
            T.copy(stats[batch, head, 1, queries], delta)
            T.fill(dq_acc, 0)
            # One tile at least: a block that left at once would leave its copies in flight.
            for n in T.Pipelined(T.max(T.ceildiv(last_end, BLOCK_N), 1), num_stages=num_stages):
                n_start = n * BLOCK_N
                keys = slice(n_start, n_start + BLOCK_N)
                T.copy(k[k_batch, k_head, keys, 0:HEAD_DIM], k_tile)
                gemm(q_tile, k_tile, scores, transpose_B=True, clear=True)
                for i, j in lang.each(BLOCK_M, BLOCK_N):
                    scores[i, j] = base.exp(at_most_0(scores[i, j] * qk_scale - row_lse[i]))
                if n_start + BLOCK_N > first_end:
                    for i, j in lang.each(BLOCK_M, BLOCK_N):
                        end = T.min(m_start + i + diagonal, Skv) if IS_CAUSAL else Skv
                        scores[i, j] = T.if_then_else(n_start + j < end, scores[i, j], 0.0)
                T.copy(v[v_batch, v_head, keys, 0:HEAD_DIM], v_tile)
                gemm(dout_tile, v_tile, dp, transpose_B=True, clear=True)
                for i, j in lang.each(BLOCK_M, BLOCK_N):
                    dp[i, j] = scores[i, j] * (dp[i, j] - delta[i])
                T.copy(dp, ds)
                gemm(ds, k_tile, dq_acc)
            for i, d in lang.each(BLOCK_M, HEAD_DIM):
                dq_acc[i, d] *= scale
            T.copy(dq_acc, q_tile)
            T.copy(q_tile, dq[batch, head, queries, 0:HEAD_DIM])

    return attention_bwd_dq


def stats_tensor(B: Any, Hq: Any, S: Any) -> Any:
    """The type of stats [B, Hq, 2, S]. Both rows are fetched as one two-dimensional box: a copy of
    one row alone would become a bulk copy, which hangs where a head is not padded
    (tile-ai/tilelang#2567) or the loop has one step (tile-ai/tilelang#2566)."""
    import tilelang.language as T

    strides = tuple(T.dynamic(f"stats_{dim}", "int64") for dim in "bht")
    return T.StridedTensor((B, Hq, 2, S), (*strides, 1), "float32")


def at_most_0(x: Any) -> Any:
    """min(x, 0), NaN kept. The logarithm of a probability is never positive; but where scores are
    so large that they and lse round apart, x is, and its exponential could be infinite."""
    import tilelang.language as T

    return T.if_then_else(x > 0.0, 0.0, x)
