"""Builder of what runs before the backward for Hopper: row by row, at a copy's speed.

It makes the statistics that the portable kernels take too (`build_attention_bwd_stats`), and sets
the turns and the count of tasks to 0. Memory is all that it waits for: a block has a tile of as
many elements as those of dq_sum, and asks for all of it at once.
"""

from typing import Any

from minitx.kernels.tilelang_attention_bwd import stats_tensor
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE
from minitx.kernels.tilelang_products import (
    LOG2E,
    make_row_dot,
    make_tensor,
    place,
    row_tensor,
    sizes,
)
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false


def build_attention_bwd_prepare(
    lang: Language, *, dtype: str, HEAD_DIM: int, WITH_DLSE: bool
) -> Any:
    """stats [B, Hq, 2, S] as in `build_attention_bwd_stats`, in base 2, and zeros in turns
    [B * Hq * tiles of queries] and taken [1], int32."""
    import tilelang.language as T

    BLOCK_M, threads = DQ_TILE // HEAD_DIM, 128
    row_dot = make_row_dot(lang)
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, S, tiles = sizes("B", "Hq", "Sq", "S", "tiles")
    plus_inf = T.infinity("float32")

    def fetch(region, tile, barrier):
        return T.tma_copy(region, tile, barrier=barrier, leader_scope_threads=32)

    @T.prim_func
    def attention_bwd_prepare(
        out: tensor("out", B, Hq, Sq),
        dout: tensor("dout", B, Hq, Sq),
        lse: row_tensor("lse", B, Hq, Sq),
        dlse: row_tensor("dlse", B, Hq, Sq),
        stats: stats_tensor(B, Hq, S),
        turns: T.Tensor((tiles,), "int32"),
        taken: T.Tensor((1,), "int32"),
    ):
        T.annotate_pass_configs({"tl.disable_warp_specialized": True})
        with T.Kernel(B * Hq * T.ceildiv(S, BLOCK_M), threads=threads) as block:
            out_tile = T.alloc_shared((BLOCK_M, HEAD_DIM), dtype)
            dout_tile = T.alloc_shared((BLOCK_M, HEAD_DIM), dtype)
            delta = T.alloc_fragment((BLOCK_M,), "float32")
            row_lse = T.alloc_fragment((BLOCK_M,), "float32")
            row_dlse = T.alloc_fragment((BLOCK_M,), "float32")
            is_there = T.alloc_barrier(32)

            tx = T.get_thread_binding()
            tile, head, batch = place(block, T.ceildiv(S, BLOCK_M), Hq)
            rows = slice(tile * BLOCK_M, tile * BLOCK_M + BLOCK_M)
            if tx < 32:
                fetch(out[batch, head, rows, 0:HEAD_DIM], out_tile, is_there)
                fetch(dout[batch, head, rows, 0:HEAD_DIM], dout_tile, is_there)
                T.barrier_arrive(is_there)
            T.copy(lse[batch, head, rows], row_lse)
            if WITH_DLSE:
                T.copy(dlse[batch, head, rows], row_dlse)
            if (tx == 0) & (tile * BLOCK_M < Sq):  # S may have one tile more
                row = batch * Hq + head
                turns[T.cast(row, "int64") * T.ceildiv(Sq, BLOCK_M) + tile] = 0
            if (tx == 0) & (block == 0):
                taken[0] = 0
            T.barrier_wait(is_there, 0)
            row_dot(out_tile, dout_tile, delta)
            for i in T.Parallel(BLOCK_M):
                has_key = row_lse[i] != -plus_inf
                dot = delta[i] - row_dlse[i] if WITH_DLSE else delta[i]
                delta[i] = T.if_then_else(has_key, dot, 0.0)
                row_lse[i] = T.if_then_else(has_key, row_lse[i] * LOG2E, plus_inf)
            T.copy(row_lse, stats[batch, head, 0, rows])
            T.copy(delta, stats[batch, head, 1, rows])

    return attention_bwd_prepare
