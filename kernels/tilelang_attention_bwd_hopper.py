"""Builders of the attention backward for Hopper, scheduled by hand: all gradients in one kernel.

The maths, arguments and limits are those of `tilelang_attention_bwd.py`, but scores are made
once: five products where the kernels there make seven. A block owns 128 keys of one key head and
streams past them the queries of every query head that reads it, in tiles of 8192 elements:

    s^T = k q^T,  dp^T = v dout^T        [keys, queries], both operands in shared memory
    dv += p^T dout                       p^T in registers
    dk += ds^T q,  dq(tile) = ds k       ds^T in shared memory

Who does what. Two warpgroups compute, 64 keys each. Of a third, one warp fetches tiles and two
threads add tiles of dq to memory, each every other one: in turn, that takes longer than a step
does. A trip of the loop issues products ahead of what is computed, to keep tensor cores busy:

    issue dq and dk of the last tile, and s between them; wait for dq and hand it over
    issue dp; wait for s; exponentiate it, beside dk and dp
    issue dv; wait for dp; make ds and share it, beside dv

dq is a sum over the blocks of a key head. It gathers in dq_sum, float32 (twice the size of q), and
the last to add to a tile makes dq of it (`tilelang_attention_dq_sum.py`).
"""

from typing import Any

from minitx.kernels import tilelang_attention_dq_sum as dq_sums
from minitx.kernels import tilelang_wgmma as wgmma
from minitx.kernels.tilelang_attention_bwd import at_most_0, stats_tensor
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE, place_in_tile
from minitx.kernels.tilelang_products import make_tensor, sizes
from minitx.kernels.tilelang_runtime import Language
from minitx.kernels.tilelang_wgmma import Operand, own_rows

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false

BLOCK_N = 128  # keys
Q_STAGES, DOUT_STAGES = 3, 2  # in flight; q is read once more, by the next trip's dk
WORKERS = 256  # threads that compute
MEET = 8  # a named barrier of theirs; TileLang counts its own from 1
ADDERS = 2  # threads that add tiles of dq to memory, in warps of their own
L2_BYTES = 2**25  # of queries, their gradients and dq_sum for blocks that work at once to share

FORGET = r"""
template <int count>
__device__ __forceinline__ void forget(float *registers) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "=f"(registers[i]));
}
"""


