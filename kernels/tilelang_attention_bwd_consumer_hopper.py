"""Hopper's attention backward, the part of the warpgroups that compute, task by task:

    make_probabilities  the first half of a trip: dq of the last step, s and dp issued, p made
    add_gradients       the second half: dv and dk issued, ds made and shared
    finish_dq           behind a task's last trip: dq of its step
    store_grads         dk and dv to memory

`tilelang_attention_bwd_hopper.py` says who waits for whom, `tilelang_attention_bwd_trip_hopper.py`
has what these are made of.

What waits behind products. The tensor cores take one product after the other. If a warp reads
shared memory behind a product that it has issued, the value comes once that product has begun, and
so does threadIdx, which is read from a special register; all that needs it waits as long. A try of
an mbarrier takes 45 clocks even if the barrier was passed long ago, and a fence holds up what comes
after it. A trip has each of these where that costs least:

    barriers    Those of q, of dout and of dq's buffer were passed long ago, as a rule. The first is
                tried ahead of the wait for the other warpgroup, and not after it, between two
                products that this one is to issue; the others while dq is multiplied, and not when
                it is there, ahead of dp.
    lse, delta  They are read ahead of the wait for the product that they go with. At D = 64 there
                are registers for half of lse only.
    the thread's index
                The compiler would read threadIdx anew for each address that is made of it. In a
                variable that it cannot see through (`wgmma.hold`) it stays in a register.
    dq's adder  It is told that a half of dq is in the buffer, and only once a fence has shown the
                stores to the copy engine, which is what reads them. At D = 128 that is done behind
                dp, whose issue the fence would hold up; at D = 64 ahead, which was faster.

Measurements: benchmarks/NOTES.md, "Energy, and what waits behind products".
"""

from typing import Any, NamedTuple

from minitx.kernels import tilelang_attention_bwd_order as order
from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_attention_bwd_trip_hopper import (
    Consumer,
    Trip,
    await_product,
    make_trip,
)
from minitx.kernels.tilelang_attention_bwd_work_hopper import (
    ADDERS,
    BATCH,
    BLOCK_N,
    DOUT_STAGES,
    GO,
    HEAD,
    IS_LATE,
    MEET,
    Q_STAGES,
    TILE,
    Shape,
    call,
    release,
    task_variables,
)


class Step(NamedTuple):
    """Where a warpgroup is. In a prim_func each is read where it is used; a macro that gave one a
    name of its own would copy the variable, and so of `Consumer`."""

    passed: Any  # steps of the block before this one
    start: Any  # those before the task
    ends: tuple[Any, Any]  # in which the task is the first to add to dq's tiles, and the last
    m: Any  # tile of queries
    n_start: Any  # the first key
    stage: Any  # the buffer of q,
    phase: Any  # in its barriers' phase
    other: Any  # the buffer of dout


def previous_adder(stage: Any) -> Any:
    """Who adds the step before that of a buffer of q, of which there are as many as adders."""
    import tilelang.language as T

    return T.Select(stage == 0, ADDERS - 1, stage - 1)


def await_task(barrier: Any, phase: Any) -> Any:
    """By the threads of a warp. ptxas keeps what the warp shares in its registers only behind such
    a wait, of one thread."""
    import tilelang.language as T

    @T.macro
    def wait():
        if T.shuffle_elect(32):
            T.barrier_wait(barrier, phase)
        T.sync_warp()

    return wait()


