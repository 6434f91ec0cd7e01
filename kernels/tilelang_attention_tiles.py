"""Sizes of the TileLang attention kernels' tiles, by kernel, head dim, dtype and device."""

import functools
from typing import Any, NamedTuple

import torch

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class Tiles(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys, num_stages of the streamed side in flight, computed by
    `threads` threads."""

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    threads: int


Table = dict[str, dict[int, Tiles]]  # by kernel, then by the width that heads are padded to

CPU_TILES: Table = {
    kernel: dict.fromkeys((32, 64, 128, 256), Tiles(32, 32, 0, 1))
    for kernel in ("fwd", "dkdv", "dq")
}

# 16-bit inputs on Hopper (compute capability 9.0), within its 227 KiB of shared memory and, as
# ptxas reports, without a spilled register. 64 rows of the left operand for every 128 threads, or
# the compiler does not use wgmma from registers; one more warpgroup copies.
HOPPER_TILES: Table = {
    "fwd": {
        32: Tiles(192, 128, 4, 384),
        64: Tiles(192, 128, 4, 384),
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

# The forward's for fewer keys than MANY_KEYS. One more warpgroup hides more of what a tile of
# queries begins and ends with, and more queries share what is fetched; fewer keys at a time cost
# more where many come (all measured, at powers of two: benchmarks/NOTES.md).
HOPPER_SHORT_TILES = {64: Tiles(256, 64, 4, 512), 128: Tiles(192, 64, 4, 384)}
MANY_KEYS = 2049

# The forward's where queries are few and keys are shared out (`tilelang_attention_merge.py`): as
# few as a product takes, with as much in flight as fits, for it is the memory that they wait for.
HOPPER_FEW_TILES = {
    32: Tiles(64, 128, 4, 128),
    64: Tiles(64, 128, 4, 128),
    96: Tiles(64, 128, 3, 128),
    128: Tiles(64, 128, 3, 128),
    192: Tiles(64, 96, 2, 128),
    256: Tiles(64, 64, 3, 128),
}

# And where they are more: of 256 queries 192 would leave half a tile.
HOPPER_CHUNK_TILES = {32: Tiles(128, 128, 4, 256), 64: Tiles(128, 128, 4, 256)}

# 16-bit inputs on other GPUs, within the 99 KiB of the smallest of them. Copies are element by
# element there, for which nvcc makes good code if rows are powers of two.
GPU_TILES: Table = {
    "fwd": {
        32: Tiles(64, 64, 0, 128),
        64: Tiles(64, 64, 0, 128),
        128: Tiles(64, 64, 0, 128),
        256: Tiles(64, 32, 0, 128),
    },
    "dkdv": {
        32: Tiles(64, 64, 0, 128),
        64: Tiles(64, 64, 0, 128),
        128: Tiles(32, 64, 0, 128),
        256: Tiles(16, 64, 0, 256),
    },
    "dq": {
        32: Tiles(64, 64, 0, 128),
        64: Tiles(64, 64, 0, 128),
        128: Tiles(64, 64, 0, 128),
        256: Tiles(64, 32, 0, 128),
    },
}

# float32 on any GPU, within 99 KiB.
FLOAT32_TILES: Table = {
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


@functools.cache
def takes_hopper_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels scheduled by hand for Hopper run in place of the portable ones."""
    if device.type == "cpu" or dtype == torch.float32:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _table(dtype: torch.dtype, device: torch.device) -> Table:
    if device.type == "cpu":
        return CPU_TILES
    if dtype == torch.float32:
        return FLOAT32_TILES
    return HOPPER_TILES if takes_hopper_kernels(dtype, device) else GPU_TILES


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether the device fetches tiles by itself: Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def padded_head_dim(D: int, dtype: torch.dtype, device: torch.device) -> int:
    """The width that tiles of head dim D are compiled for."""
    return next(width for width in _table(dtype, device)["fwd"] if width >= D)


def kernel_key(D: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What every builder's key has."""
    return {"dtype": DTYPE_NAMES[dtype], "HEAD_DIM": padded_head_dim(D, dtype, device)}


@functools.cache
def choose_tiles(kernel: str, D: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles of "fwd", "dkdv" or "dq"."""
    return _table(dtype, device)[kernel][padded_head_dim(D, dtype, device)]


def choose_hopper_fwd_tiles(D: int, has_many_keys: bool) -> Tiles:
    """Tiles of the forward for Hopper, of which a width may have two."""
    width = next(width for width in HOPPER_TILES["fwd"] if width >= D)
    tiles = HOPPER_TILES["fwd"][width]
    return tiles if has_many_keys else HOPPER_SHORT_TILES.get(width, tiles)


@functools.cache
def choose_shared_fwd_tiles(
    D: int, dtype: torch.dtype, device: torch.device, is_few: bool
) -> Tiles:
    """Tiles of the forward whose blocks share out the keys."""
    tiles = choose_tiles("fwd", D, dtype, device)
    if not takes_hopper_kernels(dtype, device):
        return tiles
    width = padded_head_dim(D, dtype, device)
    return HOPPER_FEW_TILES[width] if is_few else HOPPER_CHUNK_TILES.get(width, tiles)
