"""The gradient of an embedding in Triton: rows of dout added up by the id that read them, in order.

    dweight_v = sum of dout_i over the tokens i with id v

Tokens are sorted by id, in a stable order, and cut into pieces of PIECE. A program adds up the runs
of equal ids in its piece. A run that lies within it is done; of one that goes over an edge the sum
so far is put aside, and a second kernel, by the program of the piece where the run begins, adds
those up. No sum depends on which program is first, and none is longer than a piece or than the
number of pieces.
"""

import torch
import triton
import triton.language as tl

from minitx.kernels.triton_runtime import launching_on

# Kernels are not Python to a type checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

PIECE = 32  # tokens


@triton.jit
def _sum_runs_kernel(
    dout_ptr,  # [N, E]
    ids_ptr,  # [N], sorted
    order_ptr,  # [N]: the token of each
    out_ptr,  # [rows, E]
    partials_ptr,  # [pieces, 2, E] float32: of the run that began earlier, of that which goes on
    N,
    E,
    PIECE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    piece = tl.program_id(0)
    start = piece * PIECE
    end = tl.minimum(start + PIECE, N)
    cols = tl.arange(0, BLOCK_E)
    mask = cols < E

    run_id = tl.load(ids_ptr + start).to(tl.int64)
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1).to(tl.int64)
    began_earlier = (run_id == before).to(tl.int32)
    total = tl.zeros([BLOCK_E], dtype=tl.float32)
    row = tl.load(order_ptr + start).to(tl.int64)
    x = tl.load(dout_ptr + row * E + cols, mask=mask, other=0.0)
    for i in range(start, end):
        next_id = tl.load(ids_ptr + i + 1, mask=i + 1 < N, other=-1).to(tl.int64)
        next_row = tl.load(order_ptr + i + 1, mask=i + 1 < end, other=0).to(tl.int64)
        next_end = tl.where(i + 1 < end, E, 0)
        # Asked for before the sum needs it.
        next_x = tl.load(dout_ptr + next_row * E + cols, mask=cols < next_end, other=0.0)
        total += x.to(tl.float32)
        if next_id != run_id:
            if began_earlier != 0:
                tl.store(partials_ptr + piece.to(tl.int64) * 2 * E + cols, total, mask=mask)
            else:
                tl.store(out_ptr + run_id * E + cols, total.to(out_ptr.dtype.element_ty), mask=mask)
            total = tl.zeros([BLOCK_E], dtype=tl.float32)
            began_earlier = began_earlier * 0
        elif i + 1 == end:  # it goes on in the next piece
            kept = piece.to(tl.int64) * 2 + 1 - began_earlier
            tl.store(partials_ptr + kept * E + cols, total, mask=mask)
        run_id = next_id
        x = next_x


@triton.jit
def _join_runs_kernel(
    ids_ptr,  # [N], sorted
    out_ptr,  # [rows, E]
    partials_ptr,  # [pieces, 2, E]
    N,
    E,
    PIECE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    piece = tl.program_id(0)
    start = piece * PIECE
    end = start + PIECE
    cols = tl.arange(0, BLOCK_E)
    mask = cols < E

    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-1).to(tl.int64)
    run_id = tl.load(ids_ptr + end - 1, mask=end < N, other=-2).to(tl.int64)
    after = tl.load(ids_ptr + end, mask=end < N, other=-3).to(tl.int64)
    # Of sorted ids, the last one is that before the first only if all between are.
    if (run_id == after) & (run_id != before):
        last = end
        while after == run_id:
            last += PIECE
            after = tl.load(ids_ptr + last, mask=last < N, other=-3).to(tl.int64)
        total = tl.load(partials_ptr + (piece.to(tl.int64) * 2 + 1) * E + cols, mask=mask)
        for later in range(piece + 1, last // PIECE):
            total += tl.load(partials_ptr + tl.cast(later, tl.int64) * 2 * E + cols, mask=mask)
        tl.store(out_ptr + run_id * E + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def embedding_grad(dout: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, E] in dout's dtype: the sum of dout [N, E] over the places where ids [N] name the row.

    Sums are in float32, and in the same order every time.
    """
    N, E = dout.shape
    out = dout.new_zeros(rows, E)
    if N == 0 or E == 0:
        return out
    dout = dout.contiguous()
    sorted_ids, order = torch.sort(ids, stable=True)
    pieces = triton.cdiv(N, PIECE)
    partials = torch.empty(pieces, 2, E, dtype=torch.float32, device=dout.device)
    tile = dict(PIECE=PIECE, BLOCK_E=triton.next_power_of_2(E))
    with launching_on(dout.device):
        _sum_runs_kernel[(pieces,)](dout, sorted_ids, order, out, partials, N, E, **tile)
        _join_runs_kernel[(pieces,)](sorted_ids, out, partials, N, E, **tile)
    return out
