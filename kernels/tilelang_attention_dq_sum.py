"""How the blocks of the backward for Hopper sum dq, by the copy engine: for kernels in TileLang.

A tile of dq is a sum over the tasks of a key head. It gathers in dq_sum, float32 (twice the size
of q). The tasks that add to one tile do so in turn, in the order in which they are taken, so that
sums are the same bit for bit every time. turns[tile] starts as 0, and whoever has added sets it to
the number of tasks of the head that it and those before it are. The first of them stores, so dq_sum
need not be zeroed. The last writes dq in place of a sum: it has the sum so far brought to where
other blocks put their own part, its warps add theirs to it, scale and round, and dq is stored.

The key tiles that a query tile sees are all those from 0 up to some last one. So a task has its
predecessor at every tile but those where it has the head's first or last keys of all that are seen:
there it is the first or the last (`first_and_last_steps` of `tilelang_attention_bwd_order.py`).

No turn waits for ever. A task waits only for tasks of lower number (`locate` puts a head's in the
order of their turns). Blocks that stay take tasks by a counter; one that does not has that of its
index, and a GPU starts blocks in order of index. Either way those of lower number are taken, by
blocks that run, or have ended: had blocks that stay begun with their index, two such kernels at
once could each hold multiprocessors that the other's first tasks want. A block that runs keeps its
multiprocessor until it ends, and its tasks' numbers grow; other streams' kernels can hold up only
blocks that have not started, for which none that runs waits. Within a block a step waits for its
turn and for the steps before it, and never those for it. So, by induction over the number and,
within a block, over its steps, every wait ends.

A tile goes in halves of 64 x 64, one of each warpgroup.

Memory that one proxy (threads, or the copy engine) has written and another reads needs a fence
between. Before a turn ends there is one in what the thread waits for: a bulk copy's completion is
followed by a fence of both proxies (PTX ISA, "Async proxy"). After a turn whose sum is then brought
there has to be one, as it is threads that wait and the copy engine that reads. To add, which L2
does once the sum before is there, none is needed.
"""

from typing import Any

DQ_TILE = 8192  # elements of a tile of queries: 64 x 128 or 128 x 64
HALF = DQ_TILE // 2  # of a warpgroup: 64 queries by 64 columns
BYTES = HALF * 4

HELPERS = r"""
__device__ __forceinline__ void hand_half(float *tile, const float *half, int thread) {
  float4 *to = reinterpret_cast<float4 *>(tile) + thread / 128 * 1024 + thread % 128;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    to[i * 128] = reinterpret_cast<const float4 *>(half)[i];
}
__device__ __forceinline__ void store_tile(float *tile, float *sum, int bytes) {
  unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(sum), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void load_tile(float *tile, float *sum, int bytes, void *barrier) {
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  unsigned is_there = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;"
               :: "r"(is_there), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(to), "l"(sum), "r"(bytes), "r"(is_there) : "memory");
}
__device__ __forceinline__ void fence_proxies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void wait_turn(int *turn, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
  } while (seen < value);
}
__device__ __forceinline__ void end_turn(int *turn, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(turn), "r"(value) : "memory");
}
"""


def hand_half(dq_acc: Any, dq_tile: Any, thread: Any) -> Any:
    """A warpgroup's part, in its threads' registers, to its half of dq_tile. Hidden from TileLang,
    which would fence ahead of the next product, whatever that reads: the caller is to fence."""
    return _call("hand_half", dq_tile.access_ptr("r"), dq_acc.data, thread)


def wait_turn(turns: Any, row: Any, value: Any) -> Any:
    """Until the turn of a tile is `value`."""
    import tilelang.language as T

    return _call("wait_turn", T.address_of(turns[row]), value)


def end_turn(turns: Any, row: Any, value: Any) -> Any:
    """Once what this thread asked for is written: makes the turn of a tile `value`."""
    import tilelang.language as T

    return _call("end_turn", T.address_of(turns[row]), value)


def fence() -> Any:
    """Once a turn has come: what others have written may be loaded."""
    return _call("fence_proxies")


def store(dq_tile: Any, dq_sum: Any, row: Any, half: Any) -> Any:
    """A half of dq_tile, in shared memory, becomes the sum. Not awaited: a bulk group's, to be
    committed."""
    return _call("store_tile", *_places(dq_tile, dq_sum, row, half))


def add(dq_tile: Any, dq_sum: Any, row: Any, half: Any) -> Any:
    """The same, added to the sum."""
    return _call("tl::tma_store_add", *_places(dq_tile, dq_sum, row, half))


def load(dq_sum: Any, row: Any, half: Any, dq_tile: Any, barrier: Any) -> Any:
    """The sum so far to dq_tile; the barrier's phase, which must not have ended, expects it."""
    import tilelang.language as T

    return _call("load_tile", *_places(dq_tile, dq_sum, row, half), T.address_of(barrier))


def place_in_tile(i: Any, d: Any) -> Any:
    """Where element [i % 64, d] of half i // 64 lies in a tile: fours of registers of one number of
    all the threads of a warpgroup are neighbours, so that threads store them four at a time and
    without bank conflicts."""
    thread = i % 64 // 16 * 32 + i % 8 * 4 + d % 8 // 2
    four = i % 16 // 8 * 2 + d % 2
    return i // 64 * HALF + d // 8 * 512 + thread * 4 + four


def _places(dq_tile: Any, dq_sum: Any, row: Any, half: Any) -> tuple[Any, Any, int]:
    import tilelang.language as T

    at = T.address_of(dq_sum[T.cast(row, "int64"), half * HALF])
    return T.address_of(dq_tile[half * 64, 0]), at, BYTES


def _call(function: str, *arguments: Any) -> Any:
    import tilelang.language as T

    return T.evaluate(T.call_extern("void", function, *arguments))  # type: ignore[attr-defined]
