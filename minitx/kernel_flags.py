"""--kernel and --compare, held to what exists and to what can run here, before any work is done."""

import torch

from minitx.kernels import ATTENTION_KERNELS, KernelUnavailableError, supports
from minitx.model import GPTConfig


def check_kernels(
    kernel: str, compare: str, model: GPTConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, str]:
    """The kernels that will run, flag -> name; without --compare where that is none.

    Raises ValueError for a name that is unknown, and KernelUnavailableError for a kernel that
    cannot run this model here.
    """
    flags = {"--kernel": kernel} | ({} if compare == "none" else {"--compare": compare})
    known = ("auto", *ATTENTION_KERNELS)
    q = torch.empty((1, model.n_head, 1, model.head_width), device=device, dtype=dtype)
    k = q[:, : model.kv_heads]
    for flag, name in flags.items():
        if name not in known:
            none = " or none" if flag == "--compare" else ""
            raise ValueError(f"{flag} {name} is unknown; expected one of {', '.join(known)}{none}")
        support = supports(name, q, k, k)
        if not support.ok:
            able = [other for other in ATTENTION_KERNELS[1:] if supports(other, q, k, k).ok]
            raise KernelUnavailableError(
                f"{flag} {name} cannot run here: {support.reason}. "
                f"Kernels that can: {', '.join(able)}"
            )
    return flags
