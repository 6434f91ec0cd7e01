"""What only the TileLang backward for Hopper can get wrong: sums that blocks make in turn, in two
orders, warpgroups half a trip apart, buffers that come round, tiles that no block adds to.

A task is 128 keys, past which stream tiles of 64 (heads 128 wide) or 128 queries, in three buffers,
of dout in two: from the fourth tile, or the third, on a buffer is filled again. Up to 8192 queries
a block takes one task after the other, above it has one.
"""

import itertools
import math
import re
import shutil

import pytest
import torch

from minitx.kernels import attention, supports
from minitx.testing import (
    check_attention,
    error_budget,
    make_qkv,
    max_error,
    oracle_attention,
    run_attention,
)

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import tilelang_attention, tilelang_runtime  # noqa: E402
from minitx.kernels.tilelang_attention_bwd_hopper import build_attention_bwd_hopper  # noqa: E402
from minitx.kernels.tilelang_attention_tiles import takes_hopper_kernels  # noqa: E402

GRADS = ("dq", "dk", "dv")
NAN = math.nan
pytestmark = pytest.mark.usefixtures("poisoned_memory")
BF16, FP16 = torch.bfloat16, torch.float16
both_masks = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def on_hopper(test):
    """Runs where the kernel is the one that `tilelang` takes."""
    elsewhere = not takes_hopper_kernels(BF16, _probe.device)
    skip = pytest.mark.skipif(elsewhere, reason="needs a GPU of compute capability 9.0")
    return pytest.mark.gpu(skip(test))


@pytest.fixture
def launched(monkeypatch, nothing_remembered) -> list[str]:
    """The kernels that a backward launches."""
    names = []
    get_kernels = tilelang_attention.get_kernels

    def recording(device, requests):
        names.extend(build.__name__.removeprefix("build_attention_") for build, _ in requests)
        return get_kernels(device, requests)

    monkeypatch.setattr(tilelang_attention, "get_kernels", recording)
    return names


def assert_same_bits(actual, expected) -> None:
    for name in GRADS:
        got, want = (getattr(result, name).view(torch.int16) for result in (actual, expected))
        assert torch.equal(got, want), f"{name} differs"


# On any machine


