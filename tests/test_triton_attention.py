"""What only the Triton attention has: tiles, two backward kernels, an op, an interpreter.

What every kernel must do is in test_attention_contract.py. Here tiles are made as small as Triton
takes them, 16 x 16 and 32 x 16, so that a few dozen queries and keys cross several.
"""

import itertools
import math
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
    triton_attention_tiles,
)
from minitx.kernels.triton_attention_tiles import (  # noqa: E402
    Tiles,
    heads_per_wave,
    is_wide,
    scale_sign,
)

INTERPRETED = _probe.device.type == "cpu"


def _exactly(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """Makes float32 take exact exponentials, or those of 16-bit types, which no 16-bit input takes
    in the interpreter."""
    for module in (triton_attention, triton_attention_bwd):
        monkeypatch.setattr(module, "is_exact", lambda x: exact)


@pytest.fixture(params=["16x16-exact", "32x16-exact", "16x32-fast"])
def small_tiles(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nothing_remembered
) -> None:
    """Every kernel cut into the smallest tiles, square, tall and wide."""
    shape, exponentials = request.param.split("-")
    BLOCK_M, BLOCK_N = map(int, shape.split("x"))
    tiles = Tiles(BLOCK_M, BLOCK_N, num_warps=4, num_stages=2)
    monkeypatch.setattr(triton_attention, "fwd_tiles", lambda q, k: tiles)
    monkeypatch.setattr(triton_attention_bwd, "dq_tiles", lambda q, k: tiles)
    monkeypatch.setattr(triton_attention_bwd, "dkdv_tiles", lambda q, k: tiles)
    _exactly(monkeypatch, exponentials == "exact")


# Lengths in tiles of 16: exact, one over, one under, a diagonal that starts inside a tile, rows
# without keys for more than a tile, a query block that sees every key but the last few; and the
# diagonals one key past the corner of a tile, and one before, where an off-by-one shows.
LENGTHS = [(48, 48), (49, 49), (31, 47), (33, 70), (70, 33), (1, 40), (40, 1), (5, 64)]
LENGTHS += [(48, 65), (34, 48)]


@pytest.mark.contract("sizes", kernel="triton")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("Sq", "Skv"), LENGTHS)
def test_tiles_of_every_kind(small_tiles, device, Sq, Skv, is_causal):
    # float16, as eager attention's error in float32 is at times 0 for so few elements.
    q, k, v = make_qkv(1, 2, 1, Sq, Skv, 16, device=device, dtype=torch.float16)
    check_attention("triton", q, k, v, is_causal=is_causal, with_dlse=True)


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.parametrize(("tile", "i"), [(0, 0), (0, 15), (1, 0), (2, 15), (3, 0)])
def test_one_finite_logit_among_tiles_of_minus_infinity(small_tiles, device, tile, i):
    # Whole tiles of -inf before it and after it: -inf - -inf must not be taken.
    q = torch.ones(1, 1, 20, 16, device=device)
    k = torch.full((1, 1, 64, 16), -math.inf, device=device)
    v = torch.randn(1, 1, 64, 16, device=device)
    j = tile * 16 + i
    k[:, :, j] = 10 / 16
    out, lse = attention(q, k, v, is_causal=False, scale=1.0, kernel="triton", return_lse=True)
    torch.testing.assert_close(out, v[:, :, j : j + 1].expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 10.0))


