"""What the attention benchmark measures: shapes, and kernels beside their peers, under one call."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx.kernels import ATTENTION_KERNELS, attention, supports

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# PyTorch's kernels, each under the name of the backend it is held to.
SDPA_BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# FlashAttention-2, -3 (forward only) and -4, where their packages are installed: all have a
# flash_attn_func(q, k, v, causal=...) on [B, S, H, D].
FLASH_MODULES = {
    "fa2": "flash_attn",
    "fa3": "fa3_fwd_interface",
    "fa4": "flash_attn.cute.interface",
}
# A package built for other versions of what it stands on fails in many ways.
IMPORT_FAILURES = (ImportError, AttributeError, OSError, RuntimeError, TypeError)
PEERS = ("eager", "sdpa", *SDPA_BACKENDS, "flex", *FLASH_MODULES)
OURS = ("triton", "tilelang", "triton-softmax", "tilelang-softmax", "auto")
KERNELS = (*PEERS, *OURS)

TIMED_PASSES = ("forward", "backward", "both")
# Time of a call on tensors so small that only the host's work counts: a forward without gradients,
# a forward and backward, and a forward within a CUDA graph.
HOST_PASSES = ("host forward", "host both", "graph forward")
# Time until a new process has made a forward and backward: with empty caches, and with full ones.
START_PASSES = ("cold start", "warm start")
WITH_BACKWARD = ("backward", "both", "host both", *START_PASSES)


@dataclass(frozen=True)
class Case:
    """One shape, and what to measure on it.

    seq_len: keys, and queries too unless `queries` says how many of the last there are.
    """

    batch: int
    seq_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    is_causal: bool
    device: str
    passes: tuple[str, ...] = TIMED_PASSES
    queries: int | None = None

    @property
    def num_queries(self) -> int:
        return self.seq_len if self.queries is None else self.queries

    @property
    def has_chunk(self) -> bool:
        """Whether the causal rule is one for fewer queries than keys."""
        return self.is_causal and 1 < self.num_queries < self.seq_len

    def make_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random normal q [B, Hq, Sq, D], k, v [B, Hkv, Skv, D] and dout, of always the same
        seed."""
        generator = torch.Generator(self.device).manual_seed(0)
        of_queries = (self.q_heads, self.num_queries)
        of_keys = (self.kv_heads, self.seq_len)
        q, k, v, dout = (
            torch.randn(
                (self.batch, H, S, self.head_dim),
                generator=generator,
                device=self.device,
                dtype=DTYPES[self.dtype],
            )
            for H, S in (of_queries, of_keys, of_keys, of_queries)
        )
        return q, k, v, dout

    def flops(self, name: str) -> float | None:
        """Forward two products, 4 B Hq Sq Skv D, where causal less half of Sq Sq; backward five
        products."""
        Sq, Skv = self.num_queries, self.seq_len
        scores = Sq * (Skv - Sq / 2) if self.is_causal else Sq * Skv
        forward = 4.0 * self.batch * self.q_heads * scores * self.head_dim
        return {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}.get(name)


@dataclass
class Variant:
    """A kernel on a case.

    call: q, k, v in the variant's own layout -> out in that layout.
    is_bshd: the layout is [B, S, H, D], not [B, H, S, D].
    pinned: a context to be within, forward and backward.
    """

    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    is_bshd: bool = False
    pinned: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def own_layout(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, H, S, D] as contiguous memory in the variant's layout."""
        return x.transpose(1, 2).contiguous() if self.is_bshd else x

    def common(self, x: torch.Tensor) -> torch.Tensor:
        """x in the variant's layout as [B, H, S, D]."""
        return x.transpose(1, 2) if self.is_bshd else x


def why_not(kernel: str, case: Case, name: str) -> str | None:
    """Why a kernel cannot be measured on a case in pass `name`, or None."""
    if name == "graph forward" and case.device != "cuda":
        return "CUDA graphs need a GPU"
    if kernel == "auto" or kernel in ATTENTION_KERNELS:
        q = torch.empty(1, 1, 1, case.head_dim, device=case.device, dtype=DTYPES[case.dtype])
        return supports(kernel, q, q, q).reason or None
    if kernel in SDPA_BACKENDS:
        return None if case.device == "cuda" else "PyTorch has backends to choose from on GPUs only"
    if kernel in FLASH_MODULES:
        if case.device != "cuda":
            return "it runs on GPUs only"
        if case.dtype == "float32":
            return "it computes float16 and bfloat16 only"
        if isinstance(problem := _flash(kernel), str):
            return problem
        if kernel == "fa3" and name in WITH_BACKWARD:
            return "this package has the forward only"
    return None


def make_variant(kernel: str, case: Case) -> Variant:
    """The call to check and time; `why_not` was asked before."""
    is_causal = case.is_causal
    if kernel in SDPA_BACKENDS:
        backend = SDPA_BACKENDS[kernel]
        call = lambda q, k, v: _attention(q, k, v, is_causal, "sdpa")  # noqa: E731
        if case.has_chunk and kernel == "sdpa-efficient":
            call = _sdpa_lower_right
        return Variant(call, pinned=lambda: sdpa_kernel(backend))
    if kernel in FLASH_MODULES:
        flash = _flash(kernel)
        assert not isinstance(flash, str), "why_not was not asked"
        return Variant(lambda q, k, v: _first(flash(q, k, v, causal=is_causal)), is_bshd=True)
    if kernel == "flex":
        return Variant(_flex(case))
    return Variant(lambda q, k, v: _attention(q, k, v, is_causal, kernel))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, kernel: str
) -> torch.Tensor:
    out = attention(q, k, v, is_causal=is_causal, kernel=kernel)
    assert isinstance(out, torch.Tensor)
    return out


def _sdpa_lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Fewer queries than keys without a mask, by PyTorch's own object for that causal rule, which
    is how this backend is to be asked; `sdpa` asks flash so by itself, and cuDNN takes a mask."""
    # Not at the top: it imports torch.compile's half of PyTorch, and triton.
    from torch.nn.attention.bias import causal_lower_right

    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=causal_lower_right(q.shape[2], k.shape[2]),
        enable_gqa=q.shape[1] != k.shape[1],
    )


@functools.cache
def _flash(kernel: str) -> Callable[..., Any] | str:
    """A package's flash_attn_func, or why there is none."""
    module = FLASH_MODULES[kernel]
    try:
        return importlib.import_module(module).flash_attn_func
    except IMPORT_FAILURES as error:
        return f"the package {module} cannot be imported: {error}"


def _first(result: Any) -> torch.Tensor:
    """Some versions return (out, lse)."""
    return result[0] if isinstance(result, tuple) else result


def _flex(case: Case) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """FlexAttention, compiled for this very shape, with a causal block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if case.is_causal:
        Sq, Skv = case.num_queries, case.seq_len
        mask = create_block_mask(
            lambda b, h, i, j: i + (Skv - Sq) >= j, None, None, Sq, Skv, device=case.device
        )
    torch._dynamo.reset()  # compilations of other shapes count against a limit
    compiled = torch.compile(flex_attention, dynamic=False)
    is_grouped = case.q_heads != case.kv_heads

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _first(compiled(q, k, v, block_mask=mask, enable_gqa=is_grouped))

    return call
