"""Which tiles the blocks of Hopper's attention forward take, and how they pass through its buffers:
the producer's part.

A block takes one tile of queries after the other: the first by its own number, the rest as a
counter in memory says or, where keys are shared out and each takes as long, in turn. Of those it
holds `q_stages` at a time, of tiles of keys and of values `num_stages`, each in a buffer with two
barriers: `full`, on which consumers wait for the bytes of a copy, and `free`, on which the producer
waits until each consumer has read the buffer. Which queries they are the producer writes into two
buffers that are handed over in the same way. Both barriers flip once every time that the buffers
come round; a wait names the phase that has to be over. On `free` the producer's first round waits
for the phase before the first, which counts as over.
"""

from typing import Any, NamedTuple

from minitx.kernels.tilelang_products import count_share

WARPGROUP = 128  # threads; each takes 64 rows of a product
# Named barriers: one of all consumers, then one of each of their warpgroups. 0 is __syncthreads.
CONSUMERS, FIRST_WARPGROUP = 1, 2
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


class Buffers(NamedTuple):
    """In shared memory."""

    q: Any  # [q_stages, BLOCK_M, HEAD_DIM]
    k: Any  # [num_stages, BLOCK_N, HEAD_DIM]
    v: Any  # the same
    work: Any  # int32 [2, 4]: a tile's first query, or -1 after the last tile; head; part


class Barriers(NamedTuple):
    """Two for each buffer."""

    work_full: Any
    work_free: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


class Grid(NamedTuple):
    """What blocks share between them, in a prim_func."""

    num_m: Any  # tiles of queries of a head
    num_heads: Any  # of all parts
    tiles: Any
    blocks: Any


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
    B: Any
    parts: Any = None  # of all batches, where blocks share out keys

    @property
    def is_shared(self) -> bool:
        return self.parts is not None

    @property
    def share(self) -> Any:
        """Tiles of keys that are read for a part, if there are as many."""
        import tilelang.language as T

        return count_share(T.ceildiv(self.Skv, self.BLOCK_N), self.parts, self.B)

    def batch_of(self, part: Any) -> Any:
        import tilelang.language as T

        return T.truncmod(part, self.B) if self.is_shared else part

    def first_key_tile(self, part: Any) -> Any:
        """The first of the tiles of keys that are read for a part."""
        import tilelang.language as T

        return T.truncdiv(part, self.B) * self.share if self.is_shared else 0

    @property
    def q_stages(self) -> int:
        """Tiles of queries: as many as there is room for."""
        return 2 if self.HEAD_DIM <= 128 else 1

    def locate(self, tile: Any, grid: Grid, group: Any) -> tuple[Any, Any, Any]:
        """(first query, head, part) of a tile: heads whose keys fit in cache together are
        neighbours, and of their tiles those with most keys go first. A part is a batch or, where
        keys are shared out, of a share the batch."""
        import tilelang.language as T

        num_m, num_heads = grid.num_m, grid.num_heads
        Skv = self.share * self.BLOCK_N if self.is_shared else self.Skv
        bytes_of_l2: Any = L2_BYTES
        if self.HEAD_DIM > 64:
            bytes_of_l2 = T.if_then_else(Skv <= FEW_KEYS, FEW_KEYS_L2_BYTES, L2_BYTES)
        fit = T.max(T.truncdiv(T.truncdiv(bytes_of_l2, 4 * self.HEAD_DIM), Skv), 1)
        width = T.min(fit, T.truncdiv(num_heads, group)) * group
        first = T.truncdiv(tile, width * num_m) * width
        together = T.min(width, num_heads - first)
        rest = T.truncmod(tile, width * num_m)
        row = first + T.truncmod(rest, together)
        m_start = (num_m - 1 - T.truncdiv(rest, together)) * self.BLOCK_M
        return m_start, T.truncmod(row, self.Hq), T.truncdiv(row, self.Hq)

    def end_of_keys(self, query: Any) -> Any:
        """Where the keys end that a query may read; at 0 or before, if it may read none."""
        import tilelang.language as T

        return T.min(query + self.Skv - self.Sq + 1, self.Skv) if self.IS_CAUSAL else self.Skv

    def count_key_tiles(self, first: Any, queries: int, first_n: Any) -> Any:
        """Of keys that one of the queries may read, from the tile first_n on as far as it is shared
        out. Queries without keys read one tile, masked, and so do those past the end."""
        import tilelang.language as T

        end = T.if_then_else(first < self.Sq, self.end_of_keys(first + queries - 1), 0)
        tiles = T.ceildiv(end, self.BLOCK_N)
        return T.max(T.min(tiles - first_n, self.share) if self.is_shared else tiles, 1)

    def count_unmasked(self, first: Any, first_n: Any) -> Any:
        """Tiles of keys, from first_n on, that each query from the first on may read as a whole."""
        import tilelang.language as T

        tiles = T.truncdiv(T.max(self.end_of_keys(first), 0), self.BLOCK_N)
        return T.max(tiles - first_n, 0) if self.is_shared else tiles

    def ring(self, count: Any) -> tuple[Any, Any]:
        """(buffer, phase) of the tile that passes through the buffers after `count` others."""
        return count % self.num_stages, count // self.num_stages % 2


