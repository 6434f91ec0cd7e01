"""What a trip of the backward's loop on Hopper is made of: macros for the warpgroups that compute.

`tilelang_attention_bwd_consumer_hopper.py` puts them in order.
"""

from typing import Any, NamedTuple

from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_attention_bwd import at_most_0
from minitx.kernels.tilelang_attention_bwd_work_hopper import (
    BLOCK_N,
    FULL,
    MEET,
    WORKERS,
    Barriers,
    Buffers,
    Shape,
    call,
)
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE, hand_half
from minitx.kernels.tilelang_wgmma import Operand, own_rows

Q_BYTES = DQ_TILE * 2  # of a tile of q or dout

HELPERS = r"""
template <int first, int queries>
__device__ __forceinline__ void read_own(float *registers, const void *numbers, int thread) {
  const float2 *own = static_cast<const float2 *>(numbers) + thread % 4;
#pragma unroll
  for (int i = first / 8; i < first / 8 + queries / 8; ++i) {
    float2 pair = own[i * 4];
    registers[i * 2] = pair.x;
    registers[i * 2 + 1] = pair.y;
  }
}
template <int count>
__device__ __forceinline__ void forget(float *registers) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "=f"(registers[i]));
}
"""


class Registers(NamedTuple):
    """Fragments of both warpgroups."""

    scores: Any  # [BLOCK_N, BLOCK_M] float32
    dp: Any  # the same
    p: Any  # [BLOCK_N, BLOCK_M], 16 bits
    ds: Any  # the same
    dq_acc: Any  # [128, 64] float32, both halves of a tile
    dq_16: Any  # the same, 16 bits
    dk_acc: Any  # [BLOCK_N, HEAD_DIM] float32
    dv_acc: Any  # the same
    grad_16: Any  # the same, 16 bits
    lse: Any  # [BLOCK_M] float32
    delta: Any  # the same


class Consumer(NamedTuple):
    """What a warpgroup reads and writes."""

    buffers: Buffers
    barriers: Barriers
    registers: Registers
    qk_scale: Any
    scale: Any
    warpgroup: Any
    thread: Any  # its index, held


class Trip(NamedTuple):
    """Macros, and `add_product`, which gives a statement."""

    issue_scores: Any  # (k_tile, q_tile, stage, scores, warpgroup)
    issue_dq: Any  # (ds_tile, buffer, k_tile, dq_acc, warpgroup)
    add_product: Any  # (sums, factor, tile, stage)
    read_stats: Any  # (stats, stats_tile, stage, which, first, count, thread)
    exponentiate: Any  # (scores, p, lse, qk_scale, m_start, n_start)
    differentiate: Any  # (scores, dp, delta, ds, ds_tile, buffer, thread)
    put_dq: Any  # (step, ends, is_hidden, consumer)
    tell_adder: Any  # (adder, warpgroup)
    store: Any  # (grad, grad_16, tile, to, batch, head, n_start, warpgroup)


def await_product(pending: int, tile: Any) -> Any:
    """All products but the last `pending` issued have ended, and tile's is among them."""
    import tilelang.language as T

    registers = int(tile.shape[0]) * int(tile.shape[1]) // WORKERS

    @T.macro
    def wait():
        T.wait_wgmma(pending)
        T.warpgroup_fence_operand(tile, num_regs=registers)

    return wait()


