"""Before an evaluation runs: the model that can read the contexts, and what does not fit it."""

from pathlib import Path
from typing import Any

import torch

from minitx.checkpoint import load_model, load_state
from minitx.eval_config import EvalConfig
from minitx.kernels import ATTENTION_KERNELS, KernelUnavailableError, supports
from minitx.model import GPT


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
            stored = load_state(checkpoint)["model_config"]
            trained = stored["rope_trained_len"] or stored["max_seq_len"]
            longest = max(config.lengths(stored["max_seq_len"]))
            overrides["rope_factor"] = max(1.0, longest / trained)
    model, state = load_model(checkpoint, device=device, dtype=torch.float32, overrides=overrides)
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


def check_kernels(config: EvalConfig, model: GPT, device: torch.device, dtype: torch.dtype) -> None:
    """Raises for a kernel that is unknown or cannot run this model here."""
    shape = (1, model.config.n_head, 1, model.config.head_width)
    q = torch.empty(shape, device=device, dtype=dtype)
    k = q[:, : model.config.kv_heads]
    for flag, kernel in (("--kernel", config.kernel), ("--compare", config.compare)):
        if flag == "--compare" and kernel == "none":
            continue
        if kernel not in ("auto", *ATTENTION_KERNELS):
            known = ", ".join(("auto", *ATTENTION_KERNELS))
            none = " or none" if flag == "--compare" else ""
            raise ValueError(f"{flag} {kernel} is unknown; expected one of {known}{none}")
        support = supports(kernel, q, k, k)
        if not support.ok:
            able = [name for name in ATTENTION_KERNELS[1:] if supports(name, q, k, k).ok]
            raise KernelUnavailableError(
                f"{flag} {kernel} cannot run here: {support.reason}. "
                f"Kernels that can: {', '.join(able)}"
            )


def is_out_of_memory(error: RuntimeError) -> bool:
    """PyTorch has a class for a GPU's memory, and only words for the CPU's."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
