"""What only the Triton attention has: tiles, two backward kernels, an op, an interpreter.

What every kernel must do is in test_attention_contract.py. Here tiles are made as small as Triton
takes them, 16 x 16 and 32 x 16, so that a few dozen queries and keys cross several.
"""

import math

import pytest
import torch

from minitx.kernels import attention, supports
from minitx.testing import (
    check_attention,
    make_qkv,
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
    for module in (triton_attention, triton_attention_tiles):
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
    monkeypatch.setattr(triton_attention_dkdv, "dkdv_tiles", lambda q, k: tiles)
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
        for module in (triton_attention, triton_attention_bwd, triton_attention_dkdv):
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
