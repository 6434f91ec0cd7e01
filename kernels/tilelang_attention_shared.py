"""The TileLang attention's forward where blocks share out the keys: its kernels and launches.

Into how many shares keys are cut, and how parts are put together, `tilelang_attention_merge.py`
says.
"""

from typing import Any

import torch

from minitx.kernels.kept import Empty
from minitx.kernels.runtime import multiprocessors
from minitx.kernels.tilelang_attention_fwd import build_attention_fwd
from minitx.kernels.tilelang_attention_fwd_hopper import build_attention_fwd_hopper
from minitx.kernels.tilelang_attention_merge import (
    FEW_TILE,
    MORE_QUERIES,
    ONE_QUERY,
    build_attention_merge,
    count_shares,
)
from minitx.kernels.tilelang_attention_tiles import (
    choose_shared_fwd_tiles,
    kernel_key,
    takes_hopper_kernels,
)
from minitx.kernels.tilelang_products import exponent_scale
from minitx.kernels.tilelang_runtime import get_kernel

Requests = list[tuple[Any, dict[str, Any]]]  # builders and their keys


def count_shares_of(q: torch.Tensor, k: torch.Tensor) -> int:
    """Into how many shares the keys are cut; 1 if that does not pay."""
    Sq, D = q.shape[2:]
    tiles = choose_shared_fwd_tiles(D, q.dtype, q.device, Sq <= FEW_TILE)
    return count_shares(Sq, k.shape[2], tiles.BLOCK_N)


def shared_requests(
    Sq: int, D: int, dtype: torch.dtype, device: torch.device, is_causal: bool
) -> Requests:
    """Of a forward whose blocks share out the keys, and of what puts their parts together."""
    key = kernel_key(D, dtype, device)
    is_hopper = takes_hopper_kernels(dtype, device)
    build = build_attention_fwd_hopper if is_hopper else build_attention_fwd
    tiles = choose_shared_fwd_tiles(D, dtype, device, Sq <= FEW_TILE)
    merge_tile = ONE_QUERY if Sq == 1 else MORE_QUERIES
    # A query alone reads all keys.
    flags = {"IS_CAUSAL": is_causal and Sq > 1, "IS_SHARED": True}
    return [
        (build, {**key, **flags, **tiles._asdict()}),
        (build_attention_merge, {**key, **merge_tile._asdict()}),
    ]


def soon_requests(D: int, dtype: torch.dtype, device: torch.device, is_causal: bool) -> Requests:
    """Of what will be asked for after a first forward whose blocks share: for other numbers of
    queries, as when a prompt has been read in chunks."""
    if device.type == "cpu":
        return []
    found = [shared_requests(Sq, D, dtype, device, is_causal) for Sq in (1, FEW_TILE, FEW_TILE + 1)]
    return [request for requests in found for request in reversed(requests)]


class SharedLaunch:
    """Of that forward, with tensors of the same dtypes, shapes and strides."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, is_causal: bool, scale: float, num_shares: int
    ) -> None:
        (B, Hq, Sq, D), Hkv, device = q.shape, k.shape[1], q.device
        (build, key), (build_merge, merge_key) = shared_requests(Sq, D, q.dtype, device, is_causal)

        def soon():
            return soon_requests(D, q.dtype, device, is_causal)

        self.kernel = get_kernel(build, device, soon=soon, **key)
        self.merge = get_kernel(build_merge, device, **merge_key)
        # The heads of a group are as good as queries of one head, if each has one query alone.
        self.group = Hq // Hkv if Sq == 1 else 1
        if self.group > 1:
            Hq, Sq = Hkv, self.group
        P = num_shares * B
        self.parts = Empty.contiguous((P, Hq, Sq, key["HEAD_DIM"]), torch.float32, device)
        self.stats = Empty.contiguous((P, Hq, Sq, 2), torch.float32, device)
        self.numbers: tuple = (Hq // Hkv, exponent_scale(scale, key["dtype"]))
        if build is build_attention_fwd_hopper:
            self.numbers = (0, *self.numbers, multiprocessors(device))

    def __call__(self, q, k, v, out, lse) -> None:
        if self.group > 1:
            B, Hq, _, D = q.shape
            b, h, _, d = q.stride()
            q = q.as_strided((B, Hq // self.group, self.group, D), (b, self.group * h, h, d))
        parts, stats = self.parts.make(), self.stats.make()
        self.kernel(q, k, v, parts, stats, *self.numbers)
        self.merge(parts, stats, out, lse)
