"""Trainer: one model, one optimizer, one stream of batches, and the step that ties them together.

The same class runs the training, and each side of the parity comparison before it.

On a GPU a step never waits: were the host to look at the loss before it starts the optimizer, the
GPU would have nothing to do until the next launches arrive. What it would look for is therefore
seen to on the device: a flag, up once a loss or gradient was not finite, makes the fused optimizer
skip that step and every one after it. The numbers are copied to the host meanwhile, which looks at
them a step later (`launch_step`), or when someone asks (`settle`).
"""

import contextlib
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from minitx.batches import release_pages
from minitx.config import TrainConfig
from minitx.data import BatchStream, TokenData
from minitx.model import GPT, GPTConfig
from minitx.optim import learning_rate, make_optimizer
from minitx.random_state import random_state, restore_random_state

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, [B, S] int64 each


# float16's loss scale is halved where the scaled gradient overflows. Below this it is not the scale
# that overflows.
MIN_LOSS_SCALE = 1.0


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a number; the weights have not been touched.

    Attributes:
        result: what the step gave.
        batches: the step's micro-batches, and `before` the trainer's state before it (see
            Trainer.state_dict); both empty if Trainer.update was called on its own.
    """

    def __init__(self, message: str, result: "StepResult") -> None:
        super().__init__(message)
        self.result = result
        self.batches: list[Batch] = []
        self.before: dict[str, Any] = {}


@dataclass
class StepResult:
    loss: float  # mean over the step's targets, nats
    grad_norm: float  # of the whole gradient, before it is clipped
    lr: float
    skipped: bool  # float16 only: the scaled gradient overflowed, and the scale was halved instead


@dataclass
class Unseen:
    """A step that was launched, and whose numbers the host has not looked at."""

    number: int  # counted from 1
    values: torch.Tensor  # [2] float64 on the CPU: loss and grad_norm, once `arrived`
    arrived: torch.cuda.Event | None  # None: they are there
    lr: float
    batches: list[Batch]
    before: dict[str, Any]  # see NonFiniteError


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
    """--dtype as a dtype. auto: float32 on a CPU; on a GPU bfloat16, or float16 where the GPU has
    no bfloat16 of its own (before compute capability 8.0)."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    old = torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


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
    """Builds everything from the config and its seed: two trainers of one config start equal.

    data: what `step` takes its batches from; None for a trainer that is handed them.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: GPTConfig,
        data: TokenData | None,
        *,
        kernel: str,
        device: torch.device,
        dtype: torch.dtype,
        compile: bool,
        param_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.kernel, self.device, self.dtype = config, kernel, device, dtype
        torch.manual_seed(config.seed)
        self.model = GPT(model, kernel, config.recompute).to(device, param_dtype)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.last: StepResult | None = None
        self.unseen: Unseen | None = None
        self.stream: BatchStream | None = None
        if data is not None:
            self.stream = BatchStream(
                data.train,
                config.micro_batch,
                config.seq_len,
                seed=config.seed,
                device=device,
                read_ahead=config.accumulation,
            )
        # Gradients below float16's smallest number would be lost: the loss is scaled up for it.
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        # float16's scale is the host's to decide: there, and where the optimizer has no flag, each
        # step is looked at before the weights are touched.
        self.looks_later = bool(self.optimizer.defaults["fused"]) and not self.scaler.is_enabled()
        self.broken = torch.zeros((), device=device)  # 1 after a loss or gradient not finite
        if self.looks_later:
            self.optimizer.found_inf = self.broken  # pyright: ignore[reportAttributeAccessIssue]
        self.loss_fn = torch.compile(self.model.loss) if compile else self.model.loss
        self.autocasts = dtype != torch.float32 and param_dtype == torch.float32
        self.step_number = 0  # steps made
        self.skipped_steps = 0
        self.data_seconds = 0.0  # spent waiting for batches

    def autocast(self) -> contextlib.AbstractContextManager:
        if not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def next_batches(self) -> list[Batch]:
        """The micro-batches of one step."""
        assert self.stream is not None
        started = time.perf_counter()
        batches = [self.stream.next() for _ in range(self.config.accumulation)]
        self.data_seconds += time.perf_counter() - started
        return batches

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
        """Clips and applies the gradient. Raises NonFiniteError, the weights being as they were."""
        self._launch_update(loss, [], {})
        return self.settle()

    def _launch_update(
        self, loss: torch.Tensor, batches: list[Batch], before: dict[str, Any]
    ) -> None:
        """Clips and applies the gradient; with `looks_later` waits for nothing."""
        lr = learning_rate(self.step_number, self.config.optim, self.config.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        values = torch.stack((loss.double(), grad_norm.double()))
        arrived = None
        if self.looks_later:
            torch.maximum(self.broken, (~values.isfinite()).any().float(), out=self.broken)
            values = values.to("cpu", non_blocking=True)  # PyTorch pins the memory of the copy
            if self.device.type == "cuda":
                arrived = torch.cuda.Event()
                # On the copy's stream. In a run on cuda:1 the current one is that of cuda:0, which
                # knows nothing of the copy.
                arrived.record(torch.cuda.current_stream(self.device))
        unseen = Unseen(self.step_number + 1, values, arrived, lr, batches, before)
        if not self.looks_later:
            self._look_at(unseen)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_number += 1
        if self.looks_later:
            earlier, self.unseen = self.unseen, unseen
            if earlier is not None:
                self._look_at(earlier)

    def _clip(self) -> torch.Tensor:
        """The norm of the gradient, which is clipped by it: by the optimizer itself where that
        is fused, as it passes over all gradients anyway. It takes a divisor in float32 alone, of
        which gradients in float64 would lose their precision."""
        # The norm is of the unscaled gradient; with clipping off it is still worth its line.
        max_norm = self.config.optim.grad_clip or math.inf
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not self.looks_later or any(g.dtype != torch.float32 for g in gradients):
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        divisor = (grad_norm / max_norm).clamp(min=1.0) if max_norm < math.inf else None
        self.optimizer.grad_scale = divisor  # pyright: ignore[reportAttributeAccessIssue]
        return grad_norm

    def _look_at(self, step: Unseen) -> None:
        """Waits for a step's numbers: `last` becomes its result. Raises NonFiniteError."""
        if step.arrived is not None:
            step.arrived.synchronize()
        loss, grad_norm = step.values.tolist()
        self.last = StepResult(loss, grad_norm, step.lr, skipped=False)
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        # get_scale waits for the GPU, here alone.
        if math.isfinite(loss) and self.scaler.get_scale() > MIN_LOSS_SCALE:
            self.last.skipped = True
            self.skipped_steps += 1
            return
        self._undo_launches(step.number)
        error = NonFiniteError(self._non_finite_message(self.last), self.last)
        if step.batches:
            error.batches, error.before = step.batches, self._state() | step.before
        raise error

    def _undo_launches(self, number: int) -> None:
        """Goes back to before step `number`, since which nothing was changed on the device."""
        self.step_number, self.unseen = number - 1, None
        self.broken.zero_()

    def settle(self) -> StepResult:
        """Waits for the step that was launched last and returns its result. Raises
        NonFiniteError, as launch_step does."""
        if self.unseen is not None:
            step, self.unseen = self.unseen, None
            self._look_at(step)
        assert self.last is not None
        return self.last

    def step(self) -> StepResult:
        """Makes a step and waits for it."""
        self.launch_step()
        return self.settle()

    def launch_step(self) -> None:
        """Makes a step without waiting for it, and looks at the one before.

        Raises NonFiniteError if that one's loss or gradient is not finite (or, where a step is
        waited for, this one's): weights and optimizer are then as they were before it.
        """
        assert self.stream is not None
        before: dict[str, Any] = {"stream": self.stream.state_dict()}
        if self.model.config.dropout:  # nothing else in a step draws random numbers
            before["random_state"] = random_state()
        batches = self.next_batches()
        self._launch_update(self.backward(batches), batches, before)

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands, weights and optimizer aside; made of JSON's types. Raises
        NonFiniteError if the last step launched was not one."""
        if self.unseen is not None:
            self.settle()
        return self._state()

    def _state(self) -> dict[str, Any]:
        assert self.stream is not None
        return {
            "step": self.step_number,
            "stream": self.stream.state_dict(),
            "scaler": self.scaler.state_dict(),
            "skipped_steps": self.skipped_steps,
            "random_state": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`'s place, the global random generators included."""
        assert self.stream is not None
        self.stream.load_state_dict(state["stream"])
        if state["scaler"]:  # empty unless the run was in float16
            self.scaler.load_state_dict(state["scaler"])
        self.step_number = state["step"]
        self.skipped_steps = state["skipped_steps"]
        restore_random_state(state["random_state"])

    def _non_finite_message(self, result: StepResult) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"step {self.step_number + 1}: loss {result.loss}, gradient norm {result.grad_norm} on "
            f"kernel '{self.kernel}' in {dtype}; the weights are as they were before it; "
            "try a lower --optim.lr or more --optim.warmup_steps (--kernel eager shows whether "
            "it is the kernel)"
        )

    @torch.no_grad()
    def evaluate(self, tokens: Any, max_tokens: int) -> tuple[float, int]:
        """Mean loss in nats over the first max_tokens targets of `tokens`, and how many there were.

        Windows follow one another without overlap; the last, shorter one counts too, each token
        once. Draws no random number, so training goes on as if it had not happened. Raises
        NonFiniteError if the last step launched was not one.
        """
        if self.unseen is not None:
            self.settle()
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
            release_pages(tokens)
        self.model.train(was_training)
        return total / max(1, count), count
