"""The Triton attention as an op, and compiled: what is launched and saved, opcheck, torch.func and
torch.compile, threads, the interpreter, the compiler for Hopper, sizes beyond 32 bits.
"""

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from minitx.kernels import attention, attention_reference, supports
from minitx.testing import (
    check_attention,
    error_budget,
    make_qkv,
    max_error,
    run_attention,
)

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import (  # noqa: E402
    triton_attention,
    triton_attention_bwd,
    triton_attention_dkdv,
)

INTERPRETED = _probe.device.type == "cpu"


class Launches:
    """Stands in for a kernel and records what it is launched with."""

    def __init__(self, kernel) -> None:
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.calls.append(kwargs)
            return self.kernel[grid](*args, **kwargs)

        return launch

    def __getattr__(self, name: str):
        return getattr(self.kernel, name)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_nothing_is_computed_for_gradients_not_asked_for(
    device, monkeypatch, nothing_remembered, needs
):
    needs_dq, needs_dk, needs_dv = needs
    dq = Launches(triton_attention_bwd.attention_bwd_dq)
    dkdv = Launches(triton_attention_dkdv.attention_bwd_dkdv)
    monkeypatch.setattr(triton_attention_bwd, "attention_bwd_dq", dq)
    monkeypatch.setattr(triton_attention_dkdv, "attention_bwd_dkdv", dkdv)
    q, k, v = (
        t.requires_grad_(need)
        for t, need in zip(make_qkv(Sq=20, device=device), needs, strict=True)
    )
    out = attention(q, k, v, kernel="triton")
    if any(needs):
        out.sum().backward()
    # The first also makes what the second reads.
    assert [call["NEEDS_DQ"] for call in dq.calls] == ([needs_dq] if any(needs) else [])
    assert not any(call["HAS_DLSE"] for call in dq.calls)  # nothing was made of lse
    assert [(call["NEEDS_DK"], call["NEEDS_DV"]) for call in dkdv.calls] == (
        [(needs_dk, needs_dv)] if needs_dk or needs_dv else []
    )


@pytest.mark.contract("torch.compile and opcheck", kernel="triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "qkv", "step2"])
def test_opcheck(device, layout, dtype):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 8, device=device, layout=layout, dtype=dtype)
    out, lse = torch.ops.minitx.triton_attention_fwd(q, k, v, True, 0.3)
    torch.library.opcheck(
        torch.ops.minitx.triton_attention_bwd,
        (out * 2, lse.sin(), q, k, v, out, lse, True, 0.3, [True, False, True]),
    )
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    torch.library.opcheck(torch.ops.minitx.triton_attention_fwd, (q, k, v, True, 0.3))


def test_nothing_but_inputs_and_outputs_is_saved(device):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 2, 20, 20, 16, device=device))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out, lse = attention(q, k, v, kernel="triton", return_lse=True)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (q, k, v, out, lse)}
    saved.clear()
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        attention(q, k, v, kernel="triton")
    assert not saved


@pytest.mark.contract("gradients", kernel="triton")
def test_no_second_derivative(device):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 1, 1, 8, 8, 16, device=device))
    out = attention(q, k, v, kernel="triton")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use kernel 'reference'"):
        dq.square().sum().backward()


@pytest.mark.contract("torch.func", kernel="triton")
def test_vmap_and_per_sample_gradients(device):
    q, k, v = make_qkv(3, 4, 2, 20, 20, 16, device=device)

    def one(q, k):  # v is shared by the batch
        return attention(q[None], k[None], v[:1], kernel="triton", return_lse=True)

    out, lse = torch.vmap(one)(q, k)
    expected = attention(q, k, v[:1].expand_as(v), kernel="triton", return_lse=True)
    torch.testing.assert_close((out[:, 0], lse[:, 0]), expected)

    def loss(q, k):
        out, lse = one(q, k)
        return out.square().sum() + lse.sum()

    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(q, k)
    q, k = q.requires_grad_(), k.requires_grad_()
    out, lse = attention(q, k, v[:1].expand_as(v), kernel="triton", return_lse=True)
    wanted = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k))
    torch.testing.assert_close(grads, wanted)


def test_compiled_backward_may_be_called_twice(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, kernel="triton"), fullgraph=True, backend="aot_eager"
    )
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 2, 2, 20, 20, 16, device=device))
    with torch._functorch.config.patch(donated_buffer=False):
        out = compiled(q, k, v)
        first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        again = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="triton")
