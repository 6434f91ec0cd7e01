"""Builder of the attention forward for Hopper, scheduled by hand.

The maths is that of `tilelang_attention_fwd.py`, with the scale taken into the exponent, and with
maxima that may lag behind (`tilelang_scores_hopper.py`): per query, with m of the scores as they
come from the product and c = |qk_scale|,

    p = 2^(c s - c m),  acc' = acc + p v,  sum' = sum + sum_j p
    out = acc / sum,  lse = (c m + log2(sum)) / log2(e)

for scores s of queries that were multiplied by the sign of qk_scale before. c s - c m is one
multiply-add. Where m grows to m', acc and sum are multiplied by 2^(c m - c m') first.

Who does what. A block stays on its multiprocessor and takes one tile of BLOCK_M queries after the
other, those with most keys first (`tilelang_work_hopper.py`). Its last 128 threads are the
producer. One warp of them takes the tiles and tells the consumers which; it copies the queries of
each by TMA, then tiles of BLOCK_N keys and values, from the last to the first, into `num_stages`
buffers of each, ahead of the consumers as far as there are buffers, into the next tile of queries
too. The consumers own 64 queries for every 128 threads (a warpgroup), and get the registers that
the producer gives up. No two warpgroups wait for one another: each skips the tiles of keys that
none of its own queries may read, and stores its part of the output, from where its queries were.
What it skips it waits for all the same, so that it frees each buffer once a round.

When. A consumer issues the product of its queries with the next keys, then that of its last
probabilities with their values, and exponentiates the former while the latter runs (Shah et al.
2024, "FlashAttention-3", algorithm 2):

    s_0 = q k_0, p_0
    for n >= 1:  issue s_n = q k_n, acc += p_{n-1} v_{n-1};  await s_n
                 where a score grew too much: await acc, rescale it
                 p_n from s_n;  await acc
    issue acc += p_last v_last, s_0 of the next queries;  await acc, store it

acc is awaited when a part of p_n is there: the rest of the exponentials hides the rounding of p_n.
Only tiles on the diagonal, or with the end of the keys, are masked; being the first, they have a
loop of their own. Where there is room for one tile of queries only, above D = 128, the next ones
come when the output is stored.
"""

from typing import Any

from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels import tilelang_work_hopper as work_hopper
from minitx.kernels.tilelang_products import LOG2E, make_tensor, row_tensor, sizes
from minitx.kernels.tilelang_runtime import Language
from minitx.kernels.tilelang_scores_hopper import PART, alloc_stats, make_macros, make_scale
from minitx.kernels.tilelang_wgmma import Operand, own_rows
from minitx.kernels.tilelang_work_hopper import Sizes, take_one

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false

