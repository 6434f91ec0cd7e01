"""The backward of Triton's fused attention: dQ by blocks of queries, dK and dV by blocks of keys.

With p = exp(scale * q k^T - lse), recomputed tile by tile (FlashAttention-2, section 3.2):

    delta = rowsum(dout * out) - dlse        dv = p^T dout
    ds = p * (dout v^T - delta)              dq = scale * ds k        dk = scale * ds^T q

Two kernels, no atomics: every run gives the same bits. The first, below, also writes lse and delta
as the second reads them (triton_attention_dkdv.py). Sums are float32; p and ds are rounded to the
inputs' dtype before their products.
"""

# A type checker takes tl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from minitx.kernels.triton_attention_dkdv import dkdv_launch
from minitx.kernels.triton_attention_tiles import (
    bwd_options,
    bwd_rows,
    dq_tiles,
    heads_per_wave,
    is_wide,
    rows_pitch,
)
from minitx.kernels.triton_launch import Launch
from minitx.kernels.triton_runtime import device_function
from minitx.kernels.triton_tiles import (
    LOG2E,
    PRECISION,
    head_start,
    key_range,
    load_tile,
    probabilities,
    rows_offset,
    signed,
    store_tile,
    tile_and_head,
    tile_offsets,
    visible_keys,
)


@device_function
def _exponent(lse, EXACT: tl.constexpr):
    """What `probabilities` takes for lse. For a row without keys, +inf: its p is then 0."""
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if not EXACT:
        lse = lse * LOG2E
        # Past 2^22 an lse in float32 is off by half a unit and more, and by thousands where it is
        # 1e11. Rather too large than too small: p of 0 is finite.
        lse = tl.where(tl.abs(lse) > 2.0**22, lse + tl.abs(lse) * 2.0**-21, lse)
    return lse


