"""Which inputs the Triton attention's own kernels for Hopper take, and where; on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minitx.kernels import supports

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import triton_attention_tiles  # noqa: E402
from minitx.kernels.triton_attention_tiles import (  # noqa: E402
    GLUON_RELEASES,
    has_hopper_kernels,
    hopper_takes,
)
from minitx.kernels.triton_runtime import IS_INTERPRETED  # noqa: E402

D = 128


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention_tiles, "IS_INTERPRETED", False)
    monkeypatch.setattr(triton_attention_tiles, "has_hopper_kernels", lambda device_index: True)


def test_what_they_take(as_on_hopper):
    x = torch.empty(2, 4, 32, D, dtype=torch.bfloat16)
    wide = torch.empty(2, 4, 32, D + 8, dtype=torch.bfloat16)
    fused = torch.empty(2, 32, 3 * 4, D, dtype=torch.bfloat16).transpose(1, 2)
    for good in (x, x.half(), fused, fused[:, 4:8], wide[..., :D], wide[..., 8:], x[:, :, 3:]):
        assert hopper_takes(0.1, good)
        assert hopper_takes(0.1, x, good)
    odd = torch.empty(2, 4, 32, D + 4, dtype=torch.bfloat16)
    far = torch.empty(1, 1, 32, 2**22, dtype=x.dtype)[..., :D]
    for bad in (
        x.float(),
        x[:, :, :16],  # so few queries that most of a tile would be empty
        odd[..., :D],  # rows at multiples of 8 bytes
        torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x),  # an odd start
        x.transpose(2, 3).contiguous().transpose(2, 3),  # columns that lie apart
        x[:1].expand(2, -1, -1, -1),  # one batch read twice
        x[:0],
        far,  # offsets beyond 32 bits
    ):
        assert not hopper_takes(0.1, bad)
    assert not hopper_takes(0.1, x, x[:, :, :0])  # no keys
    assert not hopper_takes(0.1, x, x, odd[..., :D])
    assert not any(hopper_takes(scale, x) for scale in (0.0, -0.1, 1e-40, 1e300))


def test_their_head_dims(as_on_hopper):
    for D in (32, 64, 96, 128, 256):
        x = torch.empty(2, 4, 32, D, dtype=torch.bfloat16)
        assert hopper_takes(0.1, x) == (D in (64, 128))


def test_where_they_run(monkeypatch):
    ask = has_hopper_kernels.__wrapped__
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, release, expected in (
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.6.9", True),
        ((9, 0), "3.9.1", False),
        ((9, 0), "3.60.0", False),
        ((9, 0), "4.0.0", False),
        ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i, c=capability: c)
        monkeypatch.setattr(triton_attention_tiles.triton, "__version__", release)
        assert ask(0) == expected


@pytest.mark.skipif(not IS_INTERPRETED, reason="about the interpreter")
def test_the_interpreter_imports_nothing_of_them():
    script = (
        "import sys, torch, minitx.kernels as kernels\n"
        "q = torch.zeros(1, 1, 20, 128, dtype=torch.float16)\n"
        "kernels.attention(q.requires_grad_(), q, q, kernel='triton').sum().backward()\n"
        "print([m for m in sys.modules if m.startswith('minitx') and 'hopper' in m])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.decode().strip() == "[]"


@pytest.mark.slow
@pytest.mark.skipif(not IS_INTERPRETED, reason="where there is a GPU it is compiled for it anyway")
def test_they_compile_where_there_is_no_hopper():
    if not triton_attention_tiles.triton.__version__.startswith((*GLUON_RELEASES, "3.9")):
        pytest.skip("not written for this version of Triton")
    script = Path(__file__).with_name("compile_triton_attention.py")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, script, "bf16", "hopper"], env=env, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    lines = [line.split() for line in run.stdout.decode().splitlines()]
    assert len(lines) == 7  # dkdv for both head dims, the forward with each of its tiles
    for name, shared, wgmma in lines:
        assert int(shared) <= 227 * 1024, name
        assert int(wgmma) > 0, name
