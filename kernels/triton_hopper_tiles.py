"""Pieces that the Triton attention kernels for Hopper share: who works, rings of tiles, layouts.

Imported on a Hopper GPU alone, and with the versions of Triton that `hopper_takes` names: Gluon,
Triton's language one level below its own, differs from version to version.

A program has twelve warps. Two warpgroups of four compute, each on 64 rows of its own; one warp
loads tiles by TMA into rings in shared memory, both groups read the same ones, and three warps
idle. A ring has for each of its STAGES a barrier `full`, on which TMA counts the bytes it wrote,
and one `empty`, on which each group says that it has read. Stage and phase go round: the phase a
barrier waits for flips each time that the ring has been gone through.
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import functools
from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# The load of a tile by TMA, as Triton 3.9 and as 3.6 call it.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

HEAD_DIM = gl.constexpr(128)
ROWS = gl.constexpr(64)  # a warpgroup's
GROUPS = gl.constexpr(2)  # warpgroups that compute
STAGES = gl.constexpr(2)
LOG2E = gl.constexpr(1.4426950408889634)
# Registers a thread, of the second computing group and of the loading warp; the first group gets
# what they leave. An even share would be 168: too few for the accumulators.
REGISTERS = gl.constexpr((240, 24))

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def descriptor(t: torch.Tensor, n_rows: int) -> TensorDescriptor:
    """How TMA reads n_rows rows of one head of t [B, H, S, 128] at a time, and 0 past the S."""
    return TensorDescriptor(t, t.shape, t.stride(), [1, 1, n_rows, 128], TILE_LAYOUT)


def descriptors(*n_rows: int) -> tuple[Callable[[torch.Tensor], TensorDescriptor], ...]:
    """What makes `descriptor`s of n_rows rows, for tensor after tensor."""
    return tuple(functools.partial(descriptor, n_rows=n) for n in n_rows)


@gluon.constexpr_function
def product_layout(N):
    """Where a warpgroup keeps a product [64, N], in float32."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def left_layout():
    """Where it keeps the left operand of one that gives [64, HEAD_DIM]."""
    return gl.DotOperandLayout(0, product_layout(HEAD_DIM), 2)


@gluon.constexpr_function
def row_layout():
    """Where it keeps [64, HEAD_DIM] to read or write memory: 16 bytes a thread, whole rows."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N barriers that let go after COUNT arrivals."""
    result = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(result.index(i), count=COUNT)
    return result


@gluon.jit
def ring_barriers():
    """(once, full, empty, full, empty): a barrier a warpgroup, for what is loaded once, and those
    of two rings."""
    once = barriers(GROUPS, 1)
    first_full = barriers(STAGES, 1)
    first_empty = barriers(STAGES, GROUPS)
    second_full = barriers(STAGES, 1)
    second_empty = barriers(STAGES, GROUPS)
    fence_async_shared()  # TMA must see them
    return once, first_full, first_empty, second_full, second_empty


@gluon.jit
def load_next(desc, at, tiles, full, empty, stage, phase, N_ROWS: gl.constexpr):
    """Loads N_ROWS rows at `at` into a ring's stage, once both groups have read what was there."""
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), N_ROWS * HEAD_DIM * 2)
    load_tile(desc, at, full.index(stage), tiles.index(stage))


@gluon.jit
def advance(stage, phase):
    """The stage and phase after these."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@gluon.jit
def block_and_head(n_blocks, n_heads, heads_per_wave):
    """(block, head) of this program: heads_per_wave heads at a time, and of those block 0 first."""
    pid = gl.program_id(0)
    first_head = pid // (n_blocks * heads_per_wave) * heads_per_wave
    wave = gl.minimum(heads_per_wave, n_heads - first_head)
    rank = pid - first_head * n_blocks
    return rank // wave, first_head + rank % wave


@gluon.jit
def key_tiles(
    start_m, Sq, Skv, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(n_bulk, n_tiles) for the queries from start_m: of the first n_tiles tiles of keys, which
    hold every key that one of them sees, all see all keys of the first n_bulk. Where there is no
    key to see n_tiles is 1: its mask leaves nothing."""
    end = Skv
    full = Skv
    if IS_CAUSAL:
        # Query i sees keys j <= i + Skv - Sq.
        end = gl.minimum(end, start_m + BLOCK_M + (Skv - Sq))
        full = gl.minimum(full, gl.maximum(start_m + 1 + (Skv - Sq), 0))
    return full // BLOCK_N, gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def visible_keys(
    queries, tile, Sq, Skv, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr
):
    """Boolean mask [64, BLOCK_N]: may queries[i] read key tile * BLOCK_N + j, and does it exist?"""
    keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    last_key = queries + (Skv - Sq) if IS_CAUSAL else queries * 0 + (Skv - 1)
    return keys[None, :] <= last_key[:, None]


@gluon.jit
def query_tiles(
    start_n, Sq, Skv, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(first, bulk_start, bulk_end) for the keys from start_n, all multiples of BLOCK_M: no query
    below `first` sees any of them; those from bulk_start to bulk_end exist and see them all."""
    first = 0
    bulk_start = 0
    bulk_end = Sq // BLOCK_M * BLOCK_M
    if IS_CAUSAL:
        # Key j is seen by the queries i >= j - (Skv - Sq).
        first = gl.maximum(start_n - (Skv - Sq), 0) // BLOCK_M * BLOCK_M
        last_key = gl.minimum(start_n + BLOCK_N, Skv) - 1
        bulk_start = (gl.maximum(last_key - (Skv - Sq), 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    return first, gl.minimum(bulk_start, bulk_end), bulk_end


@gluon.jit
def query_tile_start(i, first, bulk_start, bulk_end, MASKED: gl.constexpr, BLOCK_M: gl.constexpr):
    """The first query of the bulk's i-th tile or, if MASKED, of the i-th of the others: from the
    diagonal over the bulk to the ragged end."""
    start_m = (first if MASKED else bulk_start) + i * BLOCK_M
    if MASKED:
        start_m = gl.where(start_m < bulk_start, start_m, bulk_end)
    return start_m


@gluon.jit
def row_pointers(ptr, strides, b, h, first):
    """Pointers [64, HEAD_DIM] to the rows of head h of batch b from `first`."""
    LAYOUT: gl.constexpr = row_layout()
    base = ptr + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    base += first.to(gl.int64) * strides[2]
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    return base + rows[:, None] * strides[2] + columns[None, :]


@gluon.jit
def existing_rows(n_rows):
    """Boolean mask [64, HEAD_DIM] of the first n_rows rows."""
    LAYOUT: gl.constexpr = row_layout()
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    return (rows < n_rows)[:, None] & (columns < HEAD_DIM)[None, :]


@gluon.jit
def store_rows(ptr, strides, b, h, first, tile, n_rows):
    """Stores the first n_rows rows of tile [64, HEAD_DIM] where `row_pointers` says."""
    pointers = row_pointers(ptr, strides, b, h, first)
    tile = gl.convert_layout(tile.to(ptr.dtype.element_ty), row_layout())
    gl.store(pointers, tile, mask=existing_rows(n_rows))
