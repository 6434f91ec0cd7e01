"""What only the TileLang forward for Hopper can get wrong: buffers that come round, warpgroups that
run at their own pace, the order in which blocks take tiles, a scale taken into the exponent.

Tiles are 128 to 256 queries by 64 to 128 keys, in two or four buffers: from the third or fifth tile
of keys on a buffer is filled again, by the same tile of queries or the next that the block takes.
"""

import math
import re
import shutil

import pytest
import torch
from tilelang_hopper import check_forward, on_hopper

from minitx.kernels import attention, attention_reference, supports
from minitx.testing import make_qkv

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import tilelang_attention, tilelang_runtime  # noqa: E402
from minitx.kernels.tilelang_attention_fwd_hopper import (  # noqa: E402
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    build_attention_fwd_hopper,
)
from minitx.kernels.tilelang_attention_tiles import (  # noqa: E402
    HOPPER_CHUNK_TILES,
    HOPPER_FEW_TILES,
    HOPPER_SHORT_TILES,
    HOPPER_TILES,
    choose_hopper_fwd_tiles,
)

INF, NAN = math.inf, math.nan
pytestmark = pytest.mark.usefixtures("poisoned_memory")
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def launched(monkeypatch, nothing_remembered) -> list:
    """The builders of the kernels that are launched."""
    builders = []
    get_kernel = tilelang_attention.get_kernel

    def recording(build, device, **key):
        builders.append(build)
        return get_kernel(build, device, **key)

    monkeypatch.setattr(tilelang_attention, "get_kernel", recording)
    return builders


def test_few_keys_have_tiles_of_their_own_in_heads_of_64_and_128():
    for width, heads in ((64, (33, 64)), (128, (97, 128))):
        long, short = HOPPER_TILES["fwd"][width], HOPPER_SHORT_TILES[width]
        for D in heads:
            assert choose_hopper_fwd_tiles(D, has_many_keys=True) == long
            assert choose_hopper_fwd_tiles(D, has_many_keys=False) == short
    assert choose_hopper_fwd_tiles(65, has_many_keys=False) == HOPPER_TILES["fwd"][96]
    assert choose_hopper_fwd_tiles(32, has_many_keys=False) == HOPPER_TILES["fwd"][32]


@pytest.mark.parametrize(
    ("D", "tiles"),
    [
        *HOPPER_TILES["fwd"].items(),
        *HOPPER_SHORT_TILES.items(),
        *HOPPER_FEW_TILES.items(),
        *HOPPER_CHUNK_TILES.items(),
    ],
)
def test_tiles_fit_a_multiprocessor(D, tiles):
    # With the two buffers that queries have up to D = 128, and some barriers.
    queries = tiles.BLOCK_M * (2 if D <= 128 else 1)
    assert 2 * D * (queries + 2 * tiles.num_stages * tiles.BLOCK_N) <= (227 - 2) * 1024
    groups = tiles.threads // 128
    registers = groups * CONSUMER_REGISTERS[groups] + PRODUCER_REGISTERS[groups]
    # What a block starts with: the same for every thread, in units of 8.
    assert registers <= 65536 // (tiles.threads + 128) // 8 * 8 * (groups + 1)


