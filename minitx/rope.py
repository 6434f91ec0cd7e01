"""Rotary position embedding, and four ways to stretch it past the trained length.

RoPE (Su et al. 2021, arXiv:2104.09864) turns the pair (x_i, x_{i + D/2}) of a query or key at
position p by the angle p * inv_freq[i]: the "half-split" layout of Llama and its kin, so that their
weights load unchanged. A model trained to L tokens reads factor * L of them if the angles are
rescaled:

    linear   inv_freq / factor                          Chen et al. 2023, arXiv:2306.15595
    ntk      a larger base, so that the lowest frequency alone is divided by factor
    yarn     linear for slow frequencies, none for fast ones, a ramp between; the logits are made
             sharper by (0.1 ln factor + 1)^2            Peng et al. 2023, arXiv:2309.00071
    llama3   the same idea with other bounds and no sharpening           Llama 3.1's own
"""

import math
from typing import Literal

import torch
from torch import nn

from minitx.metrics import is_out_of_memory

RopeScaling = Literal["none", "linear", "ntk", "yarn", "llama3"]

# Yarn's bounds, in turns over the trained length: faster than 32 is left alone, slower than 1 is
# interpolated (section 3.2 of the paper). Llama 3.1's are 4 and 1.
YARN_FAST, YARN_SLOW = 32.0, 1.0
LLAMA3_FAST, LLAMA3_SLOW = 4.0, 1.0


def inverse_frequencies(
    head_dim: int,
    base: float = 10_000.0,
    scaling: RopeScaling = "none",
    factor: float = 1.0,
    trained_len: int = 0,
) -> tuple[torch.Tensor, float]:
    """inv_freq [head_dim / 2] in float64, radians a token, and the factor on cos and sin.

    trained_len, in tokens, is what yarn and llama3 measure a frequency's turns by.
    """
    # On the CPU whatever the default device is: they are small, and some devices lack float64.
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    inv_freq = base**-exponent
    match scaling:
        case "none":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / factor, 1.0
        case "ntk":
            stretched = base * factor ** (head_dim / max(head_dim - 2, 1))
            return stretched**-exponent, 1.0
        case "yarn":
            # The ramp is linear in the dimension's index, between the indices of the two bounds.
            def index(turns: float) -> float:
                wavelength = trained_len / (turns * 2 * math.pi)
                return head_dim * math.log(wavelength) / (2 * math.log(base))

            low = max(math.floor(index(YARN_FAST)), 0)
            high = min(math.ceil(index(YARN_SLOW)), head_dim - 1)
            i = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
            interpolated = ((i - low) / max(high - low, 1e-3)).clamp(0, 1)
            scaled = inv_freq * (1 - interpolated) + inv_freq / factor * interpolated
            return scaled, 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        case "llama3":
            turns = trained_len * inv_freq / (2 * math.pi)
            kept = ((turns - LLAMA3_SLOW) / (LLAMA3_FAST - LLAMA3_SLOW)).clamp(0, 1)
            return inv_freq * kept + inv_freq / factor * (1 - kept), 1.0


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin, [max_len, head_dim / 2] each, float32 whatever the model is cast
    to."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor, attention_factor: float, max_len: int) -> None:
        super().__init__()
        self.inv_freq, self.attention_factor = inv_freq, attention_factor
        self.build(max_len, torch.device("cpu"))

    def build(self, max_len: int, device: torch.device) -> None:
        """(Re)makes the tables for positions below max_len.

        The angles are made in float64: at position 10^6 a float32 angle is off by up to 0.06
        radians. Raises ValueError for more of them than memory holds.
        """
        try:
            if max_len > 2**48:  # bytes of an address; PyTorch has other errors for such sizes
                raise MemoryError
            self._build(max_len, device)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            raise ValueError(
                f"context of {max_len} tokens: its position tables do not fit in memory; use a "
                "shorter one"
            ) from error

    def _build(self, max_len: int, device: torch.device) -> None:
        positions = torch.arange(max_len, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.inv_freq)
        factor = self.attention_factor
        self.register_buffer("cos", (angles.cos() * factor).float().to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * factor).float().to(device), persistent=False)

    def _apply(self, fn, recurse: bool = True):  # the one door of .to(), .half(), .cuda()
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32 and self.cos.device.type != "meta":
            self.build(self.cos.shape[0], self.cos.device)
        return self

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x: [B, S, H, D] at positions start .. start + S - 1. Turned in float32, returned in x's
        dtype."""
        S = x.shape[1]
        cos = self.cos[start : start + S, None]  # [S, 1, D / 2]
        sin = self.sin[start : start + S, None]
        wide = torch.promote_types(x.dtype, torch.float32)
        x1, x2 = x.to(wide).chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
