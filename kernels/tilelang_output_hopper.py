"""What a warpgroup of Hopper's attention forward stores of a tile of queries: the output, or, where
keys are shared out, a part of it.

A part is what `tilelang_attention_merge.py` puts together: the sums as they are, not divided, and
for each query the maximum that they are relative to, in powers of two, and the sum of
probabilities. Of a query that sees no key of the share the sums are 0: masked NaN among the values
would make them NaN. That is told by the places of queries and keys. Scores may be -inf of keys that
a query does see, and then NaN among their values is in its sums.
"""

from typing import Any

from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_products import LOG2E
from minitx.kernels.tilelang_work_hopper import FIRST_WARPGROUP, WARPGROUP, Sizes


def make_store(sizes: Sizes) -> Any:
    """The macro that stores: (out, lse, turn, consumer), or (parts, stats, turn, consumer)."""
    return make_store_part(sizes) if sizes.is_shared else make_store_output(sizes)


def make_store_part(sizes: Sizes) -> Any:
    import tilelang.language as T

    BLOCK_M, HEAD_DIM = sizes.BLOCK_M, sizes.HEAD_DIM
    by_row = wgmma.by_row(BLOCK_M)

    @T.macro
    def store(parts, stats, turn, consumer):
        acc, total, top = consumer.registers.acc, consumer.registers.total, consumer.registers.lse
        rows = consumer.registers.stats
        part, head, m_start = turn.part, turn.head, turn.m_start
        for i in T.Parallel(BLOCK_M):
            top[i] = rows.row_max[i] * rows.factor[i]
        if sizes.IS_CAUSAL:
            first_key = turn.first_n * sizes.BLOCK_N
            # By the first query, which sees fewest: few shares have one that sees none, and a
            # choice for each element of all can cost 17 % (benchmarks/NOTES.md).
            if sizes.end_of_keys(m_start) <= first_key:
                for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                    sees_key = sizes.end_of_keys(m_start + i) > first_key
                    acc[i, d] = T.if_then_else(sees_key, acc[i, d], 0.0)
        T.copy(acc, parts[part, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM])
        T.copy(top, stats[part, head, m_start : m_start + BLOCK_M, 0], loop_layout=by_row)
        T.copy(total, stats[part, head, m_start : m_start + BLOCK_M, 1], loop_layout=by_row)

    return store


def make_store_output(sizes: Sizes) -> Any:
    import tilelang.language as T

    BLOCK_M, HEAD_DIM = sizes.BLOCK_M, sizes.HEAD_DIM
    by_hand = wgmma.multiplies_by_hand(HEAD_DIM)
    panel = 64 if by_hand else 32  # columns that lie side by side in shared memory
    minus_inf = -T.infinity("float32")
    # For loops that write no registers: TileLang would plan them anew for each loop of the kernel.
    by_row = wgmma.by_row(BLOCK_M)

    @T.macro
    def divide(consumer):
        """acc by the sums of its queries, which become lse."""
        acc, stats = consumer.registers.acc, consumer.registers.stats
        total, lse_tile = consumer.registers.total, consumer.registers.lse
        for i in T.Parallel(BLOCK_M):
            lse_tile[i] = (stats.row_max[i] * consumer.scale.size + T.log2(total[i])) / LOG2E
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

    @T.macro
    def store(out, lse, turn, consumer):
        """Each warpgroup by way of where its queries were."""
        divide(consumer)
        acc, rounded = consumer.registers.acc, consumer.registers.rounded
        q_tile = consumer.buffers.q
        if by_hand:
            T.copy(acc, rounded)
            wgmma.store_own_rows(rounded, q_tile, turn.q_stage)
        else:
            T.copy(acc, q_tile[turn.q_stage, :, :])
        wgmma.fence_stores()
        T.sync_threads(FIRST_WARPGROUP + consumer.warpgroup, WARPGROUP)
        row = consumer.warpgroup * 64
        for c in T.unroll(HEAD_DIM // panel):
            d = c * panel
            T.tma_copy(
                q_tile[turn.q_stage, row : row + 64, d : d + panel],
                out[turn.part, turn.head, turn.m_row : turn.m_row + 64, d : d + panel],
                leader_scope_threads=WARPGROUP,
            )
        T.copy(
            consumer.registers.lse,
            lse[turn.part, turn.head, turn.m_start : turn.m_start + BLOCK_M],
            loop_layout=by_row,
        )

    return store
