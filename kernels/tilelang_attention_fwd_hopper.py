"""Builder of the attention forward for Hopper, scheduled by hand.

The maths is that of `tilelang_attention_fwd.py`, with the scale taken into the exponent: per
query, the maximum is of the scores as they come from the product, and with c = |qk_scale|

    p = 2^(c s - c m),  acc' = acc * 2^(c m - c m') + p v,  sum' = sum * 2^(c m - c m') + sum_j p
    out = acc / sum,  lse = (c m + log2(sum)) / log2(e)

for scores s that were multiplied by the sign of qk_scale before. c s - c m is one multiply-add.

Who does what. A block owns BLOCK_M queries of one head. Its last 128 threads, the producer, copy
the queries once by TMA, then tiles of BLOCK_N keys and values into `num_stages` buffers of each.
The others, the consumers, own 64 queries for every 128 threads (a warpgroup), and get the
registers that the producer gives up. Until the output no two consumers wait for one another.

When. A consumer issues the product of its queries with the next keys, then that of its last
probabilities with their values, and exponentiates the former while the latter runs (Shah et al.
2024, "FlashAttention-3", algorithm 2):

    s_0 = q k_0, p_0
    for n >= 1:  issue s_n = q k_n, acc += p_{n-1} v_{n-1};  await s_n;  p_n and rescale from s_n;
                 await acc;  acc *= rescale
    acc += p_last v_last

What the waits are for. Each buffer has a barrier `full`, on which consumers wait for the bytes of
a copy, and one `free`, on which the producer waits until each consumer's product has read the
buffer. Both flip once every num_stages tiles; a wait names the phase that has to be over. On
`free` the producer's first round waits for the phase before the first, which counts as over.
"""

from typing import Any

from minitx.kernels.tilelang_products import LOG2E, make_tensor, row_tensor, sizes
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false

WARPGROUP = 128  # threads; each takes 64 rows of a product
# Registers of a thread by warpgroups of consumers: with 128 threads of the producer they fit in the
# 65536 of a multiprocessor, in units of 8.
CONSUMER_REGISTERS = {2: 232, 3: 160}
PRODUCER_REGISTERS = {2: 40, 3: 32}
# Scaled scores of this size that differ at all differ by 2^4 and more: all but the largest have
# exponentials near 0, and keep them if the scale is up to twice what it should be.
HUGE = 2.0**28
SMALLEST = 2.0**-126  # normal float32: a masked score of -inf must stay so when it is scaled by 0
SUM_PARTS = 8  # of a row's sum. Of every 8 columns of wgmma's results a thread has two neighbours
FIRST_BARRIER = 1  # of the named ones, which warpgroups use among themselves
L2_BYTES = 2**25  # of keys and values that blocks at work at once should share