def make_halves(shape: Shape, trip: Trip) -> tuple[Any, Any]:
    """The macros of a trip's halves, each (step, consumer): up to the probabilities, and from these
    to dv and dk, not awaited."""
    import tilelang.language as T

    BLOCK_M, HEAD_DIM = shape.BLOCK_M, shape.HEAD_DIM

    @T.macro
    def make_probabilities(step, consumer):
        """p of the step, and dq of the last one, which is put down, to be added."""
        buffers, barriers, registers = consumer[:3]
        scores, dq_acc, lse = registers.scores, registers.dq_acc, registers.lse
        T.barrier_wait(barriers.q_full[step.stage], step.phase)  # ahead of its turn
        call("wait_to_go", GO + consumer.warpgroup)
        # In the first trip of nothing, for nobody: where a product is issued under a condition,
        # ptxas awaits every product at once (C7515).
        trip.issue_dq(buffers.ds, (step.passed + 1) % 2, buffers.k, dq_acc, consumer.warpgroup)
        trip.issue_scores(buffers.k, buffers.q, step.stage, scores, consumer.warpgroup)
        # While dq is multiplied: what is needed behind it.
        T.barrier_wait(barriers.dout_full[step.other], step.passed // DOUT_STAGES % 2)
        if HEAD_DIM == 128:
            trip.read_stats(lse, buffers.stats, step.other, 0, 0, BLOCK_M, consumer.thread)
        if step.passed > step.start:
            T.barrier_wait(barriers.dq_free[consumer.warpgroup], (step.passed - 1) % 2)
        await_product(1, dq_acc)
        before = previous_adder(step.stage)
        if step.passed > step.start:
            trip.put_dq(step.passed - 1, step.ends, True, consumer)
            if HEAD_DIM == 64:
                trip.tell_adder(before, consumer.warpgroup)
        call("let_go", 1 - consumer.warpgroup, GO + 1)
        if HEAD_DIM == 64:  # half of it: there are no registers for all
            trip.read_stats(lse, buffers.stats, step.other, 0, 0, 64, consumer.thread)
        trip.issue_scores(buffers.v, buffers.dout, step.other, registers.dp, consumer.warpgroup)
        # Behind dp, whose issue its fence would hold up.
        if (HEAD_DIM == 128) & (step.passed > step.start):
            trip.tell_adder(before, consumer.warpgroup)
        await_product(1, scores)
        if HEAD_DIM == 64:
            trip.read_stats(lse, buffers.stats, step.other, 0, 64, 64, consumer.thread)
        place = (step.m * BLOCK_M, step.n_start)
        trip.exponentiate(scores, registers.p, lse, consumer.qk_scale, *place)

    @T.macro
    def add_gradients(step, consumer):
        """To dv and dk; and shares ds, of which the next trip makes dq."""
        buffers, registers = consumer.buffers, consumer.registers
        dp, ds, delta = registers.dp, registers.ds, registers.delta
        trip.add_product(registers.dv_acc, registers.p, buffers.dout, step.other)
        if HEAD_DIM == 128:
            trip.read_stats(delta, buffers.stats, step.other, 1, 0, BLOCK_M, consumer.thread)
        await_product(1, dp)
        if HEAD_DIM == 64:
            trip.read_stats(delta, buffers.stats, step.other, 1, 0, BLOCK_M, consumer.thread)
        buffer = step.passed % 2
        trip.differentiate(registers.scores, dp, delta, ds, buffers.ds, buffer, consumer.thread)
        trip.add_product(registers.dk_acc, ds, buffers.q, step.stage)
        wgmma.fence_stores()
        call("let_go", consumer.warpgroup, GO)

    return make_probabilities, add_gradients


def make_ends(shape: Shape, trip: Trip) -> tuple[Any, Any]:
    """The macros of what follows a task's trips: `finish_dq`: (step, consumer), of the step behind
    the last, and `store_grads`: (dk, dv, place, consumer), with place as `Trip.store` has it."""
    import tilelang.language as T

    HEAD_DIM = shape.HEAD_DIM

    @T.macro
    def finish_dq(step, consumer):
        """dq of the last step, beside which nothing runs."""
        buffers, barriers, registers = consumer[:3]
        dq_acc = registers.dq_acc
        call("wait_to_go", GO + consumer.warpgroup)
        call("let_go", 1 - consumer.warpgroup, GO + 1)
        trip.issue_dq(buffers.ds, (step.passed - 1) % 2, buffers.k, dq_acc, consumer.warpgroup)
        T.barrier_wait(barriers.dq_free[consumer.warpgroup], (step.passed - 1) % 2)
        await_product(0, dq_acc)
        release(barriers.k_free, 0)
        # Hidden here too, dq_rounded would seem to be read and never written.
        trip.put_dq(step.passed - 1, step.ends, False, consumer)
        trip.tell_adder(previous_adder(step.stage), consumer.warpgroup)

    @T.macro
    def store_grads(dk, dv, place, consumer):
        """By way of v's buffer, of which the last dp has been made."""
        v_tile, v_free = consumer.buffers.v, consumer.barriers.v_free
        dk_acc, dv_acc = consumer.registers.dk_acc, consumer.registers.dv_acc
        grad_16 = consumer.registers.grad_16
        trip.store(dv_acc, grad_16, v_tile, dv, *place)
        for j, d in T.Parallel(BLOCK_N, HEAD_DIM):
            dk_acc[j, d] *= consumer.scale
        T.tma_store_wait(0)
        call("meet", MEET + consumer.warpgroup)
        trip.store(dk_acc, grad_16, v_tile, dk, *place)
        if T.shuffle_elect(128):
            T.tma_store_wait(0)
            T.barrier_arrive(v_free[0])
        T.sync_warp()

    return finish_dq, store_grads


def make_consumer(shape: Shape) -> Any:
    """The macro of both warpgroups: (index of the thread, group, qk_scale, scale, dk, dv, buffers,
    barriers, registers)."""
    import tilelang.language as T

    num_m = shape.num_m
    trip = make_trip(shape)
    make_probabilities, add_gradients = make_halves(shape, trip)
    finish_dq, store_grads = make_ends(shape, trip)

    @T.macro
    def consume(index, group, qk_scale, scale, dk, dv, buffers, barriers, registers):
        task = buffers.task
        # Variables: an expression would be computed anew wherever it is read.
        served, tile, kv_head, batch, is_late, first_m = task_variables()
        next_m = T.alloc_var("int32", init=0)
        first_until = T.alloc_var("int32", init=0)
        last_from = T.alloc_var("int32", init=0)
        warpgroup = T.alloc_var("int32", init=wgmma.warpgroup_of(index))
        thread = T.alloc_var("int32", init=wgmma.hold(index))
        m = T.alloc_var("int32", init=0)
        head = T.alloc_var("int32", init=0)  # of the group; both are counted, not divided
        passed = T.alloc_var("int32", init=0)  # steps; what follows is counted so, too
        start = T.alloc_var("int32", init=0)
        end = T.alloc_var("int32", init=0)
        stage = T.alloc_var("int32", init=0)
        phase = T.alloc_var("int32", init=0)
        numbers = (qk_scale, scale, warpgroup, thread)
        consumer = Consumer(buffers, barriers, registers, *numbers)
        await_task(barriers.task_full[0], 0)
        tile = task[0, TILE]
        while tile >= 0:
            is_late = task[served % 2, IS_LATE] > 0
            n_start = tile * BLOCK_N
            first_m = shape.first_tile(n_start)
            next_m = shape.first_tile_of_next(tile, n_start)
            of_task = order.first_and_last_steps(tile, group, first_m, next_m, num_m, is_late)
            start = passed
            end = passed + group * (num_m - first_m)
            first_until = of_task[0] + passed
            last_from = of_task[1] + passed
            ends = (first_until, last_from)
            m = T.Select(is_late, num_m - 1, first_m)
            head = 0
            T.fill(registers.dk_acc, 0)
            T.fill(registers.dv_acc, 0)
            call("let_go", warpgroup, GO)
            while passed < end:
                other = passed % DOUT_STAGES
                step = Step(passed, start, ends, m, n_start, stage, phase, other)
                make_probabilities(step, consumer)
                add_gradients(step, consumer)
                await_product(1, registers.dv_acc)
                release(barriers.dout_free, other)
                head = T.Select(head + 1 == group, 0, head + 1)
                if head == 0:
                    m = m + T.Select(is_late, -1, 1)
                await_product(0, registers.dk_acc)
                release(barriers.q_free, stage)
                passed += 1
                stage += 1  # counted, as a number modulo 3 takes a division
                if stage == Q_STAGES:
                    stage = 0
                    phase = 1 - phase
            finish_dq(Step(passed, start, ends, m, n_start, stage, phase, 0), consumer)
            kv_head = task[served % 2, HEAD]
            batch = task[served % 2, BATCH]
            T.sync_warp()
            release(barriers.task_free, served % 2)
            store_grads(dk, dv, (batch, kv_head, n_start, warpgroup), consumer)
            served += 1
            await_task(barriers.task_full[served % 2], served // 2 % 2)
            tile = task[served % 2, TILE]

    return consume
