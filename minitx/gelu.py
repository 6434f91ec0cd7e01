"""GELU, as PyTorch runs it and as torch.compile is to see it."""

import math

import torch
import torch.nn.functional as F


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415):
    x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # (1 + tanh u) / 2 = sigmoid(2 u): one exponential, where the tanh that compiled code would call
    # takes so many instructions that memory waits for it.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)
