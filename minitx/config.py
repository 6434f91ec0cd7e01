"""TrainConfig: everything `train.py` can be told, as dataclasses that jsonargparse reads.

The docstring under a field is its --help. Files in configs/ state only what differs from here.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from minitx.data import DataConfig
from minitx.model import GPTConfig
from minitx.recompute import Recompute
from minitx.run_files import write_whole


@dataclass
class BatchConfig:
    """How many tokens a step sees, and in how many pieces."""

    tokens: int = 32_768
    """Tokens a step, over all micro-batches."""
    seq_len: int | None = None
    """Context in tokens; the model's max_seq_len by default."""
    micro: int | None = None
    """Sequences a micro-batch; by default all of the step's in one."""


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """Learning rate at the end of the decay."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises linearly; its first value is already above 0."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to min_lr; or stable, then linear to min_lr (wsd); or constant."""
    decay_fraction: float = 0.2
    """Share of all steps that wsd decays over."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only: not on norms, biases or vectors."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the square root of the squared gradient's running mean."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0 clips nothing."""


@dataclass
class LogConfig:
    """What is printed and measured, and when."""

    interval: int = 10
    """Steps between lines of metrics."""
    eval_interval: int = 100
    """Steps between validation losses; 0 evaluates at the end only."""
    eval_tokens: int = 65_536
    """Tokens of the validation documents used for it, from the first on."""
    plots: bool = True
    """Draw loss.png and parity.png."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, under out_dir/tensorboard (needs the extra
    `tensorboard`)."""


@dataclass
class CheckpointConfig:
    """When to save, and what to keep."""

    interval: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """How many of the newest to keep; 0 keeps all."""
    best: bool = False
    """Also save after every validation that is the best so far, and keep that one apart."""


@dataclass
class DebugConfig:
    """To look into a run that went wrong."""

    replay: str | None = None
    """A debug_step_*.safetensors, left by a run whose loss or gradient was not finite. Instead of
    training, run its batch once more, from the weights it names, on --kernel in --dtype, and say
    where the first numbers that are not finite appear; exit code 5 if there are any."""


