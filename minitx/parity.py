"""Loss parity: does a kernel learn what eager attention learns, and what does it buy?

Three short trainings start from the same weights and see the same batches: on the kernel, on the
baseline, and on a truth one precision up (eager in float32 without autocast; for float32 runs the
reference in float64). Dropout is off in all three. An error budget then decides, not a tolerance:

    error(x) = distance of x from the truth
    error(kernel)  <=  2 * error(baseline) + rounding

holds for two things. At every step, x is the vector of the batch's per-token losses before the
update, and the distance its root mean square, which is at least as large as the distance of the
mean losses: so a curve that drifts away is seen at the step where it does. At the first step, x is
the gradient of each parameter, and the distance a Euclidean norm. Rounding is eps times the truth's
own size in the same measure, with the eps of what is held: float32 for a loss, the run's dtype for
a gradient, which was made from activations rounded to it.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from minitx.config import TrainConfig
from minitx.data import TokenData
from minitx.metrics import is_out_of_memory, peak_memory_gib, reset_peak_memory, synchronize
from minitx.model import GPTConfig
from minitx.run_files import write_whole
from minitx.trainer import Trainer

WARMUP_STEPS = 2  # left out of the timing: compilation, autotuning, the allocator's first growth


@dataclass
class Curve:
    """What one of the three trainings left behind."""

    losses: list[float] = field(default_factory=list)  # mean loss before each update, nats
    token_losses: list[torch.Tensor] = field(default_factory=list)  # [tokens] float64 a step
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step, CPU
    seconds: list[float] = field(default_factory=list)  # a step
    peak_gib: float | None = None  # None on a CPU: a process's peak says nothing of one kernel


@dataclass
class Parity:
    """parity.json."""

    kernel: str
    baseline: str
    steps: int
    dtype: str
    seq_len: int
    passed: bool
    max_abs_loss_diff: float  # kernel against baseline, mean loss, largest over the steps
    budget: float  # what that may be: 3 baseline errors and a rounding, by the triangle inequality
    token_loss_error: list[float]  # a step, root mean square, kernel against truth
    token_loss_baseline: list[float]  # the same of the baseline
    token_loss_budget: list[float]
    worst_gradient: str  # the parameter whose gradient comes closest to its budget, or passes it
    worst_gradient_error: float
    worst_gradient_budget: float
    kernel_losses: list[float]
    baseline_losses: list[float]
    truth_losses: list[float]
    kernel_tok_per_s: float
    baseline_tok_per_s: float
    speedup: float
    kernel_peak_gib: float | None
    baseline_peak_gib: float | None

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    def lines(self) -> list[str]:
        """One line for parity, one for the speed-up."""
        verdict = "passed" if self.passed else "FAILED"
        lines = [
            f"parity {verdict}: {self.kernel} against {self.baseline} over {self.steps} steps, "
            f"max |loss difference| {self.max_abs_loss_diff:.2e} (budget {self.budget:.2e}), "
            f"{self.dtype}, context {self.seq_len}"
        ]
        if not self.passed:
            lines[0] += (
                f"; per-token error {max(self.token_loss_error):.2e} "
                f"(baseline's {max(self.token_loss_baseline):.2e}), worst gradient "
                f"{self.worst_gradient} {self.worst_gradient_error:.2e} "
                f"(budget {self.worst_gradient_budget:.2e})"
            )
        speed = (
            f"speed-up {self.speedup:.2f}x: {self.kernel} {self.kernel_tok_per_s:,.0f} tok/s, "
            f"{self.baseline} {self.baseline_tok_per_s:,.0f} tok/s"
        )
        if self.kernel_peak_gib is not None and self.baseline_peak_gib is not None:
            speed += f"; peak {self.kernel_peak_gib:.2f} and {self.baseline_peak_gib:.2f} GiB"
        return [*lines, speed]


def run_curve(
    trainer: Trainer, steps: int, sequences: int, tick: Callable[[], object] = lambda: None
) -> Curve:
    """Trains `steps` steps and records them; `tick` is called after each.

    Losses are of the first `sequences` sequences of each step.
    """
    curve, device = Curve(), trainer.device
    on_gpu = device.type == "cuda"
    for step in range(steps):
        batches = trainer.next_batches()
        with trainer.autocast():
            x, y = batches[0]
            losses = trainer.model.token_losses(x[:sequences], y[:sequences])
        curve.token_losses.append(losses.flatten().double().cpu())
        curve.losses.append(curve.token_losses[-1].mean().item())
        synchronize(device)
        if on_gpu and step >= WARMUP_STEPS:
            reset_peak_memory(device)
        started = time.perf_counter()
        loss = trainer.backward(batches)
        if step == 0:
            # Of float16 the gradient is scaled; the scale is a power of two and divides out
            # exactly.
            scale = trainer.scaler.get_scale()
            curve.gradients = {
                name: p.grad.double().cpu() / scale
                for name, p in trainer.model.named_parameters()
                if p.grad is not None
            }
        trainer.update(loss)
        synchronize(device)
        curve.seconds.append(time.perf_counter() - started)
        if on_gpu:
            curve.peak_gib = max(curve.peak_gib or 0.0, peak_memory_gib(device))
        tick()
    return curve


def compare(
    config: TrainConfig,
    model: GPTConfig,
    data: TokenData,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tick: Callable[[], object] = lambda: None,
    say: Callable[[str], None] = print,
) -> Parity:
    """Runs the three trainings and judges. Where memory runs out, at half the context, and so on
    down.

    `tick` is called after every step of 3 * compare_steps; `say` takes a line about a shortened
    context.
    """
    model = replace(model, dropout=0.0)
    while True:
        try:
            curves = _run_three(config, model, data, device, dtype, tick)
        except RuntimeError as error:
            half = config.seq_len // 2
            if not is_out_of_memory(error) or half < 1 or config.batch.tokens % half:
                raise
            say(f"parity: context {config.seq_len} does not fit in memory; comparing at {half}")
            # As many tokens a step, in more and shorter sequences.
            config = replace(config, batch=replace(config.batch, seq_len=half, micro=None))
        else:
            return judge(config, str(dtype).removeprefix("torch."), *curves)
        _release_memory(device)


def _run_three(
    config: TrainConfig,
    model: GPTConfig,
    data: TokenData,
    device: torch.device,
    dtype: torch.dtype,
    tick: Callable[[], object],
) -> tuple[Curve, Curve, Curve]:
    """Curves of the kernel, the baseline and the truth."""
    if dtype == torch.float32:
        truth_kernel, truth_dtype = "reference", torch.float64
    else:
        truth_kernel, truth_dtype = "eager", torch.float32
    # The truth's activations are wider: on a GPU, half the micro-batch and twice as many of them.
    micro = config.micro_batch
    truth_micro = micro // 2 if device.type == "cuda" and micro % 2 == 0 else micro
    truth_config = replace(config, batch=replace(config.batch, micro=truth_micro))

    def run(run_config: TrainConfig, **how: Any) -> Curve:
        trainer = Trainer(run_config, model, data, device=device, **how)
        return run_curve(trainer, config.compare_steps, truth_micro, tick)

    curves = []
    for name in (config.kernel, config.compare):
        curves.append(run(config, kernel=name, dtype=dtype, compile=config.compile))
        _release_memory(device)
    curves.append(
        run(
            truth_config,
            kernel=truth_kernel,
            dtype=torch.float32,
            param_dtype=truth_dtype,
            compile=False,
        )
    )
    _release_memory(device)
    kernel, baseline, truth = curves
    return kernel, baseline, truth


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def judge(
    config: TrainConfig, dtype_name: str, kernel: Curve, baseline: Curve, truth: Curve
) -> Parity:
    """The module's two conditions, over three finished curves."""
    loss_eps = torch.finfo(torch.float32).eps
    errors, base, budgets, loss_budget = [], [], [], 0.0
    for k, b, t in zip(kernel.token_losses, baseline.token_losses, truth.token_losses, strict=True):
        rounding = loss_eps * _rms(t)
        errors.append(_rms(k - t))
        base.append(_rms(b - t))
        budgets.append(2 * base[-1] + rounding)
        loss_budget = max(loss_budget, 3 * base[-1] + rounding)
    passed = all(error <= budget for error, budget in zip(errors, budgets, strict=True))

    gradient_eps = torch.finfo(getattr(torch, dtype_name)).eps
    worst, worst_share = ("", 0.0, 0.0), -1.0
    for name, true_gradient in truth.gradients.items():
        error = (kernel.gradients[name] - true_gradient).norm().item()
        budget = 2 * (baseline.gradients[name] - true_gradient).norm().item()
        budget += gradient_eps * true_gradient.norm().item()
        passed = passed and error <= budget
        share = error / budget if budget else float(error > 0)
        if not share <= worst_share:  # NaN is the worst of all
            worst, worst_share = (name, error, budget), share

    differences = [abs(k - b) for k, b in zip(kernel.losses, baseline.losses, strict=True)]
    tok_per_s = [config.batch.tokens / _typical(c.seconds) for c in (kernel, baseline)]
    return Parity(
        kernel=config.kernel,
        baseline=config.compare,
        steps=len(errors),
        dtype=dtype_name,
        seq_len=config.seq_len,
        passed=passed,
        max_abs_loss_diff=max(differences),
        budget=loss_budget,
        token_loss_error=errors,
        token_loss_baseline=base,
        token_loss_budget=budgets,
        worst_gradient=worst[0],
        worst_gradient_error=worst[1],
        worst_gradient_budget=worst[2],
        kernel_losses=kernel.losses,
        baseline_losses=baseline.losses,
        truth_losses=truth.losses,
        kernel_tok_per_s=tok_per_s[0],
        baseline_tok_per_s=tok_per_s[1],
        speedup=tok_per_s[0] / tok_per_s[1],
        kernel_peak_gib=kernel.peak_gib,
        baseline_peak_gib=baseline.peak_gib,
    )


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def _typical(seconds: list[float]) -> float:
    return statistics.median(seconds[WARMUP_STEPS:] or seconds)
