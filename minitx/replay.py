"""The batch that broke a run: left in a small file, and run once more from it.

    python train.py --debug.replay runs/triton/debug_step_00000012.safetensors --kernel eager

The file holds the step's `inputs` and `targets`, int64 [micro-batches, B, S], and under the key
"minitx" of its metadata, as JSON: step, seed, kernel, dtype, loss, grad_norm, model (a GPTConfig),
scale (float16's loss scale), and checkpoint: the folder of the weights before the step, seen from
the file; null means the initial weights of the seed.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minitx.checkpoint import load_into, restore_random_state
from minitx.cli import EXIT_NON_FINITE
from minitx.config import TrainConfig
from minitx.model import GPTConfig
from minitx.trainer import NonFiniteError, Trainer

METADATA_KEY = "minitx"


def save_batch(
    out_dir: Path, trainer: Trainer, error: NonFiniteError, checkpoint: Path | None
) -> Path:
    """Writes RUN/debug_step_XXXXXXXX.safetensors and returns its path."""
    step = error.before["step"] + 1
    path = out_dir / f"debug_step_{step:08d}.safetensors"
    inputs, targets = (torch.stack(parts).cpu() for parts in zip(*error.batches, strict=True))
    about = {
        "step": step,
        "seed": trainer.config.seed,
        "kernel": trainer.kernel,
        "dtype": _name(trainer.dtype),
        "loss": str(error.result.loss),  # JSON has no nan
        "grad_norm": str(error.result.grad_norm),
        "model": asdict(trainer.model.config),
        "scale": trainer.scaler.get_scale(),
        "checkpoint": None if checkpoint is None else os.path.relpath(checkpoint, out_dir),
    }
    save_file(
        {"inputs": inputs.contiguous(), "targets": targets.contiguous()},
        path,
        metadata={METADATA_KEY: json.dumps(about)},
    )
    return path


def replay(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Runs the batch of --debug.replay forward and backward on --kernel and prints what is not
    finite.

    Returns 0 if loss and gradient are finite, else EXIT_NON_FINITE. Raises ValueError for a file
    that is not one of ours, and CheckpointError for weights that cannot be read.
    """
    assert config.debug.replay is not None
    path = Path(config.debug.replay)
    inputs, targets, about = _read(path)
    trainer = Trainer(
        replace(config, seed=about["seed"]),
        GPTConfig(**about["model"]),
        None,
        kernel=config.kernel,
        device=device,
        dtype=dtype,
        compile=config.compile,
    )
    weights = f"the initial weights of seed {about['seed']}"
    if about["checkpoint"] is not None:
        checkpoint = path.parent / about["checkpoint"]
        restore_random_state(load_into(checkpoint, trainer.model)["random_state"])
        weights = str(checkpoint)
    trainer.scaler = torch.amp.GradScaler(
        device.type, init_scale=about["scale"], enabled=trainer.scaler.is_enabled()
    )
    print(
        f"replay: step {about['step']} of {path.parent}, from {weights}, on kernel "
        f"'{config.kernel}' in {_name(dtype)}"
    )
    first_output = _watch_outputs(trainer) if not config.compile else lambda: None
    batches = list(zip(inputs.to(device), targets.to(device), strict=True))
    loss = trainer.backward(batches).item()
    trainer.scaler.unscale_(trainer.optimizer)
    grad_norm = torch.nn.utils.get_total_norm(
        [p.grad for p in trainer.model.parameters() if p.grad is not None]
    ).item()
    print(
        f"loss {loss}, gradient norm {grad_norm} (the run had {about['loss']} and "
        f"{about['grad_norm']} on '{about['kernel']}' in {about['dtype']})"
    )
    bad = [
        name
        for name, p in trainer.model.named_parameters()
        if p.grad is not None and not p.grad.isfinite().all()
    ]
    if output := first_output():
        print(f"first non-finite output: {output}")
    if bad:  # the gradient runs from the last parameter to the first
        print(f"first non-finite gradient: {bad[-1]}; {len(bad)} parameters in all")
    return 0 if math.isfinite(loss) and math.isfinite(grad_norm) else EXIT_NON_FINITE


def _watch_outputs(trainer: Trainer) -> Callable[[], str | None]:
    """Watches every module's output; the function returned names the first that was not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not found and isinstance(output, torch.Tensor) and not output.isfinite().all():
                found.append(name)

        return hook

    for name, module in trainer.model.named_modules():
        if name:
            module.register_forward_hook(watch(name))
    return lambda: found[0] if found else None


def _read(path: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[METADATA_KEY])
            return file.get_tensor("inputs"), file.get_tensor("targets"), about
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"--debug.replay {path} cannot be used ({error}); give a debug_step_*.safetensors that "
            "a run left"
        ) from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