def test_it_is_what_it_is_meant_to_be():
    # Compiled, not run: no GPU is needed, but nvcc.
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = tilelang_runtime.compile_kernel(
        build_attention_bwd_hopper,
        tilelang_runtime.Target("cuda", "sm_90a"),
        dtype="bfloat16",
        HEAD_DIM=128,
        IS_CAUSAL=True,
    ).source
    # Five products, and dq of the last step after the loop.
    assert source.count("tl::wgmma_ss<") == 4
    assert source.count("tl::wgmma_rs<") == 2
    # By numbers that a warp shares.
    assert not [line for line in source.splitlines() if "wgmma_" in line and "threadIdx" in line]
    assert "warpgroup_reg_alloc<240>" in source
    assert "warpgroup_reg_dealloc<24>" in source
    # ds, which TileLang does not know to be written, is fenced behind dk and before all are told.
    stored = source.index("store_own_rows<16384, 64>((&(((bfloat16_t*)ds_tile)")
    position = source.index("wgmma_rs<", stored)
    assert "wgmma_ss<" not in source[stored:position]
    assert position < source.index("fence_proxy_async", stored) < source.index("let_go(", stored)
    # A trip: what can be awaited or read ahead of products is; the second warpgroup is let go ahead
    # of dp, dq's adder told behind it.
    order_of_calls = ["q_full[", "wait_to_go(", "wgmma_ss<", "wgmma_ss<", "dout_full["]
    order_of_calls += ["read_own<0, 64>(lse", "dq_free[", "wait_wgmma<1>", "hand_half("]
    order_of_calls += ["let_go((1 - warpgroup)", "wgmma_ss<", "fence_proxy_async", "hand_in("]
    order_of_calls += ["wait_wgmma<1>", "exp2f(", "wgmma_rs<", "read_own<0, 64>(delta"]
    order_of_calls += ["wait_wgmma<1>", "store_own_rows<16384, 64>", "wgmma_rs<"]
    position = source.index("let_go(warpgroup")
    for word in order_of_calls:
        position = source.index(word, position) + 1
    # TileLang does not know of dq's stores either: it would fence ahead of dp.
    let_go = source.index("let_go((1 - warpgroup)")
    assert "fence_proxy_async" not in source[let_go : source.index("wgmma_ss<", let_go)]
    # A thread's index is kept, not read anew behind products that have not begun.
    assert "threadIdx" not in source[let_go : source.index("exp2f(", let_go)]
    assert "thread = read_anew(" in source
    # Plain stores of dq stay ahead of their fence, which by itself orders nothing for the compiler.
    then = r"\s+(?:\}\s+if \([^\n]*\{\s+)?"  # TileLang may say a condition again
    handed = rf"settle\(\);{then}tl::fence_proxy_async\(\);{then}hand_in\("
    assert len(re.findall(handed, source)) == 2
    # Where blocks stay they have no task but by the counter, the first one too.
    assert source.count("number = take_task(taken)") == 2
    assert source.index("number = take_task(taken)") < source.index("tl::tma_load(")
    # Keys may be overwritten once the last dq has been made of them.
    assert source.index("wait_wgmma<0>", source.rindex("tl::wgmma_ss<")) < source.index(
        "k_free[0].a"
    )
    # An adder: the sum is brought to who is last, others wait until they have their warps' part.
    turn, read, written = "wait_turn(", "tma_store_wait<0, true>", "tma_store_wait<0, false>"
    order_of_calls = [turn, "fence_proxies(", "dq_read[", "load_tile(", "rounded_read[", "dq_free["]
    order_of_calls += ["wait_for_hand_in(", "dq_read[", "tma_store(dq_desc", read]
    order_of_calls += ["store_tile(", "tma_store_add(", read, "dq_read["]
    order_of_calls += ["rounded_read[", "dq_free[", written, "end_turn("]
    position = source.index("brings_from = max(")
    for word in order_of_calls:
        position = source.index(word, position) + 1


# On a Hopper GPU


@on_hopper
@pytest.mark.contract("gradients", "sizes", "shapes and grouped heads", kernel="tilelang")
@both_masks
@both_dtypes
@pytest.mark.parametrize(
    ("D", "Hq", "Hkv", "Sq", "Skv", "layout"),
    [
        (128, 4, 2, 513, 513, "bhsd"),  # a query and a key over
        (64, 4, 2, 513, 513, "bhsd"),
        (128, 8, 2, 700, 700, "qkv"),  # slices of a projection; a group of 4
        (64, 6, 1, 640, 640, "qkv"),
        (33, 2, 2, 300, 300, "bhsd"),  # columns past the end; rows copied
        (40, 2, 1, 257, 257, "bshd"),  # and not copied
        (100, 4, 1, 130, 389, "bhsd"),  # a diagonal that starts inside a tile
        (104, 2, 2, 389, 130, "bshd"),
        (64, 3, 3, 900, 200, "bshd"),  # tiles of queries without keys
        (128, 2, 1, 333, 77, "offset"),
        (64, 4, 1, 1, 1000, "bhsd"),  # one query, which each block adds to
        (128, 2, 2, 1, 1, "bhsd"),
        (128, 2, 2, 64, 128, "bhsd"),  # one tile: one trip of the loop, an adder for it
        (64, 2, 2, 8200, 200, "bhsd"),  # blocks that do not stay
        (64, 2, 2, 390, 260, "step2"),
    ],
)
def test_gradients(launched, D, Hq, Hkv, Sq, Skv, layout, dtype, is_causal):
    q, k, v = make_qkv(2, Hq, Hkv, Sq, Skv, D, device="cuda", dtype=dtype, layout=layout)
    result = check_attention("tilelang", q, k, v, is_causal=is_causal, with_dlse=True)
    assert launched == ["bwd_hopper", "bwd_prepare"]
    if is_causal and Sq > Skv:
        assert not result.dq[:, :, : Sq - Skv].any()
    if layout in ("bhsd", "bshd"):
        for grad, t in zip((result.dq, result.dk, result.dv), (q, k, v), strict=True):
            assert grad.stride() == t.stride()


