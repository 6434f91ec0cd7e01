"""GELU, as PyTorch runs it and as torch.compile is to see it."""

import math
from typing import Any

import torch
import torch.nn.functional as F

# 2 u = x (A + B x^2)
A = 2 * math.sqrt(2 / math.pi)
B = A * 0.044715
FLAT = 32.0  # the slope is 0 below -FLAT and 1 above FLAT, where x^2 cannot overflow to 0 * inf


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415):
    x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return _Gelu.apply(x) if torch.compiler.is_compiling() else F.gelu(x, approximate="tanh")


class _Gelu(torch.autograd.Function):
    """y = x s, s = sigmoid(2 u): one exponential, where the tanh that compiled code would call
    takes so many instructions that memory waits for it.

        dx = dy (s + x s (1 - s) (A + 3 B x^2))

    Differentiated step by step it is too long for torch.compile to see as one expression, which
    then does not write dx over dy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        wide = _wide(x)
        return (wide * torch.sigmoid(wide * (A + B * wide * wide))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        wide = _wide(x).clamp(-FLAT, FLAT)
        square = wide * wide
        s = torch.sigmoid(wide * (A + B * square))
        slope = s + wide * s * (1 - s) * (A + 3 * B * square)
        return (_wide(dy) * slope).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
