"""The weights of linear layers as compiled products read them: all of them made at once.

Under autocast each product wants its weights W in 16 bits, and one that reads a norm wants the
norm's scale w in them, W diag(w) (norm.py). Made one by one that is two or three small kernels a
weight and step, forward and backward, more than anything else that a step launches. PyTorch's
operations on lists become one kernel for all in compiled code.

    V = W diag(w),   dW = dV diag(w),   dw_i = sum_o dV_oi W_oi
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Operations on lists have no public name:
# pyright: reportPrivateImportUsage=false

# Sums over the rows of weights are made of so many: enough for all multiprocessors.
PARTS = 16


class BlockWeights(NamedTuple):
    """Of a block's linear layers, in the order in which they run; None: the layer's own."""

    qkv: torch.Tensor | None
    attn_proj: torch.Tensor | None
    up: torch.Tensor | None
    mlp_proj: torch.Tensor | None


NO_WEIGHTS = BlockWeights(None, None, None, None)


def linear(module: nn.Linear, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """module(x), with `weight` for module's, if there is one."""
    if weight is None:
        return module(x)
    return F.linear(x, weight, None if module.bias is None else module.bias.to(weight.dtype))


def fold_weights(blocks: Iterable[Any], dtype: torch.dtype) -> list[BlockWeights]:
    """The weights of all blocks, of qkv and up with the scales of the norms that they read."""
    scaled, scales, plain = [], [], []
    for block in blocks:
        scaled += [block.attn.qkv.weight, block.mlp.up.weight]
        scales += [block.attn_norm.weight, block.mlp_norm.weight]
        plain += [block.attn.proj.weight, block.mlp.proj.weight]
    scaled, plain = scale_weights(scaled, scales, dtype), cast_weights(plain, dtype)
    pairs = zip(scaled[::2], plain[::2], scaled[1::2], plain[1::2], strict=True)
    return [BlockWeights(*weights) for weights in pairs]


def scale_weights(
    weights: list[torch.Tensor], scales: list[torch.Tensor], dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """weights [rows, E] times scales [E], of the products' dtype; all weights are as wide."""
    return _Scaled.apply(dtype, *weights, *scales)


def cast_weights(weights: list[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """weights, any shapes, of the products' dtype."""
    if all(w.dtype == dtype for w in weights):
        return weights
    return _Cast.apply(dtype, *weights)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        n = len(tensors) // 2
        return tuple(v.to(dtype) for v in torch._foreach_mul(tensors[:n], tensors[n:]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        n = len(tensors) // 2
        weights, scales = tensors[:n], tensors[n:]
        wide = [grad.to(w.dtype) for grad, w in zip(grads, weights, strict=True)]
        parts = PARTS if all(w.shape[0] % PARTS == 0 for w in weights) else 1
        sums = [
            (g * w).unflatten(0, (parts, -1)).sum(1) for g, w in zip(wide, weights, strict=True)
        ]
        return None, *torch._foreach_mul(wide, scales), *torch.stack(sums).sum(1).unbind()


class _Cast(torch.autograd.Function):
    """Multiplied by 1, since there is no list operation that does nothing but cast."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtype = weights[0].dtype
        return tuple(v.to(dtype) for v in torch._foreach_mul(weights, 1.0))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *torch._foreach_mul([grad.to(ctx.dtype) for grad in grads], 1.0)