WARPGROUP = 128  # threads; each takes 64 rows of a product
# Registers of a thread by warpgroups of consumers: with 128 threads of the producer they fit in
# what the block starts with, 65536 by its threads, in units of 8.
CONSUMER_REGISTERS = {2: 232, 3: 160, 4: 112}
PRODUCER_REGISTERS = {2: 40, 3: 32, 4: 32}
# Named barriers: one of all consumers, then one of each of their warpgroups. 0 is __syncthreads.
CONSUMERS, FIRST_WARPGROUP = 1, 2
EARLY_PARTS = 4  # of the scores that are exponentiated before the other product is awaited
# What a consumer knows of the tile of queries whose first product it issued last.
FIRST_QUERY, HEAD, BATCH, NUM_N, SKIPPED = range(5)


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
    fetch. `threads` are those of the consumers, 128 for every 64 queries.

    The kernel takes two more arguments: `taken`, the address of an int32 0 that no other call uses
    meanwhile, to count the tiles that blocks took, or 0 where there are no more tiles than
    multiprocessors; and how many of those there are.
    """
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
    parts = BLOCK_N // PART
    softmax = make_macros(BLOCK_M, BLOCK_N)
    q_stages = 2 if HEAD_DIM <= 128 else 1  # as many as there is room for
    by_hand = HEAD_DIM % 64 == 0  # products
    # For loops that write no registers: TileLang would plan them anew for each loop of the kernel.
    by_row = wgmma.by_row(BLOCK_M)
    panel = 64 if by_hand else 32  # columns that lie side by side in shared memory
    Q_BYTES, K_BYTES = BLOCK_M * HEAD_DIM * 2, BLOCK_N * HEAD_DIM * 2
    work_sizes = Sizes(IS_CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, num_stages, Hq, Sq, Skv)
    locate, end_of_keys, ring = work_sizes.locate, work_sizes.end_of_keys, work_sizes.ring
    count_key_tiles, count_unmasked = work_sizes.count_key_tiles, work_sizes.count_unmasked
    arrive, load, skip = work_hopper.make_macros(work_sizes)

    @T.macro
    def free_queries(free, stage):
        """When the output of the warpgroup has been read from there."""
        if T.shuffle_elect(WARPGROUP):  # the thread that stores, too
            T.tma_store_wait(0)
            T.barrier_arrive(free[stage])

    @T.macro
    def multiply_sign(q_tile, stage, qk_scale):
        if qk_scale <= 0.0:  # at 0 what is infinite becomes NaN, as it should
            for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                q_tile[stage, i, d] *= T.if_then_else(qk_scale < 0.0, -1.0, 0.0)
            wgmma.fence_stores()
            T.sync_threads(CONSUMERS, threads)

    @T.macro
    def multiply_keys(q_tile, q_stage, k_tile, stage, scores, warpgroup):
        if by_hand:
            queries = Operand(q_tile, True, q_stage * Q_BYTES + own_rows(warpgroup))
            keys = Operand(k_tile, True, stage * K_BYTES)
            wgmma.issue_product(scores, queries, keys, HEAD_DIM, clear=True)
        else:
            T.wgmma_gemm(
                q_tile[q_stage, :, :],
                k_tile[stage, :, :],
                scores,
                transpose_B=True,
                policy=rows,
                clear_accum=True,
            )

    @T.macro
    def multiply_values(p, v_tile, stage, acc):
        if by_hand:
            wgmma.issue_product(acc, p, Operand(v_tile, False, stage * K_BYTES), BLOCK_N)
        else:
            T.wgmma_gemm(p, v_tile[stage, :, :], acc, policy=rows)

    def is_far(upcoming):
        """Whether the first keys come only when the values of the last ones are freed: those of the
        tiles skipped but one are fetched before."""
        return (upcoming[FIRST_QUERY] >= 0) & (upcoming[SKIPPED] > num_stages)

    @T.macro
    def begin(trip, done, last, upcoming, warpgroup, qk_scale, tiles, barriers):
        """Takes the next tile of queries, if there is one, and issues its first product."""
        q_tile, k_tile, scores, work = tiles
        work_full, work_free, q_full, k_full, k_free, v_full, v_free = barriers
        T.barrier_wait(work_full[trip % 2], trip // 2 % 2)
        upcoming[FIRST_QUERY] = work[trip % 2, 0]
        upcoming[HEAD] = work[trip % 2, 1]
        upcoming[BATCH] = work[trip % 2, 2]
        T.sync_warp()
        if upcoming[FIRST_QUERY] >= 0:
            arrive(work_free, trip % 2)
            first = upcoming[FIRST_QUERY]
            upcoming[NUM_N] = count_key_tiles(first, BLOCK_M)
            upcoming[SKIPPED] = upcoming[NUM_N] - count_key_tiles(first + warpgroup * 64, 64)
            if q_stages > 1 and (trip > 0) & is_far(upcoming):
                T.wait_wgmma(0)
                arrive(v_free, last)
            T.barrier_wait(q_full[trip % q_stages], trip // q_stages % 2)
            multiply_sign(q_tile, trip % q_stages, qk_scale)
            # Not before: the others, waiting to change a sign together, free no buffer that this
            # might wait for. Keys and values in the order in which they are fetched.
            for n in T.serial(upcoming[SKIPPED]):
                skip(k_full, k_free, done + n)
                if n > 0:
                    skip(v_full, v_free, done + n - 1)
            stage, phase = ring(done + upcoming[SKIPPED])
            T.barrier_wait(k_full[stage], phase)
        # Where there is no tile it is one that nobody reads: ptxas awaits every product at once, if
        # one is issued under a condition (C7515).
        stage = ring(done + upcoming[SKIPPED])[0]
        multiply_keys(q_tile, trip % q_stages, k_tile, stage, scores, warpgroup)

    @T.macro
    def accumulate(IS_MASKED, n, num_n, done, m_start, q_stage, warpgroup, tiles, barriers, rest):
        """Adds what comes from tile n of the keys' tiles, counted from the last, and multiplies the
        probabilities of the one before by their values. It leaves its own to the next."""
        q_tile, k_tile, v_tile, scores, p, acc = tiles
        k_full, k_free, v_full, v_free = barriers[-4:]
        stats, scale = rest
        stage, phase = ring(done + n)
        last = ring(done + n - 1)[0]
        T.barrier_wait(k_full[stage], phase)
        multiply_keys(q_tile, q_stage, k_tile, stage, scores, warpgroup)
        multiply_values(p, v_tile, last, acc)
        T.wait_wgmma(1)  # all but the last product issued
        T.warpgroup_fence_operand(scores, num_regs=score_registers)
        arrive(k_free, stage)
        if IS_MASKED:
            softmax.mask(scores, stats, m_start, (num_n - 1 - n) * BLOCK_N, end_of_keys)
        softmax.look(scores, stats)
        if T.any_sync(stats.grew[0]) != 0:
            softmax.take_maximum(scores, stats, scale)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(acc, num_regs=acc_registers)
            for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                acc[i, d] *= stats.rescale[i]
        softmax.exponentiate(scores, stats, 0, EARLY_PARTS)
        # ptxas moves a wait for products up as far as its basic block goes: to before the
        # exponentials, which then overlap nothing. The loop that waits for the values, needed only
        # in the next round, ends that block here.
        T.warpgroup_fence_operand(scores, num_regs=score_registers)
        T.barrier_wait(v_full[stage], phase)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(acc, num_regs=acc_registers)
        arrive(v_free, last)
        softmax.exponentiate(scores, stats, EARLY_PARTS, parts)
        T.copy(scores, p)

    @T.prim_func
    def attention_fwd_hopper(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        out: tensor("out", B, Hq, Sq),
        lse: row_tensor("lse", B, Hq, Sq),
        taken: T.int64,  # a number is handed over sooner than a tensor
        group: T.int32,
        qk_scale: T.float32,
        multiprocessors: T.int32,
    ):
        T.annotate_pass_configs(
            {
                "tl.disable_warp_specialized": True,
                "tl.enable_fast_math": True,
                # All barriers are written out here. Those that TileLang adds are of all consumers.
                "tl.disable_thread_storage_sync": True,
            }
        )
        num_m = T.ceildiv(Sq, BLOCK_M)
        tiles = B * Hq * num_m
        blocks = T.min(tiles, multiprocessors)
        with T.Kernel(blocks, threads=threads + WARPGROUP) as block:
            T.import_source(work_hopper.HELPERS + wgmma.HELPERS)
            q_tile = T.alloc_shared((q_stages, BLOCK_M, HEAD_DIM), dtype)
            k_tile = T.alloc_shared((num_stages, BLOCK_N, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((num_stages, BLOCK_N, HEAD_DIM), dtype)
            work = T.alloc_shared((2, 4), "int32")  # first query, or -1 at the end; head; batch
            scores = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            p = T.alloc_fragment((BLOCK_M, BLOCK_N), dtype)
            acc = T.alloc_fragment((BLOCK_M, HEAD_DIM), "float32")
            rounded = T.alloc_fragment((BLOCK_M, HEAD_DIM), dtype)
            upcoming = T.alloc_local((5,), "int32")
            if by_hand:
                wgmma.lay_out((q_tile, k_tile, v_tile), (scores, p, acc, rounded))
            stats = alloc_stats(BLOCK_M)
            total = T.alloc_fragment((BLOCK_M,), "float32")
            lse_tile = T.alloc_fragment((BLOCK_M,), "float32")
            work_full, work_free = T.alloc_barrier([1] * 2), T.alloc_barrier([warps] * 2)
            q_full, q_free = T.alloc_barrier([1] * q_stages), T.alloc_barrier([groups] * q_stages)
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
            skipped = T.alloc_var("int32")
            last = T.alloc_var("int32")
            tile = T.alloc_var("int32")
            trip = T.alloc_var("int32")  # tiles of queries before this one
            done = T.alloc_var("int32")  # tiles of keys, all told
            tile = block
            trip = 0
            done = 0

            if thread >= threads:
                T.set_max_nreg(PRODUCER_REGISTERS[groups], 0)
                if thread < threads + 32:
                    while tile < tiles:
                        place = locate(tile, num_m, B * Hq, group)
                        m_start = place[0]
                        head = place[1]
                        batch = place[2]
                        num_n = count_key_tiles(m_start, BLOCK_M)
                        T.barrier_wait(work_free[trip % 2], 1 - trip // 2 % 2)
                        if T.shuffle_elect(32):
                            work[trip % 2, 0] = m_start
                            work[trip % 2, 1] = head
                            work[trip % 2, 2] = batch
                            T.barrier_arrive(work_full[trip % 2])
                        T.barrier_wait(q_free[trip % q_stages], 1 - trip // q_stages % 2)
                        T.tma_copy(
                            q[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM],
                            q_tile[trip % q_stages, :, :],
                            barrier=q_full[trip % q_stages],
                            leader_scope_threads=32,
                        )
                        arrive(q_full, trip % q_stages)
                        kv_head = T.truncdiv(head, group)
                        k_place = (T.min(batch, Bk - 1), T.min(kv_head, Hk - 1))
                        v_place = (T.min(batch, Bv - 1), T.min(kv_head, Hv - 1))
                        start = (num_n - 1) * BLOCK_N
                        load(k, k_tile, k_full, k_free, done, *k_place, start)
                        tile = tiles
                        if tiles > blocks:
                            if T.shuffle_elect(32):
                                tile = blocks + take_one(taken)
                            tile = T.shfl_sync(tile, 0)
                        for n in T.serial(num_n):
                            v_start = (num_n - 1 - n) * BLOCK_N
                            if n + 1 < num_n:  # keys are needed before the values of the last ones
                                k_start = v_start - BLOCK_N
                                load(k, k_tile, k_full, k_free, done + n + 1, *k_place, k_start)
                            load(v, v_tile, v_full, v_free, done + n, *v_place, v_start)
                        done += num_n
                        trip += 1
                    T.barrier_wait(work_free[trip % 2], 1 - trip // 2 % 2)
                    if T.shuffle_elect(32):
                        work[trip % 2, 0] = -1
                        T.barrier_arrive(work_full[trip % 2])
            else:
                T.set_max_nreg(CONSUMER_REGISTERS[groups], 1)
                warpgroup = T.alloc_var("int32", init=wgmma.warpgroup_of(thread))
                scale = make_scale(qk_scale)
                upcoming[SKIPPED] = 0
                buffers = (q_tile, k_tile, scores, work)
                barriers = (work_full, work_free, q_full, k_full, k_free, v_full, v_free)
                context = (upcoming, warpgroup, qk_scale, buffers, barriers)
                begin(0, 0, 0, *context)
                while upcoming[FIRST_QUERY] >= 0:
                    m_start = upcoming[FIRST_QUERY]
                    head = upcoming[HEAD]
                    batch = upcoming[BATCH]
                    num_n = upcoming[NUM_N]
                    skipped = upcoming[SKIPPED]
                    m_row = m_start + warpgroup * 64
                    num_unmasked = count_unmasked(m_row)
                    q_stage = trip % q_stages
                    T.fill(acc, 0)
                    softmax.reset(stats)
                    stage, phase = ring(done + skipped)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(scores, num_regs=score_registers)
                    arrive(k_free, stage)
                    if num_n - skipped > num_unmasked:
                        n_start = (num_n - skipped - 1) * BLOCK_N
                        softmax.mask(scores, stats, m_start, n_start, end_of_keys)
                    softmax.take_maximum(scores, stats, scale)
                    softmax.exponentiate(scores, stats, 0, parts)
                    T.copy(scores, p)
                    if q_stages > 1 and trip > 0:  # by now the last output has been read
                        free_queries(q_free, (trip - 1) % q_stages)
                    if skipped > 0:
                        skip(v_full, v_free, done + skipped - 1)
                    T.barrier_wait(v_full[stage], phase)
                    operands = (q_tile, k_tile, v_tile, scores, p, acc)
                    rest = (warpgroup, operands, barriers, (stats, scale))
                    args = (num_n, done, m_start, q_stage, *rest)
                    first_unmasked = T.max(num_n - num_unmasked, skipped + 1)
                    for n in T.serial(skipped + 1, first_unmasked):
                        accumulate(True, n, *args)
                    for n in T.serial(first_unmasked, num_n):
                        accumulate(False, n, *args)
                    done += num_n
                    last = ring(done - 1)[0]
                    multiply_values(p, v_tile, last, acc)
                    T.reduce_sum(stats.row_sum, total, dim=1)
                    if q_stages > 1:
                        begin(trip + 1, done, last, *context)
                        T.wait_wgmma(1)
                        T.warpgroup_fence_operand(acc, num_regs=acc_registers)
                        if not is_far(upcoming):
                            arrive(v_free, last)
                    else:
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(acc, num_regs=acc_registers)
                        arrive(v_free, last)
                    for i in T.Parallel(BLOCK_M):
                        lse_tile[i] = (stats.row_max[i] * scale.size + T.log2(total[i])) / LOG2E
                        total[i] = 1.0 / total[i]
                    for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                        acc[i, d] *= total[i]
                    stats.grew[0] = 0
                    for i in T.Parallel(BLOCK_M, loop_layout=by_row):
                        stats.grew[0] = stats.grew[0] | T.cast(lse_tile[i] == minus_inf, "int32")
                    if T.any_sync(stats.grew[0]) != 0:
                        # Not by a product with 0: with a masked NaN among the values acc is NaN.
                        for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                            acc[i, d] = T.if_then_else(lse_tile[i] == minus_inf, 0.0, acc[i, d])
                    # Each warpgroup to where its queries were.
                    if by_hand:
                        T.copy(acc, rounded)
                        wgmma.store_own_rows(rounded, q_tile, q_stage)
                    else:
                        T.copy(acc, q_tile[q_stage, :, :])
                    wgmma.fence_stores()
                    T.sync_threads(FIRST_WARPGROUP + warpgroup, WARPGROUP)
                    row = warpgroup * 64
                    for c in T.unroll(HEAD_DIM // panel):
                        d = c * panel
                        T.tma_copy(
                            q_tile[q_stage, row : row + 64, d : d + panel],
                            out[batch, head, m_row : m_row + 64, d : d + panel],
                            leader_scope_threads=WARPGROUP,
                        )
                    T.copy(
                        lse_tile, lse[batch, head, m_start : m_start + BLOCK_M], loop_layout=by_row
                    )
                    if q_stages == 1:
                        free_queries(q_free, 0)
                        begin(trip + 1, done, last, *context)
                    trip += 1
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(scores, num_regs=score_registers)
                if T.shuffle_elect(WARPGROUP):
                    T.tma_store_wait(0)  # that reads shared memory, which ends with the block

    return attention_fwd_hopper
