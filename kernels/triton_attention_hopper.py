"""The forward of Triton's fused attention on Hopper: loads, products and softmax at once, in Gluon.

The maths is that of triton_attention.py: with s the scores q k^T of a tile and m the largest so
far,

    row_max = m,   row_sum = sum exp(scale (s - m)),   acc = sum exp(scale (s - m)) v

A program has 128 queries of one head, 64 for each of two warpgroups, and reads the keys they see
128 at a time; triton_hopper_tiles.py says how loads are handed over. What overlaps is what
FlashAttention-3 (section 3.2) found to pay, within a warpgroup:

    tensor cores   S0 | S1, P0 V0       | S2, P1 V1       | ... | Pn Vn
    exponentials      | P0    | P1 (then acc is rescaled) | P2  |

The scores of the next tile and the product with the last one's values are in flight together, and
the softmax of the next runs under the latter; and the two groups fall out of step, so that one's
softmax runs under the other's products. The keys go from the last tile to the first: those on the
diagonal need a mask, and come before the loop that has none.

Limits: head dim 128, 16-bit inputs, scale > 0, strides and addresses that TMA reads
(`hopper_takes`).
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minitx.kernels.triton_attention_tiles import heads_per_wave
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
    key_tiles,
    left_layout,
    load_next,
    load_tile,
    product_layout,
    ring_barriers,
    store_rows,
    visible_keys,
)
from minitx.kernels.triton_launch import Launch

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)


@gluon.jit
def _softmax_step(scores, row_max, row_sum, qk_scale, huge_scale):
    """exp(scale * (scores - max)) [64, BLOCK_N], the factor for what was summed so far, the new
    row_max and the new row_sum."""
    # gl.max passes over NaN, but p is NaN where a score is, and then so are the sums.
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    # A row that has seen nothing but -inf takes a finite shift: -inf - -inf is NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    # As in triton_attention.py: a product by a power of two rounds nothing where logits are huge,
    # and maxima are subtracted before they are scaled.
    row_scale = gl.where(gl.abs(shift * qk_scale) >= 2.0**26, huge_scale, qk_scale)
    p = gl.exp2(scores * row_scale[:, None] - (shift * row_scale)[:, None])
    rescale = gl.exp2((row_max - shift) * row_scale)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """p [64, N] in pairs of 16 bits, int32 [64, N / 2]: a loop that carried 16-bit numbers would
    take every pair apart and put it together again."""
    N: gl.constexpr = p.shape[1]
    low, high = gl.split(p.reshape([ROWS, N // 2, 2]))
    if dtype == gl.bfloat16:
        code: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        code: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        code, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpacked(pairs, DTYPE: gl.constexpr):
    """What _packed was given, in DTYPE, as the left operand of a product."""
    N: gl.constexpr = pairs.shape[1] * 2
    low = (pairs & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([ROWS, N]), left_layout())


@gluon.jit
def _compute(
    INDEX: gl.constexpr, given, IS_CAUSAL: gl.constexpr
):  # fmt: skip
    """out and lse of a warpgroup's 64 queries."""
    out_ptr, lse_ptr, out_strides, bars, tiles, work, sizes, scales = given
    q_full, k_full, k_empty, v_full, v_empty = bars
    q_tiles, k_tiles, v_tiles = tiles
    b, h, start_m, n_bulk, n_tiles = work
    Hq, Sq, Skv = sizes
    scale, qk_scale, huge_scale = scales
    DTYPE: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    OUT: gl.constexpr = product_layout(HEAD_DIM)
    first = start_m + INDEX * ROWS
    queries = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, OUT)
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    q = q_tiles.index(INDEX).reshape([ROWS, HEAD_DIM])

    # The last tile's scores: nothing to overlap with yet.
    mbarrier.wait(q_full.index(INDEX), 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_tiles.index(0).reshape([BLOCK_N, HEAD_DIM])
    scores = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0), count=1)
    visible = visible_keys(queries, n_tiles - 1, Sq, Skv, IS_CAUSAL, BLOCK_N, SCORES)
    scores = gl.where(visible, scores, float("-inf"))
    first_p, rescale, row_max, row_sum = _softmax_step(
        scores, row_max, row_sum, qk_scale, huge_scale
    )
    pairs = _packed(first_p, DTYPE)

    # Keys are one stage ahead of values.
    k_stage = 1 % STAGES
    k_phase = 1 // STAGES
    v_stage = 0
    v_phase = 0
    n_masked = gl.maximum(n_tiles - n_bulk, 1)
    for MASKED in gl.static_range(1, -1, -1):  # first what needs a mask, then the bulk
        for i in range(1 if MASKED else n_masked, n_masked if MASKED else n_tiles):
            mbarrier.wait(k_full.index(k_stage), k_phase)
            k = k_tiles.index(k_stage).reshape([BLOCK_N, HEAD_DIM])
            next_scores = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            v = v_tiles.index(v_stage).reshape([BLOCK_N, HEAD_DIM])
            p = _unpacked(pairs, DTYPE)
            next_acc = warpgroup_mma(p, v, acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(next_scores,))
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            if MASKED:
                tile = n_tiles - 1 - i
                visible = visible_keys(queries, tile, Sq, Skv, IS_CAUSAL, BLOCK_N, SCORES)
                scores = gl.where(visible, scores, float("-inf"))
            next_p, rescale, row_max, row_sum = _softmax_step(
                scores, row_max, row_sum, qk_scale, huge_scale
            )
            acc, p = warpgroup_mma_wait(0, deps=(next_acc, p))
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
            pairs = _packed(next_p, DTYPE)
            k_stage, k_phase = advance(k_stage, k_phase)
            v_stage, v_phase = advance(v_stage, v_phase)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    v = v_tiles.index(v_stage).reshape([BLOCK_N, HEAD_DIM])
    p = _unpacked(pairs, DTYPE)
    next_acc = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(next_acc, p))

    is_empty = row_sum == 0.0
    lse = gl.where(is_empty, float("-inf"), row_max * scale + gl.log(row_sum))
    gl.store(lse_ptr + (b.to(gl.int64) * Hq + h) * Sq + queries, lse, mask=queries < Sq)
    inverse = gl.convert_layout(1.0 / gl.where(is_empty, 1.0, row_sum), gl.SliceLayout(1, OUT))
    store_rows(out_ptr, out_strides, b, h, first, acc * inverse[:, None], Sq - first)


