"""The forward of Triton's fused attention on Hopper: loads, products and softmax at once, in Gluon.

The maths is that of triton_attention.py: with s the scores q k^T of a tile and m the largest so
far,

    row_max = m,   row_sum = sum exp(scale (s - m)),   acc = sum exp(scale (s - m)) v

A program stays on its multiprocessor and takes one block of queries after the other, those with
most keys first: one by its number, then as a counter in memory says. A block has 64 queries of a
head for each warpgroup: three of them at a head dim of 64, two at 128, where the registers hold no
more. They read the keys that the block sees 128 at a time; triton_hopper_tiles.py says how loads
are handed over. The warp that loads takes the blocks, tells the others, and is ahead of them into
the next one. What overlaps is, within a warpgroup, as in FlashAttention-3 (section 3.2),

    tensor cores   S0 | S1, P0 V0  | S2, P1 V1 (then acc is rescaled) | ... | Pn Vn
    exponentials      | P0         | P1                               | P2  |

the product with the last tile's values and the next scores, and the search for their maximum. And
the groups fall out of step, so that one's softmax runs under the others' products.

The keys go from the last tile to the first: those on the diagonal, which need a mask, come first,
and a group passes over those that none of its queries sees.

Limits: head dim 64 or 128, 16-bit inputs, scale > 0, strides and addresses that TMA reads
(`hopper_takes`).
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import math
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

from minitx.kernels.runtime import multiprocessors
from minitx.kernels.triton_attention_tiles import heads_per_wave
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
    halves,
    joined,
    keep_seen,
    key_tiles,
    load_next,
    load_tile,
    packed,
    pass_over,
    product_layout,
    row_layout,
    row_pointers,
    unpacked,
)
from minitx.kernels.triton_launch import Launch

BLOCK_N = gl.constexpr(128)  # keys of a tile
Q_STAGES = gl.constexpr(2)  # blocks of queries: this one and the next
GROUPS = {64: 3, 128: 2}  # warpgroups that compute, by head dim
STAGES = {64: 3, 128: 2}  # tiles of keys, and of values: as many as there is room for


@gluon.jit
def _new_maximum(scores, row_max, qk_scale, huge_scale):
    """The new row_max; by what scores are multiplied and what is then subtracted of them, so that
    2^ of it is exp(scale * (scores - row_max)); and the factor for what was summed so far."""
    # gl.max passes over NaN, but p is NaN where a score is, and then so are the sums.
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    # A row that has seen nothing but -inf takes a finite shift: -inf - -inf is NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    # As in triton_attention.py: a product by a power of two rounds nothing where logits are huge,
    # and maxima are subtracted before they are scaled.
    row_scale = gl.where(gl.abs(shift * qk_scale) >= 2.0**26, huge_scale, qk_scale)
    rescale = gl.exp2((row_max - shift) * row_scale)
    return new_max, row_scale, shift * row_scale, rescale


@gluon.jit
def _exponentials(scores, row_scale, scaled_shift):
    """Of some columns of the scores."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    row_scale = gl.convert_layout(row_scale, LAYOUT)[:, None]
    return gl.exp2(scores * row_scale - gl.convert_layout(scaled_shift, LAYOUT)[:, None])