def build_attention_bwd_hopper(
    lang: Language, *, dtype: str, HEAD_DIM: int, IS_CAUSAL: bool
) -> Any:
    """dk and dv [B, Hkv, Skv, D], and dq [B, Hq, Sq, D] but for tiles of queries none of which sees
    a key: those are not written.

    dq_sum [B * Hq * tiles, DQ_TILE] float32, each tile in an order of its own (`place_in_tile`), is
    for the sums. turns [B * Hq * tiles] int32 starts as zeros. dtype is of 16 bits, HEAD_DIM 64 or
    128; the rest as in `build_attention_bwd_dkdv`."""
    import tilelang.language as T

    BLOCK_M = DQ_TILE // HEAD_DIM
    tensor = make_tensor(lang, dtype)
    B, Hq, Hkv, Sq, Skv, S, tiles = sizes("B", "Hq", "Hkv", "Sq", "Skv", "S", "tiles")
    Bk, Hk, Bv, Hv = sizes("Bk", "Hk", "Bv", "Hv")
    Q_BYTES, DS_BYTES = DQ_TILE * 2, BLOCK_N * BLOCK_M * 2
    score_regs, acc_regs, dq_regs = BLOCK_M // 2, HEAD_DIM // 2, DQ_TILE // WORKERS

    def first_tile(n_start, diagonal):
        """The first tile of queries with one that reads keys from n_start on."""
        return T.truncdiv(T.max(n_start + 1 - diagonal, 0), BLOCK_M) if IS_CAUSAL else 0

    def first_seen(tile, num_n, num_m, diagonal):
        """The first tile of queries that sees keys of a later tile, too."""
        first = first_tile((tile + 1) * BLOCK_N, diagonal)
        return T.if_then_else(tile + 1 == num_n, num_m, first)

    def tile_after(m, num_m, first_m):
        """The next step's tile of queries; after a head's last one the next head's first."""
        return T.if_then_else(m + 1 == num_m, first_m, m + 1)

    def row_step(m, num_m, first_m):
        """How far its row of dq_sum is from that of m."""
        return T.if_then_else(m + 1 == num_m, first_m + 1, 1)

    # What the order of turns decides: of two blocks, that of the later keys adds first.
    def has_sum(tile, m, seen_m):
        """Whether another block adds to tile m of queries before this one does."""
        return m >= seen_m

    def is_last(tile, m, seen_m):
        """Whether none adds to it after this one."""
        return tile == 0

    def forget(tile, count):
        """Says that a tile's old values are not used: a product that clears it reads it all the
        same, as far as the compiler knows, and it would hold its registers from trip to trip."""
        return T.evaluate(T.call_extern("void", f"forget<{count}>", tile.data))  # type: ignore[attr-defined]

    def fetch(region, tiles, barriers, stage=None):
        """By the threads of a warp, who arrive at the barrier once all is asked for."""
        tile = tiles if stage is None else tiles[stage, :, :]
        barrier = barriers if stage is None else barriers[stage]
        return T.tma_copy(region, tile, barrier=barrier, leader_scope_threads=32)

    @T.macro
    def await_product(pending, tile, registers):
        """All products but the last `pending` issued have ended, and tile's is among them."""
        T.wait_wgmma(pending)
        T.warpgroup_fence_operand(tile, num_regs=registers)

    @T.macro
    def release(barriers, index):
        if T.shuffle_elect(32):
            T.barrier_arrive(barriers[index])

    @T.macro
    def exponentiate(scores, p, stats_tile, stage, qk_scale, m_start, n_start, diagonal):
        """scores to probabilities, in 16 bits to p."""
        for j, i in T.Parallel(BLOCK_N, BLOCK_M):
            scores[j, i] = T.exp2(at_most_0(scores[j, i] * qk_scale - stats_tile[stage, 0, i]))
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
    def differentiate(scores, dp, stats_tile, stage, ds, ds_tile, buffer):
        """ds to shared memory, for both warpgroups."""
        for j, i in T.Parallel(BLOCK_N, BLOCK_M):
            dp[j, i] = scores[j, i] * (dp[j, i] - stats_tile[stage, 1, i])
        T.copy(dp, ds)
        wgmma.store_own_rows(ds, ds_tile, buffer)
        T.fence_proxy_async()
        T.sync_threads(MEET, WORKERS)

    @T.macro
    def issue_scores(k_tile, q_tile, stage, scores, warpgroup):
        """s^T, and dp^T of v and dout."""
        forget(scores, score_regs)
        keys = Operand(k_tile, True, own_rows(warpgroup))
        queries = Operand(q_tile, True, stage * Q_BYTES)
        wgmma.issue_product(scores, keys, queries, HEAD_DIM, clear=True)

    @T.macro
    def issue_dq(ds_tile, buffer, k_tile, dq_acc, warpgroup):
        """64 queries of 128 a warpgroup, or 64 columns."""
        forget(dq_acc, dq_regs)
        first = wgmma.own_columns(warpgroup, ds_tile)  # as many bytes as of k_tile
        ds = Operand(ds_tile, False, buffer * DS_BYTES + (first if BLOCK_M == 128 else 0))
        keys = Operand(k_tile, False, first if BLOCK_M == 64 else 0)
        wgmma.issue_product(dq_acc, ds, keys, BLOCK_N, clear=True)

    def add_dk(ds_tile, buffer, q_tile, stage, dk_acc, warpgroup):
        ds = Operand(ds_tile, True, buffer * DS_BYTES + own_rows(warpgroup))
        return wgmma.issue_product(dk_acc, ds, Operand(q_tile, False, stage * Q_BYTES), BLOCK_M)

    def add_dv(p, dout_tile, stage, dv_acc):
        return wgmma.issue_product(dv_acc, p, Operand(dout_tile, False, stage * Q_BYTES), BLOCK_M)

    @T.macro
    def hand_over(dq_acc, dq_tile, dq_rounded, dq_full, dq_free, step, adds_to, ends, scale):
        """dq_acc to the step's adder; if this ends a sum, dq."""
        T.barrier_wait(dq_free, step % 2)
        if ends:
            if adds_to:
                for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                    dq_acc[i, d] += dq_tile[i, d]
            for i, d in T.Parallel(BLOCK_M, HEAD_DIM):
                dq_acc[i, d] *= scale
            T.copy(dq_acc, dq_rounded)
        else:
            T.copy(dq_acc, dq_tile)
        T.fence_proxy_async()
        T.barrier_arrive(dq_full[step % ADDERS])

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
        num_n = T.ceildiv(Skv, BLOCK_N)
        num_m = T.ceildiv(Sq, BLOCK_M)
        with T.Kernel(B * Hkv * num_n, threads=WORKERS + 128) as block:
            T.import_source(FORGET + wgmma.HELPERS + dq_sums.HELPERS)
            k_tile = T.alloc_shared((BLOCK_N, HEAD_DIM), dtype)
            v_tile = T.alloc_shared((BLOCK_N, HEAD_DIM), dtype)
            q_tile = T.alloc_shared((Q_STAGES, BLOCK_M, HEAD_DIM), dtype)
            dout_tile = T.alloc_shared((DOUT_STAGES, BLOCK_M, HEAD_DIM), dtype)
            stats_tile = T.alloc_shared((DOUT_STAGES, 2, BLOCK_M), "float32")
            ds_tile = T.alloc_shared((2, BLOCK_N, BLOCK_M), dtype)
            dq_tile = T.alloc_shared((BLOCK_M, HEAD_DIM), "float32")
            dq_rounded = T.alloc_shared((BLOCK_M, HEAD_DIM), dtype)
            scores = T.alloc_fragment((BLOCK_N, BLOCK_M), "float32")
            dp = T.alloc_fragment((BLOCK_N, BLOCK_M), "float32")
            p = T.alloc_fragment((BLOCK_N, BLOCK_M), dtype)
            ds = T.alloc_fragment((BLOCK_N, BLOCK_M), dtype)
            dq_acc = T.alloc_fragment((BLOCK_M, HEAD_DIM), "float32")
            dk_acc = T.alloc_fragment((BLOCK_N, HEAD_DIM), "float32")
            dv_acc = T.alloc_fragment((BLOCK_N, HEAD_DIM), "float32")
            k_full = T.alloc_barrier(32)
            v_full = T.alloc_barrier(32)
            q_full = T.alloc_barrier([32] * Q_STAGES)
            q_free = T.alloc_barrier([8] * Q_STAGES)
            dout_full = T.alloc_barrier([32] * DOUT_STAGES)
            dout_free = T.alloc_barrier([8] * DOUT_STAGES)
            dq_full = T.alloc_barrier([WORKERS] * ADDERS)
            dq_free = T.alloc_barrier(1)
            tiles_of_16_bits = (k_tile, v_tile, q_tile, dout_tile, ds_tile, dq_rounded)
            wgmma.lay_out(tiles_of_16_bits, (scores, dp, p, ds, dq_acc, dk_acc, dv_acc))
            T.annotate_layout({dq_tile: T.Layout((BLOCK_M, HEAD_DIM), place_in_tile)})

            dq_tiles = (dq_tile, dq_rounded, dq_full, dq_free)

            tx = T.get_thread_binding()
            key_tile = locate(block, num_n, B * Hkv, Sq, HEAD_DIM)
            # Variables: an expression would be computed anew wherever it is read.
            tile = T.alloc_var("int32", init=key_tile[0])
            kv_head = T.alloc_var("int32", init=T.truncmod(key_tile[1], Hkv))
            batch = T.alloc_var("int32", init=T.truncdiv(key_tile[1], Hkv))
            n_start = tile * BLOCK_N
            keys = slice(n_start, n_start + BLOCK_N)
            diagonal = Skv - Sq + 1  # query i reads keys below i + diagonal
            first_m = first_tile(n_start, diagonal)
            trips = num_m - first_m  # one at least: the last query reads every key
            steps = group * trips
            seen_m = T.alloc_var("int32", init=first_seen(tile, num_n, num_m, diagonal))
            first_row = (batch * Hq + kv_head * group) * num_m

            if tx >= WORKERS:
                T.set_max_nreg(24, 0)
                if tx < WORKERS + 32:
                    k_batch, k_head = T.min(batch, Bk - 1), T.min(kv_head, Hk - 1)
                    v_batch, v_head = T.min(batch, Bv - 1), T.min(kv_head, Hv - 1)
                    fetch(k[k_batch, k_head, keys, 0:HEAD_DIM], k_tile, k_full)
                    T.barrier_arrive(k_full)
                    for step in T.serial(steps):
                        head = kv_head * group + T.truncdiv(step, trips)
                        m_start = (first_m + T.truncmod(step, trips)) * BLOCK_M
                        queries = slice(m_start, m_start + BLOCK_M)
                        stage = step % Q_STAGES
                        T.barrier_wait(q_free[stage], 1 - step // Q_STAGES % 2)
                        fetch(q[batch, head, queries, 0:HEAD_DIM], q_tile, q_full, stage)
                        T.barrier_arrive(q_full[stage])
                        if step == 0:
                            fetch(v[v_batch, v_head, keys, 0:HEAD_DIM], v_tile, v_full)
                            T.barrier_arrive(v_full)
                        other = step % DOUT_STAGES
                        T.barrier_wait(dout_free[other], 1 - step // DOUT_STAGES % 2)
                        fetch(dout[batch, head, queries, 0:HEAD_DIM], dout_tile, dout_full, other)
                        fetch(stats[batch, head, 0:2, queries], stats_tile, dout_full, other)
                        T.barrier_arrive(dout_full[other])
                elif tx < WORKERS + 32 + 32 * ADDERS:
                    adder = T.alloc_var("int32", init=T.truncdiv(tx - WORKERS, 32) - 1)
                    # A step's tile of queries, and its row of dq_sum; counted, not divided.
                    m = T.alloc_var("int32", init=T.if_then_else(adder == 0, first_m, num_m - 1))
                    row = T.alloc_var("int32", init=first_row + m - adder * num_m)
                    for turn in T.serial(T.truncdiv(steps + adder + ADDERS - 1, ADDERS)):
                        step = turn * ADDERS - adder  # from -1 on: that lets the first one in
                        if step >= 0:
                            if has_sum(tile, m, seen_m) & (not is_last(tile, m, seen_m)):
                                dq_sums.wait_turn(turns, row, num_n - 1 - tile)
                            # Its own: of a shared one it could take another's phase for its.
                            T.barrier_wait(dq_full[adder], (turn - adder) % 2)
                            if is_last(tile, m, seen_m):
                                head = T.truncdiv(row, num_m) - batch * Hq
                                queries = slice(m * BLOCK_M, m * BLOCK_M + BLOCK_M)
                                to = dq[batch, head, queries, 0:HEAD_DIM]
                                T.tma_copy(dq_rounded, to, leader_scope_threads=32)
                            elif T.shuffle_elect(32):
                                if has_sum(tile, m, seen_m):
                                    dq_sums.add(dq_tile, dq_sum, row)
                                else:
                                    dq_sums.store(dq_tile, dq_sum, row)
                                T.tma_store_arrive()
                            T.tma_store_wait(0)  # the tile has been read
                        next_row = T.alloc_var("int32", init=row + row_step(m, num_m, first_m))
                        next_m = T.alloc_var("int32", init=tile_after(m, num_m, first_m))
                        ends = is_last(tile, next_m, seen_m) & (step + 1 < steps)
                        if ends & has_sum(tile, next_m, seen_m):
                            dq_sums.wait_turn(turns, next_row, num_n - 1 - tile)
                            if T.shuffle_elect(32):
                                dq_sums.load(dq_sum, next_row, dq_tile, dq_free)
                        release(dq_free, 0)
                        if (step >= 0) & (not is_last(tile, m, seen_m)):
                            T.tma_store_wait(0, False)  # and dq_sum written
                            if T.shuffle_elect(32):
                                dq_sums.end_turn(turns, row, num_n - tile)
                        row = next_row + row_step(next_m, num_m, first_m)
                        m = tile_after(next_m, num_m, first_m)
            else:
                T.set_max_nreg(240, 1)
                warpgroup = T.alloc_var("int32", init=wgmma.warpgroup_of(tx))
                T.fill(dk_acc, 0)
                T.fill(dv_acc, 0)
                T.barrier_wait(k_full, 0)
                T.barrier_wait(q_full[0], 0)
                issue_scores(k_tile, q_tile, 0, scores, warpgroup)
                T.barrier_wait(v_full, 0)
                T.barrier_wait(dout_full[0], 0)
                issue_scores(v_tile, dout_tile, 0, dp, warpgroup)
                await_product(1, scores, score_regs)
                m_start = T.alloc_var("int32", init=first_m * BLOCK_M)  # counted, not divided
                exponentiate(scores, p, stats_tile, 0, qk_scale, m_start, n_start, diagonal)
                add_dv(p, dout_tile, 0, dv_acc)
                await_product(1, dp, score_regs)
                differentiate(scores, dp, stats_tile, 0, ds, ds_tile, 0)
                await_product(0, dv_acc, acc_regs)
                release(dout_free, 0)
                for step in T.serial(1, steps):
                    stage = step % Q_STAGES
                    last = (step - 1) % Q_STAGES
                    other = step % DOUT_STAGES
                    issue_dq(ds_tile, (step - 1) % 2, k_tile, dq_acc, warpgroup)
                    T.barrier_wait(q_full[stage], step // Q_STAGES % 2)
                    issue_scores(k_tile, q_tile, stage, scores, warpgroup)
                    add_dk(ds_tile, (step - 1) % 2, q_tile, last, dk_acc, warpgroup)
                    await_product(2, dq_acc, dq_regs)
                    order = (tile, T.truncdiv(m_start, BLOCK_M), seen_m)
                    hand_over(dq_acc, *dq_tiles, step - 1, has_sum(*order), is_last(*order), scale)
                    ends_head = m_start == (num_m - 1) * BLOCK_M
                    m_start = T.if_then_else(ends_head, first_m * BLOCK_M, m_start + BLOCK_M)
                    T.barrier_wait(dout_full[other], step // DOUT_STAGES % 2)
                    issue_scores(v_tile, dout_tile, other, dp, warpgroup)
                    await_product(2, scores, score_regs)
                    exponentiate(scores, p, stats_tile, other, qk_scale, m_start, n_start, diagonal)
                    add_dv(p, dout_tile, other, dv_acc)
                    await_product(1, dp, score_regs)
                    T.warpgroup_fence_operand(dk_acc, num_regs=acc_regs)
                    release(q_free, last)
                    differentiate(scores, dp, stats_tile, other, ds, ds_tile, step % 2)
                    # Nothing crosses the end of a trip. dv could, and gains nothing by it.
                    await_product(0, dv_acc, acc_regs)
                    release(dout_free, other)
                issue_dq(ds_tile, (steps - 1) % 2, k_tile, dq_acc, warpgroup)
                add_dk(ds_tile, (steps - 1) % 2, q_tile, (steps - 1) % Q_STAGES, dk_acc, warpgroup)
                await_product(1, dq_acc, dq_regs)
                order = (tile, T.truncdiv(m_start, BLOCK_M), seen_m)
                hand_over(dq_acc, *dq_tiles, steps - 1, has_sum(*order), is_last(*order), scale)
                await_product(0, dk_acc, acc_regs)
                T.sync_threads(MEET, WORKERS)  # the other's dq read these keys too
                for j, d in T.Parallel(BLOCK_N, HEAD_DIM):
                    dk_acc[j, d] *= scale
                T.copy(dk_acc, k_tile)
                T.copy(dv_acc, v_tile)
                T.fence_proxy_async()
                T.sync_threads(MEET, WORKERS)
                T.copy(k_tile, dk[batch, kv_head, keys, 0:HEAD_DIM])
                T.copy(v_tile, dv[batch, kv_head, keys, 0:HEAD_DIM])

    return attention_bwd_hopper


def locate(block: Any, num_n: Any, num_heads: Any, Sq: Any, HEAD_DIM: int) -> tuple[Any, Any]:
    """(tile of keys, key head of all batches) of a block: heads whose tiles of queries fit in L2
    go together, and of a head the last keys first."""
    import tilelang.language as T

    width = T.max(T.truncdiv(L2_BYTES // (8 * HEAD_DIM), Sq), 1)
    width = T.min(width, num_heads)  # or width * num_n might not fit in 32 bits
    first = T.truncdiv(block, width * num_n) * width
    together = T.min(width, num_heads - first)
    rest = T.truncmod(block, width * num_n)
    return num_n - 1 - T.truncdiv(rest, together), first + T.truncmod(rest, together)
