"""Checkpoints: the one place that writes and opens them. Safetensors and JSON, no pickle.

    RUN/checkpoints/step_00000100/model.safetensors      parameters and persistent buffers
                                  optimizer.safetensors  "PARAMETER.exp_avg" and so on
                                  state.json             everything else, and a hash of each file
    RUN/checkpoints/latest, best  links to a step's folder (small text files without symlinks)

A checkpoint is written into `tmp-...` beside its place, flushed to the disk and renamed; `latest`
moves last. So a kill, or a full disk, at any moment leaves a whole checkpoint that `latest` names
or that is found without it. Deletion goes the other way: renamed first, then removed.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from minitx import __version__
from minitx.model import GPT, GPTConfig
from minitx.named_state import (
    fill_optimizer,
    named_tensors,
    optimizer_state,
    parameter_names,
    unwrap,
)
from minitx.random_state import random_state, restore_random_state
from minitx.step_folders import (
    REPLACED,
    STATE,
    TEMPORARY,
    clear_leftovers,
    point,
    pointed_at,
    put_in_place,
    remove_old,
    steps,
    sync_folder,
    write_text,
)
from minitx.tensor_file import DTYPE_NAMES, write_tensors
from minitx.versions import package_version

__all__ = [
    "CheckpointError",
    "find_checkpoint",
    "load_into",
    "load_model",
    "load_state",
    "random_state",
    "restore_random_state",
    "save_checkpoint",
]

logger = logging.getLogger("minitx")

FORMAT, FORMAT_VERSION = "minitx-checkpoint", 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
ADDED_KEYS = (
    "format",
    "format_version",
    "files",
    "versions",
    "model_config",
    "optimizer",
    "sha256",
)
ADVICE = "take an earlier checkpoint, or copy this one again"


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read or written. One line: which, what is wrong, what to
    do."""