def build_attention_fwd_hopper(
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
    """Arguments and results as in `build_attention_fwd`, for 16-bit inputs whose rows TMA can
    fetch. `threads` are those of the consumers, 128 for every 64 queries."""
    import tilelang.language as T

    assert threads == BLOCK_M // 64 * WARPGROUP
    groups = threads // WARPGROUP
    warps = threads // 32
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, Skv = sizes("B", "Hq", "Sq", "Skv")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")
    minus_inf = -T.infinity("float32")
    rows = T.GemmWarpPolicy.FullRow
    score_registers, acc_registers = BLOCK_N // 2, HEAD_DIM // 2
    q_stages = 2 if HEAD_DIM <= 128 else 1
    panel = 64 if HEAD_DIM % 64 == 0 else 32  # columns that a swizzled tile has side by side

    def locate(tile, num_m, all_heads, group):
        """(first query, head, batch) of a tile: heads whose keys fit in cache together are
        neighbours, and of their tiles those with most keys go first."""
        fit = T.max(T.truncdiv(L2_BYTES // (4 * HEAD_DIM), Skv), 1)
        width = T.min(fit, T.truncdiv(all_heads, group)) * group
        first = T.truncdiv(tile, width * num_m) * width
        together = T.min(width, all_heads - first)
        rest = T.truncmod(tile, width * num_m)
        row = first + T.truncmod(rest, together)
        m_start = (num_m - 1 - T.truncdiv(rest, together)) * BLOCK_M
        return m_start, T.truncmod(row, Hq), T.truncdiv(row, Hq)

    def round_up_to_power_of_two(x):
        bits: Any = T.reinterpret(x, "int32")
        return T.reinterpret((bits + 0x7FFFFF) & -0x800000, "float32")

    def ends(m_start):
        """The keys that the first query of a tile may read, and those that its last one may."""
        if not IS_CAUSAL:
            return Skv, Skv
        diagonal = Skv - Sq + 1
        return T.min(m_start + diagonal, Skv), T.min(m_start + BLOCK_M - 1 + diagonal, Skv)

    def count_tiles(last_end):
        return T.max(T.ceildiv(last_end, BLOCK_N), 1)  # queries without keys read one, masked

    def ring(count):
        """(buffer, phase) of the count-th tile that passes through the buffers."""
        return count % num_stages, count // num_stages % 2

    @T.macro
    def arrive(barriers, index):
        if T.shuffle_elect(32):  # once for each warp
            T.barrier_arrive(barriers[index])

    @T.macro
    def load(x, tile, full, free, batch, head, start, count):
        """The count-th tile that passes through the buffers of keys, or of values."""
        stage, phase = ring(count)
        T.barrier_wait(free[stage], 1 - phase)
        T.tma_copy(
            x[batch, head, start : start + BLOCK_N, 0:HEAD_DIM],
            tile[stage, :, :],
            barrier=full[stage],
            leader_scope_threads=32,
            eviction_policy="evict_last",
        )
        arrive(full, stage)

    @T.macro
    def stored(free, stage):
        """Frees a buffer of queries when the warpgroup's output has been read from it."""
        if T.shuffle_elect(WARPGROUP):  # the thread that tma_copy chose, too
            T.tma_store_wait(0)
            T.barrier_arrive(free[stage])

    @T.macro
    def mask(scores, m_start, n_start, first_end, qk_scale):
        if qk_scale <= 0.0:  # at 0 an infinite score becomes NaN, as it should
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                scores[i, j] *= T.if_then_else(qk_scale < 0.0, -1.0, 0.0)
        if n_start + BLOCK_N > first_end:
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                end = T.min(m_start + i + Skv - Sq + 1, Skv) if IS_CAUSAL else Skv
                scores[i, j] = T.if_then_else(n_start + j < end, scores[i, j], minus_inf)

    @T.macro
    def exponentiate(scores, row_max, row_top, row_sum, top, shift, factor, rescale, size, power):
        """scores to probabilities relative to the new maximum; row statistics to match."""
        T.reduce_max(scores, top, dim=1)
        for i in T.Parallel(BLOCK_M):
            row_max[i] = T.max(row_max[i], top[i])
            # The product is exact in the multiply-add below, and rounded in the maximum: with huge
            # scores thousands would be left in the exponent. A power of two rounds neither.
            factor[i] = T.if_then_else(T.abs(row_max[i] * size) < HUGE, size, power)
            top[i] = row_max[i] * factor[i]
            # With no key seen yet, -inf - -inf would be NaN.
            shift[i] = T.if_then_else(top[i] == minus_inf, 0.0, top[i])
            rescale[i] = T.exp2(row_top[i] - shift[i])
            row_top[i] = top[i]
        for i, j in T.Parallel(BLOCK_M, BLOCK_N):
            scores[i, j] = T.exp2(scores[i, j] * factor[i] - shift[i])
        # Added up over a thread's own columns; over the threads of a row once, at the end.
        for i, c in T.Parallel(BLOCK_M, SUM_PARTS):
            row_sum[i, c] *= rescale[i]
        for g in T.unroll(BLOCK_N // SUM_PARTS):
            for i, c in T.Parallel(BLOCK_M, SUM_PARTS):
                row_sum[i, c] += scores[i, g * SUM_PARTS + c]

    @T.prim_func
    def attention_fwd_hopper(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        out: tensor("out", B, Hq, Sq),
        lse: row_tensor("lse", B, Hq, Sq),
        taken: T.Tensor((1,), "int32"),
        group: T.int32,
        qk_scale: T.float32,
        multiprocessors: T.int32,
    ):
        T.annotate_pass_configs(
            {
                "tl.disable_warp_specialized": True,
                "tl.enable_fast_math": True,
                # Barriers are all written out here: the compiler would make every thread wait.
                "tl.disable_thread_storage_sync": True,
            }
        )
        num_m = T.ceildiv(Sq, BLOCK_M)
        tiles = B * Hq * num_m
        blocks = T.min(tiles, multiprocessors)
        with T.Kernel(blocks, threads=threads + WARPGROUP) as block:
            q_tile = T.alloc_shared((q_stages, BLOCK_M, HEAD_DIM), dtype)
            k_tile = T.alloc_shared((num_stages, BLOCK_N, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((num_stages, BLOCK_N, HEAD_DIM), dtype)
            work = T.alloc_shared((2, 4), "int32")  # first query (-1: no more), head, batch
            scores = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            p = T.alloc_fragment((BLOCK_M, BLOCK_N), dtype)
            acc = T.alloc_fragment((BLOCK_M, HEAD_DIM), "float32")
            row_max = T.alloc_fragment((BLOCK_M,), "float32")
            row_top = T.alloc_fragment((BLOCK_M,), "float32")  # the same, scaled
            row_sum = T.alloc_fragment((BLOCK_M, SUM_PARTS), "float32")
            total = T.alloc_fragment((BLOCK_M,), "float32")
            top = T.alloc_fragment((BLOCK_M,), "float32")
            shift = T.alloc_fragment((BLOCK_M,), "float32")
            factor = T.alloc_fragment((BLOCK_M,), "float32")
            rescale = T.alloc_fragment((BLOCK_M,), "float32")
            work_full = T.alloc_barrier([1] * 2)
            work_free = T.alloc_barrier([warps] * 2)
            q_full = T.alloc_barrier([1] * q_stages)
            q_free = T.alloc_barrier([groups] * q_stages)
            k_full = T.alloc_barrier([1] * num_stages)
            k_free = T.alloc_barrier([warps] * num_stages)
            v_full = T.alloc_barrier([1] * num_stages)
            v_free = T.alloc_barrier([warps] * num_stages)

            thread = T.get_thread_binding()
            # Variables, so that these are computed once and not wherever they are used.
            m_start = T.alloc_var("int32")
            head = T.alloc_var("int32")
            batch = T.alloc_var("int32")
            num_n = T.alloc_var("int32")
            trip = T.alloc_var("int32")  # tiles of queries that the block has done
            done = T.alloc_var("int32")  # tiles of keys
            trip = 0
            done = 0

            if thread >= threads:
                T.set_max_nreg(PRODUCER_REGISTERS[groups], 0)
                tile = T.alloc_var("int32")
                tile = block
                if thread < threads + 32:
                    while tile < tiles:
                        place = locate(tile, num_m, B * Hq, group)
                        m_start = place[0]
                        head = place[1]
                        batch = place[2]
                        num_n = count_tiles(ends(m_start)[1])
                        T.barrier_wait(work_free[trip % 2], 1 - trip // 2 % 2)
                        if T.shuffle_elect(32):
                            work[trip % 2, 0] = m_start
                            work[trip % 2, 1] = head
                            work[trip % 2, 2] = batch
                            T.barrier_arrive(work_full[trip % 2])
                        kv_head = T.truncdiv(head, group)
                        k_batch, k_head = T.min(batch, Bk - 1), T.min(kv_head, Hk - 1)
                        v_batch, v_head = T.min(batch, Bv - 1), T.min(kv_head, Hv - 1)
                        T.barrier_wait(q_free[trip % q_stages], 1 - trip // q_stages % 2)
                        T.tma_copy(
                            q[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM],
                            q_tile[trip % q_stages, :, :],
                            barrier=q_full[trip % q_stages],
                            leader_scope_threads=32,
                            eviction_policy="evict_first",
                        )
                        arrive(q_full, trip % q_stages)
                        n_start = (num_n - 1) * BLOCK_N
                        load(k, k_tile, k_full, k_free, k_batch, k_head, n_start, done)
                        if T.shuffle_elect(32):
                            tile = blocks + T.atomic_add(taken[0], 1, return_prev=True)
                        tile = T.shfl_sync(tile, 0)
                        for n in T.serial(num_n):
                            n_start = (num_n - 1 - n) * BLOCK_N
                            if n + 1 < num_n:
                                k_start = n_start - BLOCK_N
                                load(
                                    k,
                                    k_tile,
                                    k_full,
                                    k_free,
                                    k_batch,
                                    k_head,
                                    k_start,
                                    done + n + 1,
                                )
                            load(v, v_tile, v_full, v_free, v_batch, v_head, n_start, done + n)
                        done += num_n
                        trip += 1
                    T.barrier_wait(work_free[trip % 2], 1 - trip // 2 % 2)
                    if T.shuffle_elect(32):
                        work[trip % 2, 0] = -1
                        T.barrier_arrive(work_full[trip % 2])
            else:
                T.set_max_nreg(CONSUMER_REGISTERS[groups], 1)
                warpgroup = T.truncdiv(thread, WARPGROUP)
                size = T.max(T.abs(qk_scale), SMALLEST)
                power = round_up_to_power_of_two(size)
                T.barrier_wait(work_full[0], 0)
                m_start = work[0, 0]
                while m_start >= 0:
                    head = work[trip % 2, 1]
                    batch = work[trip % 2, 2]
                    T.sync_warp()
                    arrive(work_free, trip % 2)
                    first_end = ends(m_start)[0]
                    num_n = count_tiles(ends(m_start)[1])
                    T.fill(acc, 0)
                    T.fill(row_sum, 0)
                    T.fill(row_max, minus_inf)
                    T.fill(row_top, minus_inf)
                    T.barrier_wait(q_full[trip % q_stages], trip // q_stages % 2)
                    stage0, phase0 = ring(done)
                    T.barrier_wait(k_full[stage0], phase0)
                    T.wgmma_gemm(
                        q_tile[trip % q_stages, :, :],
                        k_tile[stage0, :, :],
                        scores,
                        transpose_B=True,
                        policy=rows,
                        clear_accum=True,
                    )
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(scores, num_regs=score_registers)
                    arrive(k_free, stage0)
                    if q_stages == 2:
                        if trip > 0:
                            stored(q_free, (trip - 1) % q_stages)
                    mask(scores, m_start, (num_n - 1) * BLOCK_N, first_end, qk_scale)
                    exponentiate(
                        scores, row_max, row_top, row_sum, top, shift, factor, rescale, size, power
                    )
                    T.copy(scores, p)
                    T.barrier_wait(v_full[stage0], phase0)
                    for n in T.serial(1, num_n):
                        stage, phase = ring(done + n)
                        last = ring(done + n - 1)[0]
                        T.barrier_wait(k_full[stage], phase)
                        T.wgmma_gemm(
                            q_tile[trip % q_stages, :, :],
                            k_tile[stage, :, :],
                            scores,
                            transpose_B=True,
                            policy=rows,
                            clear_accum=True,
                        )
                        T.wgmma_gemm(p, v_tile[last, :, :], acc, policy=rows)
                        T.wait_wgmma(1)  # all but the last product issued
                        T.warpgroup_fence_operand(scores, num_regs=score_registers)
                        arrive(k_free, stage)
                        mask(scores, m_start, (num_n - 1 - n) * BLOCK_N, first_end, qk_scale)
                        exponentiate(
                            scores,
                            row_max,
                            row_top,
                            row_sum,
                            top,
                            shift,
                            factor,
                            rescale,
                            size,
                            power,
                        )
                        # ptxas moves a wait for products up as far as its basic block goes: to
                        # before the exponentials, which then overlap nothing. The loop that waits
                        # for the values, needed only in the next round, ends that block here.
                        T.warpgroup_fence_operand(scores, num_regs=score_registers)
                        T.barrier_wait(v_full[stage], phase)
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(acc, num_regs=acc_registers)
                        arrive(v_free, last)
                        T.copy(scores, p)
                        for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                            acc[i, d] *= rescale[i]
                    done += num_n
                    last_stage = ring(done - 1)[0]
                    T.wgmma_gemm(p, v_tile[last_stage, :, :], acc, policy=rows)
                    T.reduce_sum(row_sum, total, dim=1)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=acc_registers)
                    arrive(v_free, last_stage)
                    for i in T.Parallel(BLOCK_M):
                        row_max[i] = (row_max[i] * size + T.log2(total[i])) / LOG2E
                        rescale[i] = 1.0 / total[i]
                    for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                        # Not by a product with 0: with a masked NaN among the values acc is NaN.
                        acc[i, d] = T.if_then_else(
                            row_max[i] == minus_inf, 0.0, acc[i, d] * rescale[i]
                        )
                    # In place of the warpgroup's own queries, which no other one reads.
                    T.copy(acc, q_tile[trip % q_stages, :, :])
                    T.fence_proxy_async()
                    T.sync_threads(FIRST_BARRIER + warpgroup, WARPGROUP)
                    w_start = warpgroup * 64
                    for c in T.unroll(HEAD_DIM // panel):
                        T.tma_copy(
                            q_tile[
                                trip % q_stages,
                                w_start : w_start + 64,
                                c * panel : c * panel + panel,
                            ],
                            out[
                                batch,
                                head,
                                m_start + w_start : m_start + w_start + 64,
                                c * panel : c * panel + panel,
                            ],
                            leader_scope_threads=WARPGROUP,
                        )
                    if q_stages == 1:
                        stored(q_free, 0)
                    T.copy(row_max, lse[batch, head, m_start : m_start + BLOCK_M])
                    trip += 1
                    T.barrier_wait(work_full[trip % 2], trip // 2 % 2)
                    m_start = work[trip % 2, 0]
                if T.shuffle_elect(WARPGROUP):
                    T.tma_store_wait(0)  # for the reads: shared memory ends with the block

    return attention_fwd_hopper
