"""Norms, and the linear layers that read them, as torch.compile is to see them.

    z    = (x - mean) rstd           rstd = 1 / sqrt(var + eps); RMSNorm: mean 0, var = mean(x^2)
    W (z w + b) + c = (W diag(w)) z + (W b + c)
    dx   = rstd (dz - mean(dz) - z mean(dz z))           RMSNorm: without mean(dz)

PyTorch's form keeps x or z in float32 for the backward, beside its product with w in the dtype of
the linear layer. Here z is rounded to that dtype at once, and is all that is kept: the backward's
own formula asks for nothing else. The scale w moves into the weights, whose cast it joins, so that
its gradient is a sum over the rows of a matrix and not over all tokens.

Outside of compiled code each of these steps would be a pass by itself: there PyTorch's modules run.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minitx.recompute import Recompute, checkpointed

Norm = nn.LayerNorm | nn.RMSNorm


def kept_of_norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What norm_linear reads of x, and keeps for its backward: z in compiled code, else x."""
    if not torch.compiler.is_compiling() or not isinstance(norm, Norm):
        return x
    return _normalised(norm, x)


def norm_linear(
    norm: nn.Module, linear: nn.Linear, kept: torch.Tensor, recompute: Recompute = "none"
) -> torch.Tensor:
    """linear(norm(x)) of kept_of_norm(norm, x). recompute: selective makes again what is neither
    kept nor the result."""
    if not torch.compiler.is_compiling() or not isinstance(norm, Norm):
        if recompute == "selective":
            return checkpointed(lambda x: linear(norm(x)), kept)
        return linear(norm(kept))
    weight, bias, shift = linear.weight, linear.bias, getattr(norm, "bias", None)
    if shift is not None:
        shifted = (weight * shift).sum(-1)
        bias = shifted if bias is None else shifted + bias
    if recompute == "selective":
        folded = checkpointed(_fold, weight, norm.weight, kept.dtype)
    else:
        folded = _fold(weight, norm.weight, kept.dtype)
    return F.linear(kept, folded, None if bias is None else bias.to(kept.dtype))


def _fold(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (weight if scale is None else weight * scale).to(dtype)


def run_norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """norm(x); in compiled code in the autocast dtype, which the output head computes in."""
    if not torch.compiler.is_compiling() or not isinstance(norm, Norm):
        return norm(x)
    z = _normalised(norm, x)
    y = z if norm.weight is None else z * norm.weight
    shift = getattr(norm, "bias", None)
    return (y if shift is None else y + shift).to(z.dtype)


def _normalised(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    device_type = x.device.type
    is_cast = torch.is_autocast_enabled(device_type) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device_type) if is_cast else x.dtype
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return _Normalise.apply(x, isinstance(norm, nn.LayerNorm), eps, dtype)


class _Normalise(torch.autograd.Function):
    """z of x [..., E], in dtype; over the last dim."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, is_centred: bool, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if is_centred:
            var, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
            wide = wide - mean
        else:
            var = wide.square().mean(-1, keepdim=True)
        rstd = torch.rsqrt(var + eps)
        z = (wide * rstd).to(dtype)
        ctx.save_for_backward(z, rstd)
        ctx.is_centred, ctx.dtype = is_centred, x.dtype
        return z

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        z, rstd = ctx.saved_tensors
        dz, z = dz.to(rstd.dtype), z.to(rstd.dtype)
        dx = dz - z * (dz * z).mean(-1, keepdim=True)
        if ctx.is_centred:
            dx = dx - dz.mean(-1, keepdim=True)
        return (dx * rstd).to(ctx.dtype), None, None, None