@gluon.jit
def _thread_sums(p):
    """Sums of p's rows over each thread's own columns, [64, 8]: over threads they are summed up
    once, in the end."""
    return gl.sum(p.reshape([ROWS, p.shape[1] // 8, 8]), 1)


@gluon.jit
def _issue_scores(q, k_tiles, stage, HEAD_DIM: gl.constexpr):
    k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, product_layout(BLOCK_N))
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(pairs, v_tiles, stage, acc, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """(acc + p v, p), both in flight."""
    p = unpacked(pairs, DTYPE, HEAD_DIM)
    v = v_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
    return warpgroup_mma(p, v, acc, is_async=True), p


@gluon.jit
def _block(
    given, q, first, block_tiles, stage, phase,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc [64, HEAD_DIM], row_max and row_sum of the 64 queries from `first`, which are q; and the
    stage and phase after the block's tiles."""
    _pointers, bars, tiles, sizes, scales = given
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty, _work_full, _work_empty = bars
    q_tiles, k_tiles, v_tiles, _work = tiles
    _Hq, Sq, Skv, _n_blocks, _n_heads, _heads_per_wave, _n_work = sizes
    _scale, qk_scale, huge_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    OUT: gl.constexpr = product_layout(HEAD_DIM)
    n_bulk, n_tiles = key_tiles(first, ROWS, Sq, Skv, IS_CAUSAL, BLOCK_N)
    stage, phase = pass_over(
        block_tiles - n_tiles, k_full, k_empty, v_full, v_empty, stage, phase, STAGES
    )
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, OUT)

    # The last tile's scores: nothing to overlap with yet.
    mbarrier.wait(k_full.index(stage), phase)
    scores = _issue_scores(q, k_tiles, stage, HEAD_DIM)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if n_tiles > n_bulk:
        scores = keep_seen(scores, first, n_tiles - 1, Sq, Skv, IS_CAUSAL, BLOCK_N, float("-inf"))
    row_max, row_scale, shift, rescale = _new_maximum(scores, row_max, qk_scale, huge_scale)
    p = _exponentials(scores, row_scale, shift)
    sums = _thread_sums(p)
    SUMS: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    pairs = packed(p, DTYPE)
    mbarrier.wait(v_full.index(stage), phase)
    last_stage = stage
    stage, phase = advance(stage, phase, STAGES)

    for i in range(1, n_tiles):
        mbarrier.wait(k_full.index(stage), phase)
        next_scores = _issue_scores(q, k_tiles, stage, HEAD_DIM)
        next_acc, p_left = _issue_values(pairs, v_tiles, last_stage, acc, DTYPE, HEAD_DIM)
        scores = warpgroup_mma_wait(1, deps=(next_scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        tile = n_tiles - 1 - i
        if tile >= n_bulk:
            scores = keep_seen(scores, first, tile, Sq, Skv, IS_CAUSAL, BLOCK_N, float("-inf"))
        row_max, row_scale, shift, rescale = _new_maximum(scores, row_max, qk_scale, huge_scale)
        # The next trip's values are awaited here: see triton_hopper_tiles.py.
        if HEAD_DIM == 64:
            mbarrier.wait(v_full.index(stage), phase)
            acc, p_left = warpgroup_mma_wait(0, deps=(next_acc, p_left))
            mbarrier.arrive(v_empty.index(last_stage), count=1)
            p = _exponentials(scores, row_scale, shift)
        else:  # a longer product: a quarter of the exponentials before its end
            first_half, second_half = halves(scores)
            early, late = halves(first_half)
            early = _exponentials(early, row_scale, shift)
            mbarrier.wait(v_full.index(stage), phase)
            acc, p_left = warpgroup_mma_wait(0, deps=(next_acc, p_left))
            mbarrier.arrive(v_empty.index(last_stage), count=1)
            late = _exponentials(late, row_scale, shift)
            second_half = _exponentials(second_half, row_scale, shift)
            p = gl.convert_layout(joined(joined(early, late), second_half), SCORES)
        sums = sums * gl.convert_layout(rescale, SUMS)[:, None] + _thread_sums(p)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
        pairs = packed(p, DTYPE)
        last_stage = stage
        stage, phase = advance(stage, phase, STAGES)
    next_acc, p_left = _issue_values(pairs, v_tiles, last_stage, acc, DTYPE, HEAD_DIM)
    row_sum = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
    acc, p_left = warpgroup_mma_wait(0, deps=(next_acc, p_left))
    mbarrier.arrive(v_empty.index(last_stage), count=1)
    return acc, row_max, row_sum, stage, phase


@gluon.jit
def _compute(
    INDEX: gl.constexpr, given, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out and lse of a warpgroup's 64 queries of block after block."""
    pointers, bars, tiles, sizes, scales = given
    out_ptr, lse_ptr, out_strides = pointers
    q_full, q_empty, _k_full, _k_empty, _v_full, _v_empty, work_full, work_empty = bars
    q_tiles, _k_tiles, _v_tiles, work = tiles
    Hq, Sq, Skv, n_blocks, n_heads, heads_per_wave, n_work = sizes
    scale, _qk_scale, _huge_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    stage = 0
    phase = 0
    q_stage = 0
    q_phase = 0
    place = 0
    while place < n_work:
        mbarrier.wait(work_full.index(q_stage), q_phase)
        place = gl.max(work.index(q_stage).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(work_empty.index(q_stage), count=1)
        if place < n_work:
            block, head = block_and_head(place, n_blocks, n_heads, heads_per_wave)
            b = head // Hq
            h = head % Hq
            start_m = (n_blocks - 1 - block) * BLOCK_M  # the last queries see most keys
            first = start_m + INDEX * ROWS
            _n_bulk, n_tiles = key_tiles(start_m, BLOCK_M, Sq, Skv, IS_CAUSAL, BLOCK_N)
            mbarrier.wait(q_full.index(q_stage), q_phase)
            q = q_tiles.index(q_stage * GROUPS + INDEX).reshape([ROWS, HEAD_DIM])
            acc, row_max, row_sum, stage, phase = _block(
                given, q, first, n_tiles, stage, phase, IS_CAUSAL, HEAD_DIM, STAGES
            )
            mbarrier.arrive(q_empty.index(q_stage), count=1)
            q_stage, q_phase = advance(q_stage, q_phase, Q_STAGES)

            is_empty = row_sum == 0.0
            queries = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            lse = gl.where(is_empty, float("-inf"), row_max * scale + gl.log(row_sum))
            gl.store(lse_ptr + (b.to(gl.int64) * Hq + h) * Sq + queries, lse, mask=queries < Sq)
            inverse = 1.0 / gl.where(is_empty, 1.0, row_sum)
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, product_layout(HEAD_DIM)))
            out = gl.convert_layout((acc * inverse[:, None]).to(DTYPE), row_layout(HEAD_DIM))
            out_rows = row_pointers(out_ptr, out_strides, b, h, first, HEAD_DIM)
            gl.store(out_rows, out, mask=existing_rows(Sq - first, HEAD_DIM))


@gluon.jit
def _load(
    loads, given, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp's work: for block after block which it is, and its queries; then keys and values,
    from the last tile to the first."""
    q_desc, k_desc, v_desc, taken_ptr, GROUP_HEADS = loads
    _pointers, bars, tiles, sizes, _scales = given
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    q_tiles, k_tiles, v_tiles, work = tiles
    Hq, Sq, Skv, n_blocks, n_heads, heads_per_wave, n_work = sizes
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    stage = 0
    phase = 1  # every stage is empty at first
    q_stage = 0
    q_phase = 1
    taken = gl.program_id(0)
    place = 0
    while place < n_work:
        place = gl.minimum(taken, n_work)  # n_work: no more
        mbarrier.wait(work_empty.index(q_stage), q_phase)
        one = gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        work.index(q_stage).store(one * place)
        mbarrier.arrive(work_full.index(q_stage), count=1)
        if place < n_work:
            block, head = block_and_head(place, n_blocks, n_heads, heads_per_wave)
            b = head // Hq
            h = head % Hq
            kv_h = h // GROUP_HEADS
            start_m = (n_blocks - 1 - block) * BLOCK_M
            _n_bulk, n_tiles = key_tiles(start_m, BLOCK_M, Sq, Skv, IS_CAUSAL, BLOCK_N)
            mbarrier.wait(q_empty.index(q_stage), q_phase)
            bar = q_full.index(q_stage)
            mbarrier.expect(bar, BLOCK_M * HEAD_DIM * 2)
            for g in gl.static_range(GROUPS):
                at = [b, h, start_m + g * ROWS, 0]
                load_tile(q_desc, at, bar, q_tiles.index(q_stage * GROUPS + g))
            q_stage, q_phase = advance(q_stage, q_phase, Q_STAGES)
            taken = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1)
            for i in range(n_tiles):
                at = [b, kv_h, (n_tiles - 1 - i) * BLOCK_N, 0]
                load_next(k_desc, at, k_tiles, k_full, k_empty, stage, phase, TILE_BYTES)
                load_next(v_desc, at, v_tiles, v_full, v_empty, stage, phase, TILE_BYTES)
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit(
    do_not_specialize=[
        "n_blocks", "n_heads", "heads_per_wave", "n_work", "Hq", "Hkv", "Sq", "Skv",
    ]
)  # fmt: skip
def attention_fwd_hopper(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, taken_ptr, out_strides, scale, qk_scale, huge_scale,
    n_blocks, n_heads, heads_per_wave, n_work, Hq, Hkv, Sq, Skv,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out, and lse [B, Hq, Sq] (contiguous).

    qk_scale is scale * log2(e); huge_scale the power of two that it is, or next above it.
    taken_ptr: an int32 0, that no other launch uses meanwhile. n_work: blocks of queries of all
    heads.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    tiles = (
        gl.allocate_shared_memory(DTYPE, [Q_STAGES * GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    bars = (
        barriers(Q_STAGES, 1), barriers(Q_STAGES, GROUPS),
        barriers(STAGES, 1), barriers(STAGES, GROUPS),
        barriers(STAGES, 1), barriers(STAGES, GROUPS),
        barriers(Q_STAGES, 1), barriers(Q_STAGES, GROUPS),
    )  # fmt: skip
    fence_async_shared()  # TMA must see them

    pointers = (out_ptr, lse_ptr, out_strides)
    sizes = (Hq, Sq, Skv, n_blocks, n_heads, heads_per_wave, n_work)
    scales = (scale, qk_scale, huge_scale)
    # Constants stay out of tuples that have a name: there they turn into run-time values.
    given = (pointers, bars, tiles, sizes, scales)
    loads = (q_desc, k_desc, v_desc, taken_ptr, Hq // Hkv)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_compute, (0, given, IS_CAUSAL, HEAD_DIM, GROUPS, STAGES)),
                (_compute, (1, given, IS_CAUSAL, HEAD_DIM, GROUPS, STAGES)),
                (_compute, (2, given, IS_CAUSAL, HEAD_DIM, GROUPS, STAGES)),
                (_load, (loads, given, IS_CAUSAL, HEAD_DIM, GROUPS, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS[3], REGISTERS[3], LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, given, IS_CAUSAL, HEAD_DIM, GROUPS, STAGES)),
                (_compute, (1, given, IS_CAUSAL, HEAD_DIM, GROUPS, STAGES)),
                (_load, (loads, given, IS_CAUSAL, HEAD_DIM, GROUPS, STAGES)),
            ],
            [4, 1],
            [REGISTERS[2], LOADER_REGISTERS],
        )


def fwd_launch_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Callable[..., None]:
    """What fills out, in q's layout, and lse [B, Hq, Sq], given (q, k, v, out, lse) like these."""
    (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
    qk_scale = scale * LOG2E.value
    n_blocks = -(-Sq // (GROUPS[D] * ROWS.value))
    n_work = n_blocks * B * Hq
    launch = Launch(
        attention_fwd_hopper,
        q.device,
        min(n_work, multiprocessors(q.device)),
        (
            out.stride(),
            scale,
            qk_scale,
            2.0 ** math.ceil(math.log2(qk_scale)),
            n_blocks,
            B * Hq,
            heads_per_wave(2 * Skv * D * k.element_size(), Hq // Hkv),
            n_work,
            Hq,
            Hkv,
            Sq,
            Skv,
        ),
        describe=descriptors(ROWS.value, BLOCK_N.value, BLOCK_N.value),
        IS_CAUSAL=is_causal,
        HEAD_DIM=D,
        GROUPS=GROUPS[D],
        STAGES=STAGES[D],
        num_warps=4,
        enable_fp_fusion=True,
    )

    def launches(q, k, v, out, lse) -> None:
        # Of this call alone, and zeroed on its stream: calls on several streams do not meet.
        launch(q, k, v, out, lse, lse.new_zeros(1, dtype=torch.int32))

    return launches