@gluon.jit
def _load(q_desc, k_desc, v_desc, bars, tiles, work, GROUP_HEADS):
    """One warp's work: q for each group, then keys and values, from the last tile to the first."""
    q_full, k_full, k_empty, v_full, v_empty = bars
    q_tiles, k_tiles, v_tiles = tiles
    b, h, start_m, _n_bulk, n_tiles = work
    kv_h = h // GROUP_HEADS
    for g in gl.static_range(GROUPS):
        bar = q_full.index(g)
        mbarrier.expect(bar, ROWS * HEAD_DIM * 2)
        at = [b, h, start_m + g * ROWS, 0]
        load_tile(q_desc, at, bar, q_tiles.index(g))
    stage = 0
    phase = 1  # every stage is empty at first
    for i in range(n_tiles):
        at = [b, kv_h, (n_tiles - 1 - i) * BLOCK_N, 0]
        load_next(k_desc, at, k_tiles, k_full, k_empty, stage, phase, BLOCK_N)
        load_next(v_desc, at, v_tiles, v_full, v_empty, stage, phase, BLOCK_N)
        stage, phase = advance(stage, phase)


@gluon.jit(do_not_specialize=["n_heads", "heads_per_wave", "Sq", "Skv"])
def attention_fwd_hopper(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, out_strides, scale, qk_scale, huge_scale,
    n_heads, heads_per_wave, Hq, Hkv, Sq, Skv, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """out, and lse [B, Hq, Sq] (contiguous), of BLOCK_M queries of one head.

    qk_scale is scale * log2(e); huge_scale the power of two that it is, or next above it.
    """
    n_blocks = (Sq + BLOCK_M - 1) // BLOCK_M
    block, head = block_and_head(n_blocks, n_heads, heads_per_wave)
    start_m = (n_blocks - 1 - block) * BLOCK_M  # the last queries see most keys: they go first
    n_bulk, n_tiles = key_tiles(start_m, Sq, Skv, IS_CAUSAL, BLOCK_M, BLOCK_N)
    work = (head // Hq, head % Hq, start_m, n_bulk, n_tiles)

    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    tiles = (
        gl.allocate_shared_memory(DTYPE, [GROUPS, 1, 1, ROWS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], SHARED),
    )
    bars = ring_barriers()

    sizes = (Hq, Sq, Skv)
    scales = (scale, qk_scale, huge_scale)
    # Constants stay out of tuples that have a name: there they turn into run-time values.
    given = (out_ptr, lse_ptr, out_strides, bars, tiles, work, sizes, scales)
    gl.warp_specialize(
        [
            (_compute, (0, given, IS_CAUSAL)),
            (_compute, (1, given, IS_CAUSAL)),
            (_load, (q_desc, k_desc, v_desc, bars, tiles, work, Hq // Hkv)),
        ],
        [4, 1],
        REGISTERS,
    )


def fwd_launch_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Launch:
    """What fills out, in q's layout, and lse [B, Hq, Sq], given (q, k, v, out, lse) like these."""
    (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
    qk_scale = scale * LOG2E.value
    return Launch(
        attention_fwd_hopper,
        q.device,
        -(-Sq // BLOCK_M.value) * B * Hq,
        (
            out.stride(),
            scale,
            qk_scale,
            2.0 ** math.ceil(math.log2(qk_scale)),
            B * Hq,
            heads_per_wave(2 * Skv * D * k.element_size(), Hq // Hkv),
            Hq,
            Hkv,
            Sq,
            Skv,
        ),
        describe=descriptors(ROWS.value, BLOCK_N.value, BLOCK_N.value),
        IS_CAUSAL=is_causal,
        num_warps=4,
        enable_fp_fusion=True,
    )