@pytest.mark.parametrize(
    ("tiles", "consumer", "producer"),
    [(HOPPER_TILES["fwd"][64], 160, 32), (HOPPER_SHORT_TILES[64], 112, 32)],
    ids=["long", "short"],
)
def test_it_is_what_it_is_meant_to_be(tiles, consumer, producer):
    # Compiled, not run: no GPU is needed, but nvcc.
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = tilelang_runtime.compile_kernel(
        build_attention_fwd_hopper,
        tilelang_runtime.Target("cuda", "sm_90a"),
        dtype="bfloat16",
        HEAD_DIM=64,
        IS_CAUSAL=True,
        **tiles._asdict(),
    ).source
    # q k^T, before any tile, in both loops over keys and, for the next queries, after them; p v, p
    # from registers, in the loops and after them.
    assert source.count("tl::wgmma_ss<") == 4
    assert source.count("tl::wgmma_rs<") == 3
    assert source.count("tl::tma_store(") == source.count("+ take_one(taken)") == 1
    # Limits are of the bits of bounds, not of bits that TileLang kept of what was there before.
    limits = re.findall(r"= \(\(\*\(int \*\)\(&\((\w+)\)\)\) \+ 1\);", source)
    assert len(limits) == 3
    assert all(f"float {name} = bound[" in source for name in limits)
    assert f"warpgroup_reg_alloc<{consumer}>" in source
    assert f"warpgroup_reg_dealloc<{producer}>" in source
    # All wait for one another at the start, all consumers if they change the sign of queries, and
    # those of one warpgroup for its output.
    assert source.count("__syncthreads") == 1
    assert source.count("__sync_thread_partial") == 3
    assert source.count(f"__sync_thread_partial(1, {tiles.threads})") == 2
    assert source.count(" + 2), 128)") == 1
    # In the loop without a mask scores are awaited while the other product runs; what was summed up
    # is rescaled, once it is there, only where a warp finds that scores grew; and that product is
    # awaited after some of the exponentials.
    last_loop, after = (part.start() for part in list(re.finditer("tl::wgmma_ss<", source))[2:])
    loop = source[last_loop : source.rindex("tl::wgmma_rs<")]
    order = [loop.index(word) for word in ("wait_wgmma<1>", "__any_sync", "max(", "wait_wgmma<0>")]
    assert order == sorted(order)
    assert "condval" not in loop[: loop.index("__any_sync")]
    loop = loop[loop.index("wait_wgmma<0>") + 1 :]
    order = [loop.index("exp2f"), loop.index("wait_wgmma<0>"), loop.rindex("exp2f")]
    assert order == sorted(order)
    # The output is awaited, and stored, when the next queries' first product is issued.
    assert source.rindex("tl::wgmma_rs<") < after < source.rindex("wait_wgmma<1>")
    assert source.rindex("wait_wgmma<1>") < source.index("tl::tma_store(")


@on_hopper
@pytest.mark.contract("sizes", "shapes and grouped heads", "strides", kernel="tilelang")
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("D", "Hq", "Hkv", "Sq", "Skv", "layout"),
    [
        (128, 4, 4, 513, 513, "bhsd"),  # a query and a key over
        (64, 8, 2, 700, 700, "qkv"),  # slices of a projection
        (64, 4, 1, 1, 1000, "bhsd"),  # most rows of the tile past the end
        (64, 4, 2, 700, 2100, "bhsd"),  # tiles for many keys
        (64, 2, 2, 2200, 2050, "bshd"),
        (128, 4, 2, 700, 2100, "bhsd"),
        (128, 2, 2, 2200, 2050, "bshd"),
        (128, 2, 1, 130, 900, "bshd"),  # a diagonal that starts inside a tile
        (64, 3, 3, 900, 200, "bshd"),  # blocks without keys
        (64, 2, 2, 2150, 2150, "bhsd"),  # two warpgroups past the last query
        (128, 2, 2, 64, 64, "bhsd"),  # one tile: no round of the loop
        (128, 2, 2, 256, 256, "bhsd"),  # four: no buffer is filled again
        (128, 2, 2, 390, 390, "bhsd"),  # two warpgroups past the last query
        (80, 2, 2, 390, 390, "bhsd"),  # widths between those of tiles
        (160, 2, 1, 300, 500, "bshd"),
        (250, 2, 2, 400, 300, "step2"),  # copied
        (24, 6, 3, 600, 600, "offset"),
    ],
)
def test_out_and_lse(launched, D, Hq, Hkv, Sq, Skv, layout, dtype, is_causal):
    q, k, v = make_qkv(2, Hq, Hkv, Sq, Skv, D, device="cuda", dtype=dtype, layout=layout)
    check_forward(q, k, v, is_causal=is_causal)
    assert launched == [build_attention_fwd_hopper] * 2


@on_hopper
@pytest.mark.contract("sizes", kernel="tilelang")
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "Sq", "Skv", "D"),
    [
        (3, 16, 4, 1100, 1100, 128),  # 432 tiles, three to a multiprocessor
        (2, 32, 32, 1000, 1000, 64),  # 256
        (1, 40, 40, 2100, 2100, 64),  # 440
        (1, 10, 5, 2100, 2100, 128),  # 170
        (1, 20, 5, 2000, 17000, 128),  # 320: keys of 3 heads fit in cache, those of 2 are left
        (40, 16, 16, 60, 60, 64),  # 640 of one tile of keys: no round of the loop in any
        (20, 16, 4, 130, 60, 256),  # 640, some without a key; one buffer for queries
    ],
)
def test_more_tiles_than_multiprocessors(B, Hq, Hkv, Sq, Skv, D):
    q, k, v = make_qkv(B, Hq, Hkv, Sq, Skv, D, device="cuda", dtype=BF16)
    check_forward(q, k, v, is_causal=True)