class Passing(NamedTuple):
    """Macros, for threads of a warp."""

    arrive: Any  # (barriers, index): once
    load: Any  # (x, tiles, full, free, count, batch, head, start)
    skip: Any  # (full, free, count): frees the buffer of a tile that a warpgroup has no use for


def make_passing(sizes: Sizes) -> Passing:
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


def make_producer(sizes: Sizes, passing: Passing) -> Any:
    """The macro of the warp that takes tiles and fetches them: (tile, tensors q, k and v, buffers,
    barriers, grid, group, taken), `tile` a variable that holds the block's first."""
    import tilelang.language as T

    BLOCK_M, BLOCK_N, HEAD_DIM, q_stages = *sizes[1:4], sizes.q_stages
    arrive, load = passing.arrive, passing.load

    @T.macro
    def produce(tile: T.Ref, tensors, buffers, barriers, grid, group, taken):
        q, k, v = tensors
        q_tile, k_tile, v_tile, work = buffers
        work_full, work_free, q_full, q_free, k_full, k_free, v_full, v_free = barriers
        # Variables, so that these are computed once and not wherever they are used.
        m_start = T.alloc_var("int32")
        head = T.alloc_var("int32")
        part = T.alloc_var("int32")
        num_n = T.alloc_var("int32")
        trip = T.alloc_var("int32")  # tiles of queries before this one
        done = T.alloc_var("int32")  # tiles of keys, all told
        trip = 0
        done = 0
        while tile < grid.tiles:
            place = sizes.locate(tile, grid, group)
            m_start = place[0]
            head = place[1]
            part = place[2]
            first_n = sizes.first_key_tile(part)
            num_n = sizes.count_key_tiles(m_start, BLOCK_M, first_n)
            T.barrier_wait(work_free[trip % 2], 1 - trip // 2 % 2)
            if T.shuffle_elect(32):
                work[trip % 2, 0] = m_start
                work[trip % 2, 1] = head
                work[trip % 2, 2] = part
                T.barrier_arrive(work_full[trip % 2])
            T.barrier_wait(q_free[trip % q_stages], 1 - trip // q_stages % 2)
            T.tma_copy(
                q[sizes.batch_of(part), head, m_start : m_start + BLOCK_M, 0:HEAD_DIM],
                q_tile[trip % q_stages, :, :],
                barrier=q_full[trip % q_stages],
                leader_scope_threads=32,
            )
            arrive(q_full, trip % q_stages)
            kv_head = T.truncdiv(head, group)
            # Of expanded keys and values there is one batch or head.
            k_place = (
                T.min(sizes.batch_of(part), k.shape[0] - 1),
                T.min(kv_head, k.shape[1] - 1),
            )
            v_place = (
                T.min(sizes.batch_of(part), v.shape[0] - 1),
                T.min(kv_head, v.shape[1] - 1),
            )
            start = (first_n + num_n - 1) * BLOCK_N
            load(k, k_tile, k_full, k_free, done, *k_place, start)
            if sizes.is_shared:  # in shares of one size, which need no counter
                tile = tile + grid.blocks
            else:
                tile = grid.tiles
                if grid.tiles > grid.blocks:
                    if T.shuffle_elect(32):
                        tile = grid.blocks + take_one(taken)
                    tile = T.shfl_sync(tile, 0)
            for n in T.serial(num_n):
                v_start = (first_n + num_n - 1 - n) * BLOCK_N
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

    return produce


def take_one(taken: Any) -> Any:
    """The next number of the counter at `taken`."""
    import tilelang.language as T

    return T.call_extern("int32", "take_one", taken)  # type: ignore[attr-defined]