@on_hopper
@pytest.mark.contract("gradients", kernel="tilelang")
@pytest.mark.parametrize("D", [64, 128])
def test_each_tile_of_keys_is_in_dq_once(D):
    # All weights are 1/384, and the keys of each tile have a column of their own, in which they are
    # 1. Values of 1, 2 and 6 are -2, -1 and 3 from their mean.
    q = torch.zeros(2, 8, 500, D, device="cuda", dtype=BF16)
    tile = torch.arange(384, device="cuda") // 128
    k, v = (torch.zeros(2, 2, 384, D, device="cuda", dtype=BF16) for _ in range(2))
    k[:, :, torch.arange(384, device="cuda"), tile] = 1
    v[..., 0] = torch.tensor([1.0, 2.0, 6.0], device="cuda", dtype=BF16)[tile]
    dout = torch.zeros_like(q)
    dout[..., 0] = 1
    result = run_attention("tilelang", q, k, v, dout, is_causal=False, scale=0.5)
    expected = torch.zeros_like(q)
    expected[..., :3] = torch.tensor([-2.0, -1.0, 3.0], device="cuda", dtype=BF16) * (0.5 / 3)
    torch.testing.assert_close(result.dq, expected, rtol=2**-6, atol=2**-9)


@on_hopper
@pytest.mark.contract("sizes", "determinism", kernel="tilelang")
@both_masks
@pytest.mark.parametrize(
    ("B", "Hq", "Hkv", "Sq", "Skv", "D"),
    [
        (4, 16, 4, 1700, 1700, 128),  # 224 tasks of 4 heads each
        (2, 32, 32, 1000, 1000, 64),  # 512 tasks, some four to a block
        (1, 12, 12, 5000, 1700, 128),  # 168 blocks, one at a time to a multiprocessor
        (1, 12, 6, 20000, 500, 128),  # heads that fit in L2 one at a time
        (20000, 4, 2, 3, 3, 64),  # 40000 tasks of one step; heads that are left go together
    ],
)
def test_more_blocks_than_run_at_once(B, Hq, Hkv, Sq, Skv, D, is_causal):
    q, k, v = make_qkv(B, Hq, Hkv, Sq, Skv, D, device="cuda", dtype=BF16)
    check_attention("tilelang", q, k, v, is_causal=is_causal)


@on_hopper
@pytest.mark.contract("determinism", kernel="tilelang")
@both_masks
@pytest.mark.parametrize("D", [64, 128])
def test_gradients_are_the_same_bits_under_load(D, is_causal):
    # 1024 blocks, 16 to add to each tile; and a stream beside them that takes multiprocessors.
    q, k, v = make_qkv(4, 16, 16, 2048, 2048, D, device="cuda", dtype=BF16)
    dout = torch.randn_like(q)
    first = run_attention("tilelang", q, k, v, dout, is_causal=is_causal)
    stream = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    for _ in range(10):
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.mm(a, a)
        assert_same_bits(run_attention("tilelang", q, k, v, dout, is_causal=is_causal), first)
    torch.cuda.synchronize()


@on_hopper
@pytest.mark.contract("determinism", kernel="tilelang")
@pytest.mark.parametrize(("Hq", "Hkv", "S"), [(5, 5, 700), (8, 2, 700), (3, 3, 40000)])
def test_a_batch_elements_bits_are_its_own(Hq, Hkv, S):
    # Some heads are late, or all of them; and more go together than one element has.
    q, k, v = make_qkv(3, Hq, Hkv, S, S, 128, device="cuda", dtype=BF16)
    inputs = (q, k, v, torch.randn_like(q))
    whole = run_attention("tilelang", *inputs, is_causal=True)
    for i in range(3):
        alone = run_attention("tilelang", *(t[i : i + 1] for t in inputs), is_causal=True)
        for name in GRADS:
            assert torch.equal(getattr(whole, name)[i : i + 1], getattr(alone, name)), name


