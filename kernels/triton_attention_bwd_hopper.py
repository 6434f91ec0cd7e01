"""The backward of Triton's fused attention on Hopper: dQ, and dK and dV, in Gluon.

The maths, the two kernels and what the first writes for the second are those of
triton_attention_bwd.py:

    delta = rowsum(dout * out) - dlse        dv = p^T dout
    ds = p * (dout v^T - delta)              dq = scale * ds k        dk = scale * ds^T q

A program has 128 queries (dQ) or 128 keys (dK, dV) of one head, 64 for each of two warpgroups, and
walks over the other side's tiles: 128 keys, or 64 queries, at a time. triton_hopper_tiles.py says
how loads are handed over. In a warpgroup, a tile:

    dQ       tensor cores   S  | dP        | dS K          dK, dV   S | dP       | P^T dO | dS^T Q
             exponentials        P  | dS                                P | dS

Scores are kept transposed, k q^T, for dK and dV, so that p^T and ds^T come out as left operands in
registers. No atomics: every run gives the same bits.

Limits: head dim 128, 16-bit inputs, scale > 0, strides and addresses that TMA reads
(`hopper_takes`).
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minitx.kernels.triton_attention_tiles import bwd_rows, heads_per_wave, rows_pitch
from minitx.kernels.triton_hopper_tiles import (
    GROUPS,
    HEAD_DIM,
    LOG2E,
    REGISTERS,
    ROWS,
    STAGES,
    advance,
    block_and_head,
    descriptors,
    existing_rows,
    key_tiles,
    left_layout,
    load_next,
    load_tile,
    product_layout,
    query_tile_start,
    query_tiles,
    ring_barriers,
    row_pointers,
    store_rows,
    visible_keys,
)
from minitx.kernels.triton_launch import Launch

BLOCK = gl.constexpr(128)  # queries of a program for dQ, keys of one for dK and dV
BLOCK_N = gl.constexpr(128)  # keys of a tile, for dQ
BLOCK_M = ROWS  # queries of a tile, for dK and dV: so one descriptor serves both kernels


@gluon.jit
def _exponent(lse):
    """What is subtracted from scores * scale * log2(e), as in triton_attention_bwd.py: +inf for a
    row without keys, and rather too large than too small where lse is huge."""
    lse = gl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    return gl.where(gl.abs(lse) > 2.0**22, lse + gl.abs(lse) * 2.0**-21, lse)


@gluon.jit
def _compute_dq(
    INDEX: gl.constexpr, given, IS_CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr
):  # fmt: skip
    """exponent, delta and dq of a warpgroup's 64 queries."""
    pointers, strides, bars, tiles, work, sizes, scales = given
    q_full, k_full, k_empty, v_full, v_empty = bars
    q_tiles, dout_tiles, k_tiles, v_tiles = tiles
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, exponent_ptr, delta_ptr, dq_ptr = pointers
    out_strides, dout_strides, dlse_strides, dq_strides = strides
    b, h, start_m, n_bulk, n_tiles = work
    Hq, Sq, Skv, pitch = sizes
    scale, qk_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    first = start_m + INDEX * ROWS
    queries = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    row = b.to(gl.int64) * Hq + h

    exists = existing_rows(Sq - first)
    out = gl.load(row_pointers(out_ptr, out_strides, b, h, first), mask=exists, other=0.0)
    dout = gl.load(row_pointers(dout_ptr, dout_strides, b, h, first), mask=exists, other=0.0)
    delta = gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1)
    delta = gl.convert_layout(delta, gl.SliceLayout(1, SCORES))
    if HAS_DLSE:
        dlse_ptr += b.to(gl.int64) * dlse_strides[0] + h.to(gl.int64) * dlse_strides[1]
        dlse_offsets = queries.to(gl.int64) * dlse_strides[2]
        delta -= gl.load(dlse_ptr + dlse_offsets, mask=queries < Sq, other=0.0)
    lse = gl.load(lse_ptr + row * Sq + queries, mask=queries < Sq, other=0.0)
    exponent = _exponent(lse)
    gl.store(exponent_ptr + row * pitch + queries, exponent, mask=queries < Sq)
    gl.store(delta_ptr + row * pitch + queries, delta, mask=queries < Sq)

    dq = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, product_layout(HEAD_DIM))
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    q = q_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    dout = dout_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    mbarrier.wait(q_full.index(INDEX), 0)
    stage = 0
    phase = 0
    for MASKED in gl.static_range(2):  # first the bulk without a mask, then the rest with it
        for i in range(n_bulk * MASKED, n_tiles if MASKED else n_bulk):
            mbarrier.wait(k_full.index(stage), phase)
            k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
            next_scores = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            v = v_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
            next_dp = warpgroup_mma(dout, v.permute([1, 0]), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(next_scores,))
            p = gl.exp2(scores * qk_scale - exponent[:, None])
            dp = warpgroup_mma_wait(0, deps=(next_dp,))
            mbarrier.arrive(v_empty.index(stage), count=1)
            ds = p * (dp - delta[:, None])
            if MASKED:
                visible = visible_keys(queries, i, Sq, Skv, IS_CAUSAL, BLOCK_N, SCORES)
                ds = gl.where(visible, ds, 0.0)
            ds = gl.convert_layout(ds, left_layout()).to(DTYPE)
            next_dq = warpgroup_mma(ds, k, dq, is_async=True)
            dq, ds = warpgroup_mma_wait(0, deps=(next_dq, ds))
            mbarrier.arrive(k_empty.index(stage), count=1)
            stage, phase = advance(stage, phase)
    store_rows(dq_ptr, dq_strides, b, h, first, dq * scale, Sq - first)


