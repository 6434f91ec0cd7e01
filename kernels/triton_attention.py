"""Fused attention in Triton: scores stay on chip, and the softmax is taken online, tile by tile.

A program has BLOCK_M queries of one head and walks over the keys they see, BLOCK_N at a time
(FlashAttention-2, section 3.1). With s the scores q k^T of a tile and m the largest so far, it
keeps

    row_max = m,   row_sum = sum exp(scale (s - m)),   acc = sum exp(scale (s - m)) v

and where m grows, multiplies row_sum and acc by exp(scale (m_old - m_new)). In the end
out = acc / row_sum and lse = ln(row_sum) + scale * m.

    queries     keys ->    B bulk: every query of the tile sees every key, no mask at all
      |         B B M .    M masked: the diagonal, and the ragged end of the keys
      v         B B B M    . never visited

Layout: q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D], any strides, read in place; float32, float16 or
bfloat16, D from 1 to 256. Products of float32 are IEEE float32; those of 16-bit inputs are made in
their dtype and summed in float32. In Triton's interpreter 16-bit inputs are computed in float32 and
rounded once, as its tl.dot is wrong for bfloat16 (triton-lang/triton#11584).

On a Hopper GPU (compute capability 9.0), with Triton 3.6, 16-bit inputs with a head dim of 64 or
128 go to kernels of their own, triton_attention_hopper.py and triton_attention_bwd_hopper.py:
`hopper_takes` says which exactly. They compute the same and are faster there; everything else runs
on what stands here.
"""

# A type checker takes tl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from minitx.kernels.attention_ops import define_attention, empty_grads, empty_outputs
from minitx.kernels.kept import Empty
from minitx.kernels.triton_attention_bwd import prepare_bwd
from minitx.kernels.triton_attention_tiles import (
    fwd_tiles,
    heads_per_wave,
    hopper_takes,
    is_aligned,
    is_exact,
    is_wide,
    padded_head_dim,
    scale_sign,
)
from minitx.kernels.triton_launch import Launch, remember, remembered
from minitx.kernels.triton_runtime import IS_INTERPRETED, device_function
from minitx.kernels.triton_tiles import (
    LOG2E,
    PRECISION,
    exact_exp,
    head_start,
    key_range,
    load_tile,
    next_power_of_2,
    rows_offset,
    signed,
    store_tile,
    tile_and_head,
    tile_offsets,
    visible_keys,
)


@device_function
def _exponentials(scores, row_max, shift, scale, EXACT: tl.constexpr):
    """exp(scale * (scores - shift)) [BLOCK_M, BLOCK_N] and exp(scale * (row_max - shift))
    [BLOCK_M]; the score that is the shift must give about 1, however huge it is.
    """
    if EXACT:
        p = exact_exp((scores - shift[:, None]) * scale)
        rescale = exact_exp((row_max - shift) * scale)
    else:
        # One multiply-add a score. It rounds shift * qk_scale but not scores * qk_scale: nothing
        # for ordinary scores, but thousands for scores of 1e11. From 2^26 on a float32 score is no
        # more exact than 2^+-2; there the next power of two for a scale rounds neither product.
        qk_scale = scale * LOG2E
        is_huge = tl.abs(shift * qk_scale) >= 2.0**26
        row_scale = tl.where(is_huge, next_power_of_2(qk_scale), qk_scale)
        p = tl.exp2(scores * row_scale[:, None] - (shift * row_scale)[:, None])
        # Subtracted first: as a multiply-add it would not be 1 where the maximum stays, but off by
        # the rounding of shift * row_scale, once more with every tile.
        rescale = tl.exp2((row_max - shift) * row_scale)
    return p, rescale


