"""Trainer: one model, one optimizer, one stream of batches, and the step that ties them together.

The same class runs the training, and each side of the parity comparison before it.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from minitx.config import TrainConfig
from minitx.data import BatchStream, TokenData
from minitx.model import GPT, GPTConfig
from minitx.optim import learning_rate, make_optimizer

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, [B, S] int64 each


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a number; the weights have not been touched."""


@dataclass
class StepResult:
    loss: float  # mean over the step's targets, nats
    grad_norm: float  # of the whole gradient, before it is clipped
    lr: float
    skipped: bool  # float16 only: the scaled gradient overflowed, and the scale was halved instead


def resolve_device(name: str) -> torch.device:
    """--device as a device that exists here. Raises ValueError for one that does not."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name} is unknown; expected auto, cpu or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"--device {name}: this machine has {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ValueError(f"--device {name} is not supported; expected auto, cpu or cuda:N")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def model_config(config: TrainConfig, data: TokenData) -> GPTConfig:
    """The model's settings with what the data decides filled in. Raises ValueError on a misfit."""
    tokenizer_size = data.tokenizer.vocab_size
    vocab_size = config.model.vocab_size or math.ceil(tokenizer_size / 64) * 64
    if vocab_size < tokenizer_size:
        raise ValueError(
            f"--model.vocab_size {vocab_size} is smaller than the tokenizer's {tokenizer_size}; "
            "leave it out, or train a smaller tokenizer with --data.vocab_size"
        )
    max_seq_len = max(config.model.max_seq_len, config.seq_len)
    return replace(config.model, vocab_size=vocab_size, max_seq_len=max_seq_len)


class Trainer:
    """Builds everything from the config and its seed: two trainers of one config start equal."""

    def __init__(
        self,
        config: TrainConfig,
        model: GPTConfig,
        data: TokenData,
        *,
        kernel: str,
        device: torch.device,
        dtype: torch.dtype,
        compile: bool,
        param_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.kernel, self.device, self.dtype = config, kernel, device, dtype
        torch.manual_seed(config.seed)
        self.model = GPT(model, kernel).to(device, param_dtype)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.stream = BatchStream(
            data.train, config.micro_batch, config.seq_len, seed=config.seed, device=device
        )
        # Gradients below float16's smallest number would be lost: the loss is scaled up for it.
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.loss_fn = torch.compile(self.model.loss) if compile else self.model.loss
        self.autocasts = dtype != torch.float32 and param_dtype == torch.float32
        self.step_number = 0
        self.skipped_steps = 0

    def autocast(self) -> contextlib.AbstractContextManager:
        if not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def next_batches(self) -> list[Batch]:
        """The micro-batches of one step."""
        return [self.stream.next() for _ in range(self.config.accumulation)]

    def backward(self, batches: list[Batch]) -> torch.Tensor:
        """Leaves the gradient of the mean loss in the parameters (scaled, for float16); returns it.

        Each micro-batch's sum is divided by the targets of the whole step, so that micro-batches
        with different numbers of targets weigh as their tokens do.
        """
        targets = torch.stack([(y != -100).sum() for _, y in batches]).sum().clamp(min=1)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for x, y in batches:
            with self.autocast():
                loss = self.loss_fn(x, y) / targets
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def update(self, loss: torch.Tensor) -> StepResult:
        """Clips and applies the gradient. Raises NonFiniteError before touching the weights."""
        lr = learning_rate(self.step_number, self.config.optim, self.config.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.unscale_(self.optimizer)
        # The norm is of the unscaled gradient; with clipping off it is still worth its line.
        max_norm = self.config.optim.grad_clip or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        values = torch.stack((loss.double(), grad_norm.double())).tolist()  # the step's only sync
        result = StepResult(values[0], values[1], lr, skipped=False)
        if not all(math.isfinite(value) for value in values):
            if not (self.scaler.is_enabled() and math.isfinite(result.loss)):
                raise NonFiniteError(self._non_finite_message(result))
            result.skipped = True
            self.skipped_steps += 1
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_number += 1
        return result

    def step(self) -> StepResult:
        return self.update(self.backward(self.next_batches()))

    def _non_finite_message(self, result: StepResult) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"step {self.step_number}: loss {result.loss}, gradient norm {result.grad_norm} on "
            f"kernel '{self.kernel}' in {dtype}; the weights are as they were before it. "
            "Try a lower --optim.lr or more --optim.warmup_steps; --kernel eager shows whether "
            "it is the kernel"
        )

    @torch.no_grad()
    def evaluate(self, tokens: Any, max_tokens: int) -> tuple[float, int]:
        """Mean loss in nats over the first max_tokens targets of `tokens`, and how many there were.

        Windows follow one another without overlap; the last, shorter one counts too, each token
        once. Draws no random number, so training goes on as if it had not happened.
        """
        was_training = self.model.training
        self.model.eval()
        S, total, count = self.config.seq_len, 0.0, 0
        end = min(len(tokens) - 1, max_tokens)
        starts = list(range(0, end, S))
        rows = [(b, min(b + S, end)) for b in starts]
        full = [row for row in rows if row[1] - row[0] == S]
        groups = [
            full[i : i + self.config.micro_batch]
            for i in range(0, len(full), self.config.micro_batch)
        ] + [[row] for row in rows if row[1] - row[0] < S]
        for group in groups:
            windows = [torch.from_numpy(tokens[b : e + 1].astype("int64")) for b, e in group]
            window = torch.stack(windows).to(self.device)
            with self.autocast():
                losses = self.model.token_losses(window[:, :-1], window[:, 1:])
            total += losses.double().sum().item()
            count += losses.numel()
        self.model.train(was_training)
        return total / max(1, count), count