@gluon.jit
def _load_dq(q_desc, dout_desc, k_desc, v_desc, bars, tiles, work, GROUP_HEADS):
    """One warp's work: q and dout for each warpgroup, then keys and values, tile by tile."""
    q_full, k_full, k_empty, v_full, v_empty = bars
    q_tiles, dout_tiles, k_tiles, v_tiles = tiles
    b, h, start_m, _n_bulk, n_tiles = work
    kv_h = h // GROUP_HEADS
    for g in gl.static_range(GROUPS):
        bar = q_full.index(g)
        mbarrier.expect(bar, 2 * ROWS * HEAD_DIM * 2)
        at = [b, h, start_m + g * ROWS, 0]
        load_tile(q_desc, at, bar, q_tiles.index(g))
        load_tile(dout_desc, at, bar, dout_tiles.index(g))
    stage = 0
    phase = 1  # every stage is empty at first
    for i in range(n_tiles):
        at = [b, kv_h, i * BLOCK_N, 0]
        load_next(k_desc, at, k_tiles, k_full, k_empty, stage, phase, BLOCK_N)
        load_next(v_desc, at, v_tiles, v_full, v_empty, stage, phase, BLOCK_N)
        stage, phase = advance(stage, phase)


@gluon.jit(do_not_specialize=["n_heads", "heads_per_wave", "Sq", "Skv"])
def attention_bwd_dq_hopper(
    q_desc, dout_desc, k_desc, v_desc, out_ptr, lse_ptr, dout_ptr, dlse_ptr,
    exponent_ptr, delta_ptr, dq_ptr, out_strides, dout_strides, dlse_strides, dq_strides,
    scale, qk_scale, n_heads, heads_per_wave, Hq, Hkv, Sq, Skv, pitch,
    IS_CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr,
):  # fmt: skip
    """What attention_bwd_dkdv reads for each query, and dq, for 128 queries of one head.

    exponent_ptr, delta_ptr: [B, Hq, pitch] float32, of which Sq are written.
    """
    n_blocks = (Sq + BLOCK - 1) // BLOCK
    block, head = block_and_head(n_blocks, n_heads, heads_per_wave)
    start_m = (n_blocks - 1 - block) * BLOCK  # the last queries see most keys: they go first
    n_bulk, n_tiles = key_tiles(start_m, Sq, Skv, IS_CAUSAL, BLOCK, BLOCK_N)
    work = (head // Hq, head % Hq, start_m, n_bulk, n_tiles)

    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    tiles = (
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
    )
    bars = ring_barriers()

    pointers = (out_ptr, lse_ptr, dout_ptr, dlse_ptr, exponent_ptr, delta_ptr, dq_ptr)
    strides = (out_strides, dout_strides, dlse_strides, dq_strides)
    sizes = (Hq, Sq, Skv, pitch)
    scales = (scale, qk_scale)
    # Constants stay out of tuples that have a name: there they turn into run-time values.
    given = (pointers, strides, bars, tiles, work, sizes, scales)
    gl.warp_specialize(
        [
            (_compute_dq, (0, given, IS_CAUSAL, HAS_DLSE)),
            (_compute_dq, (1, given, IS_CAUSAL, HAS_DLSE)),
            (_load_dq, (q_desc, dout_desc, k_desc, v_desc, bars, tiles, work, Hq // Hkv)),
        ],
        [4, 1],
        REGISTERS,
    )


@gluon.jit
def _compute_dkdv(
    INDEX: gl.constexpr, given, IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """dk and dv of a warpgroup's 64 keys."""
    pointers, strides, bars, tiles, work, sizes, scales = given
    k_full, q_full, q_empty, dout_full, dout_empty = bars
    k_tiles, v_tiles, q_tiles, dout_tiles = tiles
    exponent_ptr, delta_ptr, dk_ptr, dv_ptr = pointers
    dk_strides, dv_strides = strides
    b, kv_h, start_n, first, bulk_start, bulk_end, n_bulk, n_masked = work
    Hq, Sq, Skv, pitch = sizes
    scale, qk_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    OUT: gl.constexpr = product_layout(HEAD_DIM)
    first_key = start_n + INDEX * ROWS
    keys = first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    dk = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, OUT)
    dv = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, OUT)
    zero = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, SCORES)
    k = k_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    v = v_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    mbarrier.wait(k_full.index(INDEX), 0)
    stage = 0
    phase = 0
    for MASKED in gl.static_range(2):
        n_tiles = n_masked if MASKED else n_bulk
        for g in range(GROUP):
            row = (b.to(gl.int64) * Hq + kv_h * GROUP + g) * pitch
            for i in range(n_tiles):
                start_m = query_tile_start(i, first, bulk_start, bulk_end, MASKED, BLOCK_M)
                # Rows start 64 bytes apart, so that two floats are one load. Past Sq these read
                # what may be there: the mask undoes it.
                at = gl.multiple_of(row + start_m, 16)
                exponent = gl.load(exponent_ptr + at + columns)  # [BLOCK_M]
                delta = gl.load(delta_ptr + at + columns)  # the same
                mbarrier.wait(q_full.index(stage), phase)
                q = q_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                next_scores = warpgroup_mma(
                    k, q.permute([1, 0]), zero, use_acc=False, is_async=True
                )
                mbarrier.wait(dout_full.index(stage), phase)
                dout = dout_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                next_dp = warpgroup_mma(v, dout.permute([1, 0]), zero, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(next_scores,))  # [64, BLOCK_M]
                p = gl.exp2(scores * qk_scale - exponent[None, :])
                if MASKED:
                    queries = start_m + columns
                    # A query that does not exist sees no key, as if it were long before.
                    last_key = queries + (Skv - Sq) if IS_CAUSAL else queries * 0 + Skv
                    last_key = gl.where(queries < Sq, last_key, -1)
                    p = gl.where(keys[:, None] <= last_key[None, :], p, 0.0)
                p_left = gl.convert_layout(p, left_layout()).to(DTYPE)
                next_dv = warpgroup_mma(p_left, dout, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(next_dp,))
                ds = p * (dp - delta[None, :])
                if MASKED:  # delta may be NaN. p tells what the mask told, and is at hand.
                    ds = gl.where(p == 0.0, 0.0, ds)
                ds = gl.convert_layout(ds, left_layout()).to(DTYPE)
                next_dk = warpgroup_mma(ds, q, dk, is_async=True)
                dv, p_left = warpgroup_mma_wait(1, deps=(next_dv, p_left))
                mbarrier.arrive(dout_empty.index(stage), count=1)
                dk, ds = warpgroup_mma_wait(0, deps=(next_dk, ds))
                mbarrier.arrive(q_empty.index(stage), count=1)
                stage, phase = advance(stage, phase)
    store_rows(dk_ptr, dk_strides, b, kv_h, first_key, dk * scale, Skv - first_key)
    store_rows(dv_ptr, dv_strides, b, kv_h, first_key, dv, Skv - first_key)


@gluon.jit
def _load_dkdv(q_desc, dout_desc, k_desc, v_desc, bars, tiles, work, GROUP: gl.constexpr):
    """One warp's work: k and v for each warpgroup, then q and dout, tile by tile of head after
    head."""
    k_full, q_full, q_empty, dout_full, dout_empty = bars
    k_tiles, v_tiles, q_tiles, dout_tiles = tiles
    b, kv_h, start_n, first, bulk_start, bulk_end, n_bulk, n_masked = work
    for g in gl.static_range(GROUPS):
        bar = k_full.index(g)
        mbarrier.expect(bar, 2 * ROWS * HEAD_DIM * 2)
        at = [b, kv_h, start_n + g * ROWS, 0]
        load_tile(k_desc, at, bar, k_tiles.index(g))
        load_tile(v_desc, at, bar, v_tiles.index(g))
    stage = 0
    phase = 1  # every stage is empty at first
    for MASKED in gl.static_range(2):
        n_tiles = n_masked if MASKED else n_bulk
        for g in range(GROUP):
            for i in range(n_tiles):
                start_m = query_tile_start(i, first, bulk_start, bulk_end, MASKED, BLOCK_M)
                at = [b, kv_h * GROUP + g, start_m, 0]
                load_next(q_desc, at, q_tiles, q_full, q_empty, stage, phase, BLOCK_M)
                load_next(dout_desc, at, dout_tiles, dout_full, dout_empty, stage, phase, BLOCK_M)
                stage, phase = advance(stage, phase)


@gluon.jit(do_not_specialize=["n_heads", "heads_per_wave", "Sq", "Skv"])
def attention_bwd_dkdv_hopper(
    q_desc, dout_desc, k_desc, v_desc, exponent_ptr, delta_ptr, dk_ptr, dv_ptr,
    dk_strides, dv_strides, scale, qk_scale, n_heads, heads_per_wave, Hq, Sq, Skv, pitch,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """dk and dv of 128 keys of one key head, summed over the query heads that share it."""
    n_blocks = (Skv + BLOCK - 1) // BLOCK
    block, head = block_and_head(n_blocks, n_heads, heads_per_wave)
    start_n = block * BLOCK  # the first keys are seen by most queries: they go first
    # Masked tiles reach from `first` to the bulk, and there may be a last one after it.
    first, bulk_start, bulk_end = query_tiles(start_n, Sq, Skv, IS_CAUSAL, BLOCK_M, BLOCK)
    n_bulk = (bulk_end - bulk_start) // BLOCK_M
    n_masked = (bulk_start - first) // BLOCK_M + gl.where(bulk_end < Sq, 1, 0)
    Hkv = Hq // GROUP
    work = (head // Hkv, head % Hkv, start_n, first, bulk_start, bulk_end, n_bulk, n_masked)

    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    tiles = (
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], SHARED),
    )
    bars = ring_barriers()

    pointers = (exponent_ptr, delta_ptr, dk_ptr, dv_ptr)
    strides = (dk_strides, dv_strides)
    sizes = (Hq, Sq, Skv, pitch)
    scales = (scale, qk_scale)
    given = (pointers, strides, bars, tiles, work, sizes, scales)
    gl.warp_specialize(
        [
            (_compute_dkdv, (0, given, IS_CAUSAL, GROUP)),
            (_compute_dkdv, (1, given, IS_CAUSAL, GROUP)),
            (_load_dkdv, (q_desc, dout_desc, k_desc, v_desc, bars, tiles, work, GROUP)),
        ],
        [4, 1],
        REGISTERS,
    )


def prepare_bwd_hopper(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    scale: float,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> Callable[..., None]:
    """`prepare_bwd` for what `hopper_takes`, all gradients needed."""
    (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
    pitch = rows_pitch(Sq)
    dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
    qk_scale, row_bytes = scale * LOG2E.value, 2 * D * q.element_size()
    launch_dq = Launch(
        attention_bwd_dq_hopper, q.device, -(-Sq // BLOCK.value) * B * Hq,
        (out.stride(), dout.stride(), dlse_strides, dq.stride(),
         scale, qk_scale, B * Hq, heads_per_wave(Skv * row_bytes, Hq // Hkv),
         Hq, Hkv, Sq, Skv, pitch),
        describe=descriptors(ROWS.value, ROWS.value, BLOCK_N.value, BLOCK_N.value),
        IS_CAUSAL=is_causal, HAS_DLSE=dlse is not None, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    launch_dkdv = Launch(
        attention_bwd_dkdv_hopper, q.device, -(-Skv // BLOCK.value) * B * Hkv,
        (dk.stride(), dv.stride(), scale, qk_scale,
         B * Hkv, heads_per_wave(Sq * row_bytes * (Hq // Hkv)), Hq, Sq, Skv, pitch),
        describe=descriptors(ROWS.value, ROWS.value, ROWS.value, ROWS.value),
        IS_CAUSAL=is_causal, GROUP=Hq // Hkv, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip

    def launches(dout, dlse, q, k, v, out, lse, dq, dk, dv) -> None:
        exponent, delta = bwd_rows(q, pitch)
        dlse = lse if dlse is None else dlse
        launch_dq(q, dout, k, v, out, lse, dout, dlse, exponent, delta, dq)
        launch_dkdv(q, dout, k, v, exponent, delta, dk, dv)

    return launches
