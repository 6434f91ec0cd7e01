"""Cross-entropy over the rows of a chunk of logits in Triton, two passes, in place.

    pass 1    max and sum_v exp(z_v - max), online: every lane carries a running maximum and a sum
              that is relative to it, takes in DEPTH words at once, and the lanes are merged at the
              end
    pass 2    dz_v = g (exp(z_v - max) / sum - [v = target]), written over z

One program has one row of any width. A row of 50,304 words in bfloat16 is 98 KiB, so the second
pass reads it from L2, and each logit crosses to main memory once each way.
"""

import torch
import triton
import triton.language as tl

from minitx.kernels.triton_runtime import launching_on

LOG2E = tl.constexpr(1.4426950408889634)

LANES = 2048
DEPTH = 4  # words that a lane takes in at once, and rescales its sum for but once
WORDS_PER_THREAD = 8  # of neighbouring lanes: 16 bytes of a 16-bit dtype


@triton.jit
def _cross_entropy_rows_kernel(
    logits_ptr,  # [C, V], becomes dz with WRITE_GRAD
    targets_ptr,  # [C]
    row_grad_ptr,  # [C]
    nll_ptr,  # [C] float32
    row_stride,
    V,
    ignore_index,
    HAS_ROW_GRAD: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row).to(tl.int64)
    lanes = tl.arange(0, LANES)
    # A target outside of the vocabulary makes the loss NaN: seen, and without a stray read.
    in_range = (target >= 0) & (target < V)
    # Read here, ahead of the reductions' barriers: after them another warp may have written dz.
    z_target = tl.load(row_ptr + target, mask=in_range, other=float("nan")).to(tl.float32)

    if target == ignore_index:
        tl.store(nll_ptr + row, 0.0)
        if WRITE_GRAD:
            for start in range(0, V, LANES):
                zero = tl.zeros([LANES], dtype=logits_ptr.dtype.element_ty)
                tl.store(row_ptr + start + lanes, zero, mask=start + lanes < V)
    else:
        lane_max = tl.full([LANES], -float("inf"), dtype=tl.float32)
        lane_sum = tl.zeros([LANES], dtype=tl.float32)
        for start in range(0, V, DEPTH * LANES):
            cols = start + tl.arange(0, DEPTH)[:, None] * LANES + lanes[None, :]
            z = tl.load(row_ptr + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
            new_max = tl.maximum(lane_max, tl.max(z, axis=0))
            # While a lane has seen -inf alone, exp(-inf - 0) is 0 where exp(-inf - -inf) is NaN.
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)
            lane_sum *= tl.exp2((lane_max - shift) * LOG2E)
            lane_sum += tl.sum(tl.exp2((z - shift[None, :]) * LOG2E), axis=0)
            lane_max = new_max
        row_max = tl.max(lane_max, axis=0)
        shift = tl.where(row_max == -float("inf"), 0.0, row_max)
        row_sum = tl.sum(lane_sum * tl.exp2((lane_max - shift) * LOG2E), axis=0)
        # log(sum) - (z - max) and not (max + log(sum)) - z: that would carry the rounding of lse.
        tl.store(nll_ptr + row, tl.log(row_sum) - (z_target - shift))

        if WRITE_GRAD:
            factor = 1.0
            if HAS_ROW_GRAD:
                factor = tl.load(row_grad_ptr + row).to(tl.float32)
            factor = tl.where(in_range, factor, float("nan"))
            # Once: a division costs as much as an exponential.
            scale = 1.0 / row_sum  # pyright: ignore[reportOperatorIssue]
            for start in range(0, V, DEPTH * LANES):
                cols = start + tl.arange(0, DEPTH)[:, None] * LANES + lanes[None, :]
                z = tl.load(row_ptr + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
                p = tl.exp2((z - shift) * LOG2E) * scale
                dz = (p - tl.where(cols == target, 1.0, 0.0)) * factor
                tl.store(row_ptr + cols, dz.to(logits_ptr.dtype.element_ty), mask=cols < V)


def cross_entropy_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    row_grad: torch.Tensor | None,
    ignore_index: int,
    write_grad: bool,
) -> torch.Tensor:
    """nll [C] float32 of logits [C, V] (rows contiguous); with write_grad they become dz in place.

    targets: [C]; row_grad: g, [C], None for ones. A target outside of [0, V) gives NaN.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.bfloat16:
        # The interpreter cuts float32 off to bfloat16 where a GPU rounds.
        z = logits.float()
        nll = cross_entropy_rows(z, targets, row_grad, ignore_index, write_grad)
        if write_grad:
            logits.copy_(z)
        return nll
    C, V = logits.shape
    nll = torch.empty(C, dtype=torch.float32, device=logits.device)
    lanes = min(LANES, triton.next_power_of_2(V))
    with launching_on(logits.device):
        _cross_entropy_rows_kernel[(C,)](
            logits,
            targets.contiguous(),
            nll if row_grad is None else row_grad.contiguous(),
            nll,
            logits.stride(0),
            V,
            ignore_index,
            HAS_ROW_GRAD=row_grad is not None,
            WRITE_GRAD=write_grad,
            LANES=lanes,
            DEPTH=min(DEPTH, triton.next_power_of_2(triton.cdiv(V, lanes))),
            num_warps=max(1, lanes // (32 * WORDS_PER_THREAD)),  # pyright: ignore[reportCallIssue]
        )
    return nll
