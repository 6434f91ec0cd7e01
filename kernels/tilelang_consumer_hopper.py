"""What a warpgroup of Hopper's attention forward makes of one tile of queries after the other: the
consumer's part, step by step as `tilelang_attention_fwd_hopper.py` schedules it.

    begin       takes the next tile of queries and issues their product with the first keys
    start       what those keys give
    accumulate  the same for each of the others, beside the product of the last one's probabilities
                and values
    finish      issues the last of those products and, behind it, begins the next tile
    store       divides the sums and stores them (`tilelang_output_hopper.py`)

`begin` runs in the midst of the tile before: what it finds is in `Registers.upcoming`, and becomes
a `Turn` when that tile is done.
"""

from typing import Any, NamedTuple

from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_output_hopper import make_store
from minitx.kernels.tilelang_scores_hopper import PART as COLUMNS
from minitx.kernels.tilelang_scores_hopper import Scale, Stats, make_macros
from minitx.kernels.tilelang_wgmma import Operand, multiplies_by_hand, own_rows
from minitx.kernels.tilelang_work_hopper import (
    CONSUMERS,
    WARPGROUP,
    Barriers,
    Buffers,
    Passing,
    Sizes,
)

EARLY_PARTS = 4  # of the scores that are exponentiated before the other product is awaited
# What a consumer knows of the tile of queries whose first product it issued last.
FIRST_QUERY, HEAD, PART, NUM_N, SKIPPED = range(5)


class Registers(NamedTuple):
    """Fragments of all consumers, and `upcoming` of each thread."""

    scores: Any  # [BLOCK_M, BLOCK_N] float32
    p: Any  # the same, 16 bits
    acc: Any  # [BLOCK_M, HEAD_DIM] float32
    rounded: Any  # the same, 16 bits
    total: Any  # [BLOCK_M] float32
    lse: Any  # the same
    upcoming: Any  # int32 [5]: FIRST_QUERY (-1: there is no more), HEAD, ...
    stats: Stats


class Consumer(NamedTuple):
    """What each step of a warpgroup reads and writes."""

    buffers: Buffers
    barriers: Barriers
    registers: Registers
    scale: Scale
    qk_scale: Any
    warpgroup: Any


class Turn(NamedTuple):
    """The tile of queries that a warpgroup is at. In a prim_func each is read where it is used."""

    m_start: Any  # first query of the block's tile, not of the warpgroup's part
    head: Any
    part: Any  # of the output
    first_n: Any  # the first tile of keys that the block reads for it
    num_n: Any  # tiles of keys that the block reads for it, from the last to the first
    skipped: Any  # of these, those that none of the warpgroup's queries may read
    trip: Any  # tiles of queries before it
    done: Any  # tiles of keys before those that are read next
    q_stage: Any  # the queries' buffer
    m_row: Any  # the warpgroup's first query


class Products(NamedTuple):
    """Macros, for all threads of a warpgroup. None of the products is awaited."""

    multiply_sign: Any  # (q_tile, stage, qk_scale): queries by the sign of the scale
    multiply_keys: Any  # (q_tile, q_stage, k_tile, stage, scores, warpgroup): scores = q k^T
    multiply_values: Any  # (p, v_tile, stage, acc): acc += p v


