"""Builder of the attention backward for Hopper, scheduled by hand: all gradients in one kernel.

The maths, arguments and limits are those of `tilelang_attention_bwd.py`, but scores are made
once: five products where the kernels there make seven. A task is 128 keys of one key head, past
which stream the queries of every query head that reads it, in tiles of 8192 elements:

    s^T = k q^T,  dp^T = v dout^T        [keys, queries], both operands in shared memory
    dv += p^T dout,  dk += ds^T q        p^T and ds^T in registers
    dq(tile) = ds k                      ds^T in shared memory, of both warpgroups

Where there are fewer blocks than tasks they stay, and take one after the other: of the next one the
first queries are there, and its keys on their way, while the sums of the last one are written.
Steps are counted on from task to task, and so are the rounds of buffers.

Who does what. Two warpgroups compute, 64 keys each (`tilelang_attention_bwd_consumer_hopper.py`);
of a third, one warp takes tasks and fetches tiles (`tilelang_attention_bwd_work_hopper.py`), and
three add tiles of dq to memory, every third one each (`tilelang_attention_bwd_adder_hopper.py`): in
turn, that takes longer than a step does. The warpgroups that compute are half a trip of the loop
apart, so that one issues products while the other exponentiates. In a trip, each will

    issue dq of the last tile, of which by now both have shared ds, and s; wait for dq
    put dq down, beside s, and the first one lets the second go; issue dp
    tell dq's adder (at D = 64 before dp); wait for s; exponentiate it, beside dp
    issue dv; wait for dp; make ds, beside dv; issue dk; share ds
    and the second one lets the first go; wait for dv and dk

Nothing is in flight from trip to trip. `tilelang_attention_bwd_order.py` says in which order tasks
and tiles are taken, `tilelang_attention_dq_sum.py` how blocks sum dq.
"""

from typing import Any

from minitx.kernels import tilelang_attention_bwd_trip_hopper as trip
from minitx.kernels import tilelang_attention_bwd_work_hopper as work
from minitx.kernels import tilelang_attention_dq_sum as dq_sums
from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_attention_bwd import stats_tensor
from minitx.kernels.tilelang_attention_bwd_adder_hopper import make_adder
from minitx.kernels.tilelang_attention_bwd_consumer_hopper import make_consumer
from minitx.kernels.tilelang_attention_bwd_trip_hopper import Registers, by_query
from minitx.kernels.tilelang_attention_bwd_work_hopper import (
    ADDERS,
    BLOCK_N,
    DOUT_STAGES,
    Q_STAGES,
    WORKERS,
    Barriers,
    Buffers,
    Shape,
    make_producer,
)
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE, place_in_tile
from minitx.kernels.tilelang_products import make_tensor, sizes
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false