@triton.jit(do_not_specialize=["n_heads", "heads_per_wave", "Sq", "Skv"])
def attention_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    scale,
    n_heads,
    heads_per_wave,
    Hq,
    Hkv,
    Sq,
    Skv,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SCALE_SIGN: tl.constexpr,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out, and lse [B, Hq, Sq] (contiguous), of one block of BLOCK_M queries of one head."""
    n_tiles = (Sq + BLOCK_M - 1) // BLOCK_M
    tile, head = tile_and_head(n_tiles, n_heads, heads_per_wave)
    start_m = (n_tiles - 1 - tile) * BLOCK_M  # the last queries see most keys: they go first
    queries = start_m + tl.arange(0, BLOCK_M)

    q_ptr = head_start(q_ptr, head, Hq, q_strides) + rows_offset(start_m, q_strides)
    q_offsets = tile_offsets(q_strides, BLOCK_M, HEAD_DIM, WIDE)
    q = load_tile(q_ptr, q_offsets, Sq - start_m, D, True)  # [BLOCK_M, HEAD_DIM]
    q, score_scale = signed(q, scale, SCALE_SIGN)

    kv_head = head // (Hq // Hkv)
    k_ptr = head_start(k_ptr, kv_head, Hkv, k_strides)
    v_ptr = head_start(v_ptr, kv_head, Hkv, v_strides)
    k_offsets = tile_offsets(k_strides, BLOCK_N, HEAD_DIM, WIDE)
    v_offsets = tile_offsets(v_strides, BLOCK_N, HEAD_DIM, WIDE)
    k_step = rows_offset(BLOCK_N, k_strides)
    v_step = rows_offset(BLOCK_N, v_strides)

    acc = tl.full([BLOCK_M, HEAD_DIM], 0.0, dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    bulk_end, end = key_range(start_m, Sq, Skv, IS_CAUSAL, BLOCK_M, BLOCK_N)
    for MASKED in tl.static_range(2):  # first the bulk without a mask, then the rest with it
        for start_n in range(bulk_end * MASKED, end if MASKED else bulk_end, BLOCK_N):
            k = load_tile(k_ptr, k_offsets, Skv - start_n, D, MASKED)  # [BLOCK_N, HEAD_DIM]
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if MASKED:
                visible = visible_keys(queries, start_n, Sq, Skv, IS_CAUSAL, BLOCK_N)
                scores = tl.where(visible, scores, float("-inf"))
            # tl.max passes over NaN, but p is NaN where a score is, and then so are the sums.
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row that has seen nothing but -inf takes a finite shift: -inf - -inf is NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p, rescale = _exponentials(scores, row_max, shift, score_scale, EXACT)
            row_max = new_max
            row_sum = row_sum * rescale + tl.sum(p, 1)
            v = load_tile(v_ptr, v_offsets, Skv - start_n, D, MASKED)  # [BLOCK_N, HEAD_DIM]
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            k_ptr += k_step
            v_ptr += v_step

    is_empty = row_sum == 0.0
    acc = acc / tl.where(is_empty, 1.0, row_sum)[:, None]
    lse = row_max * score_scale + tl.log(row_sum)
    lse = tl.where(is_empty, float("-inf"), lse)
    lse_ptr += tl.cast(head, tl.int64) * Sq
    tl.store(lse_ptr + queries, lse, mask=queries < Sq)
    out_ptr = head_start(out_ptr, head, Hq, out_strides) + rows_offset(start_m, out_strides)
    out_offsets = tile_offsets(out_strides, BLOCK_M, HEAD_DIM, WIDE)
    store_tile(out_ptr, out_offsets, acc, Sq - start_m, D)


def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), out in q's layout."""
    if IS_INTERPRETED and q.dtype != torch.float32:
        out, lse = _fwd(q.float(), k.float(), v.float(), is_causal, scale)
        return out.to(q.dtype), lse
    # All that the choice of kernel, its tiles and its arguments depend on.
    key = (
        "attention fwd", q.dtype, k.dtype, v.dtype, q.device, is_causal, scale,
        q.shape, k.shape, q.stride(), k.stride(), v.stride(), is_aligned(q, k, v),
    )  # fmt: skip
    forward = remembered(key)
    if forward is None:
        out, lse = empty_outputs(q)
        if q.numel() == 0:
            return out, lse
        launch = _fwd_launch(q, k, v, out, is_causal, scale)
        forward = remember(key, (launch, Empty.like(out), Empty.like(lse)))
    launch, out_like, lse_like = forward
    out, lse = out_like.make(), lse_like.make()
    launch(q, k, v, out, lse)
    return out, lse


def _fwd_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Callable[..., None]:
    """What fills out and lse, given (q, k, v, out, lse) like these."""
    if hopper_takes(scale, q, k, v, out):
        from minitx.kernels.triton_attention_hopper import fwd_launch_hopper

        return fwd_launch_hopper(q, k, v, out, is_causal, scale)
    (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
    BLOCK_M, BLOCK_N, num_warps, num_stages = fwd_tiles(q, k)
    return Launch(
        attention_fwd,
        q.device,
        -(-Sq // BLOCK_M) * B * Hq,
        (
            q.stride(),
            k.stride(),
            v.stride(),
            out.stride(),
            scale,
            B * Hq,
            heads_per_wave(2 * Skv * D * k.element_size(), Hq // Hkv),
            Hq,
            Hkv,
            Sq,
            Skv,
        ),
        D=D,
        HEAD_DIM=padded_head_dim(D),
        IS_CAUSAL=is_causal,
        SCALE_SIGN=scale_sign(scale),
        EXACT=is_exact(q),
        WIDE=is_wide(q, k, v, out),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=True,
    )


def _bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
    needs: list[bool],
    into: Sequence[torch.Tensor] | None = None,
) -> Sequence[torch.Tensor]:
    """(dq, dk, dv), in the inputs' layouts; one that is not needed is an empty tensor."""
    if IS_INTERPRETED and q.dtype != torch.float32:
        dout, q32, k32, v32, out = (t.float() for t in (dout, q, k, v, out))
        grads = _bwd(dout, dlse, q32, k32, v32, out, lse, is_causal, scale, needs)
        return tuple(grad.to(q.dtype) for grad in grads)
    grads = empty_grads(q, k, v, needs) if into is None else into
    if not any(needs):
        return grads
    key = (
        "attention bwd", q.dtype, k.dtype, v.dtype, dout.dtype, out.dtype, lse.dtype, q.device,
        is_causal, scale, *needs, q.shape, k.shape, q.stride(), k.stride(), v.stride(),
        out.stride(), dout.stride(),
        None if dlse is None else (dlse.dtype, dlse.stride()), *[grad.stride() for grad in grads],
        is_aligned(q, k, v, out, dout, *grads),
    )  # fmt: skip
    wanted = [grad if needed else None for grad, needed in zip(grads, needs, strict=True)]
    launches = remembered(key)
    if launches is None:
        prepare = prepare_bwd
        if all(needs) and hopper_takes(scale, q, k, v, out, dout, *grads):
            from minitx.kernels.triton_attention_bwd_hopper import prepare_bwd_hopper

            prepare = prepare_bwd_hopper
        launches = remember(key, prepare(dout, dlse, q, k, v, out, is_causal, scale, *wanted))
    launches(dout, dlse, q, k, v, out, lse, *wanted)
    return grads


_attention = define_attention("triton", _fwd, _bwd)


def triton_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, Sq, D] in q's dtype and layout, and lse [B, Hq, Sq] in float32, natural log.

    Shapes as in `attention`; both results are differentiable, once. The first call of a dtype and
    head dim compiles for some seconds; another length never does.
    """
    return _attention(q, k, v, is_causal, scale)
