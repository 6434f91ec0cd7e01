"""Builder of the attention forward for Hopper, scheduled by hand.

The maths is that of `tilelang_attention_fwd.py`, with the scale taken into the exponent, and with
maxima that may lag behind (`tilelang_scores_hopper.py`): per query, with m of the scores as they
come from the product and c = |qk_scale|,

    p = 2^(c s - c m),  acc' = acc + p v,  sum' = sum + sum_j p
    out = acc / sum,  lse = (c m + log2(sum)) / log2(e)

for scores s of queries that were multiplied by the sign of qk_scale before. c s - c m is one
multiply-add. Where m grows to m', acc and sum are multiplied by 2^(c m - c m') first.

Who does what. A block stays on its multiprocessor and takes one tile of BLOCK_M queries after the
other, those with most keys first. Its last 128 threads are the producer
(`tilelang_work_hopper.py`). One warp of them takes the tiles and tells the consumers which; it
copies the queries of each by TMA, then tiles of BLOCK_N keys and values, from the last to the
first, into `num_stages` buffers of each, ahead of the consumers as far as there are buffers, into
the next tile of queries too. The consumers (`tilelang_consumer_hopper.py`) own 64 queries for every
128 threads (a warpgroup), and get the registers that the producer gives up. No two warpgroups wait
for one another: each skips the tiles of keys that none of its own queries may read, and stores its
part of the output, from where its queries were. What it skips it waits for all the same, so that it
frees each buffer once a round.

When. A consumer issues the product of its queries with the next keys, then that of its last
probabilities with their values, and exponentiates the former while the latter runs (Shah et al.
2024, "FlashAttention-3", algorithm 2):

    s_0 = q k_0, p_0
    for n >= 1:  issue s_n = q k_n, acc += p_{n-1} v_{n-1};  await s_n
                 where a score grew too much: await acc, rescale it
                 p_n from s_n;  await acc
    issue acc += p_last v_last, s_0 of the next queries;  await acc, store it

acc is awaited when a part of p_n is there: the rest of the exponentials hides the rounding of p_n.
Only tiles on the diagonal, or with the end of the keys, are masked; being the first, they have a
loop of their own. Where there is room for one tile of queries only, above D = 128, the next ones
come when the output is stored.
"""

from typing import Any

from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels import tilelang_work_hopper as work_hopper
from minitx.kernels.tilelang_consumer_hopper import (
    Consumer,
    Registers,
    make_consumer,
)
from minitx.kernels.tilelang_products import make_tensor, part_tensors, row_tensor, sizes
from minitx.kernels.tilelang_runtime import Language
from minitx.kernels.tilelang_scores_hopper import alloc_stats, make_scale
from minitx.kernels.tilelang_wgmma import multiplies_by_hand
from minitx.kernels.tilelang_work_hopper import WARPGROUP, Barriers, Buffers, Grid, Sizes

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false

# Registers of a thread by warpgroups of consumers: with 128 threads of the producer they fit in
# what the block starts with, 65536 by its threads, in units of 8.
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 160, 4: 112}
PRODUCER_REGISTERS = {1: 40, 2: 40, 3: 32, 4: 32}