def test_threads(device):
    q, k, v = make_qkv(1, 2, 2, 40, 40, 16, device=device)
    inputs = [(q * (i + 1), k, v) for i in range(4)]
    expected = [run_attention("triton", *x, q, is_causal=True) for x in inputs]
    results = [None] * len(inputs)

    def work(i: int) -> None:
        results[i] = run_attention("triton", *inputs[i], q, is_causal=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for actual, wanted in zip(results, expected, strict=True):
        assert actual is not None
        assert torch.equal(actual.out, wanted.out)
        assert torch.equal(actual.dk, wanted.dk)


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_interpreter_rounds_half_precision_once(device, dtype):
    q, k, v = make_qkv(1, 2, 1, 40, 40, 16, device=device, dtype=dtype)
    out = attention(q, k, v, kernel="triton")
    wide = attention(q.float(), k.float(), v.float(), kernel="triton")
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.skipif(not INTERPRETED, reason="where there is a GPU it is compiled for it anyway")
def test_compiles_for_hopper_where_there_is_none():
    # What the interpreter takes the compiler may refuse; and tensor cores need tiles of 64 rows.
    script = Path(__file__).with_name("compile_triton_attention.py")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, script, "bf16", "64"], env=env, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    lines = [line.split() for line in run.stdout.decode().splitlines()]
    assert [name for name, *_ in lines] == [
        "attention_fwd",
        "attention_bwd_dq",
        "attention_bwd_dkdv",
    ]
    for name, shared, wgmma in lines:
        assert int(shared) <= 227 * 1024, name
        assert int(wgmma) > 0, name


@pytest.mark.contract("head dims", "dtypes", kernel="triton")
@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 40, 64, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_choice_of_tiles_compiles_and_is_right(dtype, D):
    for layout in ("bhsd", "bshd", "offset"):
        q, k, v = make_qkv(2, 4, 2, 300, 333, D, dtype=dtype, device="cuda")
        if layout != "bhsd":
            q, k, v = make_qkv(2, 4, 2, 300, 333, D, dtype=dtype, device="cuda", layout=layout)
        check_attention("triton", q, k, v, is_causal=True, with_dlse=True)


@pytest.mark.contract("sizes", kernel="triton")
@pytest.mark.gpu
def test_one_compilation_serves_every_length():
    kernels = (
        triton_attention.attention_fwd,
        triton_attention_bwd.attention_bwd_dq,
        triton_attention_dkdv.attention_bwd_dkdv,
    )

    def compiled() -> list[int]:
        return [sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels]

    def step(S: int) -> None:
        q, k, v = make_qkv(1, 2, 2, S, S, 48, device="cuda", dtype=torch.float16)
        run_attention("triton", q, k, v, torch.randn_like(q), is_causal=True)

    step(64), step(16)
    before = compiled()
    for S in (70, 77, 1, 15, 129, 1024):
        step(S)
    assert compiled() == before


@pytest.mark.contract("determinism", kernel="triton")
@pytest.mark.gpu
def test_deterministic_under_load():
    q, k, v = make_qkv(2, 4, 2, 1024, 1024, 64, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn_like(q)
    first = run_attention("triton", q, k, v, dout, is_causal=True)
    for _ in range(10):
        again = run_attention("triton", q, k, v, dout, is_causal=True)
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name


@pytest.mark.contract("sizes", kernel="triton")
@pytest.mark.gpu
@pytest.mark.huge
def test_one_head_beyond_32_bits():
    # 2^31 elements in one head, and rows of a stride that 32 bits of a tile's offsets do not hold.
    q = torch.randn(1, 1, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    n = 2**31 // 64 + 1000
    k = torch.zeros(1, 1, n, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    k[:, :, -1, 0], v[:, :, -1] = 1e4, 3.0
    q.data[..., 0] = 100.0
    out = attention(q, k, v, is_causal=False, kernel="triton")
    torch.testing.assert_close(out, torch.full_like(out, 3.0))
    buffer = torch.randn(1, 100, 2**25, device="cuda", dtype=torch.bfloat16)
    wide = buffer[:, :, :64].unsqueeze(1)
    narrow = wide.contiguous()  # for which Hopper has another kernel, that rounds otherwise
    truth, _ = attention_reference(narrow, narrow, narrow, is_causal=True, scale=0.125)
    eager = attention(narrow, narrow, narrow, kernel="eager")
    budget = error_budget(eager, truth, torch.bfloat16)
    for x in (wide, narrow):
        assert max_error(attention(x, x, x, kernel="triton"), truth) <= budget
