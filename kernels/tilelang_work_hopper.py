"""Which tiles the blocks of Hopper's attention forward take, and how they pass through its buffers.

A block takes one tile of queries after the other: the first by its own number, the rest as a
counter in memory says. Of tiles of keys and values it holds `num_stages` at a time, each in a
buffer with two barriers: `full`, on which consumers wait for the bytes of a copy, and `free`, on
which the producer waits until each consumer has read the buffer. Both flip once every time that the
buffers come round; a wait names the phase that has to be over. On `free` the producer's first round
waits for the phase before the first, which counts as over.
"""

from typing import Any, NamedTuple

# Of keys and values that blocks at work at once should share. With many heads of FEW_KEYS and less
# all blocks read new keys at the same time, and then none does: fewer heads are better there, if
# they are wide (measured: benchmarks/NOTES.md).
L2_BYTES = 2**25
FEW_KEYS, FEW_KEYS_L2_BYTES = 512, 2**23

HELPERS = r"""
__device__ __forceinline__ int take_one(long long counter) {
  return atomicAdd(reinterpret_cast<int *>(counter), 1);
}
"""


class Sizes(NamedTuple):
    """Of tiles, and of tensors, in a prim_func."""

    IS_CAUSAL: bool
    BLOCK_M: int
    BLOCK_N: int
    HEAD_DIM: int
    num_stages: int
    Hq: Any
    Sq: Any
    Skv: Any

    def locate(self, tile: Any, num_m: Any, all_heads: Any, group: Any) -> tuple[Any, Any, Any]:
        """(first query, head, batch) of a tile: heads whose keys fit in cache together are
        neighbours, and of their tiles those with most keys go first."""
        import tilelang.language as T

        bytes_of_l2: Any = L2_BYTES
        if self.HEAD_DIM > 64:
            bytes_of_l2 = T.if_then_else(self.Skv <= FEW_KEYS, FEW_KEYS_L2_BYTES, L2_BYTES)
        fit = T.max(T.truncdiv(T.truncdiv(bytes_of_l2, 4 * self.HEAD_DIM), self.Skv), 1)
        width = T.min(fit, T.truncdiv(all_heads, group)) * group
        first = T.truncdiv(tile, width * num_m) * width
        together = T.min(width, all_heads - first)
        rest = T.truncmod(tile, width * num_m)
        row = first + T.truncmod(rest, together)
        m_start = (num_m - 1 - T.truncdiv(rest, together)) * self.BLOCK_M
        return m_start, T.truncmod(row, self.Hq), T.truncdiv(row, self.Hq)

    def end_of_keys(self, query: Any) -> Any:
        """Where the keys end that a query may read; at 0 or before, if it may read none."""
        import tilelang.language as T

        return T.min(query + self.Skv - self.Sq + 1, self.Skv) if self.IS_CAUSAL else self.Skv

    def count_key_tiles(self, first: Any, queries: int) -> Any:
        """Of keys that one of the queries may read. Queries without keys read one tile, masked, and
        so do those past the end."""
        import tilelang.language as T

        end = T.if_then_else(first < self.Sq, self.end_of_keys(first + queries - 1), 0)
        return T.max(T.ceildiv(end, self.BLOCK_N), 1)

    def count_unmasked(self, first: Any) -> Any:
        """Tiles of keys that each query from the first on may read as a whole."""
        import tilelang.language as T

        return T.truncdiv(T.max(self.end_of_keys(first), 0), self.BLOCK_N)

    def ring(self, count: Any) -> tuple[Any, Any]:
        """(buffer, phase) of the tile that passes through the buffers after `count` others."""
        return count % self.num_stages, count // self.num_stages % 2


class Passing(NamedTuple):
    """Macros, for threads of a warp."""

    arrive: Any  # (barriers, index): once
    load: Any  # (x, tiles, full, free, count, batch, head, start)
    skip: Any  # (full, free, count): frees the buffer of a tile that a warpgroup has no use for


def make_macros(sizes: Sizes) -> Passing:
    import tilelang.language as T

    BLOCK_N, HEAD_DIM, ring = sizes.BLOCK_N, sizes.HEAD_DIM, sizes.ring

    @T.macro
    def arrive(barriers, index):
        if T.shuffle_elect(32):
            T.barrier_arrive(barriers[index])

    @T.macro
    def load(x, tiles, full, free, count, batch, head, start):
        stage, phase = ring(count)
        T.barrier_wait(free[stage], 1 - phase)
        T.tma_copy(
            x[batch, head, start : start + BLOCK_N, 0:HEAD_DIM],
            tiles[stage, :, :],
            barrier=full[stage],
            leader_scope_threads=32,
        )
        arrive(full, stage)

    @T.macro
    def skip(full, free, count):
        stage, phase = ring(count)
        T.barrier_wait(full[stage], phase)
        arrive(free, stage)

    return Passing(arrive, load, skip)


def take_one(taken: Any) -> Any:
    """The next number of the counter at `taken`."""
    import tilelang.language as T

    return T.call_extern("int32", "take_one", taken)  # type: ignore[attr-defined]
