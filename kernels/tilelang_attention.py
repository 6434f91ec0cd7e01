"""Online-LSE attention in TileLang, forward and backward: launches, ops, autograd.

out [B, Hq, Sq, D] = softmax(scale * q k^T + causal mask) v, and lse [B, Hq, Sq], the natural log of
the sum of exponentials. Scores never reach memory: keys and values stream past each tile of
queries (`tilelang_attention_fwd.py`), and again in the backward, which recomputes the
probabilities from lse (`tilelang_attention_bwd.py`). On Hopper 16-bit inputs take a forward that
is scheduled by hand (`tilelang_attention_fwd_hopper.py`), and in widths 64 and 128 a backward that
makes the scores once for all three gradients (`tilelang_attention_bwd_hopper.py`). One that is
asked for some of them alone takes the kernels for all GPUs: each way gives the same bits every
time, but not those of the other. Where queries are few and keys are many, blocks share out the keys
and a second launch puts together what they give (`tilelang_attention_shared.py`): by the lengths
alone, so that a row's bits are the same in every batch.

A kernel is compiled for each dtype, `is_causal` and width of head, never for a length: sizes and
strides are run-time arguments. Heads are padded on chip to the next width that there are tiles for
(`tilelang_attention_tiles.py`). On a GPU the first call starts all compiles, its own first: those
of the backward, if it will be needed, and of the two forwards that Hopper has for heads of 64 and
128, for few keys and for many. What calls of the same shapes and strides have in common (`Forward`,
`Backward`) is kept, since to find it takes longer than to launch; dtypes, shapes and devices of
what they are given the compiled functions check at every call all the same.

On a GPU tiles are fetched in whole rows, by TMA where there is one: rows must be contiguous and
start at multiples of 16 bytes. That is so of contiguous tensors, of [B, S, H, D] transposed, of
slices of a fused projection and of keys and values expanded over batch or heads, wherever D is a
multiple of 8 (float32: 4). Anything else, such as an odd storage offset, D = 31 or a strided last
dim, is copied first. On a CPU every stride is read in place; float16 and bfloat16 go through a
float32 copy, and results are rounded once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from minitx.kernels.attention_ops import define_attention, empty_grads, empty_outputs
from minitx.kernels.kept import Empty, remember, remembered
from minitx.kernels.runtime import multiprocessors
from minitx.kernels.tilelang_attention_bwd import (
    build_attention_bwd_dkdv,
    build_attention_bwd_dq,
    build_attention_bwd_stats,
)
from minitx.kernels.tilelang_attention_bwd_hopper import build_attention_bwd_hopper
from minitx.kernels.tilelang_attention_bwd_rows import build_attention_bwd_prepare
from minitx.kernels.tilelang_attention_bwd_work_hopper import BLOCK_N
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE
from minitx.kernels.tilelang_attention_fwd import build_attention_fwd
from minitx.kernels.tilelang_attention_fwd_hopper import build_attention_fwd_hopper
from minitx.kernels.tilelang_attention_memory import (
    ALIGNMENT,
    as_rows,
    bring_back,
    is_in_place,
    without_repeats,
)
from minitx.kernels.tilelang_attention_shared import SharedLaunch, count_shares_of
from minitx.kernels.tilelang_attention_tiles import (
    MANY_KEYS,
    choose_hopper_fwd_tiles,
    choose_tiles,
    has_tma,
    kernel_key,
    takes_hopper_kernels,
)
from minitx.kernels.tilelang_products import exponent_scale
from minitx.kernels.tilelang_runtime import get_kernel, get_kernels

STATS_TILE = 128  # rows; every BLOCK_M of the kernels that read them divides it
# Up to so many the backward for Hopper has blocks that stay, which hides what a task begins and
# ends with (measured: benchmarks/NOTES.md). Of more queries that is little.
FEW_QUERIES = 8192


def tilelang_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, Sq, D] in q's dtype and layout, and lse [B, Hq, Sq] in float32, natural log.

    Shapes as in `attention`; both results are differentiable, once. The first call of a dtype and
    head dim compiles for some seconds; another length never does.
    """
    return _attention(q, k, v, is_causal, scale)


@functools.cache
def _fwd_request(
    D: int, dtype: torch.dtype, device: torch.device, is_causal: bool, has_many_keys: bool
) -> tuple[Any, dict[str, Any]]:
    """The forward's builder and key."""
    key = {**kernel_key(D, dtype, device), "IS_CAUSAL": is_causal}
    if takes_hopper_kernels(dtype, device):
        tiles = choose_hopper_fwd_tiles(D, has_many_keys)
        return build_attention_fwd_hopper, {**key, **tiles._asdict()}
    tiles = choose_tiles("fwd", D, dtype, device)
    return build_attention_fwd, {**key, **tiles._asdict()}


