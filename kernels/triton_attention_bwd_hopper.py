"""The backward of Triton's fused attention on Hopper, in Gluon: dQ here, dK and dV in
triton_attention_dkdv_hopper.py. At a head dim of 64 dQ comes from the portable kernel, which is the
faster one there.

The maths, the two kernels and what the first writes for the second are those of
triton_attention_bwd.py:

    delta = rowsum(dout * out) - dlse        dv = p^T dout
    ds = p * (dout v^T - delta)              dq = scale * ds k        dk = scale * ds^T q

A program of the first kernel has 128 queries of one head, 64 for each of two warpgroups, and walks
over the keys they see, 128 at a time; triton_hopper_tiles.py says how loads are handed over. In a
warpgroup, a tile:

    tensor cores   S  | dP      | dS K
    exponentials        P  | dS

No atomics: every run gives the same bits.

Limits: head dim 64 or 128, 16-bit inputs, scale > 0, strides and addresses that TMA reads
(`hopper_takes`).
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minitx.kernels.triton_attention_bwd import dq_launch
from minitx.kernels.triton_attention_dkdv_hopper import dkdv_launch_hopper
from minitx.kernels.triton_attention_tiles import bwd_rows, heads_per_wave, rows_pitch
from minitx.kernels.triton_hopper_tiles import (
    LOADER_REGISTERS,
    LOG2E,
    REGISTERS,
    ROWS,
    advance,
    barriers,
    block_and_head,
    descriptors,
    existing_rows,
    key_tiles,
    left_layout,
    load_next,
    load_tile,
    product_layout,
    row_pointers,
    store_rows,
)
from minitx.kernels.triton_launch import Launch

GROUPS = gl.constexpr(2)  # warpgroups that compute
BLOCK_M = gl.constexpr(128)  # queries of a program
BLOCK_N = gl.constexpr(128)  # keys of a tile
STAGES = gl.constexpr(2)  # tiles of keys, and of values


@gluon.jit
def _exponent(lse):
    """What is subtracted from scores * scale * log2(e), as in triton_attention_bwd.py: +inf for a
    row without keys, and rather too large than too small where lse is huge."""
    lse = gl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    return gl.where(gl.abs(lse) > 2.0**22, lse + gl.abs(lse) * 2.0**-21, lse)


@gluon.jit
def _stats(given, first, HAS_DLSE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """exponent and delta [64] of the queries from `first`, which it also stores."""
    pointers, strides, _bars, _tiles, work, sizes, _scales = given
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, exponent_ptr, delta_ptr, _dq_ptr = pointers
    out_strides, dout_strides, dlse_strides, _dq_strides = strides
    b, h, _start_m, _n_bulk, _n_tiles = work
    Hq, Sq, _Skv, pitch = sizes
    LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    queries = first + gl.arange(0, ROWS, layout=LAYOUT)
    row = b.to(gl.int64) * Hq + h
    exists = existing_rows(Sq - first, HEAD_DIM)
    out_rows = row_pointers(out_ptr, out_strides, b, h, first, HEAD_DIM)
    dout_rows = row_pointers(dout_ptr, dout_strides, b, h, first, HEAD_DIM)
    out = gl.load(out_rows, mask=exists, other=0.0)
    dout = gl.load(dout_rows, mask=exists, other=0.0)
    delta = gl.convert_layout(gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1), LAYOUT)
    if HAS_DLSE:
        dlse_ptr += b.to(gl.int64) * dlse_strides[0] + h.to(gl.int64) * dlse_strides[1]
        dlse_offsets = queries.to(gl.int64) * dlse_strides[2]
        delta -= gl.load(dlse_ptr + dlse_offsets, mask=queries < Sq, other=0.0)
    lse = gl.load(lse_ptr + row * Sq + queries, mask=queries < Sq, other=0.0)
    exponent = _exponent(lse)
    gl.store(exponent_ptr + row * pitch + queries, exponent, mask=queries < Sq)
    gl.store(delta_ptr + row * pitch + queries, delta, mask=queries < Sq)
    return exponent, delta


@gluon.jit
def _visible_keys(first, tile, Sq, Skv, IS_CAUSAL: gl.constexpr):
    """Boolean mask [64, BLOCK_N]: may query first + i read key tile * BLOCK_N + j, and does it
    exist?"""
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    queries = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    last_key = queries + (Skv - Sq) if IS_CAUSAL else queries * 0 + (Skv - 1)
    return keys[None, :] <= last_key[:, None]


@gluon.jit
def _issue(left, tiles, stage, HEAD_DIM: gl.constexpr):
    """left [64, HEAD_DIM] times a tile's rows: scores, and dp of dout and values."""
    tile = tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, product_layout(BLOCK_N))
    return warpgroup_mma(left, tile.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _compute_dq(
    INDEX: gl.constexpr, given, IS_CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """exponent, delta and dq of a warpgroup's 64 queries."""
    pointers, strides, bars, tiles, work, sizes, scales = given
    q_full, k_full, k_empty, v_full, v_empty = bars
    q_tiles, dout_tiles, k_tiles, v_tiles = tiles
    dq_ptr = pointers[6]
    b, h, start_m, n_bulk, n_tiles = work
    _Hq, Sq, Skv, _pitch = sizes
    scale, qk_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    first = start_m + INDEX * ROWS
    exponent, delta = _stats(given, first, HAS_DLSE, HEAD_DIM)
    dq = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, product_layout(HEAD_DIM))
    q = q_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    dout = dout_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    mbarrier.wait(q_full.index(INDEX), 0)

    stage = 0
    phase = 0
    for MASKED in gl.static_range(2):  # first the bulk without a mask, then the rest with it
        for i in range(n_bulk * MASKED, n_tiles if MASKED else n_bulk):
            mbarrier.wait(k_full.index(stage), phase)
            next_scores = _issue(q, k_tiles, stage, HEAD_DIM)
            mbarrier.wait(v_full.index(stage), phase)
            next_dp = _issue(dout, v_tiles, stage, HEAD_DIM)
            scores = warpgroup_mma_wait(1, deps=(next_scores,))
            p = gl.exp2(scores * qk_scale - exponent[:, None])
            dp = warpgroup_mma_wait(0, deps=(next_dp,))
            mbarrier.arrive(v_empty.index(stage), count=1)
            ds = p * (dp - delta[:, None])
            if MASKED:
                ds = gl.where(_visible_keys(first, i, Sq, Skv, IS_CAUSAL), ds, 0.0)
            ds = gl.convert_layout(ds, left_layout(HEAD_DIM)).to(DTYPE)
            k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
            next_dq = warpgroup_mma(ds, k, dq, is_async=True)
            dq, ds = warpgroup_mma_wait(0, deps=(next_dq, ds))
            mbarrier.arrive(k_empty.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
    store_rows(dq_ptr, strides[3], b, h, first, dq * scale, Sq - first, HEAD_DIM)


@gluon.jit
def _load_dq(loads, bars, tiles, work, HEAD_DIM: gl.constexpr):
    """One warp's work: q and dout for each warpgroup, then keys and values, tile by tile."""
    q_desc, dout_desc, k_desc, v_desc, GROUP_HEADS = loads
    q_full, k_full, k_empty, v_full, v_empty = bars
    q_tiles, dout_tiles, k_tiles, v_tiles = tiles
    b, h, start_m, _n_bulk, n_tiles = work
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
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
        load_next(k_desc, at, k_tiles, k_full, k_empty, stage, phase, TILE_BYTES)
        load_next(v_desc, at, v_tiles, v_full, v_empty, stage, phase, TILE_BYTES)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["n_heads", "heads_per_wave", "Hq", "Hkv", "Sq", "Skv", "pitch"])
def attention_bwd_dq_hopper(
    q_desc, dout_desc, k_desc, v_desc, out_ptr, lse_ptr, dout_ptr, dlse_ptr,
    exponent_ptr, delta_ptr, dq_ptr, out_strides, dout_strides, dlse_strides, dq_strides,
    scale, qk_scale, n_heads, heads_per_wave, Hq, Hkv, Sq, Skv, pitch,
    IS_CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """What attention_bwd_dkdv reads for each query, and dq, for 128 queries of one head.

    exponent_ptr, delta_ptr: [B, Hq, pitch] float32, of which Sq are written.
    """
    n_blocks = (Sq + BLOCK_M - 1) // BLOCK_M
    block, head = block_and_head(gl.program_id(0), n_blocks, n_heads, heads_per_wave)
    start_m = (n_blocks - 1 - block) * BLOCK_M  # the last queries see most keys: they go first
    n_bulk, n_tiles = key_tiles(start_m, BLOCK_M, Sq, Skv, IS_CAUSAL, BLOCK_N)
    work = (head // Hq, head % Hq, start_m, n_bulk, n_tiles)

    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    tiles = (
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
    )
    bars = (
        barriers(GROUPS, 1),
        barriers(STAGES, 1), barriers(STAGES, GROUPS),
        barriers(STAGES, 1), barriers(STAGES, GROUPS),
    )  # fmt: skip
    fence_async_shared()  # TMA must see them

    pointers = (out_ptr, lse_ptr, dout_ptr, dlse_ptr, exponent_ptr, delta_ptr, dq_ptr)
    strides = (out_strides, dout_strides, dlse_strides, dq_strides)
    sizes = (Hq, Sq, Skv, pitch)
    scales = (scale, qk_scale)
    loads = (q_desc, dout_desc, k_desc, v_desc, Hq // Hkv)
    # Constants stay out of tuples that have a name: there they turn into run-time values.
    given = (pointers, strides, bars, tiles, work, sizes, scales)
    gl.warp_specialize(
        [
            (_compute_dq, (0, given, IS_CAUSAL, HAS_DLSE, HEAD_DIM)),
            (_compute_dq, (1, given, IS_CAUSAL, HAS_DLSE, HEAD_DIM)),
            (_load_dq, (loads, bars, tiles, work, HEAD_DIM)),
        ],
        [4, 1],
        [REGISTERS[2], LOADER_REGISTERS],
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
    rows = bwd_rows(q, pitch)  # of exponents, and of deltas
    launch_dkdv = dkdv_launch_hopper(q, k, is_causal, scale)
    if D == 64:
        launch_portable = dq_launch(dout, dlse, q, k, v, out, is_causal, scale, dq)

        def launches(dout, dlse, q, k, v, out, lse, dq, dk, dv) -> None:
            exponent, delta = rows.make(), rows.make()
            launch_portable(q, k, v, out, lse, dout, dlse, exponent, delta, dq)
            launch_dkdv(q, dout, k, v, exponent, delta, dk, dv)

        return launches
    launch_dq = Launch(
        attention_bwd_dq_hopper, q.device, -(-Sq // BLOCK_M.value) * B * Hq,
        (out.stride(), dout.stride(), (0, 0, 0) if dlse is None else dlse.stride(),
         dq.stride(), scale, scale * LOG2E.value, B * Hq,
         heads_per_wave(2 * Skv * D * k.element_size(), Hq // Hkv), Hq, Hkv, Sq, Skv, pitch),
        describe=descriptors(ROWS.value, ROWS.value, BLOCK_N.value, BLOCK_N.value),
        IS_CAUSAL=is_causal, HAS_DLSE=dlse is not None, HEAD_DIM=D, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip

    def launches_hopper(dout, dlse, q, k, v, out, lse, dq, dk, dv) -> None:
        exponent, delta = rows.make(), rows.make()
        dlse = lse if dlse is None else dlse
        launch_dq(q, dout, k, v, out, lse, dout, dlse, exponent, delta, dq)
        launch_dkdv(q, dout, k, v, exponent, delta, dk, dv)

    return launches_hopper
