"""The backward of Triton's fused attention, second half: dK and dV by blocks of keys.

The maths is that of triton_attention_bwd.py, whose kernel comes before and leaves an exponent and
delta for each query:

    dv = p^T dout        ds = p * (dout v^T - delta)        dk = scale * ds^T q

Scores are kept transposed, k q^T, so that p^T and ds^T come out as the left operands they have to
be. Nothing is ever transposed on the left: Triton 3.4 to 3.7.0 miscompiles tl.dot on Hopper where
its left operand is a transposed register tile.
"""

# A type checker takes tl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from minitx.kernels.triton_attention_tiles import (
    bwd_options,
    dkdv_tiles,
    heads_per_wave,
    is_wide,
    rows_pitch,
)
from minitx.kernels.triton_launch import Launch
from minitx.kernels.triton_tiles import (
    PRECISION,
    head_start,
    load_tile,
    probabilities,
    query_range,
    rows_offset,
    signed,
    store_tile,
    tile_and_head,
    tile_offsets,
    visible_queries,
)


@triton.jit(do_not_specialize=["n_heads", "heads_per_wave", "Sq", "Skv"])
def attention_bwd_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    exponent_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    scale,
    n_heads,
    heads_per_wave,
    Hq,
    Hkv,
    Sq,
    Skv,
    pitch,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SCALE_SIGN: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    NEEDS_DK: tl.constexpr,
    NEEDS_DV: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of BLOCK_N keys of one key head, summed over the query heads that share it."""
    n_tiles = (Skv + BLOCK_N - 1) // BLOCK_N
    tile, kv_head = tile_and_head(n_tiles, n_heads, heads_per_wave)
    start_n = tile * BLOCK_N  # the first keys are seen by most queries: they go first

    k_ptr = head_start(k_ptr, kv_head, Hkv, k_strides) + rows_offset(start_n, k_strides)
    k_offsets = tile_offsets(k_strides, BLOCK_N, HEAD_DIM, WIDE)
    k = load_tile(k_ptr, k_offsets, Skv - start_n, D, True)  # [BLOCK_N, HEAD_DIM]
    k, score_scale = signed(k, scale, SCALE_SIGN)
    v_ptr = head_start(v_ptr, kv_head, Hkv, v_strides) + rows_offset(start_n, v_strides)
    v_offsets = tile_offsets(v_strides, BLOCK_N, HEAD_DIM, WIDE)
    v = load_tile(v_ptr, v_offsets, Skv - start_n, D, True)  # [BLOCK_N, HEAD_DIM]

    q_offsets = tile_offsets(q_strides, BLOCK_M, HEAD_DIM, WIDE)
    dout_offsets = tile_offsets(dout_strides, BLOCK_M, HEAD_DIM, WIDE)
    dk = tl.full([BLOCK_N, HEAD_DIM], 0.0, dtype=tl.float32)
    dv = tl.full([BLOCK_N, HEAD_DIM], 0.0, dtype=tl.float32)
    # Masked tiles reach from `first` to the bulk, and there may be a last one after it.
    first, bulk_start, bulk_end = query_range(start_n, Sq, Skv, IS_CAUSAL, BLOCK_M, BLOCK_N)
    n_bulk = (bulk_end - bulk_start) // BLOCK_M
    n_masked = (bulk_start - first) // BLOCK_M + tl.where(bulk_end < Sq, 1, 0)
    for MASKED in tl.static_range(2):
        n_tiles = n_masked if MASKED else n_bulk
        for i in range(0, n_tiles * GROUP):  # tile after tile of head after head
            head = kv_head * GROUP
            if GROUP > 1:
                head += i // n_tiles
                i = i % n_tiles
            start_m = (first if MASKED else bulk_start) + i * BLOCK_M
            if MASKED:  # from the diagonal over the bulk to the ragged end
                start_m = tl.where(start_m < bulk_start, start_m, bulk_end)
            queries = start_m + tl.arange(0, BLOCK_M)
            q_tile = head_start(q_ptr, head, Hq, q_strides) + rows_offset(start_m, q_strides)
            q = load_tile(q_tile, q_offsets, Sq - start_m, D, MASKED)  # [BLOCK_M, HEAD_DIM]
            dout_tile = head_start(dout_ptr, head, Hq, dout_strides)
            dout_tile += rows_offset(start_m, dout_strides)
            dout = load_tile(dout_tile, dout_offsets, Sq - start_m, D, MASKED)  # the same
            row = tl.cast(head, tl.int64) * pitch + start_m
            # Past Sq these read what may be there: the mask undoes it.
            exponent = tl.load(exponent_ptr + row + tl.arange(0, BLOCK_M))  # [BLOCK_M]
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            p = probabilities(scores, score_scale, exponent[None, :], EXACT)
            if MASKED:
                visible = visible_queries(queries, start_n, Sq, Skv, IS_CAUSAL, BLOCK_N)
                p = tl.where(visible, p, 0.0)
            if NEEDS_DV:
                dv = tl.dot(p.to(q.dtype), dout, dv, input_precision=PRECISION)
            if NEEDS_DK:
                dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # as scores
                delta = tl.load(delta_ptr + row + tl.arange(0, BLOCK_M))  # [BLOCK_M]
                ds = p * (dp - delta[None, :])
                if MASKED:  # delta may be NaN. p tells what the mask told, and is at hand.
                    ds = tl.where(p == 0.0, 0.0, ds)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    if NEEDS_DK:
        dk_ptr = head_start(dk_ptr, kv_head, Hkv, dk_strides) + rows_offset(start_n, dk_strides)
        dk_offsets = tile_offsets(dk_strides, BLOCK_N, HEAD_DIM, WIDE)
        store_tile(dk_ptr, dk_offsets, dk * scale, Skv - start_n, D)
    if NEEDS_DV:
        dv_ptr = head_start(dv_ptr, kv_head, Hkv, dv_strides) + rows_offset(start_n, dv_strides)
        dv_offsets = tile_offsets(dv_strides, BLOCK_N, HEAD_DIM, WIDE)
        store_tile(dv_ptr, dv_offsets, dv, Skv - start_n, D)


def dkdv_launch(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> Launch:
    """What fills those of dk and dv that are given, at least one, called with (q, k, v, dout,
    exponent, delta, dk, dv) like these."""
    (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
    BLOCK_M, BLOCK_N, num_warps, num_stages = dkdv_tiles(q, k)
    dk_out, dv_out = (k if dk is None else dk), (v if dv is None else dv)
    return Launch(
        attention_bwd_dkdv,
        q.device,
        -(-Skv // BLOCK_N) * B * Hkv,
        (
            q.stride(),
            k.stride(),
            v.stride(),
            dout.stride(),
            dk_out.stride(),
            dv_out.stride(),
            scale,
            B * Hkv,
            heads_per_wave(2 * Sq * D * q.element_size() * (Hq // Hkv)),
            Hq,
            Hkv,
            Sq,
            Skv,
            rows_pitch(Sq),
        ),
        GROUP=Hq // Hkv,
        NEEDS_DK=dk is not None,
        NEEDS_DV=dv is not None,
        WIDE=is_wide(q, k, v, dout, dk_out, dv_out),
        **bwd_options(q, is_causal, scale),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_warps=num_warps,
        num_stages=num_stages,
    )