@on_hopper
@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="tilelang")
def test_two_streams_at_once():
    # Of different shapes: each has turns and sums of its own. And of more tasks than there are
    # multiprocessors, so that neither can have all of them: blocks that stay while a task that they
    # wait for is nobody's would wait for ever.
    inputs = [
        make_qkv(6, 16, 4, 1500, 1500, 128, device="cuda", dtype=BF16),
        make_qkv(2, 16, 16, 1000, 2100, 64, device="cuda", dtype=BF16, seed=1),
    ]
    douts = [torch.randn_like(q) for q, _, _ in inputs]
    runs = [(*qkv, dout) for qkv, dout in zip(inputs, douts, strict=True)]
    expected = [run_attention("tilelang", *run, is_causal=True) for run in runs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in runs]
    results = []
    for _ in range(5):
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                results.append(run_attention("tilelang", *run, is_causal=True))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert_same_bits(result, expected[i % 2])


@on_hopper
@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="tilelang")
@pytest.mark.parametrize("D", [64, 128])
# PyTorch's word on the leaves of this test, which are made outside of the capturing stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_graph_replayed(D):
    q, k, v = make_qkv(2, 8, 2, 700, 700, D, device="cuda", dtype=FP16)
    dout = torch.randn_like(q)

    def step():
        return run_attention("tilelang", q, k, v, dout, is_causal=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):  # turns start anew each time
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert_same_bits(captured, step())


@on_hopper
@pytest.mark.contract("strides", kernel="tilelang")
def test_keys_and_values_expanded_over_batch_and_heads():
    q, k, v = make_qkv(3, 4, 1, 300, 400, 64, device="cuda", dtype=BF16)
    for keys, values in ((k[:1], v), (k, v[:1])):
        keys, values = (t.expand(3, 4, -1, -1) for t in (keys, values))
        check_attention("tilelang", q, keys, values, is_causal=True)


@on_hopper
@pytest.mark.contract("scale", kernel="tilelang")
@both_masks
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-4])
def test_scales(scale, is_causal):
    q, k, v = make_qkv(1, 2, 2, 300, 390, 64, device="cuda", dtype=BF16)
    check_attention("tilelang", q, k, v, is_causal=is_causal, scale=scale)


