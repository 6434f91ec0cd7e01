"""How the Triton attention kernels are cut up and launched: tiles, warps, the order of heads.

Chosen by a few ifs from head dim, dtype and what a GPU has on chip. Nothing is tried out on the
tensors of a call: its first run is as right as any, and as quick, once compiled.
"""

import functools
from typing import NamedTuple

import torch
import triton

from minitx.kernels.kept import Empty
from minitx.kernels.triton_runtime import IS_INTERPRETED

# Gluon, in which the kernels for Hopper are written, differs from version to version: these are the
# releases of Triton that they have run with. (With 3.9 they compile.)
GLUON_RELEASES = ("3.6",)
L2_BYTES = 24 * 2**20  # what heads in flight may take of it: half of an H100's


class Tiles(NamedTuple):
    """How a kernel is cut up: queries and keys a tile, warps a program, loads in flight."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


def padded_head_dim(D: int) -> int:
    """HEAD_DIM: a power of two, of which tl.dot wants 16 at least."""
    return 1 << max(4, (D - 1).bit_length())


@functools.cache
def has_large_tiles(device_index: int) -> bool:
    """Whether a program may have 160 KiB of shared memory, as on A100, H100 and B200, and not only
    the 99 KiB of other GPUs since Ampere."""
    properties = torch.cuda.get_device_properties(device_index)
    return properties.shared_memory_per_block_optin >= 160 * 2**10


def interpreter_tiles(q: torch.Tensor, k: torch.Tensor) -> Tiles:
    """The interpreter pays by the operation, not by the element: the largest tiles of use."""
    BLOCK_M = min(128, max(16, triton.next_power_of_2(q.shape[2])))
    BLOCK_N = min(128, max(16, triton.next_power_of_2(k.shape[2])))
    return Tiles(BLOCK_M, BLOCK_N, 4, 1)


def scale_sign(scale: float) -> int:
    """-1, 0 or 1; 0 also for what float32 would flush to it."""
    if abs(scale) < 2.0**-126:
        return 0
    return 1 if scale > 0 else -1


def is_exact(x: torch.Tensor) -> bool:
    """Whether exponentials are to be right to the last bits of float32, and not of 16-bit types."""
    return x.dtype == torch.float32


def is_wide(*tensors: torch.Tensor) -> bool:
    """Whether 32 bits are too few for the offsets within a tile of one of them. In the interpreter
    always: it tests every 32-bit sum for overflow, at several times the price of the sum."""
    if IS_INTERPRETED:
        return True
    for t in tensors:
        _, _, s, d = t.stride()
        if s >= 2**22 or d >= 2**22:
            return True
    return False


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all of them start at multiples of 16 bytes."""
    bits = 0
    for t in tensors:
        bits |= t.data_ptr()
    return bits % 16 == 0


def heads_per_wave(head_bytes: int, group: int = 1) -> int:
    """How many heads go at a time, in whole groups, where a group reads head_bytes over and over:
    as many as leave half of a large L2 cache to the rest."""
    return max(1, L2_BYTES // max(1, head_bytes)) * group


@functools.cache
def has_hopper_kernels(device_index: int) -> bool:
    """Whether this is a Hopper GPU, and a Triton that the kernels for it are written for."""
    release = ".".join(triton.__version__.split(".")[:2])
    return (
        release in GLUON_RELEASES
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device_index) == (9, 0)
    )


