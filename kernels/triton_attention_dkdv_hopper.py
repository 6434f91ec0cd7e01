"""The backward of Triton's fused attention on Hopper, in Gluon: dK and dV, by blocks of keys.

The maths is that of triton_attention_bwd.py; exponent and delta of each query come from the kernel
that makes dQ. A program has 128 keys of one key head, 64 for each of two warpgroups, and walks over
the queries that see them, 64 at a time, of head after head of those that share the key head. Scores
are kept transposed, k q^T, so that p^T and ds^T come out as left operands in registers; the last
tile's ds^T is kept for the next trip, so that no product waits for it:

    tensor cores   S1, dS0^T Q0 | dP1, P1^T dO1 | S2, dS1^T Q1 | ...
    exponentials      | P1            | dS1        | P2

No atomics: every run gives the same bits. Exponent and delta come with the queries and with dout,
by TMA too. A warpgroup passes over tiles of queries that see none of its own keys. At a head dim of
64 dP is issued with the other two: there are registers for it.

Limits: head dim 64 or 128, 16-bit inputs, scale > 0, strides and addresses that TMA reads
(`hopper_takes`).
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minitx.kernels.triton_attention_tiles import heads_per_wave, rows_pitch
from minitx.kernels.triton_hopper_tiles import (
    FLOATS_LAYOUT,
    LOADER_REGISTERS,
    LOG2E,
    REGISTERS,
    ROWS,
    advance,
    barriers,
    block_and_head,
    columns_and_lanes,
    descriptor,
    floats_descriptor,
    keep_up_to,
    left_layout,
    load_tile,
    packed,
    pass_over,
    product_layout,
    store_tile,
    unpacked,
)
from minitx.kernels.triton_launch import Launch

GROUPS = gl.constexpr(2)  # warpgroups that compute
BLOCK_N = gl.constexpr(128)  # keys of a program
BLOCK_M = gl.constexpr(64)  # queries of a tile
STAGES = gl.constexpr(3)  # tiles of queries; dk reads each of them once more, a trip later


@gluon.jit
def _issue(left, tiles, stage, HEAD_DIM: gl.constexpr):
    """left [64, HEAD_DIM] times a tile's rows: scores of keys and queries, dp of values and
    dout."""
    tile = tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
    zero = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, product_layout(BLOCK_M))
    return warpgroup_mma(left, tile.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_dk(pairs, q_tiles, stage, dk, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """(dk + ds^T q, ds^T), both in flight."""
    ds = unpacked(pairs, DTYPE, HEAD_DIM)
    q = q_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
    return warpgroup_mma(ds, q, dk, is_async=True), ds


@gluon.jit
def _issue_dv(p, dout_tiles, stage, dv, HEAD_DIM: gl.constexpr):
    """(dv + p^T dout, p^T), both in flight."""
    p = gl.convert_layout(p, left_layout(HEAD_DIM)).to(dout_tiles.dtype)
    dout = dout_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
    return warpgroup_mma(p, dout, dv, is_async=True), p


@gluon.jit
def _probabilities(
    scores, exponents, stage, qk_scale, is_masked, start_m, diagonal, Sq, IS_CAUSAL: gl.constexpr
):
    """p^T [64, BLOCK_M] of a tile of queries: 0 where one does not see a key, or does not exist.
    Of keys that do not exist nothing is said. diagonal: how many keys past the warpgroup's first
    query 0 sees."""
    LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    exponent = exponents.index(stage).load(gl.SliceLayout(0, LAYOUT))
    p = gl.exp2(scores * qk_scale - exponent[None, :])
    if is_masked:
        columns, lanes = columns_and_lanes(BLOCK_M)
        nought = gl.full([ROWS, 1], 0, gl.int32, LAYOUT)
        columns = columns[None, :] + nought
        if IS_CAUSAL:  # row <= column + start_m + diagonal
            rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) - (start_m + diagonal)
            p = keep_up_to(p, rows[:, None] - lanes[None, :], columns, 0.0)
        if start_m + BLOCK_M > Sq:
            p = keep_up_to(p, columns, nought + (Sq - 1 - start_m - lanes)[None, :], 0.0)
    return p


@gluon.jit
def _zero_with(ds, p):
    """ds, but 0 where p is. See `keep_up_to`."""
    code: gl.constexpr = (
        "{ .reg .pred p; setp.eq.f32 p, $2, 0f00000000; selp.f32 $0, 0f00000000, $1, p; }"
    )
    return gl.inline_asm_elementwise(
        code, "=f,f,f", [ds, p], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _ds_pairs(p, dp, deltas, stage, is_masked, DTYPE: gl.constexpr):
    """ds^T, packed."""
    delta = deltas.index(stage).load(gl.SliceLayout(0, product_layout(BLOCK_M)))
    ds = p * (dp - delta[None, :])
    if is_masked:  # delta may be NaN. p tells what the mask told, and is at hand.
        ds = _zero_with(ds, p)
    return packed(ds, DTYPE)


@gluon.jit
def _compute_dkdv(
    INDEX: gl.constexpr, given, IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """dk and dv of a warpgroup's 64 keys."""
    outputs, bars, tiles, work, sizes, scales = given
    dk_desc, dv_desc = outputs
    k_full, q_full, q_empty, dout_full, dout_empty = bars
    k_tiles, v_tiles, q_tiles, dout_tiles, exponents, deltas = tiles
    b, kv_h, start_n, first_m, n_tiles = work
    Sq, Skv = sizes
    scale, qk_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    OUT: gl.constexpr = product_layout(HEAD_DIM)
    first_key = start_n + INDEX * ROWS
    diagonal = Skv - Sq - first_key
    n_skipped = 0
    bulk_start = 0
    if IS_CAUSAL:
        own_first = gl.maximum(-diagonal, 0) // BLOCK_M * BLOCK_M
        n_skipped = gl.minimum((own_first - first_m) // BLOCK_M, n_tiles)
        bulk_start = gl.minimum(ROWS, Skv - first_key) - 1 - diagonal  # it sees the last key
    n = (n_tiles - n_skipped) * GROUP
    dk = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, OUT)
    dv = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, OUT)
    k = k_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    v = v_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])
    mbarrier.wait(k_full.index(INDEX), 0)
    stage = 0
    phase = 0
    if n > 0:
        # The first tile: no dk to overlap with yet.
        stage, phase = pass_over(
            n_skipped, q_full, q_empty, dout_full, dout_empty, stage, phase, STAGES
        )
        start_m = first_m + n_skipped * BLOCK_M
        mbarrier.wait(q_full.index(stage), phase)
        next_scores = _issue(k, q_tiles, stage, HEAD_DIM)
        mbarrier.wait(dout_full.index(stage), phase)
        next_dp = _issue(v, dout_tiles, stage, HEAD_DIM)
        scores = warpgroup_mma_wait(1, deps=(next_scores,))
        is_masked = (start_m < bulk_start) | (start_m + BLOCK_M > Sq)
        p = _probabilities(
            scores, exponents, stage, qk_scale, is_masked, start_m, diagonal, Sq, IS_CAUSAL
        )
        next_dv, p_left = _issue_dv(p, dout_tiles, stage, dv, HEAD_DIM)
        dp = warpgroup_mma_wait(1, deps=(next_dp,))
        pairs = _ds_pairs(p, dp, deltas, stage, is_masked, DTYPE)
        dv, p_left = warpgroup_mma_wait(0, deps=(next_dv, p_left))
        mbarrier.arrive(dout_empty.index(stage), count=1)
        last_stage = stage
        stage, phase = advance(stage, phase, STAGES)
        mbarrier.wait(q_full.index(stage), phase, pred=n > 1)
        for i in range(1, n):
            start_m += BLOCK_M
            if GROUP > 1:
                if start_m >= Sq:  # the next head
                    start_m = first_m + n_skipped * BLOCK_M
                    stage, phase = pass_over(
                        n_skipped, q_full, q_empty, dout_full, dout_empty, stage, phase, STAGES
                    )
                mbarrier.wait(q_full.index(stage), phase)
            is_masked = (start_m < bulk_start) | (start_m + BLOCK_M > Sq)
            next_scores = _issue(k, q_tiles, stage, HEAD_DIM)
            next_dk, ds_left = _issue_dk(pairs, q_tiles, last_stage, dk, DTYPE, HEAD_DIM)
            if HEAD_DIM == 64:
                mbarrier.wait(dout_full.index(stage), phase)
                next_dp = _issue(v, dout_tiles, stage, HEAD_DIM)
                scores = warpgroup_mma_wait(2, deps=(next_scores,))
            else:
                scores = warpgroup_mma_wait(1, deps=(next_scores,))
            p = _probabilities(
                scores, exponents, stage, qk_scale, is_masked, start_m, diagonal, Sq, IS_CAUSAL
            )
            if HEAD_DIM == 64:
                dk, ds_left = warpgroup_mma_wait(1, deps=(next_dk, ds_left))
            else:  # dp not before: with ds there are no registers for it
                mbarrier.wait(dout_full.index(stage), phase)
                dk, ds_left = warpgroup_mma_wait(0, deps=(next_dk, ds_left))
                next_dp = _issue(v, dout_tiles, stage, HEAD_DIM)
            mbarrier.arrive(q_empty.index(last_stage), count=1)
            next_dv, p_left = _issue_dv(p, dout_tiles, stage, dv, HEAD_DIM)
            dp = warpgroup_mma_wait(1, deps=(next_dp,))
            pairs = _ds_pairs(p, dp, deltas, stage, is_masked, DTYPE)
            last_stage = stage
            stage, phase = advance(stage, phase, STAGES)
            # The next trip's, before dv is awaited: see triton_hopper_tiles.py.
            mbarrier.wait(q_full.index(stage), phase, pred=i + 1 < n)
            dv, p_left = warpgroup_mma_wait(0, deps=(next_dv, p_left))
            mbarrier.arrive(dout_empty.index(last_stage), count=1)
        next_dk, ds_left = _issue_dk(pairs, q_tiles, last_stage, dk, DTYPE, HEAD_DIM)
        dk, ds_left = warpgroup_mma_wait(0, deps=(next_dk, ds_left))
        mbarrier.arrive(q_empty.index(last_stage), count=1)
    else:
        stage, phase = pass_over(
            n_tiles * GROUP, q_full, q_empty, dout_full, dout_empty, stage, phase, STAGES
        )
    k.store((dk * scale).to(DTYPE))  # to where the keys and values were
    v.store(dv.to(DTYPE))
    fence_async_shared()
    store_tile(dk_desc, [b, kv_h, first_key, 0], k_tiles.index(INDEX))
    store_tile(dv_desc, [b, kv_h, first_key, 0], v_tiles.index(INDEX))
    tma.store_wait(0)