@triton.jit(do_not_specialize=["n_heads", "heads_per_wave", "Sq", "Skv"])
def attention_bwd_dq(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    exponent_ptr,
    delta_ptr,
    dq_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    dlse_strides,
    dq_strides,
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
    HAS_DLSE: tl.constexpr,
    NEEDS_DQ: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What attention_bwd_dkdv reads for each query, and dq if NEEDS_DQ, for BLOCK_M queries of a
    head.

    exponent_ptr, delta_ptr: [B, Hq, pitch] float32, of which Sq are written.
    """
    n_tiles = (Sq + BLOCK_M - 1) // BLOCK_M
    tile, head = tile_and_head(n_tiles, n_heads, heads_per_wave)
    start_m = (n_tiles - 1 - tile) * BLOCK_M  # the last queries see most keys: they go first
    queries = start_m + tl.arange(0, BLOCK_M)

    out_ptr = head_start(out_ptr, head, Hq, out_strides) + rows_offset(start_m, out_strides)
    out_offsets = tile_offsets(out_strides, BLOCK_M, HEAD_DIM, WIDE)
    out = load_tile(out_ptr, out_offsets, Sq - start_m, D, True)  # [BLOCK_M, HEAD_DIM]
    dout_ptr = head_start(dout_ptr, head, Hq, dout_strides) + rows_offset(start_m, dout_strides)
    dout_offsets = tile_offsets(dout_strides, BLOCK_M, HEAD_DIM, WIDE)
    dout = load_tile(dout_ptr, dout_offsets, Sq - start_m, D, True)  # [BLOCK_M, HEAD_DIM]
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)  # [BLOCK_M]
    if HAS_DLSE:
        dlse_ptr = head_start(dlse_ptr, head, Hq, dlse_strides)
        dlse = tl.load(dlse_ptr + rows_offset(queries, dlse_strides), mask=queries < Sq, other=0.0)
        delta -= dlse
    lse_ptr += tl.cast(head, tl.int64) * Sq
    lse = tl.load(lse_ptr + queries, mask=queries < Sq, other=0.0)  # [BLOCK_M]
    exponent = _exponent(lse, EXACT)
    row = tl.cast(head, tl.int64) * pitch + queries
    tl.store(exponent_ptr + row, exponent, mask=queries < Sq)
    tl.store(delta_ptr + row, delta, mask=queries < Sq)

    if NEEDS_DQ:
        q_ptr = head_start(q_ptr, head, Hq, q_strides) + rows_offset(start_m, q_strides)
        q_offsets = tile_offsets(q_strides, BLOCK_M, HEAD_DIM, WIDE)
        q = load_tile(q_ptr, q_offsets, Sq - start_m, D, True)  # [BLOCK_M, HEAD_DIM]
        q, score_scale = signed(q, scale, SCALE_SIGN)
        exponent = exponent[:, None]
        delta = delta[:, None]

        kv_head = head // (Hq // Hkv)
        k_ptr = head_start(k_ptr, kv_head, Hkv, k_strides)
        v_ptr = head_start(v_ptr, kv_head, Hkv, v_strides)
        k_offsets = tile_offsets(k_strides, BLOCK_N, HEAD_DIM, WIDE)
        v_offsets = tile_offsets(v_strides, BLOCK_N, HEAD_DIM, WIDE)
        k_step = rows_offset(BLOCK_N, k_strides)
        v_step = rows_offset(BLOCK_N, v_strides)

        dq = tl.full([BLOCK_M, HEAD_DIM], 0.0, dtype=tl.float32)
        bulk_end, end = key_range(start_m, Sq, Skv, IS_CAUSAL, BLOCK_M, BLOCK_N)
        for MASKED in tl.static_range(2):
            for start_n in range(bulk_end * MASKED, end if MASKED else bulk_end, BLOCK_N):
                k = load_tile(k_ptr, k_offsets, Skv - start_n, D, MASKED)  # [BLOCK_N, HEAD_DIM]
                v = load_tile(v_ptr, v_offsets, Skv - start_n, D, MASKED)  # [BLOCK_N, HEAD_DIM]
                # Both [BLOCK_M, BLOCK_N]
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
                ds = probabilities(scores, score_scale, exponent, EXACT) * (dp - delta)
                if MASKED:
                    visible = visible_keys(queries, start_n, Sq, Skv, IS_CAUSAL, BLOCK_N)
                    ds = tl.where(visible, ds, 0.0)
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
                k_ptr += k_step
                v_ptr += v_step

        dq_ptr = head_start(dq_ptr, head, Hq, dq_strides) + rows_offset(start_m, dq_strides)
        dq_offsets = tile_offsets(dq_strides, BLOCK_M, HEAD_DIM, WIDE)
        store_tile(dq_ptr, dq_offsets, dq * scale, Sq - start_m, D)


def dq_launch(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    scale: float,
    dq: torch.Tensor | None,
) -> Launch:
    """What fills exponent, delta and dq, given (q, k, v, out, lse, dout, dlse, exponent, delta, dq)
    like these."""
    (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
    BLOCK_M, BLOCK_N, num_warps, num_stages = dq_tiles(q, k)
    return Launch(
        attention_bwd_dq,
        q.device,
        -(-Sq // BLOCK_M) * B * Hq,
        (
            q.stride(),
            k.stride(),
            v.stride(),
            out.stride(),
            dout.stride(),
            (0, 0, 0) if dlse is None else dlse.stride(),
            (0, 0, 0, 0) if dq is None else dq.stride(),
            scale,
            B * Hq,
            heads_per_wave(2 * Skv * D * k.element_size(), Hq // Hkv),
            Hq,
            Hkv,
            Sq,
            Skv,
            rows_pitch(Sq),
        ),
        HAS_DLSE=dlse is not None,
        NEEDS_DQ=dq is not None,
        WIDE=is_wide(q, k, v, out, dout, q if dq is None else dq),
        **bwd_options(q, is_causal, scale),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def prepare_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    scale: float,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> Callable[..., None]:
    """What fills those of dq, dk and dv that are given, called with (dout, dlse, q, k, v, out, lse,
    dq, dk, dv) like these; None is not computed.

    dout has out's shape, dlse lse's (None: zero), with any strides; lse is contiguous.
    """
    rows = bwd_rows(q, rows_pitch(q.shape[2]))  # of exponents, and of deltas
    launch_dq = launch_dkdv = None
    if q.numel() > 0:
        launch_dq = dq_launch(dout, dlse, q, k, v, out, is_causal, scale, dq)
    if k.numel() > 0 and not (dk is None and dv is None):
        launch_dkdv = dkdv_launch(dout, q, k, v, is_causal, scale, dk, dv)

    def launches(dout, dlse, q, k, v, out, lse, dq, dk, dv) -> None:
        exponent, delta = rows.make(), rows.make()
        if launch_dq is not None:
            launch_dq(q, k, v, out, lse, dout, dlse, exponent, delta, dq)
        if launch_dkdv is not None:
            launch_dkdv(q, k, v, dout, exponent, delta, dk, dv)

    return launches
