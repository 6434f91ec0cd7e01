"""The forward of Triton's fused attention on Hopper: loads, products and softmax at once, in Gluon.

The maths is that of triton_attention.py: with s the scores q k^T of a tile and m the largest so
far,

    row_max = m,   row_sum = sum exp(scale (s - m)),   acc = sum exp(scale (s - m)) v

A program stays on its multiprocessor and takes one block of queries after the other, those with
most keys first: one by its number, then as a counter in memory says. A block has 64 queries of a
head for each warpgroup, as many groups as the registers hold for tiles of 64 or 128 keys
(`choose_tiles`). A tile's keys and the values of the one before are a stage of one ring, as a group
needs both at once; triton_hopper_tiles.py says how loads are handed over, triton_scores_hopper.py
what becomes of scores. The warp that loads (triton_loads_hopper.py) takes the blocks, tells the
others, and is ahead of them into the next one. What overlaps is, within a warpgroup, as in
FlashAttention-3 (section 3.2),

    tensor cores   S0 | S1, P0 V0  | S2, P1 V1 (then acc is rescaled) | ... | Pn Vn
    exponentials      | P0         | P1                               | P2  |

the product with the last tile's values and the next scores, and the search for their maximum. And
the groups fall out of step, so that one's softmax runs under the others' products.

The keys go from the last tile to the first: those on the diagonal, which need a mask, come first,
and a group passes over those that none of its queries sees. So those of the block's last queries
have most to do: they are the first group's and the last's in turn.

Limits: head dim 64 or 128, 16-bit inputs, scale > 0, strides and addresses that TMA reads
(`hopper_takes`).
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import math
from collections.abc import Callable
from typing import NamedTuple

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
    descriptors,
    existing_rows,
    halves,
    joined,
    keep_seen,
    key_tiles,
    packed,
    product_layout,
    read_number,
    row_layout,
    row_pointers,
    unpacked,
)
from minitx.kernels.triton_launch import Launch
from minitx.kernels.triton_loads_hopper import BLOCK, Q_STAGES, load_blocks
from minitx.kernels.triton_scores_hopper import (
    exponentials,
    log_of,
    no_scores,
    one_over,
    own_sums,
    rescaled,
    take_maximum,
)

FEW_KEYS = {64: 8192, 128: 1536}  # by head dim: with fewer smaller tiles are faster


class Tiles(NamedTuple):
    GROUPS: int  # warpgroups that compute, on 64 queries each
    BLOCK_N: int  # keys of a tile
    STAGES: int  # tiles of keys and values: as many as there is room for


def choose_tiles(D: int, Skv: int) -> Tiles:
    are_few = Skv < FEW_KEYS[D]
    if D == 64:
        return Tiles(4, 64, 6) if are_few else Tiles(3, 128, 4)
    return Tiles(2, 64, 4) if are_few else Tiles(2, 128, 2)


@gluon.jit
def _issue_scores(q, k_tiles, stage, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    k = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, product_layout(BLOCK_N))
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(
    pairs, v_tiles, stage, acc, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(acc + p v, p), both in flight."""
    p = unpacked(pairs, DTYPE, HEAD_DIM)
    v = v_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
    return warpgroup_mma(p, v, acc, is_async=True), p


