"""The training run: parity first, then the steps, with everything it leaves in its folder.

out_dir/config.yaml       every setting, resolved
        tokenizer.json    what turned the text into tokens
        parity.json, parity.png
        metrics.jsonl     one line a logged step or validation
        checkpoints/      step_00000100/, latest
        loss.png, report.json
"""

import json
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from minitx import metrics, plots
from minitx.batches import release_pages
from minitx.checkpoint import load_into, restore_random_state, save_checkpoint
from minitx.cli import EXIT_PARITY_FAILED
from minitx.config import TrainConfig, save_yaml, to_dict
from minitx.data import TokenData, load_data
from minitx.kernels import ATTENTION_KERNELS, KernelUnavailableError, supports
from minitx.model import GPT, GPTConfig, flops_per_token, num_params
from minitx.parity import Parity, compare
from minitx.resume import StopRequest, choose_out_dir, find_resume
from minitx.trainer import (
    StepResult,
    Trainer,
    model_config,
    resolve_device,
    resolve_dtype,
)

ENTROPY_SLICE = 1 << 24  # tokens counted at a time: the file may be larger than memory

HEADER = "    step     loss        lr  grad_norm   ms/step      tok/s     mfu  peak_gib"


def train(config: TrainConfig) -> int:
    """Runs what the config says; returns the exit code: 0, or 3 where parity failed.

    Raises ValueError and KernelUnavailableError, before anything is written, for what cannot run.
    """
    config.validate()
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    check_kernels(config, device, dtype)
    checkpoint = find_resume(config)
    data = load_data(config.data)
    model = model_config(config, data)
    out_dir = checkpoint.parent.parent if checkpoint else choose_out_dir(config)
    run = Run(config, model, data, out_dir, device, dtype)
    run.describe()
    if checkpoint is None:
        if config.compare != "none" and not run.prove_parity():
            return EXIT_PARITY_FAILED
        run.start()
    else:
        run.resume(checkpoint)
    return run.train()


