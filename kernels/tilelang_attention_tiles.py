"""Sizes of the TileLang attention kernels' tiles, by kernel, head dim, dtype and device."""

import functools
from typing import NamedTuple

import torch

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
FLOAT32_HEAD_DIMS = (32, 64, 128, 256)  # fewer: each costs a compile, and none is fast


class Tiles(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys, num_stages of the streamed side in flight, computed by
    `threads` threads."""

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    threads: int


CPU_TILES = Tiles(32, 32, 0, 1)

# 16-bit inputs on Hopper (compute capability 9.0), within its 227 KiB of shared memory and, as
# ptxas reports, without a spilled register. 64 rows of the left operand for every 128 threads, or
# the compiler does not use wgmma from registers; a fourth warpgroup copies.
HOPPER_TILES = {
    "fwd": {
        32: Tiles(192, 128, 2, 384),
        64: Tiles(192, 128, 2, 384),
        96: Tiles(128, 128, 2, 256),
        128: Tiles(128, 128, 2, 256),
        192: Tiles(128, 96, 2, 256),
        256: Tiles(128, 64, 2, 256),
    },
    "dkdv": {
        32: Tiles(128, 128, 2, 256),
        64: Tiles(128, 128, 2, 256),
        96: Tiles(64, 128, 2, 256),
        128: Tiles(64, 128, 2, 256),
        192: Tiles(64, 64, 2, 256),
        256: Tiles(64, 64, 2, 256),
    },
    "dq": {
        32: Tiles(128, 128, 2, 256),
        64: Tiles(128, 128, 2, 256),
        96: Tiles(128, 64, 2, 256),
        128: Tiles(128, 64, 2, 256),
        192: Tiles(128, 64, 2, 256),
        256: Tiles(128, 32, 2, 256),
    },
}

# 16-bit inputs on other GPUs, within the 99 KiB of the smallest of them.
GPU_TILES = {
    "fwd": {
        32: Tiles(64, 64, 0, 128),
        64: Tiles(64, 64, 0, 128),
        96: Tiles(64, 64, 0, 128),
        128: Tiles(64, 64, 0, 128),
        192: Tiles(64, 64, 0, 128),
        256: Tiles(64, 32, 0, 128),
    },
    "dkdv": {
        32: Tiles(64, 64, 0, 128),
        64: Tiles(64, 64, 0, 128),
        96: Tiles(64, 64, 0, 128),
        128: Tiles(32, 64, 0, 128),
        192: Tiles(32, 64, 0, 256),
        256: Tiles(16, 64, 0, 256),
    },
    "dq": {
        32: Tiles(64, 64, 0, 128),
        64: Tiles(64, 64, 0, 128),
        96: Tiles(64, 64, 0, 128),
        128: Tiles(64, 64, 0, 128),
        192: Tiles(64, 32, 0, 128),
        256: Tiles(64, 32, 0, 128),
    },
}

# float32 on any GPU, within 99 KiB.
FLOAT32_TILES = {
    "fwd": {
        32: Tiles(64, 64, 0, 128),
        64: Tiles(64, 64, 0, 128),
        128: Tiles(64, 32, 0, 128),
        256: Tiles(32, 16, 0, 128),
    },
    "dkdv": {
        32: Tiles(32, 64, 0, 128),
        64: Tiles(32, 64, 0, 128),
        128: Tiles(32, 32, 0, 128),
        256: Tiles(16, 16, 0, 128),
    },
    "dq": {
        32: Tiles(64, 32, 0, 128),
        64: Tiles(64, 32, 0, 128),
        128: Tiles(32, 32, 0, 128),
        256: Tiles(16, 16, 0, 128),
    },
}


def padded_head_dim(D: int, dtype: torch.dtype) -> int:
    """The width that tiles of head dim D are compiled for."""
    widths = FLOAT32_HEAD_DIMS if dtype == torch.float32 else HEAD_DIMS
    return next(width for width in widths if width >= D)


@functools.cache
def choose_tiles(kernel: str, D: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles of "fwd", "dkdv" or "dq"."""
    if device.type == "cpu":
        return CPU_TILES
    if dtype == torch.float32:
        table = FLOAT32_TILES
    elif torch.cuda.get_device_capability(device) == (9, 0):
        table = HOPPER_TILES
    else:
        table = GPU_TILES
    return table[kernel][padded_head_dim(D, dtype)]