def build_attention_fwd_hopper(
    lang: Language,
    *,
    dtype: str,
    HEAD_DIM: int,
    IS_CAUSAL: bool,
    BLOCK_M: int,
    BLOCK_N: int,
    num_stages: int,
    threads: int,
    IS_SHARED: bool = False,
) -> Any:
    """Arguments and results as in `build_attention_fwd`, for 16-bit inputs whose rows TMA can
    fetch. `threads` are those of the consumers, 128 for every 64 queries.

    The kernel takes two more arguments: `taken`, the address of an int32 0 that no other call uses
    meanwhile, to count the tiles that blocks took, or 0 where there are no more tiles than
    multiprocessors, or IS_SHARED; and how many of those there are.
    """
    import tilelang.language as T

    assert threads == BLOCK_M // 64 * WARPGROUP
    groups = threads // WARPGROUP
    warps = threads // 32
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, Skv = sizes("B", "Hq", "Sq", "Skv")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")
    P = sizes("P")[0] if IS_SHARED else B
    parts, stats = part_tensors(P, Hq, Sq, HEAD_DIM)
    tiling = (IS_CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, num_stages)
    work_sizes = Sizes(*tiling, Hq, Sq, Skv, B, P if IS_SHARED else None)
    q_stages = work_sizes.q_stages
    passing = work_hopper.make_passing(work_sizes)
    produce = work_hopper.make_producer(work_sizes, passing)
    consume = make_consumer(work_sizes, passing)

    @T.prim_func
    def attention_fwd_hopper(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        out: parts if IS_SHARED else tensor("out", B, Hq, Sq),
        lse: stats if IS_SHARED else row_tensor("lse", B, Hq, Sq),
        taken: T.int64,  # a number is handed over sooner than a tensor
        group: T.int32,
        qk_scale: T.float32,
        multiprocessors: T.int32,
    ):
        T.annotate_pass_configs(
            {
                "tl.disable_warp_specialized": True,
                "tl.enable_fast_math": True,
                # All barriers are written out here. Those that TileLang adds are of all consumers.
                "tl.disable_thread_storage_sync": True,
            }
        )
        num_m = T.ceildiv(Sq, BLOCK_M)
        tiles = P * Hq * num_m
        blocks = T.min(tiles, multiprocessors)
        with T.Kernel(blocks, threads=threads + WARPGROUP) as block:
            T.import_source(work_hopper.HELPERS + wgmma.HELPERS)
            q_tile = T.alloc_shared((q_stages, BLOCK_M, HEAD_DIM), dtype)
            k_tile = T.alloc_shared((num_stages, BLOCK_N, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((num_stages, BLOCK_N, HEAD_DIM), dtype)
            work = T.alloc_shared((2, 4), "int32")
            scores = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            p = T.alloc_fragment((BLOCK_M, BLOCK_N), dtype)
            acc = T.alloc_fragment((BLOCK_M, HEAD_DIM), "float32")
            rounded = T.alloc_fragment((BLOCK_M, HEAD_DIM), dtype)
            upcoming = T.alloc_local((5,), "int32")
            if multiplies_by_hand(HEAD_DIM):
                wgmma.lay_out((q_tile, k_tile, v_tile), (scores, p, acc, rounded))
            maxima = alloc_stats(BLOCK_M)
            total = T.alloc_fragment((BLOCK_M,), "float32")
            lse_tile = T.alloc_fragment((BLOCK_M,), "float32")
            work_full, work_free = T.alloc_barrier([1] * 2), T.alloc_barrier([warps] * 2)
            q_full, q_free = T.alloc_barrier([1] * q_stages), T.alloc_barrier([groups] * q_stages)
            k_full = T.alloc_barrier([1] * num_stages)
            k_free = T.alloc_barrier([warps] * num_stages)
            v_full = T.alloc_barrier([1] * num_stages)
            v_free = T.alloc_barrier([warps] * num_stages)

            buffers = Buffers(q_tile, k_tile, v_tile, work)
            barriers = Barriers(
                work_full, work_free, q_full, q_free, k_full, k_free, v_full, v_free
            )
            thread = T.get_thread_binding()
            tile = T.alloc_var("int32", init=block)
            if thread >= threads:
                T.set_max_nreg(PRODUCER_REGISTERS[groups], 0)
                if thread < threads + 32:
                    grid = Grid(num_m, P * Hq, tiles, blocks)
                    produce(tile, (q, k, v), buffers, barriers, grid, group, taken)
            else:
                T.set_max_nreg(CONSUMER_REGISTERS[groups], 1)
                warpgroup = T.alloc_var("int32", init=wgmma.warpgroup_of(thread))
                scale = make_scale(qk_scale)
                registers = Registers(scores, p, acc, rounded, total, lse_tile, upcoming, maxima)
                parts = (buffers, barriers, registers)
                consume(out, lse, Consumer(*parts, scale, qk_scale, warpgroup))

    return attention_fwd_hopper
