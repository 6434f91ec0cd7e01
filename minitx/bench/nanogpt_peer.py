"""python -m minitx.bench.nanogpt_peer: a training loop like nanoGPT's, to stand beside train.py.

A peer written from nanoGPT's published description, to be timed and not to learn: GPT-2's
architecture with learned positions, LayerNorm and linear layers without biases, GELU by the error
function, and the embedding as output head; whole logits and one cross-entropy; fused AdamW with
decay on matrices, gradients clipped to a norm of 1, autocast to bfloat16, torch.compile. Tokens are
random: speed and memory do not depend on them.

--attention chooses how attention runs: PyTorch's scaled_dot_product_attention as PyTorch picks it
(sdpa), the same held to its flash kernel (flash), or spelled out (eager).
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx import metrics
from minitx.cli import run_cli
from minitx.mfu import mfu
from minitx.model import GPTConfig

Attention = Literal["sdpa", "flash", "eager"]
WARMUP_STEPS = 5
STEPS_A_LAP = 5
GRAD_CLIP = 1.0
LEARNING_RATE = 6e-4


@dataclass
class PeerConfig:
    """What to train, and for how long.

    Args:
        attention: sdpa, flash or eager.
        batch: sequences a step.
        context: tokens a sequence.
        steps: steps to time, after a few to warm up.
        compile: compile the model with torch.compile.
        n_layer: blocks.
        n_head: heads.
        n_embd: width of the residual stream.
        vocab_size: rows of the embedding.
        dtype: autocast dtype; float32 is no autocast.
        device: cuda or cpu; by default the GPU if there is one.
        out: file for the report, in JSON.
    """

    attention: Attention = "sdpa"
    batch: int = 32
    context: int = 1024
    steps: int = 20
    compile: bool = True
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    vocab_size: int = 50304
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str | None = None
    out: Path = Path("nanogpt.json")


class Block(nn.Module):
    mask: torch.Tensor

    def __init__(self, config: PeerConfig) -> None:
        super().__init__()
        E = config.n_embd
        self.n_head, self.is_eager = config.n_head, config.attention == "eager"
        self.attention_norm = nn.LayerNorm(E, bias=False)
        self.qkv = nn.Linear(E, 3 * E, bias=False)
        self.attention_out = nn.Linear(E, E, bias=False)
        self.mlp_norm = nn.LayerNorm(E, bias=False)
        self.mlp_in = nn.Linear(E, 4 * E, bias=False)
        self.mlp_out = nn.Linear(4 * E, E, bias=False)
        if self.is_eager:
            mask = torch.ones(config.context, config.context, dtype=torch.bool).tril()
            self.register_buffer("mask", mask, persistent=False)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v and the result: [B, H, S, D]."""
        if not self.is_eager:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        return F.softmax(scores.masked_fill(~self.mask, float("-inf")), dim=-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, S, E = x.shape
        heads = (B, S, self.n_head, E // self.n_head)
        q, k, v = (
            t.view(heads).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).split(E, dim=2)
        )
        attended = self.attend(q, k, v).transpose(1, 2).reshape(B, S, E)
        x = x + self.attention_out(attended)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class NanoGPT(nn.Module):
    def __init__(self, config: PeerConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.context, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                shrink = (2 * config.n_layer) ** -0.5 if writes_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * shrink)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, nats, of targets y [B, S] after tokens x [B, S]."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


def make_step(config: PeerConfig, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that trains one step and returns its loss."""
    torch.manual_seed(0)
    model = NanoGPT(config).to(device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    forward = torch.compile(model) if config.compile else model
    dtype = getattr(torch, config.dtype)
    shape = (config.batch, config.context + 1)

    def step() -> torch.Tensor:
        window = torch.randint(config.vocab_size, shape, device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = forward(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def hold_probabilities(config: PeerConfig, device: torch.device) -> None:
    """Raises OutOfMemoryError at once, and not after a minute of compiling, if the probabilities
    that eager attention keeps for its backward do not fit by themselves."""
    shape = (config.n_layer, config.batch, config.n_head, config.context, config.context)
    torch.empty(shape, dtype=getattr(torch, config.dtype), device=device)


def measure(config: PeerConfig) -> dict:
    """Trains, and returns what report.json of train.py says too."""
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if config.attention == "eager" and device.type == "cuda":
        hold_probabilities(config, device)
    torch.set_float32_matmul_precision("high")
    metrics.reset_peak_memory(device)
    pinned = contextlib.nullcontext()
    if config.attention == "flash":
        pinned = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    seconds = []
    with pinned:  # while it is compiled, too: the choice is made then
        step = make_step(config, device)
        for _ in range(WARMUP_STEPS):
            loss = step()
        for first in range(0, config.steps, STEPS_A_LAP):
            steps = min(STEPS_A_LAP, config.steps - first)
            metrics.synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                loss = step()
            metrics.synchronize(device)
            seconds.append((time.perf_counter() - started) / steps)
    tok_per_s = config.batch * config.context / statistics.median(seconds)
    model = GPTConfig(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        vocab_size=config.vocab_size,
        max_seq_len=config.context,
        pos="learned",
        norm="layer",
        mlp="gelu",
    )
    with torch.device("meta"):
        parameters = sum(p.numel() for p in NanoGPT(config).parameters())
    return {
        "attention": config.attention,
        "compile": config.compile,
        "dtype": config.dtype,
        "steps": config.steps,
        "context": config.context,
        "parameters": parameters,
        "loss": loss.item(),
        "tok_per_s": tok_per_s,
        "mfu": mfu(device, model, config.context, tok_per_s),
        "peak_gib": metrics.peak_memory_gib(device),
    }


def run(config: PeerConfig) -> int:
    for flag in ("batch", "context", "steps", "n_layer", "n_head", "n_embd", "vocab_size"):
        if getattr(config, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1, got {getattr(config, flag)}")
    if config.n_embd % config.n_head:
        raise ValueError(f"--n_embd {config.n_embd} is not a multiple of --n_head {config.n_head}")
    report = measure(config)
    config.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    mfu = "" if report["mfu"] is None else f", MFU {report['mfu']:.1%}"
    print(
        f"nanoGPT's model, {config.attention}, {config.batch} x {config.context}: "
        f"{report['tok_per_s']:,.0f} tok/s{mfu}, peak {report['peak_gib']:.2f} GiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(run, PeerConfig, prog="minitx.bench.nanogpt_peer", description=__doc__ or ""))
