"""Opens a trained model, whatever wrote it: a checkpoint of minitx or a Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch

from minitx.checkpoint import find_checkpoint, load_model, load_state
from minitx.hf import is_hf_folder, load_hf, read_config
from minitx.model import GPT


def find_trained(path: Path) -> Path:
    """The folder that `path` means: a Hugging Face folder itself, or what find_checkpoint says."""
    return path if is_hf_folder(path) else find_checkpoint(path)


def trained_config(folder: Path) -> dict[str, Any]:
    """The settings of the model in a folder of find_trained, as fields of GPTConfig."""
    if is_hf_folder(folder):
        return vars(read_config(folder))
    return load_state(folder)["model_config"]


def load_trained(
    folder: Path,
    *,
    kernel: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    overrides: dict[str, Any] | None = None,
) -> tuple[GPT, dict[str, Any]]:
    """The model of a folder of find_trained, and its state; arguments and errors as load_model's.

    A Hugging Face folder knows of no step and of no data: its state says so.
    """
    load = load_hf if is_hf_folder(folder) else load_model
    return load(folder, kernel=kernel, device=device, dtype=dtype, overrides=overrides)