def save_checkpoint(
    run_dir: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    keep: int = 0,
    is_best: bool = False,
) -> Path:
    """Writes a checkpoint of step `step` and returns its folder.

    Args:
        model: a GPT, compiled or wrapped or not; names are stored without wrappers.
        optimizer: its state is stored by parameter name. None leaves it out.
        state: what the trainer must know to go on, made of JSON's types (inf and nan are kept).
            Added to it: `format`, `files` (size and hash), `versions`, `model_config`, `optimizer`,
            and `step` and `random_state` unless it holds them.
        keep: how many checkpoints to leave, this one included; 0 leaves all. `best` always stays.
        is_best: let `best` name this one.

    One tensor at a time is copied from the GPU. Raises CheckpointError when the disk is full or
    fails: what was there before is whole, and nothing half-written stays.
    """
    clash = [key for key in ADDED_KEYS if key in state]
    if clash or state.get("step", step) != step:
        raise ValueError(f"state must agree with step {step} and not hold {', '.join(ADDED_KEYS)}")
    folder = Path(run_dir) / "checkpoints"
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{TEMPORARY}{target.name}-{os.getpid()}"
    content: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step}
    content |= {"random_state": random_state()} | state
    content |= {"versions": _versions(), "model_config": dataclasses.asdict(unwrap(model).config)}
    moments: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        moments, content["optimizer"] = optimizer_state(optimizer, model)
    json.dumps(content)  # what JSON cannot hold is refused before anything is written
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)
        clear_leftovers(folder)
        temporary.mkdir()
        content["files"] = {MODEL: write_tensors(temporary / MODEL, named_tensors(model))}
        if optimizer is not None:
            content["files"][OPTIMIZER] = write_tensors(temporary / OPTIMIZER, moments)
        write_text(temporary / STATE, _sealed(content))
        sync_folder(temporary)
        put_in_place(temporary, target)
        if is_best:
            point(folder / "best", target.name)
        point(folder / "latest", target.name)
        if keep > 0:
            remove_old(folder, target, keep)
    except OSError as error:
        raise CheckpointError(_write_failure(target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already, unless something failed
    return target


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder that `path` means: a run folder or its `checkpoints` (the latest), a
    checkpoint folder, or a link to one.

    Without a `latest` that leads somewhere it is the highest step. What an interrupted save left
    is never taken. Raises CheckpointError where there is nothing.
    """
    path = Path(path)
    if path.name.startswith(TEMPORARY):
        raise CheckpointError(f"{path}: an interrupted save left this; give the run folder instead")
    if path.is_file() and path.name in ("latest", "best"):
        path = path.parent / (pointed_at(path) or "")
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {what}; give a run folder or a checkpoint folder")
    if (path / STATE).is_file():
        return path.resolve() if path.is_symlink() else path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = {step.name.removesuffix(REPLACED): step for step in steps(folder)}
    latest = pointed_at(folder / "latest")
    if latest in found:
        return found[latest]
    if found:
        newest = list(found.values())[-1]
        reason = (
            "has no 'latest'" if latest is None else f"'latest' leads to {latest}, no checkpoint"
        )
        logger.warning("%s: %s; taking %s", folder, reason, newest.name)
        return newest
    raise CheckpointError(
        f"{path}: no checkpoint in it (no {STATE}, no checkpoints/step_...); "
        "give a run folder that has saved, or a checkpoint folder"
    )


def load_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint folder, after every file was held to its size and hash.

    Raises CheckpointError with the name of a file that is missing, truncated, altered or foreign.
    """
    state = _read_state(Path(checkpoint))
    for name in state["files"]:
        _verify(Path(checkpoint) / name, state)
    return state


def load_model(
    path: Path,
    *,
    kernel: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    overrides: dict[str, Any] | None = None,
) -> tuple[GPT, dict[str, Any]]:
    """The model of a run or checkpoint folder, in evaluation mode, and its state.json.

    Args:
        kernel: attention kernel to run it on.
        dtype: of the weights; None keeps the stored one.
        overrides: fields of GPTConfig to change, such as rope_scaling.

    The global random state is left alone. Raises CheckpointError for files that are not whole, and
    for missing, unexpected or misshapen tensors, by name; ValueError for a bad override.
    """
    checkpoint = find_checkpoint(path)
    state = _read_state(checkpoint)
    _verify(checkpoint / MODEL, state)
    fields = {field.name for field in dataclasses.fields(GPTConfig)}
    for source, names in ((checkpoint / STATE, state["model_config"]), ("overrides", overrides)):
        if unknown := sorted(set(names or {}) - fields):
            raise CheckpointError(
                f"{source}: GPTConfig has no field {', '.join(unknown)}; expected some of "
                f"{', '.join(sorted(fields))}"
            )
    with torch.device("meta"):  # neither time nor random numbers for weights that are replaced
        model = GPT(GPTConfig(**state["model_config"] | (overrides or {})), kernel)
    own = named_tensors(model)
    with _open_tensors(checkpoint / MODEL, own) as stored:
        # Copies: a stored tensor may be a window on the file, which does not last for ever.
        weights = {name: stored.get_tensor(name).to(device, dtype, copy=True) for name in own}
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval(), state  # what is left to move: tables that are not stored


def load_into(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Fills a model, compiled or wrapped or not, and its optimizer, bit for bit; returns the state.

    The optimizer's hyperparameters become the stored ones; foreach, fused and capturable, which say
    how it runs, stay its own. Model settings that no tensor shows (dropout, rope_base) are not
    compared, and random states not restored: both are the caller's. Nothing is changed unless all
    fits. Raises CheckpointError as load_model does, also for a tensor of another dtype and for an
    optimizer with other parameter groups.
    """
    checkpoint = Path(checkpoint)
    state = load_state(checkpoint)
    own = named_tensors(model)
    if optimizer is not None:
        _check_groups(checkpoint, state, model, optimizer)
    with _open_tensors(checkpoint / MODEL, own, same_dtype=True) as stored, torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored.get_tensor(name))
    if optimizer is not None:
        with safe_open(checkpoint / OPTIMIZER, framework="pt") as stored:
            fill_optimizer(optimizer, state["optimizer"], stored)
    return state


@contextlib.contextmanager
def _open_tensors(
    path: Path, own: dict[str, torch.Tensor], same_dtype: bool = False
) -> Iterator[Any]:
    """Opens a file that must hold the tensors of `own`, in name and shape."""
    with safe_open(path, framework="pt") as stored:
        names = set(stored.keys())
        problems = [
            f"{what} {', '.join(sorted(some))}"
            for what, some in (("missing", own.keys() - names), ("unexpected", names - own.keys()))
            if some
        ]
        for name in sorted(names & own.keys()):
            header = stored.get_slice(name)
            expected, dtype = list(own[name].shape), DTYPE_NAMES[own[name].dtype]
            if header.get_shape() != expected:
                problems.append(f"{name} is {header.get_shape()}, the model's is {expected}")
            elif same_dtype and header.get_dtype() != dtype:
                problems.append(f"{name} is {header.get_dtype()}, the model's is {dtype}")
        if problems:
            raise CheckpointError(
                f"{path} does not fit this model: {'; '.join(problems)}; "
                "use the model settings it was saved with"
            )
        yield stored


def _check_groups(
    checkpoint: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    if OPTIMIZER not in state["files"]:
        raise CheckpointError(
            f"{checkpoint} was saved without an optimizer; start a new run from it"
        )
    stored = [group["params"] for group in state["optimizer"]["groups"]]
    own = parameter_names(optimizer, model)
    if stored != own:
        raise CheckpointError(
            f"{checkpoint / OPTIMIZER}: its parameter groups ({_sizes(stored)} parameters) are not "
            f"this optimizer's ({_sizes(own)}); use the optimizer settings it was saved with"
        )


def _sizes(groups: list[list[str]]) -> str:
    return " + ".join(str(len(names)) for names in groups)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "minitx": __version__}
    return versions | {p: package_version(p) for p in ("torch", "numpy", "triton", "tilelang")}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sealed(content: dict[str, Any]) -> str:
    """As JSON text, with a hash of its own content."""
    plain = json.loads(json.dumps(content))  # tuples are lists from here on
    return json.dumps(plain | {"sha256": _digest(plain)}, indent=2) + "\n"


def _read_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE
    try:
        state = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; give a checkpoint folder"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON; {ADVICE}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by minitx; give a checkpoint of minitx")
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {state.get('format_version')}, and this minitx "
            f"({__version__}) reads {FORMAT_VERSION}; use the minitx that wrote it"
        )
    if state.pop("sha256", None) != _digest(state):
        raise CheckpointError(f"{path} is damaged: its content is not what was written; {ADVICE}")
    return state


def _verify(path: Path, state: dict[str, Any]) -> None:
    expected = state["files"][path.name]
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            raise CheckpointError(
                f"{path} is damaged: {size} bytes, expected {expected['size']}; {ADVICE}"
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {ADVICE}") from error
    if digest != expected["sha256"]:
        raise CheckpointError(f"{path} is damaged: its content is not what was written; {ADVICE}")


def _write_failure(target: Path, error: OSError) -> str:
    earlier = target.parent.is_dir() and steps(target.parent)
    left = "the previous checkpoint is whole" if earlier else "there is no earlier checkpoint"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "free some space" if full else "see to the disk"
    return (
        f"{target} could not be written: {error.strerror or error}; {left} ({advice}, then resume)"
    )