@on_hopper
@pytest.mark.contract("gradients", kernel="tilelang")
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:])
def test_some_gradients_alone_come_from_the_portable_kernels(launched, needs, D):
    inputs = make_qkv(1, 4, 2, 300, 400, D, device="cuda", dtype=BF16)
    dout = torch.randn_like(inputs[0])
    truth = oracle_attention(*inputs, dout, is_causal=True)
    eager = run_attention("eager", *inputs, dout, is_causal=True)
    leaves = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    attention(*leaves, kernel="tilelang").backward(dout)
    assert ("bwd_hopper" in launched) == all(needs)
    for leaf, need, name in zip(leaves, needs, GRADS, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            budget = error_budget(getattr(eager, name), getattr(truth, name), BF16)
            assert max_error(leaf.grad, getattr(truth, name)) <= budget, name


@on_hopper
@pytest.mark.contract("NaN, inf and huge logits", "strides", kernel="tilelang")
@both_masks
@pytest.mark.parametrize(("S", "D"), [(100, 40), (200, 104)])
def test_memory_past_the_ends_is_never_seen(S, D, is_causal):
    # In rows and in columns.
    plain = make_qkv(1, 2, 2, S, S, D, device="cuda", dtype=FP16)
    plain = (*plain, torch.ones_like(plain[0]))
    buffers = [torch.full((1, 2, 256, 128), NAN, device="cuda", dtype=FP16) for _ in plain]
    views = [buffer[:, :, :S, :D] for buffer in buffers]
    for view, t in zip(views, plain, strict=True):
        view.copy_(t)
    actual = run_attention("tilelang", *views, is_causal=is_causal)
    assert_same_bits(actual, run_attention("tilelang", *plain, is_causal=is_causal))
    assert actual.dq.isfinite().all()


@on_hopper
@pytest.mark.contract("NaN, inf and huge logits", kernel="tilelang")
def test_keys_past_the_end_weigh_nothing():
    # Scores of -32, next to which the 0 of a key that is not there would have probability 1; and
    # delta is 4e6, which float16 does not hold. All keys are equal: no gradient but v's.
    q = torch.ones(1, 1, 128, 64, device="cuda", dtype=FP16)
    k = torch.full((1, 1, 100, 64), -4.0, device="cuda", dtype=FP16)
    v = torch.full((1, 1, 100, 64), 256.0, device="cuda", dtype=FP16)
    result = run_attention("tilelang", q, k, v, torch.full_like(q, 256.0), is_causal=False)
    assert result.dq.abs().max() <= 0.1
    assert result.dk.abs().max() <= 0.1
    torch.testing.assert_close(result.dv, torch.full_like(v, 128 * 256.0 / 100), rtol=2e-3, atol=0)


@on_hopper
@pytest.mark.contract("NaN, inf and huge logits", kernel="tilelang")
@pytest.mark.parametrize("D", [64, 128])
def test_nan_and_huge_logits(D):
    q, k, v = make_qkv(1, 1, 1, 300, 300, D, device="cuda", dtype=BF16)
    dout = torch.randn_like(q)
    clean = run_attention("tilelang", q, k, v, dout, is_causal=True)
    q[:, :, 200] = NAN
    dirty = run_attention("tilelang", q, k, v, dout, is_causal=True)
    others = [i for i in range(300) if i != 200]
    assert dirty.dq[:, :, 200].isnan().all()
    assert torch.equal(dirty.dq[:, :, others], clean.dq[:, :, others])
    for name, end in (("dk", 256), ("dv", 201)):  # ds of a key in the same tile is 0 times NaN
        assert getattr(dirty, name)[:, :, :201].isnan().all()
        assert torch.equal(getattr(dirty, name)[:, :, end:], getattr(clean, name)[:, :, end:])

    # Scores of 1e11 and their lse round thousands apart: what is recomputed must not pass 1.
    generator = torch.Generator().manual_seed(0)
    q, k = ((torch.rand(1, 1, 200, D, generator=generator) + 1) * 1e5 for _ in range(2))
    q, k = (t.to("cuda", BF16) for t in (q, k))
    huge = run_attention("tilelang", q, k, torch.ones_like(k), torch.ones_like(q), is_causal=True)
    assert all(getattr(huge, name).isfinite().all() for name in GRADS)
    assert huge.dv.max() <= 200 * (1 + 2**-7)


@on_hopper
@pytest.mark.contract("sizes", kernel="tilelang")
def test_one_query_and_millions_of_keys():
    # Heads times tiles of keys that would go together do not fit in 32 bits.
    q = torch.zeros(1, 1, 1, 64, device="cuda", dtype=BF16)
    k = torch.zeros(1, 1, 2**22 + 2**21 + 1, 64, device="cuda", dtype=BF16)
    v = torch.ones_like(k)
    result = run_attention("tilelang", q, k, v, torch.ones_like(q), is_causal=True)
    torch.testing.assert_close(result.dv, torch.full_like(v, 1 / k.shape[2]), rtol=1e-2, atol=0)
    assert not result.dk.any()
    assert not result.dq.any()


@on_hopper
@pytest.mark.contract("sizes", kernel="tilelang")
@pytest.mark.huge
def test_sums_of_more_than_2_to_the_31_elements():
    shape = (2056, 16, 1024, 64)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(4))
    whole = run_attention("tilelang", q, k, v, dout, is_causal=True)
    for i in (0, 2055):
        # Of all heads: which of them are late, and so a sum's order, hangs on how many there are.
        part = run_attention("tilelang", *(t[i : i + 1] for t in (q, k, v, dout)), is_causal=True)
        for name in GRADS:
            assert torch.equal(getattr(whole, name)[i : i + 1], getattr(part, name)), name