@gluon.jit
def _block(
    given, q, first, block_tiles, stage, phase,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc [64, HEAD_DIM], row_max and row_sum of the 64 queries from `first`, which are q; and the
    stage and phase after the block's tiles."""
    _pointers, bars, tiles, sizes, scales = given
    _q_full, _q_empty, full, empty, _work_full, _work_empty = bars
    q_tiles, k_tiles, v_tiles, _work = tiles
    _Hq, Sq, Skv, _n_blocks, _n_heads, _heads_per_wave, _n_work = sizes
    _scale, qk_scale, huge_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    n_bulk, n_tiles = key_tiles(first, ROWS, Sq, Skv, IS_CAUSAL, BLOCK_N)
    for _i in range(n_tiles, block_tiles):  # which other warpgroups alone need
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, product_layout(HEAD_DIM))

    # The last tile's scores: nothing to overlap with yet.
    mbarrier.wait(full.index(stage), phase)
    scores = _issue_scores(q, k_tiles, stage, HEAD_DIM, BLOCK_N)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty.index(stage), count=1)
    if n_tiles > n_bulk:
        scores = keep_seen(scores, first, n_tiles - 1, Sq, Skv, IS_CAUSAL, BLOCK_N, float("-inf"))
    known, rescale = take_maximum(scores, no_scores(scores), qk_scale, huge_scale)
    p = exponentials(scores, known, qk_scale, huge_scale)
    sums = own_sums(p)
    pairs = packed(p, DTYPE)
    stage, phase = advance(stage, phase, STAGES)
    mbarrier.wait(full.index(stage), phase)

    for i in range(1, n_tiles):
        next_scores = _issue_scores(q, k_tiles, stage, HEAD_DIM, BLOCK_N)
        next_acc, p_left = _issue_values(pairs, v_tiles, stage, acc, DTYPE, HEAD_DIM, BLOCK_N)
        scores = warpgroup_mma_wait(1, deps=(next_scores,))
        tile = n_tiles - 1 - i
        if tile >= n_bulk:
            scores = keep_seen(scores, first, tile, Sq, Skv, IS_CAUSAL, BLOCK_N, float("-inf"))
        known, rescale = take_maximum(scores, known, qk_scale, huge_scale)
        last_stage = stage
        stage, phase = advance(stage, phase, STAGES)
        # The next trip's tiles are awaited here: see triton_hopper_tiles.py.
        if HEAD_DIM == 64:
            mbarrier.wait(full.index(stage), phase)
            acc, p_left = warpgroup_mma_wait(0, deps=(next_acc, p_left))
            mbarrier.arrive(empty.index(last_stage), count=1)
            p = exponentials(scores, known, qk_scale, huge_scale)
        else:  # a longer product: a quarter of the exponentials before its end
            first_half, second_half = halves(scores)
            early, late = halves(first_half)
            early = exponentials(early, known, qk_scale, huge_scale)
            mbarrier.wait(full.index(stage), phase)
            acc, p_left = warpgroup_mma_wait(0, deps=(next_acc, p_left))
            mbarrier.arrive(empty.index(last_stage), count=1)
            late = exponentials(late, known, qk_scale, huge_scale)
            second_half = exponentials(second_half, known, qk_scale, huge_scale)
            p = gl.convert_layout(joined(joined(early, late), second_half), SCORES)
        sums = sums * rescale + own_sums(p)
        acc = rescaled(acc, rescale, HEAD_DIM)
        pairs = packed(p, DTYPE)
    next_acc, p_left = _issue_values(pairs, v_tiles, stage, acc, DTYPE, HEAD_DIM, BLOCK_N)
    row_max = gl.convert_layout(gl.max(known[0], 1), gl.SliceLayout(1, SCORES))
    row_sum = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
    acc, p_left = warpgroup_mma_wait(0, deps=(next_acc, p_left))
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = advance(stage, phase, STAGES)
    return acc, row_max, row_sum, stage, phase


