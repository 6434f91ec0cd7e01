"""Runs train.py in this process, on a model of a few thousand weights and a few kilobytes of
text."""

from pathlib import Path

import torch

from minitx.cli import parse_config, run_cli
from minitx.config import TrainConfig
from minitx.data import load_data
from minitx.trainer import Trainer, model_config
from minitx.training import train

TINY = {
    "kernel": "sdpa",
    "max_steps": 6,
    "compare_steps": 4,
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.n_embd": 32,
    "model.max_seq_len": 32,
    "data.tokenizer": "bytes",
    "batch.tokens": 128,
    "optim.warmup_steps": 2,
    "optim.lr": 1e-2,
    "log.interval": 2,
    "log.eval_interval": 4,
    "log.eval_tokens": 256,
    "log.plots": "false",
    "device": "cpu",
}


def write_text(folder: Path, seed: int = 0) -> Path:
    """A file of 6 kB of lines that a model can learn something from."""
    path = folder / "text.txt"
    lines = (
        f"{(i * 7 + seed) % 89} times {i % 11} is {(i * 7 + seed) % 89 * (i % 11)}\n"
        for i in range(400)
    )
    path.write_text("".join(lines), encoding="utf-8")
    return path


def tiny_args(folder: Path, out: str = "run", **changes: object) -> list[str]:
    """Arguments of train.py for a run in `folder`; a change named a__b sets --a.b, None leaves it
    out."""
    settings = {
        **TINY,
        "data.source": str(write_text(folder)),
        "data.cache_dir": str(folder / "cache"),
        "out_dir": str(folder / out),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def run_train(args: list[str]) -> int:
    """train.py's exit code."""
    return run_cli(train, TrainConfig, args, prog="train.py", description="")


def tiny_config(folder: Path, **changes: object) -> TrainConfig:
    """The tiny run's config, as an object."""
    return parse_config(TrainConfig, tiny_args(folder, **changes), prog="train.py", description="")


def make_trainer(config: TrainConfig, **how) -> Trainer:
    data = load_data(config.data)
    how = {"kernel": "sdpa", "dtype": torch.float32, "compile": False, "device": "cpu", **how}
    how["device"] = torch.device(how["device"])
    return Trainer(config, model_config(config, data), data, **how)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
