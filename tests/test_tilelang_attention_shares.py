"""The TileLang attention whose blocks share out the keys: where shares begin and end, and how parts
are put together.

Shares are a tile or two here, of 32 keys on a CPU and of 128 on a GPU, in place of the hundreds of
keys that pay.
"""

import math
import shutil

import pytest
import torch
from tilelang_hopper import check_forward, on_hopper

from minitx.kernels import attention, attention_reference, supports
from minitx.testing import check_attention, error_budget, make_qkv, max_error

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import (  # noqa: E402
    tilelang_attention,
    tilelang_attention_merge,
    tilelang_attention_shared,
    tilelang_attention_tiles,
    tilelang_runtime,
)
from minitx.kernels.tilelang_attention_fwd_hopper import build_attention_fwd_hopper  # noqa: E402
from minitx.kernels.tilelang_attention_merge import (  # noqa: E402
    MORE_QUERIES,
    ONE_QUERY,
    SHARINGS,
    Sharing,
    build_attention_merge,
    count_shares,
)
from minitx.kernels.tilelang_attention_tiles import (  # noqa: E402
    HOPPER_FEW_TILES,
)

INF, NAN = math.inf, math.nan
BF16, FP16 = torch.bfloat16, torch.float16
TILE = 32 if _probe.device.type == "cpu" else 128  # keys, as far as the shapes below go


@pytest.fixture
def small_shares(monkeypatch, nothing_remembered, poisoned_memory) -> list[int]:
    """Keys are shared out wherever there are two tiles of them; the numbers of shares that were
    taken. What of a part is not written is NaN."""
    taken = []
    shared = tilelang_attention.SharedLaunch

    def recording(*args):
        taken.append(args[-1])
        return shared(*args)

    sharings = (Sharing(1, TILE, 0, 128), Sharing(64, TILE, 0, 32), Sharing(10**6, TILE, 0, 32))
    monkeypatch.setattr(tilelang_attention_merge, "SHARINGS", sharings)
    monkeypatch.setattr(tilelang_attention_merge, "CHUNK_TILE", 10**6)
    monkeypatch.setattr(tilelang_attention_merge, "FEWEST_KEYS", 0)
    monkeypatch.setattr(tilelang_attention, "SharedLaunch", recording)
    return taken


# Sq, Skv in tiles and keys beyond; shares.
LENGTHS = [
    (1, (3, 0), 3),
    (1, (40, 1), 41),
    (1, (129, 0), 65),  # two tiles to a share
    (2, (2, 1), 3),  # one key in the last share, which the first query does not see
    (40, (5, 3), 6),  # a diagonal through two shares
    (TILE + 7, (2, 5), 3),  # queries that see no key of the last share, in a tile of their own
    (3 * TILE, (2, 9), 3),  # queries that see none of any share
    (70, (70, 0), 24),  # shares of three tiles, the last of one
]


@pytest.mark.contract("sizes", "causal, aligned bottom-right", "empty rows", kernel="tilelang")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("Sq", "tiles", "shares"), LENGTHS)
def test_shares_of_every_kind(device, small_shares, Sq, tiles, shares, is_causal):
    Skv = tiles[0] * TILE + tiles[1]
    q, k, v = make_qkv(2, 4, 2, Sq, Skv, 31, device=device, dtype=FP16)
    result = check_attention("tilelang", q, k, v, is_causal=is_causal, with_dlse=True)
    assert small_shares == [shares]
    if is_causal and Sq > Skv:
        assert not result.out[:, :, : Sq - Skv].any()
        assert (result.lse[:, :, : Sq - Skv] == -INF).all()


@pytest.mark.contract("shapes and grouped heads", "strides", kernel="tilelang")
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "qkv", "step2", "offset"])
@pytest.mark.parametrize(("Hq", "Hkv"), [(6, 2), (3, 3), (66, 1)])
def test_a_query_alone_is_that_of_its_group(device, small_shares, layout, Hq, Hkv):
    # 66 heads of one are more than a tile.
    Skv = 2 * TILE + 9
    q, k, v = make_qkv(2, Hq, Hkv, Skv, Skv, 24, device=device, layout=layout)
    q = q[:, :, 40:41]
    for is_causal in (True, False):
        check_attention("tilelang", q, k, v, is_causal=is_causal)
    assert small_shares == [-(-Skv // TILE)] * 2


@pytest.mark.contract("strides", kernel="tilelang")
def test_queries_and_keys_that_are_expanded(device, small_shares):
    q, k, v = make_qkv(2, 6, 1, 1, 300, 24, device=device)
    k, v = k.expand(-1, 3, -1, -1), v[:1].expand(2, 3, -1, -1)
    check_attention("tilelang", q, k, v, is_causal=True)
    check_attention("tilelang", q[:, :1].expand(-1, 6, -1, -1), k, v, is_causal=True)


@pytest.mark.contract("scale", kernel="tilelang")
@pytest.mark.parametrize("Sq", [1, 50])
@pytest.mark.parametrize("scale", [0.0, -1.3, 30.0])
def test_scales(device, small_shares, Sq, scale):
    q, k, v = make_qkv(1, 4, 2, Sq, 300, 16, device=device, dtype=BF16)
    check_attention("tilelang", q, k, v, is_causal=True, scale=scale, with_dlse=True)
    assert small_shares[0] > 1


@pytest.mark.contract("NaN, inf and huge logits", kernel="tilelang")
@pytest.mark.parametrize("Sq", [1, 50])
@pytest.mark.parametrize("size", [1e11, -1e11, 1e4])
def test_shares_of_huge_logits_weigh_as_much_as_they_hold(device, small_shares, Sq, size):
    # Equal logits, of one key in the first share and three in the third: to an lse of 1e11 the
    # three are nothing, and parts put together by it would weigh the same.
    q = torch.ones(1, 1, Sq, 16, device=device)
    k = torch.full((1, 1, 3 * TILE, 16), -2.0 * abs(size), device=device)
    v = torch.zeros_like(k)
    for j, value in ((5, 1.0), (2 * TILE, 3.0), (2 * TILE + 1, 5.0), (2 * TILE + 9, 7.0)):
        k[:, :, j], v[:, :, j] = size, value
    out, lse = attention(q, k, v, is_causal=False, scale=1 / 16, kernel="tilelang", return_lse=True)
    assert small_shares == [3]
    torch.testing.assert_close(out, torch.full_like(out, 4.0))
    truth = attention_reference(q, k, v, is_causal=False, scale=1 / 16)[1]
    torch.testing.assert_close(lse.double(), truth.double(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("Sq", [1, 50])
def test_a_maximum_that_changes_by_hundreds_from_share_to_share(device, small_shares, Sq):
    for steps in ([-600.0, -300.0, 0.0, 300.0], [300.0, 0.0, -300.0, -600.0]):
        k = torch.tensor(steps, device=device).repeat_interleave(TILE).view(1, 1, -1, 1)
        q = torch.ones(1, 1, Sq, 1, device=device)
        v = torch.arange(4.0 * TILE, device=device).view_as(k)
        out, lse = attention(
            q, k, v, is_causal=False, scale=1.0, kernel="tilelang", return_lse=True
        )
        torch.testing.assert_close(out, v[k == 300.0].mean().expand_as(out))
        torch.testing.assert_close(lse, torch.full_like(lse, 300 + math.log(TILE)))


@pytest.mark.contract("NaN, inf and huge logits", "empty rows", kernel="tilelang")
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_nan_and_infinities_reach_who_sees_them(device, small_shares, dtype):
    # The last share is seen by the last 20 queries alone, but read for all.
    Sq, Skv = 50, 3 * TILE + 20

    def run(change):
        q, k, v = make_qkv(1, 2, 1, Sq, Skv, 16, device=device, dtype=dtype)
        change(q, k, v)
        return attention(q.abs(), k, v, scale=0.3, kernel="tilelang", return_lse=True)

    def set_key(value):
        return lambda q, k, v: k[:, :, -20:].fill_(value)

    def set_value(q, k, v):
        v[:, :, -20:] = NAN

    for value in (INF, NAN):
        out, lse = run(set_key(value))
        assert not out[:, :, :30].isnan().any()
        assert out[:, :, 30:].isnan().all()
        assert not lse[:, :, 30:].isfinite().any()
    out, lse = run(set_key(-INF))
    assert out.isfinite().all()
    assert lse.isfinite().all()
    out, lse = run(set_value)
    assert not out[:, :, :30].isnan().any()  # of a part without keys
    assert out[:, :, 30:].isnan().all()
    assert lse.isfinite().all()
    out, lse = run(lambda q, k, v: k.fill_(-INF))
    assert not out.any()
    assert (lse == -INF).all()


@pytest.mark.contract("NaN, inf and huge logits", "causal, aligned bottom-right", kernel="tilelang")
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("Sq", "is_causal"), [(1, True), (50, True), (50, False)], ids=["one", "causal", "full"]
)
# A share whose probabilities add up to 0, and one whose weight is 0.
@pytest.mark.parametrize("score", [-INF, -1000.0], ids=["minus inf", "far"])
@pytest.mark.parametrize("nan_at", [TILE + 3, 3 * TILE], ids=["amid", "last share"])
def test_nan_of_a_value_whatever_its_score(
    device, small_shares, dtype, Sq, is_causal, score, nan_at
):
    # Every key from the second share on adds as much to a score. The first 30 of 50 queries see no
    # key of the last share.
    Skv = 3 * TILE + 20
    q, k, v = make_qkv(2, 4, 2, Sq, Skv, 16, device=device, dtype=dtype)
    q[..., 0] = 1.0
    k[:, :, TILE:, 0] = score
    kwargs = {"is_causal": is_causal, "scale": 1.0}
    truth = attention_reference(q, k, v, **kwargs)
    eager = attention(q, k, v, kernel="eager", return_lse=True, **kwargs)
    v[:, :, nan_at, :8] = NAN
    out, lse = attention(q, k, v, kernel="tilelang", return_lse=True, **kwargs)
    assert small_shares == [4]
    queries = torch.arange(Sq, device=device)
    sees = nan_at <= queries + Skv - Sq if is_causal else queries >= 0
    assert torch.equal(out[..., :8].isnan(), sees[:, None].expand_as(out[..., :8]))
    wanted = truth[0].masked_fill(out.isnan(), NAN)
    assert not out[..., 8:].isnan().any()
    assert max_error(out, wanted) <= error_budget(eager[0], truth[0], dtype)
    assert max_error(lse, truth[1]) <= error_budget(eager[1], truth[1], dtype)


@pytest.mark.contract("NaN, inf and huge logits", "empty rows", kernel="tilelang")
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "whole"])
def test_rows_of_minus_inf_alone_are_0_beside_nan(
    device, small_shares, monkeypatch, dtype, is_shared
):
    if not is_shared:
        monkeypatch.setattr(tilelang_attention_merge, "FEWEST_KEYS", 10**9)

    def run(Sq, Skv, **kwargs):
        q, k, v = make_qkv(1, 2, 1, Sq, Skv, 16, device=device, dtype=dtype)
        k[:, :, : Skv - 20, 0] = -INF
        q[..., 0] = 1.0
        v[:] = NAN
        return attention(q, k, v, kernel="tilelang", return_lse=True, **kwargs)

    # Of 50 queries the last 20 see keys with scores beyond -inf; of more than there are keys the
    # first see none at all.
    for Sq, Skv in ((50, 3 * TILE + 20), (2 * TILE + 60, 2 * TILE + 9)):
        out, lse = run(Sq, Skv, is_causal=True)
        assert not out[:, :, : Sq - 20].any()
        assert (lse[:, :, : Sq - 20] == -INF).all()
        assert out[:, :, Sq - 20 :].isnan().all()
        assert lse[:, :, Sq - 20 :].isfinite().all()
    for Sq in (1, 50):
        out, lse = run(Sq, 3 * TILE + 20, is_causal=False)
        assert out.isnan().all()
        assert lse.isfinite().all()
    assert len(small_shares) == (4 if is_shared else 0)


@pytest.mark.contract("determinism", kernel="tilelang")
@pytest.mark.parametrize(("Hq", "Hkv", "Sq"), [(6, 2, 1), (4, 4, 1), (4, 2, 40)])
def test_bits_do_not_hang_on_batch_and_heads(device, small_shares, Hq, Hkv, Sq):
    q, k, v = make_qkv(3, Hq, Hkv, Sq, 500, 16, device=device, dtype=BF16)
    kwargs = {"is_causal": True, "kernel": "tilelang", "return_lse": True}
    whole = attention(q, k, v, **kwargs)
    group = Hq // Hkv
    for b in range(3):
        for h in range(Hkv):
            heads = slice(h * group, h * group + group)
            one = q[b : b + 1, heads], k[b : b + 1, h : h + 1], v[b : b + 1, h : h + 1]
            for part, all_of_them in zip(attention(*one, **kwargs), whole, strict=True):
                assert torch.equal(part, all_of_them[b : b + 1, heads])
    for part, again in zip(attention(q, k, v, **kwargs), whole, strict=True):
        assert torch.equal(part, again)


def test_one_compile_for_all_numbers_of_shares(device, small_shares):
    compiled = []
    for Skv in (70, 300, 5000):
        for Sq in (1, 2, 40):
            q, k, v = make_qkv(1, 2, 1, Sq, Skv * TILE // 32, 16, device=device)
            attention(q, k, v, is_causal=True, kernel="tilelang")
        compiled.append(set(tilelang_runtime._kernels))
    assert all(names == compiled[0] for names in compiled)
    assert len(set(small_shares)) > 3


def test_no_share_is_empty_and_few_are_small():
    limit = {1: (512, 128), 2: (512, 32), 64: (2048, 32), 65: (2048, 8), 256: (4096, 4)}
    for Sq, (min_keys, most) in limit.items():
        for BLOCK_N in (32, 64, 96, 128):
            for Skv in (*range(1, 9000, 37), 4096, 16384, 16385, 131072, 10**6 + 1):
                shares = count_shares(Sq, Skv, BLOCK_N)
                tiles = -(-Skv // BLOCK_N)
                share = -(-tiles // shares)  # as kernels reckon it
                assert (shares - 1) * share < tiles <= shares * share
                assert 1 <= shares <= most
                assert shares == 1 or Skv >= max(4096, 2 * min_keys, (shares - 1) * min_keys)
    assert count_shares(SHARINGS[-1].max_queries + 1, 10**6, 128) == 1
    assert count_shares(SHARINGS[-1].max_queries, 10**6, 128) == 2
    assert all(s.max_shares <= ONE_QUERY.max_shares for s in SHARINGS if s.max_queries == 1)
    assert all(s.max_shares <= MORE_QUERIES.max_shares for s in SHARINGS if s.max_queries > 1)


@pytest.mark.parametrize(("Sq", "Hq"), [(1, 2), (40, 8)])
def test_what_is_launched_on_hopper(monkeypatch, small_shares, Sq, Hq):
    launches = []

    def get_kernel(build, device, **key):
        key.pop("soon", None)
        return lambda *args: launches.append((build, key, args))

    monkeypatch.setattr(tilelang_attention_shared, "get_kernel", get_kernel)
    monkeypatch.setattr(tilelang_attention_shared, "takes_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(tilelang_attention_shared, "multiprocessors", lambda _: 20)
    q, k, v = make_qkv(3, 8, 2, Sq, 5 * TILE, 64, device="cpu")
    out, lse = tilelang_attention._fwd(q, k, v, True, 0.125)
    (_, key, forward), (build, merge_key, merge) = launches
    assert (key["IS_CAUSAL"], key["IS_SHARED"]) == (Sq > 1, True)
    assert build is build_attention_merge
    assert merge_key["BLOCK_M"] == (1 if Sq == 1 else 8)
    parts, stats = forward[3:5]
    rows = 4 if Sq == 1 else Sq
    assert (parts.shape, parts.dtype) == ((15, Hq, rows, 64), torch.float32)
    assert (stats.shape, stats.dtype) == ((15, Hq, rows, 2), torch.float32)
    assert forward[0].shape == (3, Hq, rows, 64)
    assert forward[0].data_ptr() == q.data_ptr()
    assert forward[5] == 0  # no counter
    assert forward[6] == (1 if Sq == 1 else 4)
    assert [id(t) for t in merge] == [id(t) for t in (parts, stats, out, lse)]


def test_a_first_forward_that_shares_prepares_other_numbers_of_queries(monkeypatch):
    monkeypatch.setattr(tilelang_attention_tiles, "takes_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(tilelang_attention_shared, "takes_hopper_kernels", lambda *_: True)
    where = 64, BF16, torch.device("cuda", 78), True  # no such device: nothing is cached
    soon = tilelang_attention_shared.soon_requests(*where)
    for Sq in (1, 2, 64, 65, 500):
        assert all(r in soon for r in tilelang_attention_shared.shared_requests(Sq, *where))
    assert tilelang_attention_shared.soon_requests(64, BF16, torch.device("cpu"), True) == []


def test_parts_are_stored_from_registers():
    # Compiled, not run: no GPU is needed, but nvcc.
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = tilelang_runtime.compile_kernel(
        build_attention_fwd_hopper,
        tilelang_runtime.Target("cuda", "sm_90a"),
        dtype="bfloat16",
        HEAD_DIM=64,
        IS_CAUSAL=True,
        IS_SHARED=True,
        **HOPPER_FEW_TILES[64]._asdict(),
    ).source
    assert "float* __restrict__ out" in source
    assert "tma_store(" not in source
    assert "take_one(taken)" not in source
    assert source.count("tl::wgmma_ss<") == 4
    assert source.count("tl::wgmma_rs<") == 3


# The kernels for Hopper


@on_hopper
@pytest.mark.contract("sizes", "shapes and grouped heads", "head dims", kernel="tilelang")
@pytest.mark.parametrize(
    ("D", "dtype"), [(24, FP16), (64, BF16), (80, FP16), (128, BF16), (160, FP16), (256, FP16)]
)
@pytest.mark.parametrize(
    ("Hq", "Hkv", "Sq", "Skv"),
    [
        (40, 8, 1, 5000),  # 320 tiles, some three to a multiprocessor
        (4, 2, 50, 700),
        (4, 2, 50, 2 * TILE + 2),
        (2, 2, 300, 1111),
        (2, 1, 900, 600),  # queries without keys
    ],
)
def test_every_tile_for_hopper(small_shares, D, dtype, Hq, Hkv, Sq, Skv):
    q, k, v = make_qkv(1, Hq, Hkv, Sq, Skv, D, device="cuda", dtype=dtype, layout="bshd")
    for scale in (None, -0.3):
        check_forward(q, k, v, is_causal=True, scale=scale)
    assert min(small_shares) > 1


@on_hopper
@pytest.mark.parametrize("Sq", [1, 64, 256])
@pytest.mark.parametrize("step", [0.02, -0.2])
def test_maxima_that_lag_within_shares(small_shares, Sq, step):
    # Scores grow, or shrink, by up to 2^37 from one tile of keys to the next.
    for D in (64, 128):
        q, k, v = make_qkv(1, 4, 2, Sq, 3000, D, device="cuda", dtype=BF16)
        q[..., 0] = torch.linspace(0, D**0.5, Sq) if Sq > 1 else D**0.5
        k[..., 0] = torch.arange(3000) * -step
        check_forward(q, k, v, is_causal=True)


@on_hopper
@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="tilelang")
@pytest.mark.parametrize("Sq", [1, 40, 200])
def test_shares_in_a_graph_and_on_streams(Sq):
    kwargs = {"is_causal": True, "kernel": "tilelang", "return_lse": True}
    inputs = [make_qkv(2, 8, 2, Sq, S, 64, device="cuda", dtype=BF16) for S in (5000, 16500)]
    alone = [attention(*qkv, **kwargs) for qkv in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    graphs, captured = [torch.cuda.CUDAGraph() for _ in inputs], []
    for graph, qkv, stream in zip(graphs, inputs, streams, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            captured.append(attention(*qkv, **kwargs))
    for _ in range(5):
        together = []
        for stream, graph, qkv in zip(streams, graphs, inputs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                together.append(attention(*qkv, **kwargs))
        torch.cuda.synchronize()
        for want, *got in zip(alone, captured, together, strict=True):
            for out, lse in got:
                assert torch.equal(out, want[0])
                assert torch.equal(lse, want[1])


@on_hopper
@pytest.mark.parametrize(("Sq", "D"), [(1, 64), (1, 128), (64, 128), (256, 64), (256, 128)])
def test_as_long_as_it_is_meant_for(Sq, D):
    q, k, v = make_qkv(2, 8, 2, Sq, 16400, D, device="cuda", dtype=BF16)
    assert tilelang_attention_shared.count_shares_of(q, k) > 2
    check_forward(q, k, v, is_causal=True)