def check_kernels(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raises for a kernel that is unknown or cannot run this model here, before any work is
    done."""
    for flag, kernel in (("--kernel", config.kernel), ("--compare", config.compare)):
        if flag == "--compare" and kernel == "none":
            continue
        if kernel not in ("auto", *ATTENTION_KERNELS):
            known = ", ".join(("auto", *ATTENTION_KERNELS))
            none = " or none" if flag == "--compare" else ""
            raise ValueError(f"{flag} {kernel} is unknown; expected one of {known}{none}")
        shape = (1, config.model.n_head, 1, config.model.head_width)
        q = torch.empty(shape, device=device, dtype=dtype)
        k = q[:, : config.model.kv_heads]
        support = supports(kernel, q, k, k)
        if not support.ok:
            able = [name for name in ATTENTION_KERNELS[1:] if supports(name, q, k, k).ok]
            raise KernelUnavailableError(
                f"{flag} {kernel} cannot run here: {support.reason}. "
                f"Kernels that can: {', '.join(able)}"
            )


class Run:
    """One training run in its folder."""

    def __init__(
        self,
        config: TrainConfig,
        model: GPTConfig,
        data: TokenData,
        out_dir: Path,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.model, self.data = config, model, data
        self.out_dir, self.device, self.dtype = out_dir, device, dtype
        self.trainer: Trainer | None = None
        self.parity: Parity | None = None
        self.best_val_loss = math.inf
        self.laps: list[float] = []  # seconds a step, of each logged stretch
        self.peak_gib = 0.0
        self.records: dict[str, dict[str, Any]] = {}  # the newest record of each kind
        self.unigram_entropy = unigram_entropy(data)

    # -- before the first step ------------------------------------------------------------------

    def describe(self) -> None:
        config, model, data = self.config, self.model, self.data
        name = str(self.dtype).removeprefix("torch.")
        where = self.device.type
        if where == "cuda":
            where = torch.cuda.get_device_name(self.device)
        print(f"run: {self.out_dir}  kernel: {config.kernel}  device: {where}  dtype: {name}")
        print(
            f"data: {config.data.source}, {len(data.train):,} training and {len(data.val):,} "
            f"validation tokens of {data.tokenizer.vocab_size:,}; unigram entropy "
            f"{self.unigram_entropy:.3f} nats a token"
        )
        with torch.device("meta"):
            params = num_params(GPT(model))
        print(
            f"model: {params:,} parameters, {model.n_layer} layers, width {model.n_embd}, "
            f"{model.n_head} heads; context {config.seq_len}, {config.batch.tokens:,} tokens a "
            f"step in {config.accumulation} x {config.micro_batch} sequences"
        )

    def prove_parity(self) -> bool:
        config = self.config
        with tqdm(total=3 * config.compare_steps, desc="parity", disable=None, leave=False) as bar:
            self.parity = compare(
                config,
                self.model,
                self.data,
                device=self.device,
                dtype=self.dtype,
                tick=bar.update,
                say=bar.write,
            )
        for line in self.parity.lines():
            print(line)
        self.parity.save(self.out_dir / "parity.json")
        if config.log.plots:
            plots.plot_parity(asdict(self.parity), self.out_dir / "parity.png")
        if not self.parity.passed:
            print(f"stopped before training; see {self.out_dir / 'parity.json'}")
        return self.parity.passed

    def make_trainer(self) -> Trainer:
        config = self.config
        metrics.reset_peak_memory(self.device)
        return Trainer(
            config,
            self.model,
            self.data,
            kernel=config.kernel,
            device=self.device,
            dtype=self.dtype,
            compile=config.compile,
        )

    def start(self) -> None:
        save_yaml(self.config, self.out_dir / "config.yaml")
        self.data.tokenizer.save(self.out_dir / "tokenizer.json")
        self.trainer = self.make_trainer()

    def resume(self, checkpoint: Path) -> None:
        self.trainer = trainer = self.make_trainer()
        # The run's own settings are the stored ones, unless --resume_allow let others through.
        groups = trainer.optimizer.param_groups
        settings = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        state = load_into(checkpoint, trainer.model, trainer.optimizer)
        for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
            group.update(own)
        trainer.stream.load_state_dict(state["stream"])
        trainer.scaler.load_state_dict(state["scaler"])
        trainer.step_number = state["step"]
        trainer.skipped_steps = state["skipped_steps"]
        self.best_val_loss = math.inf if state["best_val_loss"] is None else state["best_val_loss"]
        restore_random_state(state["random_state"])
        print(f"resumed from {checkpoint} at step {trainer.step_number}")

    # -- the steps ------------------------------------------------------------------------------

    def train(self) -> int:
        """Trains to max_steps, or until a signal; returns the exit code."""
        trainer, config = self.trainer, self.config
        assert trainer is not None
        log = metrics.MetricsLog(self.out_dir / "metrics.jsonl")
        timer = metrics.StepTimer(self.device)
        started = time.perf_counter()
        interactive = tqdm(
            total=config.max_steps, initial=trainer.step_number, disable=None, leave=False
        )
        interactive.write(HEADER)
        saved_at = trainer.step_number
        with StopRequest() as stop, interactive as bar:
            while trainer.step_number < config.max_steps and not stop.requested:
                timer.start()
                result = trainer.step()
                timer.count()
                bar.update()
                step = trainer.step_number
                if step % config.log.interval == 0 or step == config.max_steps:
                    bar.write(self.log_step(log, step, result, timer.lap()))
                due = config.log.eval_interval and step % config.log.eval_interval == 0
                is_best = False
                if due or step == config.max_steps:
                    timer.pause()
                    line, is_best = self.log_eval(log, step)
                    bar.write(line)
                interval = config.checkpoint.interval
                wanted = config.checkpoint.best and is_best
                if (interval and step % interval == 0) or wanted:
                    timer.pause()
                    self.save(is_best)
                    saved_at = step
        log.close()
        if saved_at != trainer.step_number:
            self.save(is_best=False)
        if stop.requested and trainer.step_number < config.max_steps:
            print(
                f"stopped at step {trainer.step_number}, saved; go on with: "
                f"python train.py --resume {self.out_dir}"
            )
            return 0
        self.finish(time.perf_counter() - started)
        return 0

    def log_step(
        self, log: metrics.MetricsLog, step: int, result: StepResult, seconds: float
    ) -> str:
        """Writes the metrics of a step and returns its line."""
        assert self.trainer is not None
        self.laps.append(seconds)
        self.peak_gib = max(self.peak_gib, metrics.peak_memory_gib(self.device))
        tok_per_s = self.config.batch.tokens / seconds
        mfu = self.mfu(tok_per_s)
        self.records["train"] = {
            "kind": "train",
            "step": step,
            "tokens": step * self.config.batch.tokens,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "ms_per_step": seconds * 1e3,
            "tok_per_s": tok_per_s,
            "mfu": mfu,
            "peak_gib": self.peak_gib,
            "skipped_steps": self.trainer.skipped_steps,
        }
        if not math.isfinite(result.grad_norm):  # a step that float16 skipped; JSON has no inf
            self.records["train"]["grad_norm"] = None
        log.write(self.records["train"])
        share = "      -" if mfu is None else f"{mfu:7.1%}"
        skipped = f"  skipped {self.trainer.skipped_steps}" if self.trainer.skipped_steps else ""
        return (
            f"{step:8d} {result.loss:8.4f} {result.lr:9.2e} {result.grad_norm:10.3f} "
            f"{seconds * 1e3:9.1f} {tok_per_s:10,.0f} {share} {self.peak_gib:9.2f}{skipped}"
        )

    def log_eval(self, log: metrics.MetricsLog, step: int) -> tuple[str, bool]:
        """Validates; returns the line, and whether the loss is the best so far."""
        assert self.trainer is not None
        val_loss, count = self.trainer.evaluate(self.data.val, self.config.log.eval_tokens)
        bytes_per_token = self.data.val_bytes / max(1, len(self.data.val))
        bits_per_byte = val_loss / math.log(2) / bytes_per_token
        self.records["eval"] = {
            "kind": "eval",
            "step": step,
            "val_loss": val_loss,
            "val_bits_per_byte": bits_per_byte,
            "val_tokens": count,
        }
        log.write(self.records["eval"])
        is_best = val_loss < self.best_val_loss
        self.best_val_loss = min(self.best_val_loss, val_loss)
        line = f"{step:8d} validation loss {val_loss:.4f}, {bits_per_byte:.4f} bits a byte"
        return line, is_best

    def mfu(self, tok_per_s: float) -> float | None:
        peak = metrics.peak_flops(self.device)
        if peak is None:
            return None
        return tok_per_s * flops_per_token(self.model, self.config.seq_len) / peak

    # -- what is left behind --------------------------------------------------------------------

    def save(self, is_best: bool) -> None:
        trainer = self.trainer
        assert trainer is not None
        best = self.best_val_loss
        state = {
            "step": trainer.step_number,
            "tokens_seen": trainer.step_number * self.config.batch.tokens,
            "config": to_dict(self.config),
            "stream": trainer.stream.state_dict(),
            "scaler": trainer.scaler.state_dict(),
            "skipped_steps": trainer.skipped_steps,
            "best_val_loss": best if math.isfinite(best) else None,
        }
        save_checkpoint(
            self.out_dir,
            step=trainer.step_number,
            model=trainer.model,
            optimizer=trainer.optimizer,
            state=state,
            keep=self.config.checkpoint.keep,
            is_best=is_best,
        )

    def finish(self, seconds: float) -> None:
        """report.json, loss.png and the closing lines."""
        trainer = self.trainer
        assert trainer is not None
        # The first stretch holds compilation and warm-up, unless it is the only one.
        typical = statistics.median(self.laps[1:] or self.laps) if self.laps else math.nan
        tok_per_s = self.config.batch.tokens / typical
        evaluation = self.records.get("eval", {})
        report = {
            "kernel": self.config.kernel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compile": self.config.compile,
            "steps": trainer.step_number,
            "tokens": trainer.step_number * self.config.batch.tokens,
            "context": self.config.seq_len,
            "parameters": num_params(trainer.model),
            "flops_per_token": flops_per_token(self.model, self.config.seq_len),
            "loss": self.records.get("train", {}).get("loss"),
            "val_loss": evaluation.get("val_loss"),
            "val_bits_per_byte": evaluation.get("val_bits_per_byte"),
            "unigram_entropy": self.unigram_entropy,
            "tok_per_s": tok_per_s,
            "mfu": self.mfu(tok_per_s),
            "peak_gib": self.peak_gib,
            "seconds": seconds,
            "parity_passed": None if self.parity is None else self.parity.passed,
            "speedup": None if self.parity is None else self.parity.speedup,
            "environment": metrics.environment(self.device),
        }
        text = json.dumps(report, indent=2) + "\n"
        (self.out_dir / "report.json").write_text(text, encoding="utf-8")
        if self.config.log.plots:
            runs = {self.config.kernel: self.out_dir / "metrics.jsonl"}
            plots.plot_losses(runs, self.out_dir / "loss.png", self.unigram_entropy)
        print(
            f"done: {trainer.step_number} steps in {seconds:.0f} s, validation loss "
            f"{report['val_loss']:.4f} (unigram entropy {self.unigram_entropy:.4f}), "
            f"{tok_per_s:,.0f} tok/s; see {self.out_dir}"
        )


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
