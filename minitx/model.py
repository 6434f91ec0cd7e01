"""A GPT in one file: GPT-2, Llama, SmolLM2 and Qwen3 are settings of it.

Shapes: B batch, S tokens of this call, T tokens with what the cache holds, E = n_embd, H heads,
Hkv key/value heads, D head_dim, V vocab_size.

Attention is called by name, `attention(..., kernel=...)`; the kernel is how a model is run and no
part of what it is, so every checkpoint runs on every kernel. Dropout acts on the embedding and on
the two residual branches, never on attention probabilities: a fused kernel does not have them, and
so all kernels train the same function.

Initialisation (GPT-2's): weights normal with standard deviation 0.02, the two projections that
write to the residual stream 0.02 / sqrt(2 n_layer), so that its variance does not grow with depth;
biases 0, norms 1.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from minitx.embedding import Embedding
from minitx.gelu import gelu
from minitx.kernels import ATTENTION_KERNELS, attention, linear_cross_entropy, packed_attention
from minitx.norm import kept_of_norm, norm_linear, run_norm
from minitx.recompute import BLOCKS_AN_UP, Recompute, checkpointed
from minitx.rope import RopeScaling, RotaryEmbedding, inverse_frequencies

INIT_STD = 0.02


@dataclass
class GPTConfig:
    """What the model is. Its checkpoints carry it."""

    n_layer: int = 12
    """Blocks."""
    n_head: int = 12
    """Query heads."""
    n_kv_head: int | None = None
    """Key/value heads, a divisor of n_head (grouped-query attention); as many as n_head by
    default."""
    n_embd: int = 768
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of a head; n_embd / n_head by default."""
    max_seq_len: int = 1024
    """Longest context in tokens that is trained, and the size of a learned position table."""
    vocab_size: int | None = None
    """Rows of the embedding; by default the tokenizer's size, rounded up to a multiple of 64."""
    pos: Literal["rope", "learned"] = "rope"
    """Position encoding."""
    rope_base: float = 10_000.0
    """RoPE's base; larger turns slower."""
    rope_scaling: RopeScaling = "none"
    """How RoPE is stretched beyond rope_trained_len."""
    rope_factor: float = 1.0
    """By how much RoPE is stretched (rope_scaling)."""
    rope_trained_len: int | None = None
    """Context in tokens that RoPE was trained to before it was stretched; max_seq_len by
    default."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, before each branch and at the end."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Gated SiLU of three matrices, or GELU (tanh form) of two."""
    mlp_hidden: int | None = None
    """Inner width of the MLP; by default 4 E for gelu, and 8/3 E rounded up to 64 for swiglu."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head (Qwen3)."""
    tie_embeddings: bool = True
    """The output head is the embedding."""
    bias: bool = False
    """Biases in linear layers and LayerNorm."""
    dropout: float = 0.0
    """Share of embedding and residual activations dropped in training; off in evaluation."""

    def __post_init__(self) -> None:
        optional = ("n_kv_head", "head_dim", "mlp_hidden", "rope_trained_len", "vocab_size")
        for name in ("n_layer", "n_head", "n_embd", "max_seq_len", *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not (math.isfinite(self.rope_base) and self.rope_base > 1.0):
            raise ValueError(f"rope_base must be a finite number above 1, got {self.rope_base}")
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0.0):
            raise ValueError(f"norm_eps must be a finite number from 0 on, got {self.norm_eps}")
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"n_head must be a multiple of n_kv_head, got {self.n_head} and {self.n_kv_head}"
            )
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head} "
                "(or give head_dim)"
            )
        if self.pos == "rope" and self.head_width % 2:
            raise ValueError(f"rope needs an even head_dim, got {self.head_width}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not (math.isfinite(self.rope_factor) and self.rope_factor >= 1.0):
            raise ValueError(f"rope_factor must be at least 1, got {self.rope_factor}")

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def mlp_width(self) -> int:
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        return 4 * self.n_embd if self.mlp == "gelu" else -(-(8 * self.n_embd // 3) // 64) * 64


class KVCache:
    """Keys and values of the tokens read so far, a pair of [B, Hkv, max_len, D] a layer."""

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        max_len: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        shape = (batch_size, config.kv_heads, max_len, config.head_width)
        self.k = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.v = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.max_len = max_len
        self.length = 0  # tokens held; the model moves it on once a call

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes k, v [B, Hkv, S, D] behind what is held; returns views of all [B, Hkv, T, D]."""
        end = self.length + k.shape[2]
        self.k[layer][:, :, self.length : end] = k
        self.v[layer][:, :, self.length : end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]


def make_norm(config: GPTConfig, width: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(width, eps=config.norm_eps)


class Attention(nn.Module):
    def __init__(
        self, config: GPTConfig, layer: int, kernel: str, recompute: Recompute = "none"
    ) -> None:
        super().__init__()
        H, Hkv, D = config.n_head, config.kv_heads, config.head_width
        self.layer, self.kernel = layer, kernel
        self.recompute: Recompute = recompute
        self.heads = (H, Hkv, Hkv)
        self.head_dim = D
        self.qkv = nn.Linear(config.n_embd, (H + 2 * Hkv) * D, bias=config.bias)
        self.proj = nn.Linear(H * D, config.n_embd, bias=config.bias)
        self.q_norm = nn.RMSNorm(D, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(D, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        rope: RotaryEmbedding | None,
        cache: KVCache | None,
    ) -> torch.Tensor:
        """Attention of norm(x) [B, S, E]."""
        fused = norm_linear(norm, self.qkv, kept_of_norm(norm, x), self.recompute)
        fused = rearrange(fused, "b s (h d) -> b s h d", d=self.head_dim)
        if self.recompute == "selective" and cache is None:  # which is not to be written twice
            out = checkpointed(self._attend, fused, rope, cache)
            return checkpointed(self._project, out)
        return self._project(self._attend(fused, rope, cache))

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        return self.proj(rearrange(out, "b h s d -> b s (h d)"))

    def _attend(
        self, fused: torch.Tensor, rope: RotaryEmbedding | None, cache: KVCache | None
    ) -> torch.Tensor:
        """[B, H, S, D] of fused [B, S, H + 2 Hkv, D]."""
        if self.q_norm is None and rope is None and cache is None:
            return packed_attention(fused, self.heads[0], is_causal=True, kernel=self.kernel)
        q, k, v = fused.split(self.heads, dim=2)  # [B, S, H or Hkv, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            start = cache.length if cache is not None else 0
            q, k = rope(q, start), rope(k, start)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # views: kernels take any strides
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
            q = q.to(k.dtype)
        # Bottom-right causality: with a cache the S queries are the last of T tokens.
        out = attention(q, k, v, is_causal=True, kernel=self.kernel)
        assert isinstance(out, torch.Tensor)  # without lse
        return out


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recompute: Recompute = recompute
        self.makes_up_again = layer % BLOCKS_AN_UP == 0
        self.gated = config.mlp == "swiglu"
        width = config.mlp_width
        self.up = nn.Linear(config.n_embd, width * (2 if self.gated else 1), bias=config.bias)
        self.proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """The MLP of norm(x) [B, S, E]."""
        kept = kept_of_norm(norm, x)
        if self.recompute != "selective":
            return self._down(norm_linear(norm, self.up, kept))
        if self.makes_up_again:
            return checkpointed(lambda z: self._down(norm_linear(norm, self.up, z)), kept)
        return checkpointed(self._down, norm_linear(norm, self.up, kept, self.recompute))

    def _down(self, h: torch.Tensor) -> torch.Tensor:
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            return self.proj(F.silu(gate) * h)
        return self.proj(gelu(h))


class Block(nn.Module):
    def __init__(
        self, config: GPTConfig, layer: int, kernel: str, recompute: Recompute = "none"
    ) -> None:
        super().__init__()
        self.attn_norm = make_norm(config, config.n_embd)
        self.attn = Attention(config, layer, kernel, recompute)
        self.mlp_norm = make_norm(config, config.n_embd)
        self.mlp = MLP(config, layer, recompute)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, rope: RotaryEmbedding | None, cache: KVCache | None
    ) -> torch.Tensor:
        x = x + self.dropout(self.attn(x, self.attn_norm, rope, cache))
        return x + self.dropout(self.mlp(x, self.mlp_norm))


class GPT(nn.Module):
    """Decoder-only transformer. `kernel` names the attention kernel; set_kernel changes it.
    `recompute` says which activations the blocks keep for a backward."""

    def __init__(
        self, config: GPTConfig, kernel: str = "auto", recompute: Recompute = "none"
    ) -> None:
        super().__init__()
        self.recompute: Recompute = recompute
        if config.vocab_size is None or config.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {config.vocab_size}")
        self.config = config
        E, V = config.n_embd, config.vocab_size
        self.tok_embd = Embedding(V, E)
        self.pos_embd = nn.Embedding(config.max_seq_len, E) if config.pos == "learned" else None
        self.rope: RotaryEmbedding | None = None
        if config.pos == "rope":
            inv_freq, factor = inverse_frequencies(
                config.head_width,
                config.rope_base,
                config.rope_scaling,
                config.rope_factor,
                config.rope_trained_len or config.max_seq_len,
            )
            self.rope = RotaryEmbedding(inv_freq, factor, config.max_seq_len)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, i, kernel, recompute) for i in range(config.n_layer)
        )
        self.norm = make_norm(config, E)
        # With tied embeddings there is no second module, so the weight exists, and is saved, once.
        self.head = None if config.tie_embeddings else nn.Linear(E, V, bias=False)
        self.set_kernel(kernel)
        self.init_weights()

    def init_weights(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(".proj")
                std = INIT_STD / math.sqrt(2 * self.config.n_layer) if residual else INIT_STD
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def set_kernel(self, kernel: str) -> None:
        """Chooses the attention kernel of every block: one of ATTENTION_KERNELS or "auto"."""
        if kernel != "auto" and kernel not in ATTENTION_KERNELS:
            names = ", ".join(("auto", *ATTENTION_KERNELS))
            raise ValueError(f"unknown kernel '{kernel}'; expected one of {names}")
        for module in self.modules():
            if isinstance(module, Attention):
                module.kernel = kernel

    def extend_context(self, max_len: int) -> None:
        """Lets the model read max_len tokens. RoPE tables grow; a learned table cannot.

        Raises ValueError beyond learned positions, and beyond what memory holds of tables.
        """
        if self.max_context >= max_len:
            return
        if self.rope is None:
            raise ValueError(
                f"context of {max_len} tokens is beyond the {self.config.max_seq_len} learned "
                "positions of this model; use at most that, or a model with RoPE"
            )
        self.rope.build(max_len, self.rope.cos.device)

    @property
    def max_context(self) -> int:
        """Longest context in tokens that can be read now."""
        return self.config.max_seq_len if self.rope is None else self.rope.cos.shape[0]

    @property
    def output_weight(self) -> torch.Tensor:
        """[V, E]: the matrix that turns hidden states into logits."""
        return self.tok_embd.weight if self.head is None else self.head.weight

    def hidden(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """tokens [B, S] int64 -> final, normalised hidden states [B, S, E].

        With a cache, the tokens follow those it holds, and are added to it.
        Raises ValueError for more tokens than the positions allow.
        """
        S = tokens.shape[1]
        start = cache.length if cache is not None else 0
        limit = self.max_context if cache is None else min(self.max_context, cache.max_len)
        if start + S > limit:
            raise ValueError(
                f"{start + S} tokens are more than the {limit} this model can read now; "
                "shorten the context, or call extend_context (RoPE) or enlarge the cache"
            )
        x = self.tok_embd(tokens)
        if self.pos_embd is not None:
            x = x + self.pos_embd.weight[start : start + S]
        x = self.dropout(x)
        draws_random = self.training and self.config.dropout > 0
        for block in self.blocks:
            if self.recompute == "full" and cache is None:
                x = checkpointed(block, x, self.rope, cache, draws_random=draws_random)
            else:
                x = block(x, self.rope, cache)
        if cache is not None:
            cache.length += S
        return run_norm(self.norm, x)

    def forward(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """tokens [B, S] int64 -> logits [B, S, V]. logits[:, i] predict the token after tokens[:,
        i]."""
        return F.linear(self.hidden(tokens, cache), self.output_weight)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropies, nats, of targets [B, S]; targets of -100 are left out.

        A sum, not a mean: micro-batches with different numbers of targets then add up rightly.
        """
        return self._cross_entropy(tokens, targets, "sum")

    @torch.no_grad()
    def token_losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, nats, of each target [B, S], without gradients; 0 where left out."""
        return self._cross_entropy(tokens, targets, "none").view_as(targets)

    def _cross_entropy(
        self, tokens: torch.Tensor, targets: torch.Tensor, reduction: str
    ) -> torch.Tensor:
        hidden = self.hidden(tokens).flatten(0, 1)
        return linear_cross_entropy(
            hidden, self.output_weight, targets.flatten(), ignore_index=-100, reduction=reduction
        )


def num_params(model: GPT) -> int:
    """All parameters, a tied matrix counted once."""
    return sum(p.numel() for p in model.parameters())