@pytest.mark.contract("empty rows", kernel="triton")
def test_logits_of_minus_infinity_alone_are_an_empty_row(small_tiles, device):
    q = torch.ones(1, 1, 20, 16, device=device, requires_grad=True)
    k = torch.full((1, 1, 40, 16), -math.inf, device=device)
    v = torch.randn(1, 1, 40, 16, device=device, requires_grad=True)
    out, lse = attention(q, k, v, is_causal=False, kernel="triton", return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    out.sum().backward()
    assert not v.grad.any()


@pytest.mark.contract("NaN, inf and huge logits", kernel="triton")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_huge_equal_logits_of_any_size(device, monkeypatch, nothing_remembered, exact):
    # Head after head from 2^10 to 2^120: a product's rounding must not reach the exponent.
    _exactly(monkeypatch, exact)
    # Of 8 bits, so that q k^T is exact: BLAS, which interprets it, may multiply and add in one
    # rounding in one part of a tile and in two in another.
    size = torch.logspace(5, 60, 24, base=2, device=device).bfloat16().float().view(1, -1, 1, 1)
    q, k = (size.expand(1, -1, 40, 3).clone() for _ in range(2))
    v = torch.randn(1, 24, 40, 3, device=device)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = attention(q, k, v, is_causal=False, scale=0.7, kernel="triton", return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    expected = (0.7 * 3 * size.double() ** 2 + math.log(40)).float().squeeze(3).expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=3e-7, atol=0)
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_a_maximum_that_grows_by_hundreds_from_tile_to_tile(small_tiles, device):
    # Rescaling by 2^-hundreds, and in the other direction by 1.
    for steps in ([-600.0, -300.0, 0.0, 300.0], [300.0, 0.0, -300.0, -600.0]):
        k = torch.tensor(steps, device=device).repeat_interleave(16).view(1, 1, 64, 1)
        q = torch.ones(1, 1, 4, 1, device=device)
        v = torch.randn(1, 1, 64, 1, device=device)
        out, lse = attention(q, k, v, is_causal=False, scale=1.0, kernel="triton", return_lse=True)
        mean = v[k == 300.0].mean().expand_as(out)
        torch.testing.assert_close(out, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(lse, torch.full_like(lse, 300 + math.log(16)))


def test_no_tile_reads_what_lies_past_the_lengths(small_tiles, device):
    q, k, v = make_qkv(1, 2, 1, 39, 39, 11, device=device)
    dout = torch.randn_like(q)
    padded = []
    for t in (q, k, v, dout):
        buffer = torch.full((1, t.shape[1], 64, 32), math.nan, device=device)
        buffer[:, :, :39, :11] = t
        padded.append(buffer[:, :, :39, :11])
    for is_causal in (True, False):
        actual = run_attention("triton", *padded, is_causal=is_causal)
        expected = run_attention("triton", q, k, v, dout, is_causal=is_causal)
        for name in ("out", "lse", "dq", "dk", "dv"):
            torch.testing.assert_close(getattr(actual, name), getattr(expected, name))


def test_no_buffer_is_read_before_it_is_written(small_tiles, device, monkeypatch):
    q, k, v = make_qkv(2, 4, 2, 41, 57, 16, device=device)
    dout = torch.randn_like(q)
    expected = run_attention("triton", q, k, v, dout, is_causal=True)
    for owner, name in ((torch, "empty"), (torch, "empty_like")):
        make = getattr(owner, name)
        poisoned = lambda *a, make=make, **kw: make(*a, **kw).fill_(math.nan)  # noqa: E731
        monkeypatch.setattr(owner, name, poisoned)
    actual = run_attention("triton", q, k, v, dout, is_causal=True)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def test_a_nan_gradient_stays_with_the_keys_its_query_sees(small_tiles, device):
    q, k, v = make_qkv(1, 1, 1, 40, 40, 16, device=device)
    dout = torch.randn_like(q)
    clean = run_attention("triton", q, k, v, dout, is_causal=True)
    q[:, :, 20] = math.nan
    dirty = run_attention("triton", q, k, v, dout, is_causal=True)
    assert dirty.dq[:, :, 20].isnan().all()
    others = [i for i in range(40) if i != 20]
    torch.testing.assert_close(dirty.dq[:, :, others], clean.dq[:, :, others])
    # Keys after 20 were never seen by query 20. (Their dk is NaN here and there: 0 times q.)
    assert dirty.dv[:, :, :21].isnan().all()
    assert dirty.dk[:, :, :21].isnan().all()
    torch.testing.assert_close(dirty.dv[:, :, 21:], clean.dv[:, :, 21:])


@pytest.mark.parametrize("wave", [1, 2, 3, 100])
def test_heads_in_waves_of_any_size(small_tiles, device, monkeypatch, wave):
    # 5 x 3 heads: waves that divide them, that do not, and one for all.
    q, k, v = make_qkv(5, 3, 3, 40, 40, 16, device=device)
    expected = attention(q, k, v, kernel="triton")
    monkeypatch.setattr(triton_attention, "heads_per_wave", lambda *sizes: wave)
    assert torch.equal(attention(q, k, v, kernel="triton"), expected)


@pytest.mark.contract("strides", kernel="triton")
def test_strides_too_large_for_32_bits(small_tiles, device, monkeypatch):
    # A tile's own offsets in 64 bits give what 32 bits give; a stride of 2^22 asks for 64.
    q, k, v = make_qkv(1, 2, 1, 40, 40, 16, device=device)
    dout = torch.randn_like(q)
    results = []
    for wide in (False, True):
        for module in (triton_attention, triton_attention_bwd):
            monkeypatch.setattr(module, "is_wide", lambda *tensors, wide=wide: wide)
        results.append(run_attention("triton", q, k, v, dout, is_causal=True))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(results[0], name), getattr(results[1], name))
    monkeypatch.undo()
    monkeypatch.setattr(triton_attention_tiles, "IS_INTERPRETED", False)
    meta = torch.empty(1, device="meta")
    assert is_wide(meta.expand(2, 2, 4, 4), meta.as_strided((1, 1, 4, 4), (1, 1, 2**22, 1)))
    assert is_wide(meta.as_strided((1, 1, 4, 4), (1, 1, 1, 2**22)))
    assert not is_wide(meta.as_strided((1, 1, 4, 4), (2**40, 2**40, 2**20, 1)))


def test_scale_sign():
    assert [scale_sign(s) for s in (2.0, 1e-30, 0.0, -0.0, 1e-60, -1e-60, -3.0)] == [
        1, 1, 0, 0, 0, 0, -1,
    ]  # fmt: skip


def test_heads_per_wave_keeps_groups_whole_and_never_is_zero():
    assert heads_per_wave(1 << 40, 4) == 4  # one head is too much, and still goes with its group
    assert heads_per_wave(0, 3) % 3 == 0
    assert heads_per_wave(1 << 20) > 1


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
    dkdv = Launches(triton_attention_bwd.attention_bwd_dkdv)
    monkeypatch.setattr(triton_attention_bwd, "attention_bwd_dq", dq)
    monkeypatch.setattr(triton_attention_bwd, "attention_bwd_dkdv", dkdv)
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
        triton_attention_bwd.attention_bwd_dkdv,
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