def hopper_takes(scale: float, q: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernels for Hopper alone can take these tensors, q [B, Hq, Sq, D] and all others
    that they read or write in rows of D; and they are the faster ones wherever they can.

    They are made for 16-bit inputs, a head dim of 64 or 128 and a scale that is a normal float32
    above 0. Decoding stays with tiles of 16 queries; theirs have 128 and more.
    """
    return (
        q.shape[3] in (64, 128)
        and q.shape[2] > 16
        and q.dtype != torch.float32
        and 2.0**-120 <= scale <= 2.0**120
        and not IS_INTERPRETED
        and has_hopper_kernels(q.device.index)
        and _tma_reads(q)
        and all(_tma_reads(t) for t in others)
    )


def _tma_reads(t: torch.Tensor) -> bool:
    """Whether TMA can read t [B, H, S, D] of 16 bits: it starts at a multiple of 16 bytes, and its
    strides are multiples of that too (not 0, as of an expanded tensor), under 2^40 bytes, and 1 in
    the last dim. And 32 bits must hold the offsets within a tile: see `is_wide`."""
    b, h, s, d = t.stride()
    return (
        d == 1
        and (b | h | s) % 8 == 0  # each of them is
        and 0 < b < 2**39
        and 0 < h < 2**39
        and 0 < s < 2**22
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
    )


def bwd_options(q: torch.Tensor, is_causal: bool, scale: float) -> dict:
    """What both kernels of the backward are compiled with."""
    return {
        "D": q.shape[3],
        "HEAD_DIM": padded_head_dim(q.shape[3]),
        "IS_CAUSAL": is_causal,
        "SCALE_SIGN": scale_sign(scale),
        "EXACT": is_exact(q),
        "enable_fp_fusion": not is_exact(q),
    }


def rows_pitch(Sq: int) -> int:
    """Floats from row to row of `bwd_rows`: rows start at multiples of 64 bytes."""
    return -(-Sq // 16) * 16


def bwd_rows(q: torch.Tensor, pitch: int) -> Empty:
    """What makes room for a float a query, [B, Hq, pitch], in which the first kernel of a backward
    leaves the second something. A last tile may read BLOCK_M floats from anywhere in them."""
    B, Hq, _, _ = q.shape
    return Empty.contiguous((B * Hq * pitch + 128,), torch.float32, q.device)


def fwd_tiles(q: torch.Tensor, k: torch.Tensor) -> Tiles:
    """The forward's tiles: the fastest of those that fit on chip."""
    if IS_INTERPRETED:
        return interpreter_tiles(q, k)
    HEAD_DIM, is_float32 = padded_head_dim(q.shape[3]), q.dtype == torch.float32
    if is_float32 and HEAD_DIM > 128:
        return Tiles(16, 32, 8, 1)
    if q.shape[2] <= 16:  # decoding: no more rows than tl.dot asks for
        return Tiles(16, 32, 4, 2 if HEAD_DIM <= 128 else 1)
    if is_float32:
        return Tiles(64, 32, 8, 2) if HEAD_DIM <= 64 else Tiles(32, 32, 8, 1)
    if HEAD_DIM <= 64:
        return Tiles(128, 64, 8, 3)
    if not has_large_tiles(q.device.index):
        return Tiles(128, 64, 8, 2) if HEAD_DIM <= 128 else Tiles(64, 32, 4, 2)
    return Tiles(64, 64, 4, 3) if HEAD_DIM <= 128 else Tiles(128, 64, 8, 2)


def dq_tiles(q: torch.Tensor, k: torch.Tensor) -> Tiles:
    """Tiles of attention_bwd_dq: the fastest of those that fit on chip."""
    if IS_INTERPRETED:
        return interpreter_tiles(q, k)
    HEAD_DIM, is_float32 = padded_head_dim(q.shape[3]), q.dtype == torch.float32
    if is_float32 and HEAD_DIM <= 64:
        return Tiles(64, 32, 8, 2)
    if is_float32:
        return Tiles(32, 32, 8, 1) if HEAD_DIM <= 128 else Tiles(16, 32, 8, 1)
    if HEAD_DIM <= 64:
        return Tiles(128, 64, 8, 3)
    if not has_large_tiles(q.device.index):
        return Tiles(64, 64, 4, 2) if HEAD_DIM <= 128 else Tiles(32, 32, 4, 1)
    return Tiles(128, 64, 8, 3) if HEAD_DIM <= 128 else Tiles(128, 32, 8, 1)


def dkdv_tiles(q: torch.Tensor, k: torch.Tensor) -> Tiles:
    """Tiles of attention_bwd_dkdv: the fastest of those that fit on chip."""
    if IS_INTERPRETED:
        return interpreter_tiles(q, k)
    HEAD_DIM, is_float32 = padded_head_dim(q.shape[3]), q.dtype == torch.float32
    if is_float32:
        return Tiles(32, 32, 8, 1) if HEAD_DIM <= 128 else Tiles(16, 32, 8, 1)
    if HEAD_DIM <= 64:
        return Tiles(64, 64, 4, 3)
    if HEAD_DIM <= 128:
        return Tiles(32, 64, 4, 3)
    return Tiles(32, 64, 8, 1) if has_large_tiles(q.device.index) else Tiles(32, 32, 4, 1)
