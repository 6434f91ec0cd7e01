"""What the tests of the Triton attention's own kernels for Hopper share: where they run, and the
marks. The fixture `launches`, which tells what ran, is in conftest.py.
"""

import pytest
import torch

from minitx.kernels import supports

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels.triton_attention_tiles import has_hopper_kernels  # noqa: E402
from minitx.kernels.triton_runtime import IS_INTERPRETED  # noqa: E402

NAMES = ("out", "lse", "dq", "dk", "dv")

on_hopper = pytest.mark.skipif(
    IS_INTERPRETED or not has_hopper_kernels(0), reason="needs a Hopper GPU"
)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
each_head_dim = pytest.mark.parametrize("D", [64, 128])
causal_or_not = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])


def both(D: int) -> list[str]:
    """What a forward and a backward launch of these kernels. (At a head dim of 64 dq comes from the
    portable one.)"""
    dq = ["attention_bwd_dq_hopper"] if D == 128 else []
    return ["attention_fwd_hopper", *dq, "attention_bwd_dkdv_hopper"]
