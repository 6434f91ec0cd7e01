"""Pieces that the Triton attention kernels for Hopper share: who works, rings of tiles, layouts.

Imported on a Hopper GPU alone, and with the versions of Triton that `hopper_takes` names: Gluon,
Triton's language one level below its own, differs from version to version.

A program has two to four warpgroups of four warps that compute, each on 64 rows of its own, and
one warp that loads tiles by TMA into rings in shared memory, which all of them read. A ring has for
each of its stages a barrier `full`, on which TMA counts the bytes it wrote, and one `empty`, on
which each warpgroup says that it has read. Stage and phase go round: the phase a barrier waits for
flips each time that the ring has been gone through.

A wait for products counts from the last one issued: all but so many have ended. ptxas moves it up
as far as its basic block goes, to before exponentials that were to run meanwhile. So where
something is to overlap, a barrier's wait, which is a loop, stands between: one that has to come
some time before the next product anyway.
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

import functools
from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# The load and the store of a tile by TMA, as Triton 3.9 and as 3.6 call them.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

ROWS = gl.constexpr(64)  # a warpgroup's
LOG2E = gl.constexpr(1.4426950408889634)
# Registers a thread by computing warpgroups, of all but the first and of the loading warp; the
# first warpgroup gets what they leave. An even share would be too few for the accumulators.
REGISTERS = gl.constexpr({2: 240, 3: 160, 4: 112})
LOADER_REGISTERS = gl.constexpr(24)

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FLOATS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def descriptor(t: torch.Tensor, n_rows: int) -> TensorDescriptor:
    """How TMA reads or writes n_rows rows of one head of t [B, H, S, D] at a time: 0, or nothing,
    past the S."""
    return TensorDescriptor(t, t.shape, t.stride(), [1, 1, n_rows, t.shape[3]], TILE_LAYOUT)


def floats_descriptor(t: torch.Tensor, n: int) -> TensorDescriptor:
    """How TMA reads n neighbours of t, one-dimensional and of float32."""
    return TensorDescriptor(t, t.shape, t.stride(), [n], FLOATS_LAYOUT)


def descriptors(*n_rows: int) -> tuple[Callable[[torch.Tensor], TensorDescriptor], ...]:
    """What makes `descriptor`s of n_rows rows, for tensor after tensor."""
    return tuple(functools.partial(descriptor, n_rows=n) for n in n_rows)


@gluon.constexpr_function
def product_layout(N):
    """Where a warpgroup keeps a product [64, N], in float32."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def left_layout(N):
    """Where it keeps the left operand of one that gives [64, N]."""
    return gl.DotOperandLayout(0, product_layout(N), 2)