@on_hopper
@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="tilelang")
def test_calls_at_once_do_not_take_tiles_of_one_another():
    inputs = [make_qkv(4, 16, 16, S, S, 64, device="cuda", dtype=BF16) for S in (1000, 700, 1300)]
    kwargs = {"is_causal": True, "kernel": "tilelang", "return_lse": True}
    alone = [attention(*qkv, **kwargs) for qkv in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        together = []
        for stream, qkv in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                together.append(attention(*qkv, **kwargs))
        torch.cuda.synchronize()
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


@on_hopper
@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="tilelang")
def test_graphs_replayed_at_once_do_not_take_tiles_of_one_another():
    kwargs = {"is_causal": True, "kernel": "tilelang", "return_lse": True}
    inputs = [make_qkv(4, 16, 16, S, S, 64, device="cuda", dtype=BF16) for S in (1000, 1300)]
    alone = [attention(*qkv, **kwargs) for qkv in inputs]
    torch.cuda.synchronize()
    capturing = torch.cuda.Stream()
    graphs, captured = [torch.cuda.CUDAGraph() for _ in inputs], []
    for graph, qkv in zip(graphs, inputs, strict=True):
        with torch.cuda.graph(graph, stream=capturing):
            captured.append(attention(*qkv, **kwargs))
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(alone, captured, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


@on_hopper
@pytest.mark.contract("strides", kernel="tilelang")
def test_keys_and_values_expanded_over_batch_and_heads():
    q, k, v = make_qkv(3, 4, 1, 300, 400, 64, device="cuda", dtype=BF16)
    for keys, values in ((k[:1], v), (k, v[:1])):
        check_forward(q, keys.expand(3, 4, -1, -1), values.expand(3, 4, -1, -1), is_causal=True)


@on_hopper
@pytest.mark.contract("scale", kernel="tilelang")
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-40, 1e-4, 30.0])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_scales(scale, is_causal, D):
    q, k, v = make_qkv(1, 2, 2, 300, 390, D, device="cuda", dtype=BF16)
    check_forward(q, k, v, is_causal=is_causal, scale=scale)


@on_hopper
@pytest.mark.contract("scale", kernel="tilelang")
@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_a_sign_is_taken_into_the_queries_of_each_tile_once(scale):
    # 160 tiles of 256 queries and 320 of 192, so that most blocks take several; then tiles of which
    # a warpgroup, past the last query, skips more keys than there are buffers for.
    for S, D in ((1200, 64), (1900, 128), (2150, 64), (1030, 64), (1930, 128), (2180, 128)):
        q, k, v = make_qkv(2, 16, 4, S, S, D, device="cuda", dtype=FP16)
        check_forward(q, k, v, is_causal=True, scale=scale)


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("step", [0.02, 0.2, -0.2])
def test_maxima_that_lag(step, dtype):
    # Tiles of keys come from the last to the first. The last query's scores grow by 2^4 from one to
    # the next, which a maximum lets pass once or twice, by 2^37 or not at all; those of the first
    # queries hardly.
    for S, D in ((700, 64), (2100, 64), (700, 128), (2100, 128)):
        q, k, v = make_qkv(1, 2, 1, S, S, D, device="cuda", dtype=dtype)
        q[..., 0] = torch.linspace(0, D**0.5, S)
        k[..., 0] = torch.arange(S) * -step
        check_forward(q, k, v, is_causal=True)


@on_hopper
@pytest.mark.contract("determinism", kernel="tilelang")
@pytest.mark.parametrize(("S", "D"), [(700, 64), (2100, 64), (700, 128), (2100, 128)])
def test_bits_do_not_hang_on_a_query_s_neighbours(S, D):
    # Scores of every seventh query grow from one tile of keys to the next; a warp has 16 queries.
    q, k, v = make_qkv(1, 1, 1, S, S, D, device="cuda", dtype=BF16)
    q[..., 0] = 0
    k[..., 0] = torch.arange(S) * -0.2
    alone = attention(q, k, v, kernel="tilelang", return_lse=True)
    q[:, :, ::7, 0] = D**0.5
    beside = attention(q, k, v, kernel="tilelang", return_lse=True)
    others = [i for i in range(S) if i % 7]
    for a, b in zip(alone, beside, strict=True):
        assert torch.equal(a[:, :, others], b[:, :, others])
        assert not torch.equal(a, b)


@on_hopper
@pytest.mark.parametrize("offset", [-40.0, 40.0])
def test_scores_far_from_0(offset):
    # A limit below 0 is not compared as an integer.
    for S in (500, 2100):
        q, k, v = make_qkv(1, 2, 2, S, S, 64, device="cuda", dtype=BF16)
        q[..., 0], k[..., 0] = 40.0, offset
        check_forward(q, k, v, is_causal=True)


