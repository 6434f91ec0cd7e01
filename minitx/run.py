"""A training run: parity first, then the steps, with everything it leaves in its folder.

out_dir/config.yaml       every setting, resolved
        environment.json  versions, device, git state and config of every start, resumed ones too
        tokenizer.json    what turned the text into tokens
        parity.json, parity.png
        metrics.jsonl     one line a logged step or validation
        tensorboard/      the same, with --log.tensorboard
        checkpoints/      step_00000100/, latest, best
        loss.png, report.json
        debug_step_*      the batch of a step that was not finite: see minitx/replay.py
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minitx import metrics, plots, report
from minitx.checkpoint import CheckpointError, find_checkpoint, load_into, save_checkpoint
from minitx.cli import EXIT_NON_FINITE, EXIT_NOT_WRITTEN, RunStopped
from minitx.config import DebugConfig, TrainConfig, save_yaml, to_dict
from minitx.data import TokenData
from minitx.mfu import mfu
from minitx.model import GPT, GPTConfig, num_params
from minitx.parity import compare
from minitx.replay import save_batch
from minitx.signals import StopRequest
from minitx.trainer import NonFiniteError, StepResult, Trainer

HEADER = "    step     loss        lr  grad_norm   ms/step      tok/s     mfu  peak_gib"


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
        self.best_val_loss = math.inf
        self.saved_at = 0  # the step of the last checkpoint
        self.logged_at = 0  # the step of the last line of metrics
        self.tokens_ahead = 0  # seen beyond steps * batch.tokens: resumed with another batch.tokens
        self.logs: list[metrics.MetricsLog | metrics.TensorBoardLog] = []
        self.peak_gib = 0.0
        self.unigram_entropy = report.unigram_entropy(data)

    # -- before the first step ------------------------------------------------------------------

    def describe(self) -> None:
        config, model, data = self.config, self.model, self.data
        where = self.device.type
        if where == "cuda":
            where = torch.cuda.get_device_name(self.device)
        print(
            f"run: {self.out_dir}  kernel: {config.kernel}  device: {where}  dtype: {config.dtype}"
        )
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

    def record_start(self, step: int) -> None:
        """config.yaml, and this start's entry in environment.json."""
        # What is asked of one start is not a setting of the run.
        lasting = replace(
            self.config, overwrite=False, resume=None, resume_allow=False, debug=DebugConfig()
        )
        with self.writing(self.out_dir):
            save_yaml(lasting, self.out_dir / "config.yaml")
            metrics.record_environment(
                self.out_dir / "environment.json", self.device, step, to_dict(lasting)
            )

    def prove_parity(self) -> bool:
        config = self.config
        with tqdm(total=3 * config.compare_steps, desc="parity", disable=None, leave=False) as bar:
            try:
                parity = compare(
                    config,
                    self.model,
                    self.data,
                    device=self.device,
                    dtype=self.dtype,
                    tick=bar.update,
                    say=bar.write,
                )
            except NonFiniteError as error:
                raise RunStopped(
                    f"in the comparison before training: {error}", EXIT_NON_FINITE
                ) from error
        for line in parity.lines():
            print(line)
        with self.writing(self.out_dir):
            parity.save(self.out_dir / "parity.json")
            if config.log.plots:
                plots.plot_parity(asdict(parity), self.out_dir / "parity.png")
        if not parity.passed:
            print(f"stopped before training; see {self.out_dir / 'parity.json'}")
        return parity.passed

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
        with self.writing(self.out_dir):
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
        trainer.load_state_dict(state)
        self.best_val_loss = math.inf if state["best_val_loss"] is None else state["best_val_loss"]
        self.saved_at = self.logged_at = trainer.step_number
        self.tokens_ahead = state["tokens_seen"] - trainer.step_number * self.config.batch.tokens
        self.record_start(trainer.step_number)
        print(f"resumed from {checkpoint} at step {trainer.step_number}")

    # -- the steps ------------------------------------------------------------------------------

    def train(self, stop: StopRequest) -> int:
        """Trains to max_steps, or until a signal; returns the exit code."""
        trainer, config = self.trainer, self.config
        assert trainer is not None
        first = trainer.step_number
        if first >= config.max_steps and (self.out_dir / "report.json").is_file():
            print(f"nothing left to train: step {first} of --max_steps {config.max_steps}")
            return 0
        started = time.perf_counter()
        with self.writing(self.out_dir):
            self.open_logs(first)
        bar = tqdm(total=config.max_steps, initial=first, disable=None, leave=False)
        try:
            with bar:
                self.make_steps(stop, bar)
            if self.saved_at != trainer.step_number:
                self.save()
        except NonFiniteError as error:
            raise RunStopped(self.keep_what_broke(error), EXIT_NON_FINITE) from error
        except RuntimeError as error:
            # Ctrl-C reaches the compilers that this process has started, too.
            if not stop.requested or isinstance(error, RunStopped):
                raise
            print(f"stopped in the middle of step {trainer.step_number + 1}; {self.how_to_go_on()}")
            return 0
        except OSError as error:
            # Of its own files RunStopped would have said so: it is what it prints that nobody can
            # take, as where the other end of a pipe is gone.
            if self.saved_at != trainer.step_number:
                self.save()
            raise RunStopped(
                f"its lines cannot be printed: {error.strerror or error}; {self.how_to_go_on()}",
                EXIT_NOT_WRITTEN,
            ) from error
        finally:
            for log in self.logs:
                log.close()
        if stop.requested and trainer.step_number < config.max_steps:
            print(f"stopped at step {trainer.step_number}, saved; {self.how_to_go_on()}")
            return 0
        with self.writing(self.out_dir):
            report.finish(
                self.out_dir,
                config,
                self.model,
                self.device,
                self.unigram_entropy,
                time.perf_counter() - started,
            )
        return 0

    def make_steps(self, stop: StopRequest, bar: tqdm) -> None:
        trainer, config = self.trainer, self.config
        assert trainer is not None
        timer = metrics.StepTimer(self.device)
        bar.write(HEADER)
        while trainer.step_number < config.max_steps and not stop.requested:
            timer.start()
            trainer.launch_step()
            timer.count()
            stop.defer()  # from its first step on, a signal waits until the run is saved
            bar.update()
            step = trainer.step_number
            is_last, is_best = step == config.max_steps, False
            if step % config.log.interval == 0 or is_last:
                bar.write(self.log_step(step, trainer.settle(), timer.lap()))
            if is_last or (config.log.eval_interval and step % config.log.eval_interval == 0):
                timer.pause()
                line, is_best = self.log_eval(step)
                is_best = is_best and config.checkpoint.best
                bar.write(line)
            interval = config.checkpoint.interval
            if (interval and step % interval == 0) or is_best:
                timer.pause()
                self.save(is_best)

    def tokens_seen(self, step: int) -> int:
        return self.tokens_ahead + step * self.config.batch.tokens

    def open_logs(self, step: int) -> None:
        self.logs = [metrics.MetricsLog(self.out_dir / "metrics.jsonl", step)]
        if self.config.log.tensorboard:
            self.logs.append(metrics.TensorBoardLog(self.out_dir / "tensorboard", step))

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record to the logs. Where that fails, the steps made so far are saved, if they
        can be."""
        try:
            for log in self.logs:
                log.write(record)
        except OSError:
            with self.writing(self.out_dir / "metrics.jsonl"):
                self.save()
                raise

    def log_step(self, step: int, result: StepResult, seconds: float) -> str:
        """Writes the metrics of a step and returns its line; `seconds` a step since the last."""
        trainer = self.trainer
        assert trainer is not None
        self.peak_gib = max(self.peak_gib, metrics.peak_memory_gib(self.device))
        tok_per_s = self.config.batch.tokens / seconds
        share = mfu(self.device, self.model, self.config.seq_len, tok_per_s)
        record = {
            "kind": "train",
            "step": step,
            "tokens": self.tokens_seen(step),
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,  # not finite where float16 skipped the step
            "ms_per_step": seconds * 1e3,
            "data_ms": trainer.data_seconds * 1e3 / (step - self.logged_at),
            "tok_per_s": tok_per_s,
            "mfu": share,
            "peak_gib": self.peak_gib,
            "skipped_steps": trainer.skipped_steps,
        }
        self.logged_at, trainer.data_seconds = step, 0.0
        self.write(record)
        percent = "      -" if share is None else f"{share:7.1%}"
        skipped = f"  skipped {trainer.skipped_steps}" if trainer.skipped_steps else ""
        return (
            f"{step:8d} {result.loss:8.4f} {result.lr:9.2e} {result.grad_norm:10.3f} "
            f"{seconds * 1e3:9.1f} {tok_per_s:10,.0f} {percent} {self.peak_gib:9.2f}{skipped}"
        )

    def log_eval(self, step: int) -> tuple[str, bool]:
        """Validates; returns the line, and whether the loss is the best so far."""
        assert self.trainer is not None
        val_loss, count = self.trainer.evaluate(self.data.val, self.config.log.eval_tokens)
        if count == 0:
            return f"{step:8d} no validation text (--data.val_fraction)", False
        bits = report.bits_per_byte(val_loss, self.data)
        self.write(
            {
                "kind": "eval",
                "step": step,
                "val_loss": val_loss,
                "val_bits_per_byte": bits,
                "val_tokens": count,
            }
        )
        is_best = val_loss < self.best_val_loss
        self.best_val_loss = min(self.best_val_loss, val_loss)
        bits_text = "" if bits is None else f", {bits:.4f} bits a byte"
        return f"{step:8d} validation loss {val_loss:.4f}{bits_text}", is_best

    # -- what is left behind --------------------------------------------------------------------

    def save(self, is_best: bool = False) -> None:
        assert self.trainer is not None
        self.write_checkpoint(self.trainer.state_dict(), self.config.checkpoint.keep, is_best)

    def write_checkpoint(self, state: dict[str, Any], keep: int, is_best: bool = False) -> Path:
        trainer, best = self.trainer, self.best_val_loss
        assert trainer is not None
        with self.writing(self.out_dir / "checkpoints"):
            path = save_checkpoint(
                self.out_dir,
                step=state["step"],
                model=trainer.model,
                optimizer=trainer.optimizer,
                state=state
                | {
                    "tokens_seen": self.tokens_seen(state["step"]),
                    "config": to_dict(self.config),
                    "best_val_loss": best if math.isfinite(best) else None,
                },
                keep=keep,
                is_best=is_best,
            )
        self.saved_at = state["step"]
        return path

    def keep_what_broke(self, error: NonFiniteError) -> str:
        """Saves the state before the step, beside the checkpoints that are there, and the step's
        batch; returns the line that says so."""
        assert self.trainer is not None
        step = error.before["step"]
        if not all(bool(p.isfinite().all()) for p in self.trainer.model.parameters()):
            if step == self.saved_at and step > 0:  # which were read from there
                return f"{error}; those of its checkpoint are not finite: go on from an earlier one"
            return f"{error}; the weights themselves are not finite; {self.how_to_go_on()}"
        checkpoint = None  # the initial weights
        if step == self.saved_at and step > 0:
            checkpoint = find_checkpoint(self.out_dir)
        elif step > 0:
            checkpoint = self.write_checkpoint(error.before, keep=0)
        with self.writing(self.out_dir):
            path = save_batch(self.out_dir, self.trainer, error, checkpoint)
        return (
            f"{error}; {self.how_to_go_on()}; the batch alone: python train.py "
            f"--debug.replay {path}"
        )

    def how_to_go_on(self) -> str:
        if self.saved_at == 0:
            return "there is no checkpoint"
        return f"go on with: python train.py --resume {self.out_dir}"

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Around what writes: a full or failing disk stops the run in one line."""
        try:
            yield
        except CheckpointError as error:
            raise RunStopped(str(error), EXIT_NOT_WRITTEN) from error
        except OSError as error:
            name = error.filename or path
            raise RunStopped(
                f"{name} could not be written: {error.strerror or error}; see to the disk; "
                f"{self.how_to_go_on()}",
                EXIT_NOT_WRITTEN,
            ) from error