def build_attention_bwd_hopper(
    lang: Language, *, dtype: str, HEAD_DIM: int, IS_CAUSAL: bool
) -> Any:
    """dk and dv [B, Hkv, Skv, D], and dq [B, Hq, Sq, D] but for tiles of queries none of which sees
    a key: those are not written.

    dq_sum [B * Hq * tiles, DQ_TILE] float32, each tile in an order of its own (`place_in_tile`), is
    for the sums. turns [B * Hq * tiles] and taken [1], which counts tasks, are int32 and start as
    zeros; taken goes by its address. blocks: as many as there are tasks, or fewer, which then
    stay. dtype is of 16 bits, HEAD_DIM 64 or 128; the rest as in `build_attention_bwd_dkdv`."""
    import tilelang.language as T

    tensor = make_tensor(lang, dtype)
    B, Hq, Hkv, Sq, Skv, S, tiles = sizes("B", "Hq", "Hkv", "Sq", "Skv", "S", "tiles")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")
    shape = Shape(IS_CAUSAL, HEAD_DIM, B, Hq, Hkv, Sq, Skv)
    BLOCK_M = shape.BLOCK_M
    produce = make_producer(shape)
    add = make_adder(shape)
    consume = make_consumer(shape)

    @T.prim_func
    def attention_bwd_hopper(
        q: tensor("q", B, Hq, Sq),
        k: tensor("k", Bk, Hk, Skv),
        v: tensor("v", Bv, Hv, Skv),
        dout: tensor("dout", B, Hq, Sq),
        stats: stats_tensor(B, Hq, S),
        dq: tensor("dq", B, Hq, Sq),
        dk: tensor("dk", B, Hkv, Skv),
        dv: tensor("dv", B, Hkv, Skv),
        dq_sum: T.Tensor((tiles, DQ_TILE), "float32"),
        turns: T.StridedTensor((tiles,), (1,), "int32"),
        taken: T.int64,
        blocks: T.int32,
        group: T.int32,
        qk_scale: T.float32,
        scale: T.float32,
    ):
        T.annotate_pass_configs(
            {
                "tl.disable_warp_specialized": True,
                "tl.enable_fast_math": True,
                "tl.disable_thread_storage_sync": True,
                "tl.disable_shared_memory_reuse": True,
            }
        )
        with T.Kernel(blocks, threads=WORKERS + 128) as block:
            T.import_source(work.HELPERS + trip.HELPERS + wgmma.HELPERS + dq_sums.HELPERS)
            k_tile = T.alloc_shared((BLOCK_N, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((BLOCK_N, HEAD_DIM), dtype)
            q_tile = T.alloc_shared((Q_STAGES, BLOCK_M, HEAD_DIM), dtype)
            dout_tile = T.alloc_shared((DOUT_STAGES, BLOCK_M, HEAD_DIM), dtype)
            stats_tile = T.alloc_shared((DOUT_STAGES, 2, BLOCK_M), "float32")
            ds_tile = T.alloc_shared((2, BLOCK_N, BLOCK_M), dtype)
            dq_tile = T.alloc_shared((128, 64), "float32")
            dq_rounded = T.alloc_shared((1, 128, 64), dtype)
            task = T.alloc_shared((2, 4), "int32", scope="shared")

            scores = T.alloc_fragment((BLOCK_N, BLOCK_M), "float32")
            dp = T.alloc_fragment((BLOCK_N, BLOCK_M), "float32")
            p = T.alloc_fragment((BLOCK_N, BLOCK_M), dtype)
            ds = T.alloc_fragment((BLOCK_N, BLOCK_M), dtype)
            dq_acc = T.alloc_fragment((128, 64), "float32")
            dq_16 = T.alloc_fragment((128, 64), dtype)
            dk_acc = T.alloc_fragment((BLOCK_N, HEAD_DIM), "float32")
            dv_acc = T.alloc_fragment((BLOCK_N, HEAD_DIM), "float32")
            grad_16 = T.alloc_fragment((BLOCK_N, HEAD_DIM), dtype)
            lse = T.alloc_fragment((BLOCK_M,), "float32")
            delta = T.alloc_fragment((BLOCK_M,), "float32")

            # Once a warp: 8 that compute, or an adder. Thread by thread: the 32 that fetch.
            task_full = T.alloc_barrier([1] * 2)
            task_free = T.alloc_barrier([8 + ADDERS] * 2)
            k_free = T.alloc_barrier([8])
            v_free = T.alloc_barrier([2])  # by warpgroups, of which one thread stores
            q_full = T.alloc_barrier([32] * Q_STAGES)
            q_free = T.alloc_barrier([8] * Q_STAGES)
            dout_full = T.alloc_barrier([32] * DOUT_STAGES)
            dout_free = T.alloc_barrier([8] * DOUT_STAGES)
            dq_free = T.alloc_barrier([1] * 2)
            dq_read = T.alloc_barrier([1] * (2 * ADDERS))
            rounded_read = T.alloc_barrier([1] * (2 * ADDERS))

            tiles_of_16_bits = (k_tile, v_tile, q_tile, dout_tile, ds_tile, dq_rounded)
            products = (scores, dp, p, ds, dq_acc, dq_16, dk_acc, dv_acc, grad_16)
            wgmma.lay_out(tiles_of_16_bits, products)
            T.annotate_layout({lse: by_query(BLOCK_M), delta: by_query(BLOCK_M)})
            T.annotate_layout({dq_tile: T.Layout((128, 64), place_in_tile)})

            streamed = (q_tile, dout_tile, stats_tile)
            buffers = Buffers(task, k_tile, v_tile, *streamed, ds_tile, dq_tile, dq_rounded)
            of_tasks = (task_full, task_free, k_free, v_free)
            of_streamed = (q_full, q_free, dout_full, dout_free)
            barriers = Barriers(*of_tasks, *of_streamed, dq_free, dq_read, rounded_read)
            tx = T.get_thread_binding()
            if tx >= WORKERS:
                T.set_max_nreg(24, 0)
                if tx < WORKERS + 32:
                    tensors = (q, k, v, dout, stats)
                    produce(block, taken, blocks, group, tensors, buffers, barriers)
                else:
                    add(tx, group, dq, dq_sum, turns, buffers, barriers)
            else:
                T.set_max_nreg(240, 1)
                registers = Registers(*products, lse, delta)
                consume(tx, group, qk_scale, scale, dk, dv, buffers, barriers, registers)

    return attention_bwd_hopper
