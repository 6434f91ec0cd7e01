"""--deterministic: the same bits in every run on the same machine.

The kernels of this project are deterministic as they are. PyTorch's own choose otherwise where that
is faster, unless they are told; some then raise, and are refused here by name before any work.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

from minitx.kernels import KernelUnavailableError, attention
from minitx.model import GPTConfig

PROBE_TOKENS = 64


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """PyTorch's deterministic mode while entered, if enabled.

    To be entered before CUDA is first used: cuBLAS reads its setting when it starts.
    """
    if not enabled:
        yield
        return
    # NVIDIA's cuBLAS documentation, "Results Reproducibility": buffers of a fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = before[2:]


def check_deterministic(
    flag: str, kernel: str, model: GPTConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises KernelUnavailableError if the kernel cannot train this model deterministically.

    It is tried on a few tokens: which of its backends PyTorch takes depends on more than the name.
    """
    D = model.head_width
    q, k, v = (
        torch.zeros(1, heads, PROBE_TOKENS, D, device=device, dtype=dtype, requires_grad=True)
        for heads in (model.n_head, model.kv_heads, model.kv_heads)
    )
    try:
        out = attention(q, k, v, kernel=kernel)
        assert isinstance(out, torch.Tensor)
        out.backward(torch.ones_like(out))
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        name = str(dtype).removeprefix("torch.")
        raise KernelUnavailableError(
            f"--deterministic: {flag} {kernel} cannot, for {name} and heads of {D} on "
            f"{device.type}: {str(error).splitlines()[0].split('.')[0]}; choose another kernel"
        ) from error
