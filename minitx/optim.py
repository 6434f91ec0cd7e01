"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) and the learning rate as a function of the
step."""

import math

import torch
from torch import nn

from minitx.config import OptimConfig


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """The learning rate of step `step`, counted from 0; a pure function, so a resume needs no
    state.

    Warm-up: lr * (step + 1) / (warmup_steps + 1), which is above 0 at once and would reach lr at
    step warmup_steps. Then the schedule, down to min_lr at step max_steps.
    """
    lr, min_lr, warmup = config.lr, config.min_lr, config.warmup_steps
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return lr
    if config.schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
        return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    decay_steps = max(1, round(max_steps * config.decay_fraction))
    decay_start = max(warmup, max_steps - decay_steps)
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, max_steps - decay_start)))
    return lr + (min_lr - lr) * progress


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, in PyTorch's fused form where the parameters' device has
    one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type == "cuda" for p in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )
