"""What only the TileLang attention has: tiles, three backward kernels, rows as TMA wants them.

What every kernel must do is in test_attention_contract.py. On a CPU tiles are 32 x 32, so that a
few dozen queries and keys cross several; head dims keep to two widths, as each compiles anew.
"""

import itertools
import math
import shutil

import pytest
import torch

from minitx.kernels import attention, supports
from minitx.testing import check_attention, make_qkv, run_attention

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import (  # noqa: E402
    tilelang_attention,
    tilelang_attention_fwd,
    tilelang_runtime,
)
from minitx.kernels.tilelang_attention_tiles import (  # noqa: E402
    FLOAT32_TILES,
    GPU_TILES,
    HOPPER_TILES,
)

RESULTS = ("out", "lse", "dq", "dk", "dv")
INF, NAN = math.inf, math.nan

# In tiles of 32 (and of 64 and 128, on a GPU): one key; exact; one over; a diagonal that starts
# inside a tile; rows without keys for more than a tile; the last query alone; keys for 4 tiles; and
# the first key of a tile seen by the last query of another alone, for tiles of 128 x 128 and less,
# and of 192 x 128.
LENGTHS = [
    *((1, 1), (64, 64), (65, 65), (40, 70), (130, 33), (1, 100), (33, 129)),
    *((200, 329), (200, 265)),
]


@pytest.mark.contract("sizes", kernel="tilelang")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("Sq", "Skv"), LENGTHS)
def test_tiles_of_every_kind(device, Sq, Skv, is_causal):
    # float16, as eager attention's own error in float32 is 0 at times for so few elements.
    q, k, v = make_qkv(2, 4, 2, Sq, Skv, 31, device=device, dtype=torch.float16)
    check_attention("tilelang", q, k, v, is_causal=is_causal, with_dlse=True)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_float32_is_ieee(device, is_causal):
    q, k, v = make_qkv(2, 4, 2, 128, 128, 32, device=device)
    check_attention("tilelang", q, k, v, is_causal=is_causal)


@pytest.mark.contract("head dims", kernel="tilelang")
# 1 and 8 are padded fourfold and more, 48 to the next width, 64 fills it.
@pytest.mark.parametrize("D", [1, 8, 48, 64])
def test_head_dims_are_padded_on_chip(device, D):
    q, k, v = make_qkv(1, 2, 1, 40, 40, D, device=device, dtype=torch.bfloat16)
    check_attention("tilelang", q, k, v, is_causal=True)


@pytest.mark.contract("scale", kernel="tilelang")
@pytest.mark.parametrize("scale", [0.0, -1.3], ids=["zero", "negative"])
def test_the_maximum_is_that_of_scaled_scores(device, scale):
    q, k, v = make_qkv(1, 2, 2, 70, 70, 16, device=device)
    check_attention("tilelang", q, k, v, is_causal=True, scale=scale, with_dlse=True)


@pytest.mark.contract("NaN, inf and huge logits", kernel="tilelang")
@pytest.mark.parametrize(("tile", "i"), [(0, 0), (0, 31), (1, 0), (3, 31)])
def test_one_finite_logit_among_tiles_of_minus_infinity(device, tile, i):
    # Whole tiles of -inf before it and after it: -inf - -inf must not be taken.
    q = torch.ones(1, 1, 20, 16, device=device)
    k = torch.full((1, 1, 128, 16), -INF, device=device)
    v = torch.randn(1, 1, 128, 16, generator=torch.Generator().manual_seed(0)).to(device)
    j = tile * 32 + i
    k[:, :, j] = 10 / 16
    out, lse = attention(q, k, v, is_causal=False, scale=1.0, kernel="tilelang", return_lse=True)
    torch.testing.assert_close(out, v[:, :, j : j + 1].expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 10.0))


@pytest.mark.contract("empty rows", kernel="tilelang")
def test_logits_of_minus_infinity_alone_are_an_empty_row(device):
    q = torch.ones(1, 1, 20, 16, device=device, requires_grad=True)
    k = torch.full((1, 1, 40, 16), -INF, device=device)
    v = torch.ones(1, 1, 40, 16, device=device, requires_grad=True)
    out, lse = attention(q, k, v, is_causal=False, kernel="tilelang", return_lse=True)
    assert not out.any()
    assert (lse == -INF).all()
    out.sum().backward()
    assert not v.grad.any()


def test_a_maximum_that_changes_by_hundreds_from_tile_to_tile(device):
    # Rescaling by e^-hundreds, and in the other direction by 1.
    for steps in ([-600.0, -300.0, 0.0, 300.0], [300.0, 0.0, -300.0, -600.0]):
        k = torch.tensor(steps, device=device).repeat_interleave(32).view(1, 1, 128, 1)
        q = torch.ones(1, 1, 4, 1, device=device)
        v = torch.arange(128.0, device=device).view(1, 1, 128, 1)
        out, lse = attention(
            q, k, v, is_causal=False, scale=1.0, kernel="tilelang", return_lse=True
        )
        torch.testing.assert_close(out, v[k == 300.0].mean().expand_as(out))
        torch.testing.assert_close(lse, torch.full_like(lse, 300 + math.log(32)))


@pytest.mark.contract("NaN, inf and huge logits", kernel="tilelang")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_huge_logits_keep_gradients_finite(device, dtype):
    # Scores of 1e11 and their lse round thousands apart: what is recomputed must not pass 1.
    generator = torch.Generator().manual_seed(0)
    q, k = ((torch.rand(1, 1, 40, 64, generator=generator) + 1) * 1e5 for _ in range(2))
    v = torch.ones(1, 1, 40, 64)
    q, k, v = (t.to(device, dtype).requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, kernel="tilelang")
    torch.testing.assert_close(out, torch.ones_like(out))
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert v.grad.max() <= 40 * (1 + 2**-7)


def test_a_nan_query_stays_with_the_keys_it_sees(device):
    q, k, v = make_qkv(1, 1, 1, 70, 70, 16, device=device)
    dout = torch.ones_like(q)
    clean = run_attention("tilelang", q, k, v, dout, is_causal=True)
    q[:, :, 40] = NAN
    dirty = run_attention("tilelang", q, k, v, dout, is_causal=True)
    others = [i for i in range(70) if i != 40]
    for name in ("out", "lse", "dq"):
        assert getattr(dirty, name)[:, :, 40].isnan().all()
        expected = getattr(clean, name)[:, :, others]
        torch.testing.assert_close(getattr(dirty, name)[:, :, others], expected)
    assert dirty.dv[:, :, :41].isnan().all()
    assert dirty.dk[:, :, :41].isnan().all()
    torch.testing.assert_close(dirty.dv[:, :, 41:], clean.dv[:, :, 41:])


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_nothing_past_the_ends_is_seen(device, is_causal):
    # In rows and in columns; and what the kernels leave unwritten they do not read.
    plain = make_qkv(1, 2, 2, 39, 39, 24, device=device, dtype=torch.float16)
    plain = (*plain, torch.ones_like(plain[0]))
    buffers = [torch.full((1, 2, 64, 64), NAN, device=device, dtype=t.dtype) for t in plain]
    views = [buffer[:, :, :39, :24] for buffer in buffers]
    for view, t in zip(views, plain, strict=True):
        view.copy_(t)
    actual = run_attention("tilelang", *views, is_causal=is_causal)
    expected = run_attention("tilelang", *plain, is_causal=is_causal)
    for name in RESULTS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def test_no_buffer_is_read_before_it_is_written(device, request):
    q, k, v = make_qkv(2, 4, 2, 41, 57, 16, device=device)
    dout = torch.ones_like(q)
    expected = run_attention("tilelang", q, k, v, dout, is_causal=True)
    request.getfixturevalue("poisoned_memory")
    actual = run_attention("tilelang", q, k, v, dout, is_causal=True)
    for name in RESULTS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "qkv", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_usual_views_are_not_copied(device, layout, dtype):
    if layout == "expanded":
        q, k, v = make_qkv(2, 4, 1, 40, 40, 24, device=device, dtype=dtype)
        k, v = k.expand(2, 4, -1, -1), v[:1].expand(2, 4, -1, -1)
    else:
        q, k, v = make_qkv(2, 4, 4, 40, 40, 24, device=device, dtype=dtype, layout=layout)
    assert tilelang_attention.as_rows(q).data_ptr() == q.data_ptr()
    for t in (k, v):
        rows = tilelang_attention.without_repeats(t)
        assert rows.data_ptr() == t.data_ptr()
        assert all(rows.stride(dim) > 0 for dim in range(3) if rows.shape[dim] > 1)
        assert torch.equal(rows.expand_as(t), t)
    check_attention("tilelang", q, k, v, is_causal=True)


@pytest.mark.contract("strides", kernel="tilelang")
@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "step2", "offset"])
@pytest.mark.parametrize("D", [1, 7, 12, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_that_tma_cannot_fetch_are_copied(layout, D, dtype):
    q, k, v = make_qkv(2, 4, 2, 70, 70, D, device="cuda", dtype=dtype, layout=layout)
    rows = tilelang_attention.as_rows(q)
    assert torch.equal(rows, q)
    assert rows.data_ptr() % 16 == 0
    assert all(s * rows.element_size() % 16 == 0 for s in rows.stride()[:3])
    check_attention("tilelang", q, k, v, is_causal=True)


@pytest.mark.contract("strides", kernel="tilelang")
def test_dims_of_one_may_have_any_stride(device):
    q, k, v = make_qkv(1, 1, 1, 1, 1, 32, device=device, dtype=torch.float16)
    strided = [t.as_strided(t.shape, (3, 5, 7, 1)) for t in (q, k, v)]
    dout = torch.ones_like(q)
    actual = run_attention("tilelang", *strided, dout, is_causal=True)
    expected = run_attention("tilelang", q, k, v, dout, is_causal=True)
    for name in RESULTS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@pytest.mark.contract("determinism", kernel="tilelang")
def test_gradients_are_bitwise_the_same_every_time(device):
    q, k, v = make_qkv(2, 4, 2, 130, 130, 32, device=device, dtype=torch.float16)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    first, *others = (run_attention("tilelang", q, k, v, dout, is_causal=True) for _ in range(5))
    for other, name in itertools.product(others, RESULTS):
        assert torch.equal(getattr(other, name), getattr(first, name)), name


@pytest.mark.contract("torch.compile and opcheck", kernel="tilelang")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_opcheck(device, layout):
    q, k, v = make_qkv(1, 2, 1, 8, 8, 16, device=device, layout=layout)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    ops = torch.ops.minitx
    torch.library.opcheck(ops.tilelang_attention_fwd.default, (*leaves, True, 0.25))
    out, lse = ops.tilelang_attention_fwd(q, k, v, True, 0.25)
    for dlse, needs in ((None, [True, False, True]), (torch.ones_like(lse), [True] * 3)):
        arguments = (torch.ones_like(out), dlse, q, k, v, out, lse, True, 0.25, needs)
        torch.library.opcheck(ops.tilelang_attention_bwd.default, arguments)


@pytest.mark.contract("torch.func", kernel="tilelang")
def test_vmap_over_queries_alone(device):
    q, k, v = make_qkv(6, 2, 1, 20, 20, 16, device=device)
    q = q.unflatten(0, (3, 2))
    mapped = torch.vmap(lambda q: attention(q, k[:2], v[:2], kernel="tilelang"))(q)
    for i in range(3):
        assert torch.equal(mapped[i], attention(q[i], k[:2], v[:2], kernel="tilelang"))


def _bytes_on_chip(kernel: str, D: int, tiles, element_size: int) -> int:
    """Shared memory that the kernel's tiles take, padding aside."""
    M, N, num_stages, threads = tiles
    stages = max(num_stages, 1)
    owned, streamed = {"fwd": (M, N), "dkdv": (N, M), "dq": (M, N)}[kernel]
    size = D * (owned * (1 if kernel == "fwd" else 2) + streamed * 2 * stages)
    if kernel == "dkdv" and element_size == 2 and threads > N * 2:
        size += 2 * M * N  # p and ds
    size *= element_size
    if kernel == "dkdv":
        size += 2 * M * 4 * stages  # statistics
    if element_size == 4:  # what the products are made from, 32 of the inner dim at a time
        first, second = {"fwd": (1, 1), "dkdv": (2, 2), "dq": (2, 1)}[kernel]
        size += first * 32 * (M + N + 8) * 4 + second * streamed * (owned + 4) * 4
    return size


@pytest.mark.parametrize("kernel", ["fwd", "dkdv", "dq"])
@pytest.mark.parametrize(
    ("table", "element_size", "room"),
    [(HOPPER_TILES, 2, 227), (GPU_TILES, 2, 99), (FLOAT32_TILES, 4, 99)],
    ids=["hopper", "gpu", "fp32"],
)
def test_tiles_fit_the_chip(table, element_size, room, kernel):
    for D, tiles in table[kernel].items():
        assert _bytes_on_chip(kernel, D, tiles, element_size) <= room * 1024
        assert kernel == "fwd" or tilelang_attention.STATS_TILE % tiles.BLOCK_M == 0


def test_scores_are_rounded_before_anything_is_subtracted():
    # Compiled, not run: no GPU is needed, but nvcc.
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = tilelang_runtime.compile_kernel(
        tilelang_attention_fwd.build_attention_fwd,
        tilelang_runtime.Target("cuda", "sm_80"),
        dtype="bfloat16",
        HEAD_DIM=64,
        IS_CAUSAL=True,
        **GPU_TILES["fwd"][64]._asdict(),
    ).source
    assert "__fmul_rn" in source


@pytest.mark.parametrize("needed", ["dk", "dv"])
def test_one_of_dk_and_dv_alone_compiles_too(needed):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = tilelang_runtime.compile_kernel(
        tilelang_attention.build_attention_bwd_dkdv,
        tilelang_runtime.Target("cuda", "sm_90a"),
        dtype="bfloat16",
        HEAD_DIM=64,
        IS_CAUSAL=True,
        WITH_DK=needed == "dk",
        WITH_DV=needed == "dv",
        **HOPPER_TILES["dkdv"][64]._asdict(),
    ).source
    assert (needed == "dv") == ("dk_acc" not in source)


@pytest.mark.contract("head dims", "dtypes", kernel="tilelang")
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("D", HOPPER_TILES["fwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tile_on_the_gpu(dtype, D, is_causal):
    # Several tiles each way, the last of them ragged; three stages round the pipeline.
    q, k, v = make_qkv(1, 4, 2, 500, 700, D, device="cuda", dtype=dtype)
    check_attention("tilelang", q, k, v, is_causal=is_causal, with_dlse=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "is_causal"), [(64, True), (64, False), (128, True), (256, True)])
def test_the_kernels_of_other_gpus_are_right_here_too(
    monkeypatch, nothing_remembered, D, is_causal
):
    def tiles(name, D, dtype, device):
        return GPU_TILES[name][D]

    monkeypatch.setattr(tilelang_attention, "takes_hopper_kernels", lambda dtype, device: False)
    monkeypatch.setattr(tilelang_attention, "choose_tiles", tiles)
    for name in ("_fwd_request", "_bwd_requests"):  # as if for the first time
        uncached = getattr(tilelang_attention, name).__wrapped__
        monkeypatch.setattr(tilelang_attention, name, uncached)
    q, k, v = make_qkv(1, 4, 2, 200, 300, D, device="cuda", dtype=torch.bfloat16)
    check_attention("tilelang", q, k, v, is_causal=is_causal, with_dlse=True)


@pytest.mark.contract("empty rows", kernel="tilelang")
@pytest.mark.gpu
def test_rows_without_keys_for_whole_blocks():
    # 1000 queries, 30 keys: most blocks have nothing to do, and must still end well.
    q, k, v = make_qkv(2, 4, 2, 1000, 30, 64, device="cuda", dtype=torch.bfloat16)
    result = check_attention("tilelang", q, k, v, is_causal=True)
    assert not result.out[:, :, :970].any()
    assert (result.lse[:, :, :970] == -INF).all()
    assert not result.dq[:, :, :970].any()


@pytest.mark.contract("sizes", kernel="tilelang")
@pytest.mark.gpu
@pytest.mark.parametrize("S", [65537, 200001])
def test_very_long_rows(S):
    q = torch.zeros(1, 1, 129, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 1, S, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.ones_like(k)
    out, lse = attention(q, k, v, kernel="tilelang", return_lse=True)
    torch.testing.assert_close(out, torch.ones_like(out))
    n_keys = torch.arange(S - 128, S + 1, device="cuda", dtype=torch.float64)
    torch.testing.assert_close(lse[0, 0].double(), n_keys.log(), rtol=1e-5, atol=0)
