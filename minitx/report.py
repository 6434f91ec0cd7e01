"""report.json, loss.png and the closing line: what a run came to, read from its own files."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import torch

from minitx import metrics, plots
from minitx.batches import release_pages
from minitx.config import TrainConfig
from minitx.data import TokenData
from minitx.mfu import flops_per_token, mfu
from minitx.model import GPT, GPTConfig, num_params
from minitx.run_files import read_whole, write_whole

ENTROPY_SLICE = 1 << 24  # tokens counted at a time: the file may be larger than memory


def unigram_entropy(data: TokenData) -> float:
    """Entropy in nats of one training token drawn at random: what a model without context can
    reach."""
    counts = np.zeros(data.tokenizer.vocab_size)
    for start in range(0, len(data.train), ENTROPY_SLICE):
        tokens = data.train[start : start + ENTROPY_SLICE]
        counts += np.bincount(tokens, minlength=len(counts))
        release_pages(data.train)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def finish(
    out_dir: Path,
    config: TrainConfig,
    model: GPTConfig,
    device: torch.device,
    entropy: float,
    seconds: float,
) -> None:
    """Writes report.json and loss.png and prints the closing line.

    All parts of a resumed run count: losses, speed and memory are read from metrics.jsonl, parity
    from parity.json. `seconds` are of the last part.
    """
    records = metrics.read_metrics(out_dir / "metrics.jsonl")
    train = [r for r in records if r["kind"] == "train"]
    evaluation = next((r for r in reversed(records) if r["kind"] == "eval"), {})
    # The first stretch holds compilation and warm-up, unless it is the only one.
    typical_ms = statistics.median(r["ms_per_step"] for r in train[1:] or train)
    tok_per_s = config.batch.tokens / typical_ms * 1e3
    parity = read_whole(out_dir / "parity.json", dict, {})
    with torch.device("meta"):
        parameters = num_params(GPT(model))
    report = {
        "kernel": config.kernel,
        "dtype": config.dtype,
        "compile": config.compile,
        "deterministic": config.deterministic,
        "steps": config.max_steps,
        "tokens": config.max_steps * config.batch.tokens,
        "context": config.seq_len,
        "parameters": parameters,
        "flops_per_token": flops_per_token(model, config.seq_len),
        "loss": train[-1]["loss"],
        "val_loss": evaluation.get("val_loss"),
        "val_bits_per_byte": evaluation.get("val_bits_per_byte"),
        "unigram_entropy": entropy,
        "tok_per_s": tok_per_s,
        "mfu": mfu(device, model, config.seq_len, tok_per_s),
        "peak_gib": max(r["peak_gib"] for r in train),
        "data_ms": statistics.median(r["data_ms"] for r in train[1:] or train),
        "seconds": seconds,
        "parity_passed": parity.get("passed"),
        "speedup": parity.get("speedup"),
        "environment": metrics.environment(device),
    }
    write_whole(out_dir / "report.json", json.dumps(report, indent=2) + "\n")
    if config.log.plots:
        plots.plot_losses({config.kernel: out_dir / "metrics.jsonl"}, out_dir / "loss.png", entropy)
    loss = "no validation text"
    if report["val_loss"] is not None:
        loss = f"validation loss {report['val_loss']:.4f}"
    print(
        f"done: {config.max_steps} steps in {seconds:.0f} s, {loss} (unigram entropy "
        f"{entropy:.4f}), {tok_per_s:,.0f} tok/s; see {out_dir}"
    )


def bits_per_byte(nats: float, data: TokenData) -> float | None:
    """Mean validation loss in nats a token -> bits a byte of the validation text."""
    if not data.val_bytes or not math.isfinite(nats):
        return None
    return nats / math.log(2) * len(data.val) / data.val_bytes