@on_hopper
@pytest.mark.contract("NaN, inf and huge logits", kernel="tilelang")
@pytest.mark.parametrize("scale", [0.18, -0.18])
def test_maxima_that_become_huge_from_tile_to_tile(scale):
    # Four tiles of keys whose scores are far apart, on both sides of where another factor is taken.
    # No powers of two: their products with the scale would be exact.
    steps = torch.tensor([-(1.3 * 2.0**50), -1.3, 1.3 * 2.0**20, 1.3 * 2.0**45])
    steps *= math.copysign(1, scale)
    v = torch.randn(1, 1, 512, 64, generator=torch.Generator().manual_seed(0)).to("cuda", BF16)
    q = torch.zeros(1, 1, 200, 64, device="cuda", dtype=BF16)
    q[..., 0] = torch.linspace(1, 2, 200)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 0, 2, 0]):
        k = torch.zeros_like(v)
        k[0, 0, :, 0] = steps[order].to("cuda").repeat_interleave(128)
        out, lse = attention(
            q, k, v, is_causal=False, scale=scale, kernel="tilelang", return_lse=True
        )
        truth = attention_reference(q, k, v, is_causal=False, scale=scale)
        torch.testing.assert_close(out.double(), truth[0], rtol=2**-8, atol=2**-10)
        torch.testing.assert_close(lse.double(), truth[1], rtol=1e-6, atol=1e-5)


@on_hopper
@pytest.mark.contract("NaN, inf and huge logits", kernel="tilelang")
@pytest.mark.parametrize("D", [64, 128])
def test_a_huge_maximum_that_stays_while_those_of_other_queries_grow(D):
    # Those of odd queries grow in every tile, and their warps rescale what was summed up for all of
    # their queries: for even ones by 1, though the product of scale and maximum is rounded.
    q, k, v = growing_beside_huge(D)
    q, k, v = q.to("cuda"), k.to("cuda"), v.to("cuda")
    out, lse = attention(q, k, v, is_causal=False, scale=0.18, kernel="tilelang", return_lse=True)
    truth = attention_reference(q, k, v, is_causal=False, scale=0.18)
    torch.testing.assert_close(out.double(), truth[0], rtol=2**-8, atol=2**-10)
    torch.testing.assert_close(lse.double(), truth[1], rtol=1e-6, atol=1e-5)


def growing_beside_huge(D: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    v = torch.randn(1, 1, 512, D, generator=torch.Generator().manual_seed(0)).to(BF16)
    q, k = torch.zeros(1, 1, 200, D, dtype=BF16), torch.zeros_like(v)
    q[..., ::2, 0] = q[..., 1::2, 1] = 1
    k[..., 0] = 1.3 * 2.0**24
    k[..., 1] = 128 * torch.arange(8, 0, -1).repeat_interleave(64)  # keys are read last to first
    return q, k, v


@on_hopper
@pytest.mark.contract("NaN, inf and huge logits", "empty rows", kernel="tilelang")
def test_infinite_scores_and_nan():
    def inputs():
        q, k, v = make_qkv(1, 2, 1, 300, 400, 64, device="cuda", dtype=BF16)
        return q.abs(), k, v

    q, k, v = inputs()
    k[:] = -INF  # each score: no key is left
    out, lse = check_forward(q, k, v, is_causal=True)
    assert not out.any()
    assert (lse == -INF).all()

    for value in (INF, -INF, NAN):  # seen by the queries from 150 on
        q, k, v = inputs()
        k[:, :, 250] = value
        out, _ = check_forward(q, k, v, is_causal=True)
        assert out[:, :, :150].isfinite().all()
        assert out[:, :, 150:].isnan().all() == (value != -INF)

    q, k, v = inputs()
    q[:, :, 40] = NAN
    out, lse = check_forward(q, k, v, is_causal=True)
    assert out.isnan().any(-1).sum() == lse.isnan().sum() == 2

    q, k, v = inputs()
    k[:, :, 250] = -INF  # times a scale of 0
    check_forward(q, k, v, is_causal=False, scale=0.0)


@on_hopper
@pytest.mark.contract("empty rows", kernel="tilelang")
def test_nan_values_leave_rows_without_keys_at_0():
    q, k, v = make_qkv(1, 2, 1, 400, 300, 64, device="cuda", dtype=BF16)
    v[:, :, 0] = NAN
    out, lse = attention(q, k, v, is_causal=True, kernel="tilelang", return_lse=True)
    assert not out[:, :, :100].any()
    assert (lse[:, :, :100] == -INF).all()
    assert out[:, :, 100:].isnan().all()
