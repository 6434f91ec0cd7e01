"""Before an evaluation runs: the model that can read the contexts, and what does not fit it."""

from pathlib import Path
from typing import Any

import torch

from minitx.eval_config import EvalConfig
from minitx.model import GPT
from minitx.trained import load_trained, trained_config


def load_for_contexts(
    config: EvalConfig, checkpoint: Path, device: torch.device
) -> tuple[GPT, dict[str, Any]]:
    """The model in float32, RoPE stretched as asked, able to read the longest context; its state.

    Raises ValueError for contexts or strides that do not fit it or one another.
    """
    overrides: dict[str, Any] = {}
    if config.rope_scaling is not None:
        overrides = {"rope_scaling": config.rope_scaling, "rope_factor": config.rope_factor}
        if config.rope_factor is None:
            stored = trained_config(checkpoint)
            trained = stored["rope_trained_len"] or stored["max_seq_len"]
            longest = max(config.lengths(stored["max_seq_len"]))
            overrides["rope_factor"] = max(1.0, longest / trained)
    model, state = load_trained(checkpoint, device=device, dtype=torch.float32, overrides=overrides)
    if config.rope_scaling is not None and model.rope is None:
        raise ValueError(
            f"--rope_scaling {config.rope_scaling} needs a model with RoPE; this one has "
            f"{model.config.max_seq_len} learned positions"
        )
    lengths = config.lengths(model.config.max_seq_len)
    for length in lengths:
        config.stride_of(length)
    model.extend_context(max(lengths))
    return model, state


def check_vocabulary(ids: int, model: GPT, checkpoint: Path) -> None:
    """Raises ValueError where a tokenizer of so many ids is beyond the model's embedding."""
    vocab_size = model.config.vocab_size
    assert vocab_size is not None
    if ids > vocab_size:
        raise ValueError(
            f"the tokenizer has {ids} ids, but the model of {checkpoint} a vocabulary of "
            f"{vocab_size}: they do not belong together; use the tokenizer it was trained with"
        )
