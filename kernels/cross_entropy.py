"""Output head and cross-entropy as one function: nats of each target from the last hidden states.

    z_i   = weight h_i                                    [V] logits of token i
    nll_i = log sum_v exp(z_iv) - z_i,target              natural log

The kernels `reference` (float64) and `eager` make all logits at once, N * V of them: 3.1 GiB in
bfloat16 for 32k tokens and 50k words, and twice that again in float32. `chunked` and `triton` never
do (chunked_cross_entropy.py).
"""

import torch
import torch.nn.functional as F

from minitx.kernels.checks import check_name, library_problem
from minitx.kernels.chunked_cross_entropy import (
    chunked_nll,
    chunked_sum,
    refuse_bad_targets,
    stats_dtype,
)
from minitx.kernels.errors import KernelUnavailableError

CROSS_ENTROPY_KERNELS = ("reference", "eager", "chunked", "triton")
REDUCTIONS = ("none", "sum", "mean")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    kernel: str = "auto",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """cross_entropy(hidden @ weight^T, targets) in memory O(chunk_tokens * V) beside its arguments.

    Args:
        hidden: [N, E], any strides.
        weight: [V, E].
        targets: [N] integers in [0, V), or ignore_index: that token's loss and gradient are 0.
        reduction: "sum", "mean" (over the tokens that are not ignored), or "none".
        kernel: one of CROSS_ENTROPY_KERNELS, or "auto": triton on a GPU, chunked elsewhere.
        chunk_tokens: rows of logits that exist at once; by default what CHUNK_BYTES holds.

    Under autocast products are made in its dtype, whatever hidden and weight are.

    Returns:
        Nats, float32 (float64 for float64): a scalar, or [N] for "none". Differentiable once in
        hidden and weight. With every target ignored a sum is 0 and a mean NaN, as in PyTorch.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or names that do not fit; on a CPU also a
            target outside [0, V). On a GPU such a target makes its loss and gradients NaN, without
            a look at the data that would stall the stream.
        KernelUnavailableError: the kernel cannot run here; the message says which can.
    """
    _check(hidden, weight, targets, reduction, chunk_tokens)
    kernel = _choose(kernel, hidden)
    compute_dtype = _compute_dtype(hidden, weight)
    if kernel in ("reference", "eager"):
        h, w = hidden.to(compute_dtype), weight.to(compute_dtype)
        if kernel == "reference":
            h, w = h.double(), w.double()
        nll = _whole(h, w, targets, ignore_index)
        total = (nll if reduction == "none" else nll.sum()).to(stats_dtype(compute_dtype))
    else:
        settings = (ignore_index, chunk_tokens or 0, compute_dtype, kernel == "triton")
        if reduction == "none":
            total = chunked_nll(hidden, weight, targets, *settings)
        else:
            wants = [torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight)]
            total = chunked_sum(hidden, weight, targets, *settings, *wants)[0]
    if reduction == "mean":
        total = total / (targets != ignore_index).sum()
    return total


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    reduction: str,
    chunk_tokens: int | None,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or targets.dim() != 1:
        raise ValueError(
            "expected hidden [N, E], weight [V, E] and targets [N], got shapes "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if hidden.shape[1] != weight.shape[1] or hidden.shape[0] != targets.shape[0]:
        raise ValueError(
            "hidden and weight must agree in E, hidden and targets in N, got shapes "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight must have at least one row (one word), got 0")
    if hidden.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise TypeError(
            "hidden and weight must be float32, float16, bfloat16 or float64, got "
            f"{hidden.dtype} and {weight.dtype}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets must be int64 or int32, got {targets.dtype}")
    if not hidden.device == weight.device == targets.device:
        raise ValueError(
            "hidden, weight and targets must be on one device, got "
            f"{hidden.device}, {weight.device} and {targets.device}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"unknown reduction '{reduction}'; expected one of {', '.join(REDUCTIONS)}"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")


def _choose(kernel: str, hidden: torch.Tensor) -> str:
    check_name(kernel, CROSS_ENTROPY_KERNELS)
    if kernel == "auto":
        on_gpu = hidden.device.type == "cuda" and hidden.dtype != torch.float64
        return "triton" if on_gpu and _triton_problem(hidden) is None else "chunked"
    if kernel == "triton":
        reason = _triton_problem(hidden)
        if hidden.dtype == torch.float64:
            reason = "it computes float32, float16 and bfloat16, not float64"
        if reason is not None:
            raise KernelUnavailableError(
                f"kernel 'triton' cannot run this cross-entropy: {reason}. "
                "Kernels that can: eager, chunked"
            )
    return kernel


def _triton_problem(hidden: torch.Tensor) -> str | None:
    return library_problem("triton", hidden.device.type, hidden.device.index)


def _compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}"
        )
    return hidden.dtype


def _whole(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """The plain form, [N]: all logits at once. Differentiable by autograd, any number of times."""
    logits = F.linear(hidden, weight)
    refuse_bad_targets(targets, logits.shape[1], ignore_index)
    return F.cross_entropy(
        logits.to(stats_dtype(logits.dtype)),
        targets.long(),
        ignore_index=ignore_index,
        reduction="none",
    )