def by_query(queries: int) -> Any:
    """The layout of a number a query in registers: each thread has those of its columns of s^T."""
    import tilelang.language as T

    def owners(i: Any, row: Any) -> tuple[Any, Any]:
        return row * 4 + i % 8 // 2, i // 8 * 2 + i % 2

    return T.Fragment([queries], forward_fn=owners, replicate=WORKERS // 4)


def make_products(shape: Shape) -> tuple[Any, Any, Any]:
    """Those of `Trip` that issue products, not awaited."""
    import tilelang.language as T

    HEAD_DIM, BLOCK_M = shape.HEAD_DIM, shape.BLOCK_M
    DS_BYTES = BLOCK_N * BLOCK_M * 2
    score_regs, dq_regs = BLOCK_M // 2, DQ_TILE // WORKERS

    def forget(tile, count):
        """Says that a tile's old values are not used: a product that clears it reads it all the
        same, as far as the compiler knows, and it would hold its registers from trip to trip."""
        return call(f"forget<{count}>", tile.data)

    @T.macro
    def issue_scores(k_tile, q_tile, stage, scores, warpgroup):
        """s^T, and dp^T of v and dout."""
        forget(scores, score_regs)
        keys = Operand(k_tile, True, own_rows(warpgroup))
        queries = Operand(q_tile, True, stage * Q_BYTES)
        wgmma.issue_product(scores, keys, queries, HEAD_DIM, clear=True)

    @T.macro
    def issue_dq(ds_tile, buffer, k_tile, dq_acc, warpgroup):
        """A warpgroup's half."""
        forget(dq_acc, dq_regs)
        first = wgmma.own_columns(warpgroup, ds_tile)  # as many bytes as of k_tile
        ds = Operand(ds_tile, False, buffer * DS_BYTES + (first if BLOCK_M == 128 else 0))
        keys = Operand(k_tile, False, first if BLOCK_M == 64 else 0)
        wgmma.issue_product(dq_acc, ds, keys, BLOCK_N, clear=True)

    def add_product(sums, factor, tile, stage):
        """dv of p and dout, and dk of ds and q."""
        return wgmma.issue_product(sums, factor, Operand(tile, False, stage * Q_BYTES), BLOCK_M)

    return issue_scores, issue_dq, add_product


def make_pointwise(shape: Shape) -> tuple[Any, Any, Any]:
    """Those of `Trip` that make p of scores, and ds of p and dp."""
    import tilelang.language as T

    IS_CAUSAL, Sq, Skv = shape.IS_CAUSAL, shape.Sq, shape.Skv
    BLOCK_M, diagonal = shape.BLOCK_M, shape.diagonal

    @T.macro
    def read_stats(stats, stats_tile, stage, which, first, count, thread):
        """lse (0) or delta (1) of `count` queries of a tile from `first` on: a thread's own, as
        `by_query` says. It counts where they are read: reads wait until the products that were
        issued before have begun."""
        numbers = stats_tile.access_ptr("r", offset=(stage * 2 + which) * BLOCK_M)
        call(f"read_own<{first}, {count}>", stats.data, numbers, thread)

    @T.macro
    def exponentiate(scores, p, lse, qk_scale, m_start, n_start):
        """scores to probabilities, in 16 bits to p."""
        for j, i in T.Parallel(BLOCK_N, BLOCK_M):
            scores[j, i] = T.exp2(at_most_0(scores[j, i] * qk_scale - lse[i]))
        # Queries and keys past the end are zeros; 0 times an infinite key is NaN, and 0 itself may
        # be a score far above the others.
        crosses_end = m_start + BLOCK_M > Sq
        hides_keys = (m_start + diagonal if IS_CAUSAL else Skv) < n_start + BLOCK_N
        if crosses_end or hides_keys:
            for j, i in T.Parallel(BLOCK_N, BLOCK_M):
                end = m_start + i + diagonal if IS_CAUSAL else Skv
                is_seen = (m_start + i < Sq) & (n_start + j < end)
                scores[j, i] = T.if_then_else(is_seen, scores[j, i], 0.0)
        T.copy(scores, p)

    @T.macro
    def differentiate(scores, dp, delta, ds, ds_tile, buffer, thread):
        """ds, and to shared memory, for both warpgroups; a fence is wanted before they are told."""
        for j, i in T.Parallel(BLOCK_N, BLOCK_M):
            dp[j, i] = scores[j, i] * (dp[j, i] - delta[i])
        T.copy(dp, ds)
        wgmma.store_own_rows(ds, ds_tile, buffer, True, thread)

    return read_stats, exponentiate, differentiate


def make_outputs(shape: Shape) -> tuple[Any, Any, Any]:
    """Those of `Trip` that hand on gradients."""
    import tilelang.language as T

    HEAD_DIM = shape.HEAD_DIM

    @T.macro
    def put_dq(step, ends, is_hidden, consumer):
        """dq_acc to where a step's adder takes it from, which is free; by the last of those who
        add, dq. The adder is to be told.

        ends: the steps in which the task is the first of those, and the last. is_hidden: from
        TileLang, as `store_own_rows` says."""
        dq_tile, dq_rounded = consumer.buffers.dq, consumer.buffers.dq_rounded
        dq_acc, dq_16 = consumer.registers.dq_acc, consumer.registers.dq_16
        first_until, last_from = ends
        if step >= last_from:
            if step >= first_until:
                for i, d in T.Parallel(128, 64):
                    dq_acc[i, d] += dq_tile[i, d]
            for i, d in T.Parallel(128, 64):
                dq_acc[i, d] *= consumer.scale
            T.copy(dq_acc, dq_16)
            wgmma.store_own_rows(dq_16, dq_rounded, 0, is_hidden, consumer.thread)
        else:
            hand_half(dq_acc, dq_tile, consumer.thread)

    @T.macro
    def tell_adder(adder, warpgroup):
        """A half of dq is where the adder takes it from. The copy engine is to read what threads
        have stored, hence the fence."""
        wgmma.fence_stores()
        call("hand_in", FULL + adder * 2 + warpgroup)

    @T.macro
    def store(grad, grad_16, tile, to, batch, head, n_start, warpgroup):
        """dk or dv of a warpgroup's keys, by way of its rows of a tile; not awaited."""
        T.copy(grad, grad_16)
        function = f"store_own_rows<{BLOCK_N * wgmma.ROW_BYTES}, {HEAD_DIM}>"
        call(function, tile.access_ptr("r"), grad_16.data)
        wgmma.fence_stores()
        call("meet", MEET + warpgroup)
        first, rows = warpgroup * 64, n_start + warpgroup * 64
        for half in T.unroll(HEAD_DIM // 64):
            columns = slice(half * 64, half * 64 + 64)
            T.tma_copy(
                tile[first : first + 64, columns],
                to[batch, head, rows : rows + 64, columns],
                leader_scope_threads=128,
            )

    return put_dq, tell_adder, store


def make_trip(shape: Shape) -> Trip:
    return Trip(*make_products(shape), *make_pointwise(shape), *make_outputs(shape))