@dataclass
class TrainConfig:
    """Train a GPT with the attention kernel of your choice, and prove that it learns the same."""

    kernel: str = "auto"
    """Attention kernel: eager, sdpa, triton-softmax, tilelang-softmax, triton, tilelang or auto."""
    compare: str = "eager"
    """Kernel that the chosen one is compared with before training; none skips the comparison."""
    compare_steps: int = 20
    """Steps of training on each kernel for that comparison."""
    out_dir: str | None = None
    """Folder of the run; by default runs/KERNEL, with a number behind it if that exists. A run that
    is resumed stays in its own."""
    overwrite: bool = False
    """Empty out_dir first, if it holds a run."""
    resume: str | None = None
    """Run or checkpoint folder to go on from; auto: the latest of out_dir (runs/KERNEL), or a fresh
    start there."""
    resume_allow: bool = False
    """Go on although settings that change the result differ from those of the run resumed."""
    max_steps: int = 1000
    """Steps to train in all, those before a resume included."""
    seed: int = 0
    """Seed of the weights, the data order and dropout."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Autocast dtype; float32 is no autocast. auto: bfloat16 on a GPU (float16 before compute
    capability 8.0), float32 on a CPU."""
    compile: bool = False
    """Compile the model with torch.compile."""
    recompute: Recompute = "none"
    """Activation checkpointing: which activations of a block are not kept for the backward but made
    again in it. selective: norms and activation functions, and one product of 24 (the MLP's first
    in every sixth block); full: all but attention."""
    deterministic: bool = False
    """Give the same bits in every run on the same machine, or refuse a kernel that cannot."""
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def seq_len(self) -> int:
        return self.model.max_seq_len if self.batch.seq_len is None else self.batch.seq_len

    @property
    def micro_batch(self) -> int:
        return self.batch.micro or self.batch.tokens // self.seq_len

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return self.batch.tokens // (self.seq_len * self.micro_batch)

    def validate(self) -> None:
        """Raises ValueError, naming the flag, for settings that do not go together."""
        at_least_one = {
            "--max_steps": self.max_steps,
            "--compare_steps": self.compare_steps,
            "--batch.tokens": self.batch.tokens,
            "--batch.seq_len": self.seq_len,
            "--log.interval": self.log.interval,
            "--log.eval_tokens": self.log.eval_tokens,
        }
        for flag, value in at_least_one.items():
            if value < 1:
                raise ValueError(f"{flag} must be at least 1, got {value}")
        not_negative = {
            "--optim.lr": self.optim.lr,
            "--optim.min_lr": self.optim.min_lr,
            "--optim.warmup_steps": self.optim.warmup_steps,
            "--optim.weight_decay": self.optim.weight_decay,
            "--optim.eps": self.optim.eps,
            "--optim.grad_clip": self.optim.grad_clip,
            "--log.eval_interval": self.log.eval_interval,
            "--checkpoint.interval": self.checkpoint.interval,
            "--checkpoint.keep": self.checkpoint.keep,
        }
        for flag, value in not_negative.items():
            if value < 0:
                raise ValueError(f"{flag} must not be negative, got {value}")
        for flag, beta in (
            ("--optim.beta1", self.optim.beta1),
            ("--optim.beta2", self.optim.beta2),
        ):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{flag} must be at least 0 and below 1, got {beta}")
        if not -(2**63) <= self.seed < 2**64:  # what PyTorch's generators take
            raise ValueError(f"--seed must be from -2**63 to 2**64 - 1, got {self.seed}")
        refuse_empty(
            {
                "--out_dir": self.out_dir,
                "--resume": self.resume,
                "--debug.replay": self.debug.replay,
                "--data.source": self.data.source,
                "--data.cache_dir": self.data.cache_dir,
            }
        )
        if self.overwrite and self.resume is not None:
            raise ValueError("--overwrite and --resume contradict each other: give one of them")
        if self.model.pos == "learned" and self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"--batch.seq_len {self.seq_len} is beyond the {self.model.max_seq_len} learned "
                "positions; raise --model.max_seq_len"
            )
        if self.batch.micro is not None and self.batch.micro < 1:
            raise ValueError(f"--batch.micro must be at least 1, got {self.batch.micro}")
        sequences, left = divmod(self.batch.tokens, self.seq_len)
        if left or sequences == 0:
            raise ValueError(
                f"--batch.tokens {self.batch.tokens} is not a multiple of the context of "
                f"{self.seq_len} tokens; try {max(1, sequences) * self.seq_len}"
            )
        if sequences % self.micro_batch:
            raise ValueError(
                f"--batch.micro {self.batch.micro} does not divide the {sequences} sequences of a "
                f"step ({self.batch.tokens} tokens of context {self.seq_len})"
            )
        if self.optim.schedule != "constant" and self.optim.min_lr > self.optim.lr:
            raise ValueError(
                f"--optim.min_lr {self.optim.min_lr} is above --optim.lr {self.optim.lr}, which "
                "decays to it; give a lower one, or --optim.schedule constant"
            )
        if not 0.0 <= self.optim.decay_fraction <= 1.0:
            raise ValueError(
                f"--optim.decay_fraction must be in [0, 1], got {self.optim.decay_fraction}"
            )


def refuse_empty(paths: dict[str, str | None]) -> None:
    """Raises ValueError for a path by flag that is empty, as of an unset variable of a shell: it
    would mean the current folder."""
    for flag, path in paths.items():
        if path == "":
            raise ValueError(f"{flag} is empty; give a path, or leave it out")


def refuse_nothing(amounts: dict[str, float | None]) -> None:
    """Raises ValueError for an amount by flag of which nothing, or less, is asked."""
    for flag, amount in amounts.items():
        if amount is not None and amount <= 0:
            raise ValueError(f"{flag} must be above 0, got {amount:g}")


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain dicts, for JSON and YAML."""
    return dataclasses.asdict(config)


def save_yaml(config: Any, path: Path) -> None:
    write_whole(path, yaml.safe_dump(to_dict(config), sort_keys=False))


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple]:
    """Settings that differ between two config dicts: dotted name -> (old, new)."""
    found: dict[str, tuple] = {}
    for name in old.keys() | new.keys():
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found.update(differences(a, b, f"{prefix}{name}."))
        elif a != b:
            found[prefix + name] = (a, b)
    return dict(sorted(found.items()))
