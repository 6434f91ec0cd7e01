"""Cross-entropy over the rows of a chunk of logits in Triton, in place, read once and written once.

    nll  = log sum_v exp(z_v - max) - (z_target - max)
    dz_v = g (exp(z_v - max) / sum - [v = target]), written over z

A row of 50,304 words in bfloat16 is 98 KiB: one program holds no more than a piece of it. Programs
keep their pieces in registers, and wait for the maximum and the sum of the others
(triton_groups.py). The one that has the target's logit writes nll.
"""

import torch
import triton
import triton.language as tl

from minitx.kernels.triton_groups import Chunks, chunk_of, launch_groups, merge_partials, publish
from minitx.kernels.triton_rows import exp_below, in_float32

# Kernels are not Python to a type checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

# By bytes of a logit. Measured on an H200 for 2 (benchmarks/NOTES.md); for 4 as the wide softmax's
# backward has them.
PIECES = {
    2: Chunks(BLOCK_N=2048, num_warps=1, programs_per_sm=28),
    4: Chunks(BLOCK_N=8192, num_warps=8, programs_per_sm=3),
}


@triton.jit
def _cross_entropy_rows_kernel(
    logits_ptr,  # [C, V], becomes dz with WRITE_GRAD
    targets_ptr,  # [C]
    row_grad_ptr,  # [C]
    nll_ptr,  # [C] float32
    words_ptr,  # [C, n_pieces] int64, zeros
    row_stride,
    C,
    V,
    n_pieces,
    ignore_index,
    HAS_ROW_GRAD: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    PUBLISH: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,
):
    EXACT: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    lanes = tl.arange(0, BLOCK_N)
    for r in range(tl.program_id(0) // n_pieces, C, tl.num_programs(0) // n_pieces):
        row = tl.cast(r, tl.int64)
        piece = chunk_of(r, n_pieces)
        start = piece * BLOCK_N
        ptrs = logits_ptr + row * row_stride + start + lanes
        mask = lanes < V - start
        partials = words_ptr + row * n_pieces

        z = tl.load(ptrs, mask=mask, other=-float("inf"))  # [BLOCK_N]
        target = tl.load(targets_ptr + row).to(tl.int64)
        # A target outside of the vocabulary makes the loss NaN: seen, and without a stray read.
        in_range = (target >= 0) & (target < V)
        writes_nll = piece == tl.where(in_range, target // BLOCK_N, 0)
        if PUBLISH:
            piece_max = tl.max(in_float32(z))
            piece_sum = tl.sum(exp_below(in_float32(z), piece_max, EXACT))
            publish(partials + piece, piece_max, piece_sum)

        if WRITE and (WRITE_GRAD or writes_nll):
            # Read here, ahead of the reductions' barriers: after them another warp may have
            # written dz.
            z_target = tl.load(
                logits_ptr + row * row_stride + target,
                mask=in_range & writes_nll,
                other=float("nan"),
            ).to(tl.float32)
            row_max, row_sum = merge_partials(partials, n_pieces, MERGE, EXACT)

            is_ignored = target == ignore_index
            if writes_nll:
                # log(sum) - (z - max) and not (max + log(sum)) - z: that would carry the rounding
                # of lse.
                shift = tl.where(row_max == -float("inf"), 0.0, row_max)
                nll = tl.log(row_sum) - (z_target - shift)
                tl.store(nll_ptr + row, tl.where(is_ignored, 0.0, nll))
            if WRITE_GRAD:
                if is_ignored:
                    zero = tl.zeros([BLOCK_N], dtype=logits_ptr.dtype.element_ty)
                    tl.store(ptrs, zero, mask=mask)
                else:
                    factor = 1.0
                    if HAS_ROW_GRAD:
                        factor = tl.load(row_grad_ptr + row).to(tl.float32)
                    factor = tl.where(in_range, factor, float("nan"))
                    # Once: a division costs as much as an exponential.
                    p = exp_below(in_float32(z), row_max, EXACT) * (1.0 / row_sum)
                    dz = (p - tl.where(lanes == target - start, 1.0, 0.0)) * factor
                    tl.store(ptrs, dz.to(logits_ptr.dtype.element_ty), mask=mask)


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
    pieces = PIECES[logits.element_size()]
    pieces = pieces._replace(BLOCK_N=min(pieces.BLOCK_N, triton.next_power_of_2(V)))
    n_pieces = triton.cdiv(V, pieces.BLOCK_N)
    words = torch.zeros(C * n_pieces, dtype=torch.int64, device=logits.device)

    def launch(n_groups: int, **options) -> None:
        _cross_entropy_rows_kernel[(n_groups * n_pieces,)](
            logits,
            targets.contiguous(),
            nll if row_grad is None else row_grad.contiguous(),
            nll,
            words,
            logits.stride(0),
            C,
            V,
            n_pieces,
            ignore_index,
            HAS_ROW_GRAD=row_grad is not None,
            WRITE_GRAD=write_grad,
            **options,
        )

    launch_groups(launch, C, n_pieces, pieces, logits.device)
    return nll