@gluon.jit
def _compute(
    INDEX: gl.constexpr, given, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out and lse of a warpgroup's 64 queries of block after block."""
    pointers, bars, tiles, sizes, scales = given
    out_ptr, lse_ptr, out_strides = pointers
    q_full, q_empty, _full, _empty, work_full, work_empty = bars
    q_tiles, _k_tiles, _v_tiles, work = tiles
    Hq, Sq, Skv, _n_blocks, _n_heads, _heads_per_wave, _n_work = sizes
    scale, _qk_scale, _huge_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    stage = 0
    phase = 0
    q_stage = 0
    q_phase = 0
    start_m = 0
    while start_m >= 0:
        mbarrier.wait(work_full.index(q_stage), q_phase)
        start_m = read_number(work, q_stage * BLOCK)
        b = read_number(work, q_stage * BLOCK + 1)
        h = read_number(work, q_stage * BLOCK + 2)
        mbarrier.arrive(work_empty.index(q_stage), count=1)
        if start_m >= 0:
            # In turn the first or the last of the block's queries, which see fewest or most keys.
            place = gl.where(q_stage == 0, INDEX, GROUPS - 1 - INDEX)
            first = start_m + place * ROWS
            _n_bulk, n_tiles = key_tiles(start_m, BLOCK_M, Sq, Skv, IS_CAUSAL, BLOCK_N)
            mbarrier.wait(q_full.index(q_stage), q_phase)
            q = q_tiles.index(q_stage * GROUPS + place).reshape([ROWS, HEAD_DIM])
            acc, row_max, row_sum, stage, phase = _block(
                given, q, first, n_tiles, stage, phase, IS_CAUSAL, HEAD_DIM, BLOCK_N, STAGES
            )
            mbarrier.arrive(q_empty.index(q_stage), count=1)
            q_stage, q_phase = advance(q_stage, q_phase, Q_STAGES)

            is_empty = row_sum == 0.0
            queries = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            lse = gl.where(is_empty, float("-inf"), row_max * scale + log_of(row_sum))
            gl.store(lse_ptr + (b.to(gl.int64) * Hq + h) * Sq + queries, lse, mask=queries < Sq)
            inverse = one_over(gl.where(is_empty, 1.0, row_sum))
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, product_layout(HEAD_DIM)))
            out = gl.convert_layout((acc * inverse[:, None]).to(DTYPE), row_layout(HEAD_DIM))
            out_rows = row_pointers(out_ptr, out_strides, b, h, first, HEAD_DIM)
            gl.store(out_rows, out, mask=existing_rows(Sq - first, HEAD_DIM))


@gluon.jit(
    do_not_specialize=[
        "n_blocks", "n_heads", "heads_per_wave", "n_work", "Hq", "Hkv", "Sq", "Skv",
    ]
)  # fmt: skip
def attention_fwd_hopper(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, taken_ptr, out_strides, scale, qk_scale, huge_scale,
    n_blocks, n_heads, heads_per_wave, n_work, Hq, Hkv, Sq, Skv,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """out, and lse [B, Hq, Sq] (contiguous).

    qk_scale is scale * log2(e); huge_scale the power of two that it is, or next above it.
    taken_ptr: an int32 0, that no other launch uses meanwhile; with no more blocks than programs
    it is not read. n_work: blocks of queries of all heads.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = (
        gl.allocate_shared_memory(DTYPE, [Q_STAGES * GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(gl.int32, [Q_STAGES * BLOCK, 1], NUMBERS),
    )
    bars = (
        barriers(Q_STAGES, 1), barriers(Q_STAGES, GROUPS),
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
    R: gl.constexpr = REGISTERS[GROUPS]
    if GROUPS == 4:
        gl.warp_specialize(
            [
                (_compute, (0, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (_compute, (1, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (_compute, (2, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (_compute, (3, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (load_blocks, (loads, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
            ],
            [4, 4, 4, 1],
            [R, R, R, LOADER_REGISTERS],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_compute, (0, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (_compute, (1, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (_compute, (2, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (load_blocks, (loads, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
            ],
            [4, 4, 1],
            [R, R, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (_compute, (1, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
                (load_blocks, (loads, given, IS_CAUSAL, HEAD_DIM, GROUPS, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [R, LOADER_REGISTERS],
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
    tiles = choose_tiles(D, Skv)
    n_blocks = -(-Sq // (tiles.GROUPS * ROWS.value))
    n_work = n_blocks * B * Hq
    n_programs = min(n_work, multiprocessors(q.device))
    launch = Launch(
        attention_fwd_hopper,
        q.device,
        n_programs,
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
        describe=descriptors(ROWS.value, tiles.BLOCK_N, tiles.BLOCK_N),
        IS_CAUSAL=is_causal,
        HEAD_DIM=D,
        **tiles._asdict(),
        num_warps=4,
        enable_fp_fusion=True,
    )

    if n_work == n_programs:
        nothing = torch.empty(0, dtype=torch.int32, device=q.device)  # which takes no memory
        return lambda q, k, v, out, lse: launch(q, k, v, out, lse, nothing)

    def launches(q, k, v, out, lse) -> None:
        # Of this call alone, and zeroed on its stream: calls on several streams do not meet.
        launch(q, k, v, out, lse, lse.new_zeros(1, dtype=torch.int32))

    return launches
