"""Hopper's attention backward, the adders' part: three warps that add tiles of dq to memory, as
`tilelang_attention_dq_sum.py` says.

The warpgroups that compute put dq of a step down in a buffer of two halves, one each, and an adder
takes it from there. Adders take the block's steps in turn:

    dq_free      a half may be put down; where the sum so far is asked for, that is there
    FULL         (named barriers) a half of an adder's step has been put down
    dq_read, rounded_read
                 an adder has read a half: of dq, and of what is rounded in place of it

When the adder of one step has read, that of the next may bring the sum so far to the buffer. Of a
task's steps each knows whether the next one brings it: if not, it gives the buffer itself. Else the
next step's own adder does, and so it does at a task's first step, of which nobody knew before.
"""

from typing import Any, NamedTuple

from minitx.kernels import tilelang_attention_bwd_order as order
from minitx.kernels import tilelang_attention_dq_sum as dq_sums
from minitx.kernels.tilelang_attention_bwd_work_hopper import (
    ADDERS,
    BATCH,
    BLOCK_N,
    FULL,
    HEAD,
    IS_LATE,
    TILE,
    WORKERS,
    Shape,
    call,
    release,
    task_variables,
)


class Part(NamedTuple):
    """What an adder adds to a tile of dq. In a prim_func each is read where it is used."""

    adder: Any
    step: Any  # of the task
    first_until: Any  # in steps below this the task is the first to add to a tile,
    last_from: Any  # from that on the last
    brings_from: Any  # the first step to which the sum so far is brought
    last: Any  # who adds the step before,
    has_before: Any  # if there is one,
    phase_before: Any  # and in which phase of its barriers
    batch: Any
    head: Any  # of queries
    m: Any  # tile of queries
    row: Any  # the tile's, in dq_sum
    turn: Any  # how many tasks add before this one


def make_give() -> tuple[Any, Any]:
    """The macros by which a step's own adder gives it the buffer: `give`: (part, barriers), and
    `bring`: (part, dq_sum, dq_tile, barriers) with the sum so far."""
    import tilelang.language as T

    @T.macro
    def give(part, barriers):
        dq_read, rounded_read = barriers.dq_read, barriers.rounded_read
        for half in T.unroll(2):
            if part.has_before:
                T.barrier_wait(dq_read[part.last * 2 + half], part.phase_before)
                T.barrier_wait(rounded_read[part.last * 2 + half], part.phase_before)
            release(barriers.dq_free, half)

    @T.macro
    def bring(part, dq_sum, dq_tile, barriers):
        dq_read, rounded_read = barriers.dq_read, barriers.rounded_read
        dq_sums.fence()
        for half in T.unroll(2):
            if part.has_before:
                T.barrier_wait(dq_read[part.last * 2 + half], part.phase_before)
            if T.shuffle_elect(32):
                dq_sums.load(dq_sum, part.row, half, dq_tile, barriers.dq_free[half])
            if part.has_before:
                T.barrier_wait(rounded_read[part.last * 2 + half], part.phase_before)
            release(barriers.dq_free, half)

    return give, bring


def make_send(shape: Shape) -> Any:
    """The macro that stores or adds a step's halves: (part, dq, dq_sum, buffers, barriers)."""
    import tilelang.language as T

    def half_of_dq(dq, part, half):
        """The part of a tile that is a warpgroup's: 64 queries of 128, or 64 columns."""
        start, column = (part.m * 2 + half, 0) if shape.BLOCK_M == 128 else (part.m, half)
        rows = slice(start * 64, start * 64 + 64)
        return dq[part.batch, part.head, rows, column * 64 : column * 64 + 64]

    @T.macro
    def send(part, dq, dq_sum, buffers, barriers):
        dq_read, rounded_read = barriers.dq_read, barriers.rounded_read
        for half in T.unroll(2):
            call("wait_for_hand_in", FULL + part.adder * 2 + half)
            if part.step >= part.last_from:
                release(dq_read, part.adder * 2 + half)  # by the warps
                rounded = buffers.dq_rounded[0, half * 64 : half * 64 + 64, 0:64]
                T.tma_copy(rounded, half_of_dq(dq, part, half), leader_scope_threads=32)
                T.tma_store_wait(0)
            else:
                if T.shuffle_elect(32):
                    if part.step < part.first_until:
                        dq_sums.store(buffers.dq, dq_sum, part.row, half)
                    else:
                        dq_sums.add(buffers.dq, dq_sum, part.row, half)
                    T.tma_store_arrive()
                T.tma_store_wait(0)  # this half has been read
                release(dq_read, part.adder * 2 + half)
            release(rounded_read, part.adder * 2 + half)
            if part.step + 1 < part.brings_from:
                release(barriers.dq_free, half)

    return send