def _soon_requests(
    D: int,
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    needs: tuple[bool, ...],
) -> list[tuple[Any, dict[str, Any]]]:
    """Builders and keys of what will be asked for after a first forward: in its backward, and at
    another length."""
    if device.type == "cpu":  # where a compile keeps a core busy that the first one needs
        return []
    forwards = [_fwd_request(D, dtype, device, is_causal, many) for many in (False, True)]
    backwards = _bwd_requests(D, dtype, device, is_causal, False, needs) if any(needs) else []
    return backwards + forwards


@functools.cache
def _bwd_requests(
    D: int,
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    with_dlse: bool,
    needs: tuple[bool, ...],
) -> list[tuple[Any, dict[str, Any]]]:
    """Builders and keys of what a backward runs that needs some of dq, dk and dv."""
    key = kernel_key(D, dtype, device)

    def tiled(name: str, **flags: bool) -> dict[str, Any]:
        tiles = choose_tiles(name, D, dtype, device)
        return {**key, "IS_CAUSAL": is_causal, **flags, **tiles._asdict()}

    needs_dq, needs_dk, needs_dv = needs
    if all(needs) and takes_hopper_kernels(dtype, device) and key["HEAD_DIM"] in (64, 128):
        return [
            (build_attention_bwd_hopper, {**key, "IS_CAUSAL": is_causal}),  # compiles longest
            (build_attention_bwd_prepare, {**key, "WITH_DLSE": with_dlse}),
        ]
    flags = {"WITH_DLSE": with_dlse, "USE_TMA": has_tma(device)}
    wanted: list[tuple[Any, dict[str, Any]]] = [(build_attention_bwd_stats, {**key, **flags})]
    if needs_dk or needs_dv:
        wanted += [(build_attention_bwd_dkdv, tiled("dkdv", WITH_DK=needs_dk, WITH_DV=needs_dv))]
    if needs_dq:
        wanted += [(build_attention_bwd_dq, tiled("dq"))]
    return wanted


