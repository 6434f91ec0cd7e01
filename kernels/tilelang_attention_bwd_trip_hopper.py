"""What the warpgroups that compute do in a trip of the backward's loop on Hopper: for kernels in
TileLang.

`tilelang_attention_bwd_hopper.py` says in which order, and who waits for whom.
"""

from typing import Any, NamedTuple

from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_attention_bwd import at_most_0
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE, hand_half
from minitx.kernels.tilelang_wgmma import Operand, own_rows

BLOCK_N = 128  # keys
WORKERS = 256  # threads that compute
ADDERS = 3  # warps that add tiles of dq to memory
# Named barriers; TileLang takes number 1 for its own.
FULL = 2  # at FULL + 2 * i + j adder i (a warp) waits for its half of dq from warpgroup j
GO = FULL + 2 * ADDERS  # at GO + i warpgroup i waits for the other one
MEET = GO + 2  # at MEET + i the warps of warpgroup i

HELPERS = r"""
__device__ __forceinline__ void let_go(int is_it, int barrier) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p bar.arrive %1, 256; }"
               :: "r"(is_it), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_to_go(int barrier) {
  asm volatile("bar.sync %0, 256;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void meet(int barrier) {
  asm volatile("bar.sync %0, 128;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void hand_in(int barrier) {
  asm volatile("bar.arrive %0, 160;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_hand_in(int barrier) {
  asm volatile("bar.sync %0, 160;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ int take_task(long long counter) {
  int number = 0;
  if (threadIdx.x % 32 == 0) number = atomicAdd(reinterpret_cast<int *>(counter), 1);
  return __shfl_sync(~0u, number, 0);
}
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


class Shape(NamedTuple):
    """Of heads, and of tensors in a prim_func."""

    IS_CAUSAL: bool
    HEAD_DIM: int
    Sq: Any
    Skv: Any

    @property
    def BLOCK_M(self) -> int:
        """Queries of a tile."""
        return DQ_TILE // self.HEAD_DIM

    @property
    def diagonal(self) -> Any:
        """Query i reads keys below i + diagonal, by the causal rule."""
        return self.Skv - self.Sq + 1

    def first_tile(self, n_start: Any) -> Any:
        """The first tile of queries with one that reads keys from n_start on."""
        import tilelang.language as T

        if not self.IS_CAUSAL:
            return 0
        return T.truncdiv(T.max(n_start + 1 - self.diagonal, 0), self.BLOCK_M)


class Trip(NamedTuple):
    """Macros, and functions that give statements."""

    release: Any  # (barriers, index): by the threads of a warp, once
    await_product: Any  # (pending, tile)
    issue_scores: Any
    issue_dq: Any
    add_product: Any
    read_stats: Any
    exponentiate: Any
    differentiate: Any
    put_dq: Any
    tell_adder: Any
    store: Any


def call(function: str, *arguments: Any) -> Any:
    """A statement that calls one of the helpers in CUDA."""
    import tilelang.language as T

    return T.evaluate(T.call_extern("void", function, *arguments))  # type: ignore[attr-defined]


def by_query(queries: int) -> Any:
    """The layout of a number a query in registers: each thread has those of its columns of s^T."""
    import tilelang.language as T

    def owners(i: Any, row: Any) -> tuple[Any, Any]:
        return row * 4 + i % 8 // 2, i // 8 * 2 + i % 2

    return T.Fragment([queries], forward_fn=owners, replicate=WORKERS // 4)


def make_macros(shape: Shape) -> Trip:
    import tilelang.language as T

    IS_CAUSAL, HEAD_DIM, Sq, Skv = shape
    BLOCK_M, diagonal = shape.BLOCK_M, shape.diagonal
    Q_BYTES, DS_BYTES = DQ_TILE * 2, BLOCK_N * BLOCK_M * 2
    score_regs, dq_regs = BLOCK_M // 2, DQ_TILE // WORKERS

    def forget(tile, count):
        """Says that a tile's old values are not used: a product that clears it reads it all the
        same, as far as the compiler knows, and it would hold its registers from trip to trip."""
        return call(f"forget<{count}>", tile.data)

    @T.macro
    def await_product(pending, tile):
        """All products but the last `pending` issued have ended, and tile's is among them."""
        T.wait_wgmma(pending)
        registers = int(tile.shape[0]) * int(tile.shape[1]) // WORKERS
        T.warpgroup_fence_operand(tile, num_regs=registers)

    @T.macro
    def release(barriers, index):
        if T.shuffle_elect(32):
            T.barrier_arrive(barriers[index])

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

    @T.macro
    def put_dq(dq_acc, dq_16, dq_tiles, step, ends, scale, is_hidden, thread):
        """dq_acc to where a step's adder takes it from, which is free; by the last of those who
        add, dq. The adder is to be told.

        is_hidden: from TileLang, as `store_own_rows` says."""
        dq_tile, dq_rounded = dq_tiles
        first_until, last_from = ends
        if step >= last_from:
            if step >= first_until:
                for i, d in T.Parallel(128, 64):
                    dq_acc[i, d] += dq_tile[i, d]
            for i, d in T.Parallel(128, 64):
                dq_acc[i, d] *= scale
            T.copy(dq_acc, dq_16)
            wgmma.store_own_rows(dq_16, dq_rounded, 0, is_hidden, thread)
        else:
            hand_half(dq_acc, dq_tile, thread)

    @T.macro
    def tell_adder(adder, warpgroup):
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

    return Trip(
        release,
        await_product,
        issue_scores,
        issue_dq,
        add_product,
        read_stats,
        exponentiate,
        differentiate,
        put_dq,
        tell_adder,
        store,
    )