def make_adder(shape: Shape) -> Any:
    """The macro of the adders: (thread, group, dq, dq_sum, turns, buffers, barriers)."""
    import tilelang.language as T

    Hq, num_m, num_n = shape.Hq, shape.num_m, shape.num_n
    give, bring = make_give()
    send = make_send(shape)

    @T.macro
    def add_part(part, dq, dq_sum, turns, buffers, barriers):
        # Before a task's first step nobody knows whether the sum so far is to come.
        if (part.step == 0) & (part.brings_from > 0):
            give(part, barriers)
        # Ahead of its part, which it need not wait for.
        if part.step >= part.first_until:
            dq_sums.wait_turn(turns, part.row, part.turn)
        if part.step >= part.brings_from:
            bring(part, dq_sum, buffers.dq, barriers)
        send(part, dq, dq_sum, buffers, barriers)
        if part.step < part.last_from:
            T.tma_store_wait(0, False)  # dq_sum has been written
            if T.shuffle_elect(32):
                dq_sums.end_turn(turns, part.row, part.turn + 1)

    @T.macro
    def add(thread, group, dq, dq_sum, turns, buffers, barriers):
        task, task_full = buffers.task, barriers.task_full
        # Variables: an expression would be computed anew wherever it is read.
        served, tile, kv_head, batch, is_late, first_m = task_variables()
        next_m = T.alloc_var("int32", init=0)
        first_until = T.alloc_var("int32", init=0)
        last_from = T.alloc_var("int32", init=0)
        steps = T.alloc_var("int32", init=0)
        adder = T.alloc_var("int32", init=T.truncdiv(thread - WORKERS, 32) - 1)
        last = T.alloc_var("int32", init=(adder + 2) % ADDERS)
        use = T.alloc_var("int32", init=0)  # of the adder's barriers
        step = T.alloc_var("int32", init=adder)
        turn = T.alloc_var("int32", init=0)
        brings_from = T.alloc_var("int32", init=0)
        T.barrier_wait(task_full[0], 0)
        tile = task[0, TILE]
        while tile >= 0:
            kv_head = task[served % 2, HEAD]
            batch = task[served % 2, BATCH]
            is_late = task[served % 2, IS_LATE] > 0
            T.sync_warp()
            release(barriers.task_free, served % 2)
            n_start = tile * BLOCK_N
            first_m = shape.first_tile(n_start)
            next_m = shape.first_tile_of_next(tile, n_start)
            steps = group * (num_m - first_m)
            ends = order.first_and_last_steps(tile, group, first_m, next_m, num_m, is_late)
            first_until = ends[0]
            last_from = ends[1]
            turn = order.turn_of(tile, num_n, is_late)
            brings_from = T.max(first_until, last_from)
            ends = (first_until, last_from, brings_from)
            while step < steps:
                phase_before = (use + T.Select(adder == 0, 1, 0)) % 2
                has_before = (use > 0) | (adder > 0)
                at = order.step_at(step, group, first_m, num_m, is_late)
                head, m = kv_head * group + at[0], at[1]
                row = T.alloc_var("int32", init=(batch * Hq + head) * num_m + m)
                before = (last, has_before, phase_before)
                part = Part(adder, step, *ends, *before, batch, head, m, row, turn)
                add_part(part, dq, dq_sum, turns, buffers, barriers)
                use += 1
                step += ADDERS
            step -= steps
            served += 1
            T.barrier_wait(task_full[served % 2], served // 2 % 2)
            tile = task[served % 2, TILE]

    return add