class Forward:
    """What forwards with tensors of the same dtypes, shapes and strides have in common."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
    ) -> None:
        out, lse = empty_outputs(q)
        self.out, self.lse = Empty.like(out), Empty.like(lse)
        self.reads_in_place = is_in_place(q, k, v, out)
        num_shares = count_shares_of(q, k)
        if num_shares > 1:
            self.launch = SharedLaunch(q, k, is_causal, scale, num_shares)
        else:
            wanted = tuple(t.requires_grad for t in (q, k, v))
            self.launch = Launch(q, k, is_causal, scale, wanted)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.out.make(), self.lse.make()
        if self.reads_in_place:
            self.launch(q, k, v, out, lse)
            return out, lse
        out_rows = as_rows(out, keep=False)
        self.launch(as_rows(q), without_repeats(k), without_repeats(v), out_rows, lse)
        bring_back(out_rows, out)
        return out, lse


class Launch:
    """Of the forward whose blocks read all keys of their queries."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        is_causal: bool,
        scale: float,
        wanted: tuple[bool, ...],
    ) -> None:
        (B, Hq, Sq, D), (Hkv, Skv) = q.shape, k.shape[1:3]
        build, key = _fwd_request(D, q.dtype, q.device, is_causal, Skv >= MANY_KEYS)

        def soon():
            return _soon_requests(D, q.dtype, q.device, is_causal, wanted)

        self.kernel = get_kernel(build, q.device, soon=soon, **key)
        self.is_counted = False
        self.numbers: tuple = (Hq // Hkv, exponent_scale(scale, key["dtype"]))
        if build is build_attention_fwd_hopper:
            num_blocks = multiprocessors(q.device)
            self.is_counted = B * Hq * -(-Sq // key["BLOCK_M"]) > num_blocks
            self.numbers = (0, *self.numbers, num_blocks)

    def __call__(self, q, k, v, out, lse) -> None:
        if self.is_counted:
            # Of this call alone, and zeroed on its stream: calls on several streams do not meet.
            taken = lse.new_zeros(1, dtype=torch.int32)
            self.kernel(q, k, v, out, lse, taken.data_ptr(), *self.numbers[1:])
        else:
            self.kernel(q, k, v, out, lse, *self.numbers)


def _fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not q.is_cuda and q.dtype != torch.float32:
        out, lse = _fwd(q.float(), k.float(), v.float(), is_causal, scale)
        return out.to(q.dtype), lse
    key = (
        "tilelang fwd", q.dtype, k.dtype, v.dtype, q.device, is_causal, scale,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0,
    )  # fmt: skip
    forward = remembered(key)
    if forward is None:
        if q.numel() == 0 or k.numel() == 0:
            out, lse = empty_outputs(q)
            return out.zero_(), lse.fill_(float("-inf"))
        forward = remember(key, Forward(q, k, v, is_causal, scale))
    return forward(q, k, v)


class Backward:
    """What backwards with tensors of the same dtypes, shapes and strides have in common."""

    def __init__(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        is_causal: bool,
        scale: float,
        needs: list[bool],
        into: Sequence[torch.Tensor] | None,
    ) -> None:
        (B, Hq, Sq, D), (Hkv, Skv), device = q.shape, k.shape[1:3], q.device
        grads = empty_grads(q, k, v, needs) if into is None else into
        self.grads = [Empty.like(grad) for grad in grads]
        self.needs = tuple(needs)
        written = [grad for grad, needed in zip(grads, needs, strict=True) if needed]
        self.is_in_place = is_in_place(q, k, v, out, dout, *written)
        requests = _bwd_requests(D, q.dtype, device, is_causal, dlse is not None, self.needs)
        names = [build for build, _ in requests]
        self.kernels = dict(zip(names, get_kernels(device, requests), strict=True))

        key = requests[0][1]
        self.numbers = (Hq // Hkv, exponent_scale(scale, key["dtype"]), scale)
        BLOCK_M = DQ_TILE // key["HEAD_DIM"]
        num_tiles = B * Hq * -(-Sq // BLOCK_M)
        # Queries in tiles to which no block comes, as none of them sees a key.
        self.num_empty = max(Sq - Skv, 0) // BLOCK_M * BLOCK_M if is_causal else 0
        S = -(-Sq // STATS_TILE) * STATS_TILE

        self.stats = Empty.contiguous((B, Hq, 2, S), torch.float32, device)
        self.dq_sum = Empty.contiguous((num_tiles, DQ_TILE), torch.float32, device)
        self.turns = Empty.contiguous((num_tiles,), torch.int32, device)
        self.taken = Empty.contiguous((1,), torch.int32, device)
        if build_attention_bwd_hopper in self.kernels:
            self.num_blocks = B * Hkv * -(-Skv // BLOCK_N)
            if Sq <= FEW_QUERIES:
                self.num_blocks = min(self.num_blocks, multiprocessors(device))

    def __call__(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        into: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        grads = tuple([grad.make() for grad in self.grads]) if into is None else into
        if self.is_in_place:
            self._launch(dout, dlse, q, k, v, out, lse, *grads)
            return grads
        rows = [
            as_rows(grad, keep=False) if needed else grad
            for grad, needed in zip(grads, self.needs, strict=True)
        ]
        inputs = (as_rows(q), without_repeats(k), without_repeats(v), as_rows(out))
        self._launch(as_rows(dout), dlse, *inputs, lse, *rows)
        for row, grad in zip(rows, grads, strict=True):
            bring_back(row, grad)
        return grads

    def _launch(self, dout, dlse, q, k, v, out, lse, dq, dk, dv) -> None:
        """Fills those of dq, dk and dv that are needed."""
        kernels, stats = self.kernels, self.stats.make()
        rows = (out, dout, lse, lse if dlse is None else dlse, stats)
        if hopper := kernels.get(build_attention_bwd_hopper):
            dq_sum, turns, taken = self.dq_sum.make(), self.turns.make(), self.taken.make()
            kernels[build_attention_bwd_prepare](*rows, turns, taken)
            work = (taken.data_ptr(), self.num_blocks)
            hopper(q, k, v, dout, stats, dq, dk, dv, dq_sum, turns, *work, *self.numbers)
            if self.num_empty > 0:
                dq.narrow(2, 0, self.num_empty).zero_()
            return
        kernels[build_attention_bwd_stats](*rows)
        inputs, (_, needs_dk, needs_dv) = (q, k, v, dout, stats), self.needs
        if dkdv := kernels.get(build_attention_bwd_dkdv):
            dkdv(*inputs, dk if needs_dk else dv, dv if needs_dv else dk, *self.numbers)
        if portable_dq := kernels.get(build_attention_bwd_dq):
            portable_dq(*inputs, dq, *self.numbers)


def _bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
    needs: list[bool],
    into: Sequence[torch.Tensor] | None = None,
) -> Sequence[torch.Tensor]:
    """(dq, dk, dv) in the inputs' layouts; one that is not needed is an empty tensor."""
    if not q.is_cuda and q.dtype != torch.float32:
        dout, q32, k32, v32, out = (t.float() for t in (dout, q, k, v, out))
        grads = _bwd(dout, dlse, q32, k32, v32, out, lse, is_causal, scale, needs)
        return tuple(grad.to(q.dtype) for grad in grads)
    written = () if into is None else into
    bits = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
    for grad in written:
        bits |= grad.data_ptr()
    key = (
        "tilelang bwd", q.dtype, k.dtype, v.dtype, dout.dtype, out.dtype, q.device, is_causal,
        scale, *needs, dlse is None, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        dout.stride(), out.stride(), *[(grad.dtype, grad.stride()) for grad in written],
        bits % ALIGNMENT == 0,
    )  # fmt: skip
    backward = remembered(key)
    if backward is None:
        if q.numel() == 0 or k.numel() == 0:
            grads = empty_grads(q, k, v, needs) if into is None else into
            return tuple(grad.zero_() for grad in grads)
        made = Backward(dout, dlse, q, k, v, out, is_causal, scale, needs, into)
        backward = remember(key, made)
    return backward(dout, dlse, q, k, v, out, lse, into)


_attention = define_attention("tilelang", _fwd, _bwd)
