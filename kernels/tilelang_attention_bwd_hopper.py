"""Builders of the attention backward for Hopper, scheduled by hand: all gradients in one kernel.

The maths, arguments and limits are those of `tilelang_attention_bwd.py`, but scores are made
once: five products where the kernels there make seven. A task is 128 keys of one key head, past
which stream the queries of every query head that reads it, in tiles of 8192 elements:

    s^T = k q^T,  dp^T = v dout^T        [keys, queries], both operands in shared memory
    dv += p^T dout,  dk += ds^T q        p^T and ds^T in registers
    dq(tile) = ds k                      ds^T in shared memory, of both warpgroups

Where there are fewer blocks than tasks they stay, and take one after the other: of the next one the
first queries are there, and its keys on their way, while the sums of the last one are written.
Steps are counted on from task to task, and so are the rounds of buffers.

Who does what. Two warpgroups compute, 64 keys each; of a third, one warp takes tasks and fetches
tiles, and three add tiles of dq to memory, every third one each: in turn, that takes longer than a
step does. The warpgroups that compute are half a trip of the loop apart, so that one issues
products while the other exponentiates. In a trip, each will

    issue dq of the last tile, of which by now both have shared ds, and s; wait for dq
    put dq down, beside s, and the first one lets the second go; issue dp
    tell dq's adder; wait for s; exponentiate it, beside dp
    issue dv; wait for dp; make ds, beside dv; issue dk; share ds
    and the second one lets the first go; wait for dv and dk

Nothing is in flight from trip to trip. `tilelang_attention_bwd_trip_hopper.py` has the parts of a
trip, `tilelang_attention_bwd_order.py` says in which order tasks and tiles are taken,
`tilelang_attention_dq_sum.py` how they sum dq.
"""

from typing import Any

from minitx.kernels import tilelang_attention_bwd_order as order
from minitx.kernels import tilelang_attention_dq_sum as dq_sums
from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_attention_bwd import stats_tensor
from minitx.kernels.tilelang_attention_bwd_trip_hopper import (
    ADDERS,
    BLOCK_N,
    FULL,
    GO,
    HELPERS,
    MEET,
    WORKERS,
    Shape,
    by_query,
    call,
    make_macros,
)
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE, place_in_tile
from minitx.kernels.tilelang_products import make_tensor, sizes
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false

Q_STAGES, DOUT_STAGES = 3, 2  # in flight; q is read for longer, by dk
# What a block's warps are told of a task, of which there are two at a time. A tile of -1: no more.
TILE, HEAD, BATCH, IS_LATE = range(4)


