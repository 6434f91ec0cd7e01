"""minitx.kernels: attention, row softmax and the loss as pure tensor functions, one name a kernel.

Importing this package loads torch alone; triton and tilelang are imported when a kernel of theirs
is asked for. The semantics every kernel keeps are written down in `reference.py`.
"""

from minitx.kernels.api import (
    ATTENTION_KERNELS,
    SOFTMAX_KERNELS,
    Support,
    attention,
    packed_attention,
    softmax,
    supports,
    supports_softmax,
)
from minitx.kernels.cross_entropy import CROSS_ENTROPY_KERNELS, linear_cross_entropy
from minitx.kernels.errors import KernelUnavailableError
from minitx.kernels.merge import merge_attention
from minitx.kernels.reference import attention_reference, softmax_reference
from minitx.kernels.runtime import choose_triton_interpreter

choose_triton_interpreter()

__all__ = [
    "ATTENTION_KERNELS",
    "CROSS_ENTROPY_KERNELS",
    "SOFTMAX_KERNELS",
    "KernelUnavailableError",
    "Support",
    "attention",
    "attention_reference",
    "linear_cross_entropy",
    "merge_attention",
    "packed_attention",
    "softmax",
    "softmax_reference",
    "supports",
    "supports_softmax",
]