@gluon.constexpr_function
def row_layout(HEAD_DIM):
    """Where it keeps [64, HEAD_DIM] to read or write memory: 16 bytes a thread, whole rows."""
    return gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N barriers that let go after COUNT arrivals."""
    result = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(result.index(i), count=COUNT)
    return result


@gluon.jit
def load_next(desc, at, tiles, full, empty, stage, phase, N_BYTES: gl.constexpr):
    """Loads a tile of N_BYTES at `at` into a ring's stage, once all have read what was there."""
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), N_BYTES)
    load_tile(desc, at, full.index(stage), tiles.index(stage))


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The stage and phase after these."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@gluon.jit
def pass_over(
    n, first_full, first_empty, second_full, second_empty, stage, phase, STAGES: gl.constexpr
):
    """Lets go of the next n tiles of two rings, which other warpgroups alone need."""
    for _i in range(n):
        mbarrier.wait(first_full.index(stage), phase)
        mbarrier.arrive(first_empty.index(stage), count=1)
        mbarrier.wait(second_full.index(stage), phase)
        mbarrier.arrive(second_empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def write_number(numbers, i, number):
    """Writes one of `numbers` in shared memory: by a single warp."""
    one = gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    numbers.index(i).store(one * number)


@gluon.jit
def read_number(numbers, i):
    """Reads it, in each thread of a warpgroup."""
    return gl.max(numbers.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def block_and_head(place, n_blocks, n_heads, heads_per_wave):
    """(block, head) of a place in the order of work: heads_per_wave heads at a time, and of those
    block 0 first."""
    first_head = place // (n_blocks * heads_per_wave) * heads_per_wave
    wave = gl.minimum(heads_per_wave, n_heads - first_head)
    rank = place - first_head * n_blocks
    return rank // wave, first_head + rank % wave


@gluon.jit
def key_tiles(start_m, n_rows, Sq, Skv, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """(n_bulk, n_tiles) for the n_rows queries from start_m: of the first n_tiles tiles of keys,
    which hold every key that one of them sees, all see all keys of the first n_bulk. Where there is
    no key to see, or no query, n_tiles is 1: its mask leaves nothing."""
    end = Skv
    full = Skv
    if IS_CAUSAL:
        # Query i sees keys j <= i + Skv - Sq.
        end = gl.minimum(end, start_m + n_rows + (Skv - Sq))
        full = gl.minimum(full, gl.maximum(start_m + 1 + (Skv - Sq), 0))
    end = gl.where(start_m < Sq, end, 0)
    return full // BLOCK_N, gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def keep_up_to(x, at, last, ELSE: gl.constexpr):
    """x where at <= last, ELSE (0 or -inf) elsewhere. In assembly, and not said to be pure: or the
    compiler would turn a branch around it into a choice, made for every tile."""
    if ELSE == 0.0:
        code: gl.constexpr = (
            "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }"
        )
    else:
        code: gl.constexpr = (
            "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }"
        )
    return gl.inline_asm_elementwise(
        code, "=f,f,r,r", [x, at, last], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def columns_and_lanes(N: gl.constexpr):
    """arange(N) as the sum of two, along the columns of `product_layout`: a thread's part of the
    first is known when it is compiled, and of the second one number."""
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, product_layout(N)))
    return columns & ~6, columns & 6


@gluon.jit
def keep_seen(
    x, first, tile, Sq, Skv, IS_CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, ELSE: gl.constexpr
):
    """x [64, BLOCK_N] where query first + i may read key tile * BLOCK_N + j, and it exists; ELSE
    where not."""
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns, lanes = columns_and_lanes(BLOCK_N)
    if IS_CAUSAL:
        last = rows + (first + (Skv - Sq) - tile * BLOCK_N)
    else:
        last = rows * 0 + (Skv - 1 - tile * BLOCK_N)
    nought = gl.full([ROWS, 1], 0, gl.int32, LAYOUT)
    return keep_up_to(x, columns[None, :] + nought, last[:, None] - lanes[None, :], ELSE)


@gluon.jit
def halves(x):
    """The first and the second half of the columns of x [64, N], of which each thread has some."""
    N: gl.constexpr = x.shape[1]
    return gl.split(x.reshape([ROWS, 2, N // 2]).permute([0, 2, 1]))


@gluon.jit
def joined(first, second):
    """What `halves` gave."""
    N: gl.constexpr = first.shape[1] * 2
    second = gl.convert_layout(second, first.type.layout)
    return gl.join(first, second).permute([0, 2, 1]).reshape([ROWS, N])


@gluon.jit
def packed(p, dtype: gl.constexpr):
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
def unpacked(pairs, DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """What `packed` was given, in DTYPE, as the left operand of a product [64, HEAD_DIM]."""
    N: gl.constexpr = pairs.shape[1] * 2
    low = (pairs & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([ROWS, N]), left_layout(HEAD_DIM))


@gluon.jit
def row_pointers(ptr, strides, b, h, first, HEAD_DIM: gl.constexpr):
    """Pointers [64, HEAD_DIM] to the rows of head h of batch b from `first`."""
    LAYOUT: gl.constexpr = row_layout(HEAD_DIM)
    base = ptr + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    rows = (first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))).to(gl.int64)
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    return base + rows[:, None] * strides[2] + columns[None, :]


@gluon.jit
def existing_rows(n_rows, HEAD_DIM: gl.constexpr):
    """Boolean mask [64, HEAD_DIM] of the first n_rows rows."""
    LAYOUT: gl.constexpr = row_layout(HEAD_DIM)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    return (rows < n_rows)[:, None] & (columns < HEAD_DIM)[None, :]


@gluon.jit
def store_rows(ptr, strides, b, h, first, tile, n_rows, HEAD_DIM: gl.constexpr):
    """Stores the first n_rows rows of tile [64, HEAD_DIM] where `row_pointers` says."""
    pointers = row_pointers(ptr, strides, b, h, first, HEAD_DIM)
    tile = gl.convert_layout(tile.to(ptr.dtype.element_ty), row_layout(HEAD_DIM))
    gl.store(pointers, tile, mask=existing_rows(n_rows, HEAD_DIM))