def make_products(sizes: Sizes) -> Products:
    import tilelang.language as T

    BLOCK_M, BLOCK_N, HEAD_DIM = sizes[1:4]
    by_hand = multiplies_by_hand(HEAD_DIM)
    rows = T.GemmWarpPolicy.FullRow
    Q_BYTES, K_BYTES = BLOCK_M * HEAD_DIM * 2, BLOCK_N * HEAD_DIM * 2

    @T.macro
    def multiply_sign(q_tile, stage, qk_scale):
        if qk_scale <= 0.0:  # at 0 what is infinite becomes NaN, as it should
            for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                q_tile[stage, i, d] *= T.if_then_else(qk_scale < 0.0, -1.0, 0.0)
            wgmma.fence_stores()
            T.sync_threads(CONSUMERS, BLOCK_M // 64 * WARPGROUP)

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

    return Products(multiply_sign, multiply_keys, multiply_values)


def make_begin(sizes: Sizes, passing: Passing, products: Products) -> tuple[Any, Any]:
    """The macro `begin`: (trip, done, last, consumer), and the function `is_far`."""
    import tilelang.language as T

    BLOCK_M, num_stages, q_stages = sizes.BLOCK_M, sizes.num_stages, sizes.q_stages
    ring, count_key_tiles = sizes.ring, sizes.count_key_tiles
    arrive, skip = passing.arrive, passing.skip

    def is_far(upcoming):
        """Whether the first keys come only when the values of the last ones are freed: those of the
        tiles skipped but one are fetched before."""
        return (upcoming[FIRST_QUERY] >= 0) & (upcoming[SKIPPED] > num_stages)

    @T.macro
    def begin(trip, done, last, consumer):
        """Takes the next tile of queries, if there is one, and issues its first product.

        trip, done: tiles of queries and of keys before it; last: the buffer of the last values."""
        q_tile, k_tile, work = consumer.buffers.q, consumer.buffers.k, consumer.buffers.work
        work_full, work_free, q_full = consumer.barriers[:3]
        k_full, k_free, v_full, v_free = consumer.barriers[4:]
        scores, upcoming = consumer.registers.scores, consumer.registers.upcoming
        warpgroup = consumer.warpgroup
        T.barrier_wait(work_full[trip % 2], trip // 2 % 2)
        upcoming[FIRST_QUERY] = work[trip % 2, 0]
        upcoming[HEAD] = work[trip % 2, 1]
        upcoming[PART] = work[trip % 2, 2]
        T.sync_warp()
        if upcoming[FIRST_QUERY] >= 0:
            arrive(work_free, trip % 2)
            first = upcoming[FIRST_QUERY]
            first_n = sizes.first_key_tile(upcoming[PART])
            upcoming[NUM_N] = count_key_tiles(first, BLOCK_M, first_n)
            own = count_key_tiles(first + warpgroup * 64, 64, first_n)
            upcoming[SKIPPED] = upcoming[NUM_N] - own
            if q_stages > 1 and (trip > 0) & is_far(upcoming):
                T.wait_wgmma(0)
                arrive(v_free, last)
            T.barrier_wait(q_full[trip % q_stages], trip // q_stages % 2)
            products.multiply_sign(q_tile, trip % q_stages, consumer.qk_scale)
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
        products.multiply_keys(q_tile, trip % q_stages, k_tile, stage, scores, warpgroup)

    return begin, is_far


def make_keys(sizes: Sizes, passing: Passing, products: Products) -> tuple[Any, Any]:
    """The macros `start`: (stage, num_unmasked, turn, consumer) for the first tile of keys, and
    `accumulate`: (IS_MASKED, n, end_n, done, m_start, q_stage, consumer) for the n-th."""
    import tilelang.language as T

    BLOCK_M, BLOCK_N, HEAD_DIM = sizes[1:4]
    score_registers, acc_registers = BLOCK_N // 2, HEAD_DIM // 2
    parts = BLOCK_N // COLUMNS
    ring, end_of_keys, arrive = sizes.ring, sizes.end_of_keys, passing.arrive
    softmax = make_macros(BLOCK_M, BLOCK_N)

    @T.macro
    def start(stage, num_unmasked, turn, consumer):
        """The probabilities of the first tile that is not skipped."""
        registers, k_free = consumer.registers, consumer.barriers.k_free
        scores, stats = registers.scores, registers.stats
        T.fill(registers.acc, 0)
        softmax.reset(stats)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(scores, num_regs=score_registers)
        arrive(k_free, stage)
        if turn.num_n - turn.skipped > num_unmasked:
            n_start = (turn.first_n + turn.num_n - turn.skipped - 1) * BLOCK_N
            softmax.mask(scores, stats, turn.m_start, n_start, end_of_keys)
        softmax.take_maximum(scores, stats, consumer.scale)
        softmax.exponentiate(scores, stats, 0, parts)
        T.copy(scores, registers.p)

    @T.macro
    def accumulate(IS_MASKED, n, end_n, done, m_start, q_stage, consumer):
        """Adds what comes from tile n of the keys' tiles, counted from the last before end_n, and
        multiplies the probabilities of the one before by their values. It leaves its own to the
        next."""
        q_tile, k_tile, v_tile = consumer.buffers[:3]
        k_full, k_free, v_full, v_free = consumer.barriers[4:]
        scores, p, acc = consumer.registers.scores, consumer.registers.p, consumer.registers.acc
        stats = consumer.registers.stats
        stage, phase = ring(done + n)
        last = ring(done + n - 1)[0]
        T.barrier_wait(k_full[stage], phase)
        products.multiply_keys(q_tile, q_stage, k_tile, stage, scores, consumer.warpgroup)
        products.multiply_values(p, v_tile, last, acc)
        T.wait_wgmma(1)  # all but the last product issued
        T.warpgroup_fence_operand(scores, num_regs=score_registers)
        arrive(k_free, stage)
        if IS_MASKED:
            softmax.mask(scores, stats, m_start, (end_n - 1 - n) * BLOCK_N, end_of_keys)
        softmax.look(scores, stats)
        if T.any_sync(stats.grew[0]) != 0:
            softmax.take_maximum(scores, stats, consumer.scale)
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

    return start, accumulate


def make_consumer(sizes: Sizes, passing: Passing) -> Any:
    """The macro of all consumers: (out, lse, consumer)."""
    import tilelang.language as T

    q_stages, ring = sizes.q_stages, sizes.ring
    score_registers, acc_registers = sizes.BLOCK_N // 2, sizes.HEAD_DIM // 2
    arrive, skip = passing.arrive, passing.skip
    products = make_products(sizes)
    begin, is_far = make_begin(sizes, passing, products)
    start, accumulate = make_keys(sizes, passing, products)
    store = make_store(sizes)

    @T.macro
    def free_queries(free, stage):
        """When the output of the warpgroup has been read from there."""
        if T.shuffle_elect(WARPGROUP):  # the thread that stores, too
            T.tma_store_wait(0)
            T.barrier_arrive(free[stage])

    @T.macro
    def add_keys(turn, consumer):
        """acc and the sums of all tiles of keys, but for the last tile's product with values."""
        barriers = consumer.barriers
        num_unmasked = sizes.count_unmasked(turn.m_row, turn.first_n)
        stage, phase = ring(turn.done + turn.skipped)
        start(stage, num_unmasked, turn, consumer)
        if q_stages > 1 and turn.trip > 0:  # by now the last output has been read
            free_queries(barriers.q_free, (turn.trip - 1) % q_stages)
        if turn.skipped > 0:
            skip(barriers.v_full, barriers.v_free, turn.done + turn.skipped - 1)
        T.barrier_wait(barriers.v_full[stage], phase)
        rest = (turn.first_n + turn.num_n, turn.done, turn.m_start, turn.q_stage, consumer)
        first_unmasked = T.max(turn.num_n - num_unmasked, turn.skipped + 1)
        for n in T.serial(turn.skipped + 1, first_unmasked):
            accumulate(True, n, *rest)
        for n in T.serial(first_unmasked, turn.num_n):
            accumulate(False, n, *rest)

    @T.macro
    def finish(turn, consumer):
        """The product that is left and, where there is room for more queries, the next tile's
        first."""
        acc, stats = consumer.registers.acc, consumer.registers.stats
        v_free, upcoming = consumer.barriers.v_free, consumer.registers.upcoming
        last = ring(turn.done - 1)[0]
        products.multiply_values(consumer.registers.p, consumer.buffers.v, last, acc)
        T.reduce_sum(stats.row_sum, consumer.registers.total, dim=1)
        if q_stages > 1:
            begin(turn.trip + 1, turn.done, last, consumer)
            T.wait_wgmma(1)
            T.warpgroup_fence_operand(acc, num_regs=acc_registers)
            if not is_far(upcoming):
                arrive(v_free, last)
        else:
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(acc, num_regs=acc_registers)
            arrive(v_free, last)

    @T.macro
    def consume(out, lse, consumer):
        upcoming = consumer.registers.upcoming
        # Variables, so that these are computed once and not wherever they are used.
        m_start = T.alloc_var("int32")
        head = T.alloc_var("int32")
        part = T.alloc_var("int32")
        num_n = T.alloc_var("int32")
        skipped = T.alloc_var("int32")
        trip = T.alloc_var("int32")  # tiles of queries before this one
        done = T.alloc_var("int32")  # tiles of keys, all told
        trip = 0
        done = 0
        upcoming[SKIPPED] = 0
        begin(0, 0, 0, consumer)
        while upcoming[FIRST_QUERY] >= 0:
            m_start = upcoming[FIRST_QUERY]
            head = upcoming[HEAD]
            part = upcoming[PART]
            num_n = upcoming[NUM_N]
            skipped = upcoming[SKIPPED]
            m_row = m_start + consumer.warpgroup * 64
            q_stage = trip % q_stages
            first_n = sizes.first_key_tile(part)
            turn = Turn(m_start, head, part, first_n, num_n, skipped, trip, done, q_stage, m_row)
            add_keys(turn, consumer)
            done += num_n
            finish(turn, consumer)
            store(out, lse, turn, consumer)
            if q_stages == 1:
                free_queries(consumer.barriers.q_free, 0)
                begin(trip + 1, done, ring(done - 1)[0], consumer)
            trip += 1
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(consumer.registers.scores, num_regs=score_registers)
        if T.shuffle_elect(WARPGROUP):
            T.tma_store_wait(0)  # that reads shared memory, which ends with the block

    return consume