def build_attention_bwd_hopper(
    lang: Language, *, dtype: str, HEAD_DIM: int, IS_CAUSAL: bool
) -> Any:
    """dk and dv [B, Hkv, Skv, D], and dq [B, Hq, Sq, D] but for tiles of queries none of which sees
    a key: those are not written.

    dq_sum [B * Hq * tiles, DQ_TILE] float32, each tile in an order of its own (`place_in_tile`), is
    for the sums. turns [B * Hq * tiles] and taken [1], which counts tasks, are int32 and start as
    zeros; taken goes by its address. blocks: as many as there are tasks, or fewer, which then
    stay. dtype is of 16 bits, HEAD_DIM 64 or 128; the rest as in `build_attention_bwd_dkdv`."""
    import tilelang.language as T

    tensor = make_tensor(lang, dtype)
    B, Hq, Hkv, Sq, Skv, S, tiles = sizes("B", "Hq", "Hkv", "Sq", "Skv", "S", "tiles")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")
    shape = Shape(IS_CAUSAL, HEAD_DIM, Sq, Skv)
    BLOCK_M, first_tile = shape.BLOCK_M, shape.first_tile
    trip = make_macros(shape)
    release, await_product = trip.release, trip.await_product

    def keep(value):
        return T.alloc_var("int32", init=value)[0]

    def fetch(region, tile, barrier):
        """By the threads of a warp, who arrive at the barrier once all is asked for."""
        return T.tma_copy(region, tile, barrier=barrier, leader_scope_threads=32)

    def take(taken):
        """By the threads of a warp, one task's number for all."""
        return T.call_extern("int32", "take_task", taken)  # type: ignore[attr-defined]

    def half_of_dq(dq, batch, head, m, half):
        """The part of a tile that is a warpgroup's: 64 queries of 128, or 64 columns."""
        start, column = (m * 2 + half, 0) if BLOCK_M == 128 else (m, half)
        rows = slice(start * 64, start * 64 + 64)
        return dq[batch, head, rows, column * 64 : column * 64 + 64]

    @T.prim_func
    def attention_bwd_hopper(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        dout: tensor("dout", B, Hq, Sq),
        stats: stats_tensor(B, Hq, S),
        dq: tensor("dq", B, Hq, Sq),
        dk: tensor("dk", B, Hkv, Skv),
        dv: tensor("dv", B, Hkv, Skv),
        dq_sum: T.Tensor((tiles, DQ_TILE), "float32"),
        turns: T.StridedTensor((tiles,), (1,), "int32"),
        taken: T.int64,
        blocks: T.int32,
        group: T.int32,
        qk_scale: T.float32,
        scale: T.float32,
    ):
        T.annotate_pass_configs(
            {
                "tl.disable_warp_specialized": True,
                "tl.enable_fast_math": True,
                "tl.disable_thread_storage_sync": True,
                "tl.disable_shared_memory_reuse": True,
            }
        )
        num_n = T.ceildiv(Skv, BLOCK_N)
        num_m = T.ceildiv(Sq, BLOCK_M)
        tasks = B * Hkv * num_n
        stays = tasks > blocks
        with T.Kernel(blocks, threads=WORKERS + 128) as block:
            T.import_source(HELPERS + wgmma.HELPERS + dq_sums.HELPERS)
            k_tile = T.alloc_shared((BLOCK_N, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((BLOCK_N, HEAD_DIM), dtype)
            q_tile = T.alloc_shared((Q_STAGES, BLOCK_M, HEAD_DIM), dtype)
            dout_tile = T.alloc_shared((DOUT_STAGES, BLOCK_M, HEAD_DIM), dtype)
            stats_tile = T.alloc_shared((DOUT_STAGES, 2, BLOCK_M), "float32")
            ds_tile = T.alloc_shared((2, BLOCK_N, BLOCK_M), dtype)
            # Both halves of a tile, of 64 x 64; of one stage, as store_own_rows wants them.
            dq_tile = T.alloc_shared((128, 64), "float32")
            dq_rounded = T.alloc_shared((1, 128, 64), dtype)
            task = T.alloc_shared((2, 4), "int32", scope="shared")
            scores = T.alloc_fragment((BLOCK_N, BLOCK_M), "float32")
            dp = T.alloc_fragment((BLOCK_N, BLOCK_M), "float32")
            p = T.alloc_fragment((BLOCK_N, BLOCK_M), dtype)
            ds = T.alloc_fragment((BLOCK_N, BLOCK_M), dtype)
            dq_acc = T.alloc_fragment((128, 64), "float32")
            dq_16 = T.alloc_fragment((128, 64), dtype)
            dk_acc = T.alloc_fragment((BLOCK_N, HEAD_DIM), "float32")
            dv_acc = T.alloc_fragment((BLOCK_N, HEAD_DIM), "float32")
            grad_16 = T.alloc_fragment((BLOCK_N, HEAD_DIM), dtype)
            lse = T.alloc_fragment((BLOCK_M,), "float32")
            delta = T.alloc_fragment((BLOCK_M,), "float32")
            task_full = T.alloc_barrier([1] * 2)
            task_free = T.alloc_barrier([8 + ADDERS] * 2)
            k_free = T.alloc_barrier([8])
            v_free = T.alloc_barrier([2])
            # A task's first of q brings the keys, its first of dout the values.
            q_full = T.alloc_barrier([32] * Q_STAGES)
            q_free = T.alloc_barrier([8] * Q_STAGES)
            dout_full = T.alloc_barrier([32] * DOUT_STAGES)
            dout_free = T.alloc_barrier([8] * DOUT_STAGES)
            # Of each half; an adder has its own: of shared ones it could take a phase for another.
            dq_free = T.alloc_barrier([1] * 2)
            dq_read = T.alloc_barrier([1] * (2 * ADDERS))
            rounded_read = T.alloc_barrier([1] * (2 * ADDERS))
            tiles_of_16_bits = (k_tile, v_tile, q_tile, dout_tile, ds_tile, dq_rounded)
            products = (scores, dp, p, ds, dq_acc, dq_16, dk_acc, dv_acc, grad_16)
            wgmma.lay_out(tiles_of_16_bits, products)
            T.annotate_layout({lse: by_query(BLOCK_M), delta: by_query(BLOCK_M)})
            T.annotate_layout({dq_tile: T.Layout((128, 64), place_in_tile)})

            dq_tiles = (dq_tile, dq_rounded)

            tx = T.get_thread_binding()
            late = order.num_late(Hkv, group, Sq, HEAD_DIM) if IS_CAUSAL else 0
            # Variables: an expression would be computed anew wherever it is read.
            served = T.alloc_var("int32", init=0)  # tasks
            tile = T.alloc_var("int32", init=0)
            kv_head = T.alloc_var("int32", init=0)
            batch = T.alloc_var("int32", init=0)
            is_late = T.alloc_var("bool", init=False)
            first_m = T.alloc_var("int32", init=0)
            next_m = T.alloc_var("int32", init=0)
            first_until = T.alloc_var("int32", init=0)
            last_from = T.alloc_var("int32", init=0)
            steps = T.alloc_var("int32", init=0)  # one at least: the last query reads every key

            if tx >= WORKERS:
                T.set_max_nreg(24, 0)
                if tx < WORKERS + 32:
                    passed = T.alloc_var("int32", init=0)  # steps
                    number = T.alloc_var("int32", init=block)
                    if stays:
                        number = take(taken)
                    while number < tasks:
                        place = order.locate(number, num_n, B, Hkv, late, Sq, HEAD_DIM, keep)
                        tile = place[0]
                        kv_head = place[1]
                        batch = place[2]
                        is_late = place[3]
                        T.barrier_wait(task_free[served % 2], 1 - served // 2 % 2)
                        if T.shuffle_elect(32):
                            task[served % 2, TILE] = tile
                            task[served % 2, HEAD] = kv_head
                            task[served % 2, BATCH] = batch
                            task[served % 2, IS_LATE] = T.Select(is_late, 1, 0)
                            T.barrier_arrive(task_full[served % 2])
                        n_start = tile * BLOCK_N
                        keys = slice(n_start, n_start + BLOCK_N)
                        first_m = first_tile(n_start)
                        steps = group * (num_m - first_m)
                        k_batch, k_head = T.min(batch, Bk - 1), T.min(kv_head, Hk - 1)
                        v_batch, v_head = T.min(batch, Bv - 1), T.min(kv_head, Hv - 1)
                        for step in T.serial(steps):
                            at = order.step_at(step, group, first_m, num_m, is_late)
                            head, m_start = kv_head * group + at[0], at[1] * BLOCK_M
                            queries = slice(m_start, m_start + BLOCK_M)
                            stage = passed % Q_STAGES
                            T.barrier_wait(q_free[stage], 1 - passed // Q_STAGES % 2)
                            of_q = q[batch, head, queries, 0:HEAD_DIM]
                            fetch(of_q, q_tile[stage, :, :], q_full[stage])
                            if step == 0:
                                T.barrier_wait(k_free[0], 1 - served % 2)
                                fetch(k[k_batch, k_head, keys, 0:HEAD_DIM], k_tile, q_full[stage])
                            T.barrier_arrive(q_full[stage])
                            other = passed % DOUT_STAGES
                            T.barrier_wait(dout_free[other], 1 - passed // DOUT_STAGES % 2)
                            of_dout = dout[batch, head, queries, 0:HEAD_DIM]
                            fetch(of_dout, dout_tile[other, :, :], dout_full[other])
                            of_stats = stats[batch, head, 0:2, queries]
                            fetch(of_stats, stats_tile[other, :, :], dout_full[other])
                            if step == 0:
                                T.barrier_wait(v_free[0], 1 - served % 2)
                                of_v = v[v_batch, v_head, keys, 0:HEAD_DIM]
                                fetch(of_v, v_tile, dout_full[other])
                            T.barrier_arrive(dout_full[other])
                            passed += 1
                        served += 1
                        number = tasks
                        if stays:
                            number = take(taken)
                    T.barrier_wait(task_free[served % 2], 1 - served // 2 % 2)
                    if T.shuffle_elect(32):
                        task[served % 2, TILE] = -1
                        T.barrier_arrive(task_full[served % 2])
                else:
                    adder = T.alloc_var("int32", init=T.truncdiv(tx - WORKERS, 32) - 1)
                    # Who adds the tile before.
                    last = T.alloc_var("int32", init=(adder + 2) % ADDERS)
                    use = T.alloc_var("int32", init=0)
                    step = T.alloc_var("int32", init=adder)  # of the task
                    turn = T.alloc_var("int32", init=0)
                    brings_from = T.alloc_var("int32", init=0)
                    T.barrier_wait(task_full[0], 0)
                    tile = task[0, TILE]
                    while tile >= 0:
                        kv_head = task[served % 2, HEAD]
                        batch = task[served % 2, BATCH]
                        is_late = task[served % 2, IS_LATE] > 0
                        T.sync_warp()
                        release(task_free, served % 2)
                        n_start = tile * BLOCK_N
                        first_m = first_tile(n_start)
                        of_next = first_tile(n_start + BLOCK_N)
                        next_m = T.Select(tile + 1 == num_n, num_m, of_next)
                        steps = group * (num_m - first_m)
                        ends = order.first_and_last_steps(
                            tile, group, first_m, next_m, num_m, is_late
                        )
                        first_until = ends[0]
                        last_from = ends[1]
                        turn = order.turn_of(tile, num_n, is_late)
                        # The first step to which the sum so far is brought.
                        brings_from = T.max(first_until, last_from)
                        while step < steps:
                            phase_before = (use + T.Select(adder == 0, 1, 0)) % 2
                            has_before = (use > 0) | (adder > 0)
                            at = order.step_at(step, group, first_m, num_m, is_late)
                            head, m = kv_head * group + at[0], at[1]
                            row = T.alloc_var("int32", init=(batch * Hq + head) * num_m + m)
                            # To its first tile a task's own adder gives the buffer, as before it
                            # nobody knows whether the sum so far is to come there.
                            if (step == 0) & (brings_from > 0):
                                for half in T.unroll(2):
                                    if has_before:
                                        T.barrier_wait(dq_read[last * 2 + half], phase_before)
                                        T.barrier_wait(rounded_read[last * 2 + half], phase_before)
                                    release(dq_free, half)
                            # Ahead of its part, which it need not wait for.
                            if step >= first_until:
                                dq_sums.wait_turn(turns, row, turn)
                            if step >= brings_from:
                                dq_sums.fence()
                                for half in T.unroll(2):
                                    if has_before:
                                        T.barrier_wait(dq_read[last * 2 + half], phase_before)
                                    if T.shuffle_elect(32):
                                        at_half = dq_free[half]
                                        dq_sums.load(dq_sum, row, half, dq_tile, at_half)
                                    if has_before:
                                        T.barrier_wait(rounded_read[last * 2 + half], phase_before)
                                    release(dq_free, half)
                            for half in T.unroll(2):
                                call("wait_for_hand_in", FULL + adder * 2 + half)
                                if step >= last_from:
                                    release(dq_read, adder * 2 + half)  # by the warps
                                    rounded = dq_rounded[0, half * 64 : half * 64 + 64, 0:64]
                                    to = half_of_dq(dq, batch, head, m, half)
                                    T.tma_copy(rounded, to, leader_scope_threads=32)
                                    T.tma_store_wait(0)
                                else:
                                    if T.shuffle_elect(32):
                                        if step < first_until:
                                            dq_sums.store(dq_tile, dq_sum, row, half)
                                        else:
                                            dq_sums.add(dq_tile, dq_sum, row, half)
                                        T.tma_store_arrive()
                                    T.tma_store_wait(0)  # this half has been read
                                    release(dq_read, adder * 2 + half)
                                release(rounded_read, adder * 2 + half)
                                if step + 1 < brings_from:
                                    release(dq_free, half)
                            if step < last_from:
                                T.tma_store_wait(0, False)  # dq_sum has been written
                                if T.shuffle_elect(32):
                                    dq_sums.end_turn(turns, row, turn + 1)
                            use += 1
                            step += ADDERS
                        step -= steps
                        served += 1
                        T.barrier_wait(task_full[served % 2], served // 2 % 2)
                        tile = task[served % 2, TILE]
            else:
                T.set_max_nreg(240, 1)
                warpgroup = T.alloc_var("int32", init=wgmma.warpgroup_of(tx))
                thread = T.alloc_var("int32", init=wgmma.hold(tx))
                m = T.alloc_var("int32", init=0)
                head = T.alloc_var("int32", init=0)  # of the group; both are counted, not divided
                passed = T.alloc_var("int32", init=0)  # steps; what follows is counted so, too
                start = T.alloc_var("int32", init=0)
                end = T.alloc_var("int32", init=0)
                stage = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                # ptxas keeps what the warp shares in its registers only behind such a wait, of one
                # thread.
                if T.shuffle_elect(32):
                    T.barrier_wait(task_full[0], 0)
                T.sync_warp()
                tile = task[0, TILE]
                while tile >= 0:
                    is_late = task[served % 2, IS_LATE] > 0
                    n_start = tile * BLOCK_N
                    first_m = first_tile(n_start)
                    of_next = first_tile(n_start + BLOCK_N)
                    next_m = T.Select(tile + 1 == num_n, num_m, of_next)
                    of_task = order.first_and_last_steps(
                        tile, group, first_m, next_m, num_m, is_late
                    )
                    start = passed
                    end = passed + group * (num_m - first_m)
                    first_until = of_task[0] + passed
                    last_from = of_task[1] + passed
                    m = T.Select(is_late, num_m - 1, first_m)
                    head = 0
                    T.fill(dk_acc, 0)
                    T.fill(dv_acc, 0)
                    call("let_go", warpgroup, GO)
                    ends = (first_until, last_from)
                    while passed < end:
                        other = passed % DOUT_STAGES
                        T.barrier_wait(q_full[stage], phase)
                        call("wait_to_go", GO + warpgroup)
                        # In the first trip of nothing, for nobody: where a product is issued under
                        # a condition, ptxas awaits every product at once (C7515).
                        trip.issue_dq(ds_tile, (passed + 1) % 2, k_tile, dq_acc, warpgroup)
                        trip.issue_scores(k_tile, q_tile, stage, scores, warpgroup)
                        T.barrier_wait(dout_full[other], passed // DOUT_STAGES % 2)
                        if HEAD_DIM == 128:
                            trip.read_stats(lse, stats_tile, other, 0, 0, BLOCK_M, thread)
                        if passed > start:
                            T.barrier_wait(dq_free[warpgroup], (passed - 1) % 2)
                        await_product(1, dq_acc)
                        before = T.Select(stage == 0, ADDERS - 1, stage - 1)
                        if passed > start:
                            of = passed - 1
                            trip.put_dq(dq_acc, dq_16, dq_tiles, of, ends, scale, True, thread)
                            if HEAD_DIM == 64:
                                trip.tell_adder(before, warpgroup)
                        call("let_go", 1 - warpgroup, GO + 1)
                        if HEAD_DIM == 64:  # half: there are no registers for all
                            trip.read_stats(lse, stats_tile, other, 0, 0, 64, thread)
                        trip.issue_scores(v_tile, dout_tile, other, dp, warpgroup)
                        if (HEAD_DIM == 128) & (passed > start):
                            trip.tell_adder(before, warpgroup)
                        await_product(1, scores)
                        if HEAD_DIM == 64:
                            trip.read_stats(lse, stats_tile, other, 0, 64, 64, thread)
                        trip.exponentiate(scores, p, lse, qk_scale, m * BLOCK_M, n_start)
                        trip.add_product(dv_acc, p, dout_tile, other)
                        if HEAD_DIM == 128:
                            trip.read_stats(delta, stats_tile, other, 1, 0, BLOCK_M, thread)
                        await_product(1, dp)
                        if HEAD_DIM == 64:
                            trip.read_stats(delta, stats_tile, other, 1, 0, BLOCK_M, thread)
                        trip.differentiate(scores, dp, delta, ds, ds_tile, passed % 2, thread)
                        trip.add_product(dk_acc, ds, q_tile, stage)
                        wgmma.fence_stores()
                        call("let_go", warpgroup, GO)
                        await_product(1, dv_acc)
                        release(dout_free, other)
                        head = T.Select(head + 1 == group, 0, head + 1)
                        if head == 0:
                            m = m + T.Select(is_late, -1, 1)
                        await_product(0, dk_acc)
                        release(q_free, stage)
                        passed += 1
                        stage += 1  # counted, as a number modulo 3 takes a division
                        if stage == Q_STAGES:
                            stage = 0
                            phase = 1 - phase
                    call("wait_to_go", GO + warpgroup)
                    call("let_go", 1 - warpgroup, GO + 1)
                    trip.issue_dq(ds_tile, (passed - 1) % 2, k_tile, dq_acc, warpgroup)
                    T.barrier_wait(dq_free[warpgroup], (passed - 1) % 2)
                    await_product(0, dq_acc)
                    release(k_free, 0)
                    # Hidden here too, dq_rounded would seem to be read and never written.
                    trip.put_dq(dq_acc, dq_16, dq_tiles, passed - 1, ends, scale, False, thread)
                    trip.tell_adder(T.Select(stage == 0, ADDERS - 1, stage - 1), warpgroup)
                    kv_head = task[served % 2, HEAD]
                    batch = task[served % 2, BATCH]
                    T.sync_warp()
                    release(task_free, served % 2)
                    place_of_grads = (batch, kv_head, n_start, warpgroup)
                    trip.store(dv_acc, grad_16, v_tile, dv, *place_of_grads)
                    for j, d in T.Parallel(BLOCK_N, HEAD_DIM):
                        dk_acc[j, d] *= scale
                    T.tma_store_wait(0)
                    call("meet", MEET + warpgroup)
                    trip.store(dk_acc, grad_16, v_tile, dk, *place_of_grads)
                    if T.shuffle_elect(128):
                        T.tma_store_wait(0)
                        T.barrier_arrive(v_free[0])
                    T.sync_warp()
                    served += 1
                    if T.shuffle_elect(32):
                        T.barrier_wait(task_full[served % 2], served // 2 % 2)
                    T.sync_warp()
                    tile = task[served % 2, TILE]

    return attention_bwd_hopper