@gluon.jit
def _load_dkdv(loads, bars, tiles, work, Hq, pitch, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """One warp's work: k and v for each warpgroup, then q and dout, tile by tile of head after
    head."""
    q_desc, dout_desc, k_desc, v_desc, exponent_desc, delta_desc = loads
    k_full, q_full, q_empty, dout_full, dout_empty = bars
    k_tiles, v_tiles, q_tiles, dout_tiles, exponents, deltas = tiles
    b, kv_h, start_n, first_m, n_tiles = work
    TILE_BYTES: gl.constexpr = BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4
    for g in gl.static_range(GROUPS):
        bar = k_full.index(g)
        mbarrier.expect(bar, 2 * ROWS * HEAD_DIM * 2)
        at = [b, kv_h, start_n + g * ROWS, 0]
        load_tile(k_desc, at, bar, k_tiles.index(g))
        load_tile(v_desc, at, bar, v_tiles.index(g))
    stage = 0
    phase = 1  # every stage is empty at first
    for g in range(GROUP):
        h = kv_h * GROUP + g
        for i in range(n_tiles):
            start_m = first_m + i * BLOCK_M
            row = (b * Hq + h) * pitch + start_m
            mbarrier.wait(q_empty.index(stage), phase)
            mbarrier.expect(q_full.index(stage), TILE_BYTES)
            load_tile(q_desc, [b, h, start_m, 0], q_full.index(stage), q_tiles.index(stage))
            load_tile(exponent_desc, [row], q_full.index(stage), exponents.index(stage))
            mbarrier.wait(dout_empty.index(stage), phase)
            mbarrier.expect(dout_full.index(stage), TILE_BYTES)
            load_tile(
                dout_desc, [b, h, start_m, 0], dout_full.index(stage), dout_tiles.index(stage)
            )
            load_tile(delta_desc, [row], dout_full.index(stage), deltas.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["n_heads", "heads_per_wave", "Hq", "Sq", "Skv", "pitch"])
def attention_bwd_dkdv_hopper(
    q_desc, dout_desc, k_desc, v_desc, exponent_desc, delta_desc, dk_desc, dv_desc,
    scale, qk_scale, n_heads, heads_per_wave, Hq, Sq, Skv, pitch,
    IS_CAUSAL: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """dk and dv of 128 keys of one key head, summed over the query heads that share it."""
    n_blocks = (Skv + BLOCK_N - 1) // BLOCK_N
    block, head = block_and_head(gl.program_id(0), n_blocks, n_heads, heads_per_wave)
    start_n = block * BLOCK_N  # the first keys are seen by most queries: they go first
    first_m = 0
    if IS_CAUSAL:
        # Key j is seen by the queries i >= j - (Skv - Sq).
        first_m = gl.maximum(start_n - (Skv - Sq), 0) // BLOCK_M * BLOCK_M
    n_tiles = gl.maximum((Sq - first_m + BLOCK_M - 1) // BLOCK_M, 0)
    Hkv = Hq // GROUP
    work = (head // Hkv, head % Hkv, start_n, first_m, n_tiles)

    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    tiles = (
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], FLOATS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], FLOATS_LAYOUT),
    )
    bars = (
        barriers(GROUPS, 1),
        barriers(STAGES, 1), barriers(STAGES, GROUPS),
        barriers(STAGES, 1), barriers(STAGES, GROUPS),
    )  # fmt: skip
    fence_async_shared()  # TMA must see them

    outputs = (dk_desc, dv_desc)
    sizes = (Sq, Skv)
    scales = (scale, qk_scale)
    loads = (q_desc, dout_desc, k_desc, v_desc, exponent_desc, delta_desc)
    # Constants stay out of tuples that have a name: there they turn into run-time values.
    given = (outputs, bars, tiles, work, sizes, scales)
    gl.warp_specialize(
        [
            (_compute_dkdv, (0, given, IS_CAUSAL, GROUP, HEAD_DIM)),
            (_compute_dkdv, (1, given, IS_CAUSAL, GROUP, HEAD_DIM)),
            (_load_dkdv, (loads, bars, tiles, work, Hq, pitch, GROUP, HEAD_DIM)),
        ],
        [4, 1],
        [REGISTERS[2], LOADER_REGISTERS],
    )


def dkdv_launch_hopper(q: torch.Tensor, k: torch.Tensor, is_causal: bool, scale: float) -> Launch:
    """What fills dk and dv, given (q, dout, k, v, exponent, delta, dk, dv) like these, with what
    `bwd_rows` makes filled."""
    (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
    rows = functools.partial(descriptor, n_rows=ROWS.value)
    queries = functools.partial(descriptor, n_rows=BLOCK_M.value)
    floats = functools.partial(floats_descriptor, n=BLOCK_M.value)
    return Launch(
        attention_bwd_dkdv_hopper, q.device, -(-Skv // BLOCK_N.value) * B * Hkv,
        (scale, scale * LOG2E.value, B * Hkv,
         heads_per_wave(2 * Sq * D * q.element_size() * (Hq // Hkv)), Hq, Sq, Skv, rows_pitch(Sq)),
        describe=(queries, queries, rows, rows, floats, floats, rows, rows),
        IS_CAUSAL=is_causal, GROUP=Hq // Hkv, HEAD_DIM=D, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
