"""TileLang attention launched again: what is kept for it, and what is told apart."""

import itertools
import shutil
import weakref

import pytest
import torch
from attention_calls import calls_that_differ, other_strides, results_of

from minitx.kernels import attention, kept, supports
from minitx.kernels.kept import Empty
from minitx.testing import check_attention, make_qkv

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import tilelang_attention, tilelang_runtime  # noqa: E402
from minitx.kernels.runtime import multiprocessors  # noqa: E402
from minitx.kernels.tilelang_attention_bwd_rows import build_attention_bwd_prepare  # noqa: E402
from minitx.kernels.tilelang_attention_tiles import (  # noqa: E402
    choose_hopper_fwd_tiles,
    takes_hopper_kernels,
)


@pytest.fixture(autouse=True)
def nothing_kept_yet(monkeypatch) -> None:
    monkeypatch.setattr(kept, "_remembered", {})


def shifted(t: torch.Tensor) -> torch.Tensor:
    """t's values and strides, at an address that is no multiple of 16 bytes."""
    memory = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    assert memory.data_ptr() % 16 == t.element_size()
    return memory.copy_(t)


def calls(device: str) -> dict[str, dict]:
    """Those, and some whose rows TMA cannot fetch where they are."""
    examples = calls_that_differ(device)
    first = examples["nothing"]
    moved = {f"{n}'s address": first | {n: shifted(first[n])} for n in ("q", "k", "v", "dout")}
    return examples | moved


def test_calls_that_differ_are_told_apart(device):
    examples = calls(device)
    for name, call in examples.items():
        before = set(kept._remembered)
        actual = results_of("tilelang", **call)
        # A forward and a backward; fewer if it took what another call left. (The kernels are told
        # the strides of dlse at every launch.)
        is_same_forward = name.startswith(("dout", "dlse", "no d"))
        new = 0 if name == "dlse's strides" else 1 if is_same_forward else 2
        assert len(set(kept._remembered) - before) == new, name
        expected = results_of("reference", **call)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        again = results_of("tilelang", **call)
        assert all(torch.equal(a, b) for a, b in zip(again, actual, strict=True)), name
    number = len(kept._remembered)
    results_of("tilelang", **examples["nothing"])
    assert len(kept._remembered) == number


def test_results_lie_as_they_should_again_and_again(device):
    for name, call in calls(device).items():
        if not all(call["needs"]):
            continue
        inputs = [call[n] for n in "qkv"]
        lse = torch.empty(inputs[0].shape[:3])
        want = [torch.empty_like(t).stride() for t in (inputs[0], lse, *inputs)]
        for _ in range(2):
            assert [t.stride() for t in results_of("tilelang", **call)] == want, name


def test_another_dtype_is_refused_again_and_again(device):
    """By the ops: attention() itself refuses before. q's decides, and on a CPU all become float32
    if it is another."""
    q, k, v = make_qkv(1, 2, 2, 8, 8, 16, device=device)
    out, lse = attention(q, k, v, kernel="tilelang", return_lse=True)
    ops, rest = torch.ops.minitx, (True, 0.25)
    arguments = {"dout": out, "dlse": lse, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    ops.tilelang_attention_bwd(*arguments.values(), *rest, [True] * 3)
    for name in (name for name in arguments if name != "q"):
        wrong = arguments | {name: arguments[name].double()}
        for _ in range(2):
            if name in "kv":
                with pytest.raises((RuntimeError, ValueError), match="dtype"):
                    ops.tilelang_attention_fwd(wrong["q"], wrong["k"], wrong["v"], *rest)
            with pytest.raises((RuntimeError, ValueError), match="dtype"):
                ops.tilelang_attention_bwd(*wrong.values(), *rest, [True] * 3)


def test_gradients_that_lie_otherwise_are_told_apart(device):
    call = calls(device)["nothing"]
    inputs = [call[name] for name in "qkv"]
    out, lse = attention(*inputs, kernel="tilelang", scale=0.25, return_lse=True)
    rest = (call["dout"], None, *inputs, out, lse, True, 0.25, [True] * 3)
    expected = tilelang_attention._bwd(*rest)
    for into in (
        [other_strides(t) for t in inputs],
        [shifted(t.contiguous()) for t in inputs],
    ):
        results = tilelang_attention._bwd(*rest, into)
        for result, place, want in zip(results, into, expected, strict=True):
            assert result is place
            assert torch.equal(result, want)


def test_what_is_kept_keeps_no_tensor_alive(device):
    examples = calls(device)
    results_of("tilelang", **examples["nothing"])
    references = [weakref.ref(examples["nothing"][name]) for name in ("q", "k", "v", "dout")]
    examples.clear()
    assert kept._remembered
    assert [reference() for reference in references] == [None] * 4


def test_a_kernel_that_does_not_compile_is_asked_for_again(device, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler")

    q, k, v = make_qkv(1, 2, 2, 8, 8, 16, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(tilelang_attention, "get_kernel", fail)
        with pytest.raises(RuntimeError, match="no compiler"):
            attention(q, k, v, kernel="tilelang")
    assert attention(q, k, v, kernel="tilelang").isfinite().all()


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (2, 1, 3), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_an_empty_tensor_is_as_it_was_asked_for(device, shape, dtype):
    want = torch.empty(shape, dtype=dtype, device=device)
    wanted = [want, want.mT] if want.dim() > 1 else [want]
    made = [Empty.like(t).make() for t in wanted]
    made.append(Empty.contiguous(shape, dtype, want.device).make())
    for got, t in zip(made, [*wanted, want], strict=True):
        assert (got.shape, got.stride()) == (t.shape, t.stride())
        assert (got.dtype, got.device) == (t.dtype, t.device)


@pytest.mark.two_gpus
def test_an_empty_tensor_lies_on_its_own_device():
    for index, current in itertools.product(range(2), repeat=2):
        with torch.cuda.device(current):
            t = Empty.contiguous((3, 4), torch.float32, torch.device("cuda", index)).make()
        assert t.device.index == index


# The counter that blocks of the forward for Hopper take tiles by


def test_a_counter_is_made_where_there_are_more_tiles_than_multiprocessors(monkeypatch):
    launches = []
    monkeypatch.setattr(
        tilelang_attention, "get_kernel", lambda *args, **key: lambda *args: launches.append(args)
    )
    monkeypatch.setattr(tilelang_attention, "takes_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(tilelang_attention, "multiprocessors", lambda _: 4)
    tilelang_attention._fwd_request.cache_clear()
    BLOCK_M = choose_hopper_fwd_tiles(64, has_many_keys=False).BLOCK_M
    try:
        for Hq, Sq in ((4, BLOCK_M), (2, BLOCK_M + 1), (4, BLOCK_M + 1), (5, 1)):
            q, k, v = make_qkv(1, Hq, 1, Sq, 8, 64, device="cpu")
            tilelang_attention._fwd(q, k, v, True, 0.125)
    finally:
        tilelang_attention._fwd_request.cache_clear()
    counters = [args[5] for args in launches]
    assert counters[:2] == [0, 0]
    assert all(counters[2:])
    assert [args[6] for args in launches] == [4, 2, 4, 5]
    assert [args[8] for args in launches] == [4] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_as_many_tiles_as_multiprocessors_and_one_more(D):
    if not takes_hopper_kernels(torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    num_blocks = multiprocessors(torch.device("cuda", 0))
    for heads in (num_blocks - 1, num_blocks, num_blocks + 1):
        q, k, v = make_qkv(1, heads, heads, 70, 70, D, device="cuda", dtype=torch.bfloat16)
        check_attention("tilelang", q, k, v, is_causal=True)


# What runs before the backward for Hopper


@pytest.fixture
def hopper_launches(monkeypatch):
    """(name, arguments) of what a backward launches for Hopper, of 3 multiprocessors."""
    launches = []

    def get_kernels(device, requests):
        def recording(name):
            return lambda *args: launches.append((name, args))

        return [recording(build.__name__.removeprefix("build_")) for build, _ in requests]

    monkeypatch.setattr(tilelang_attention, "get_kernels", get_kernels)
    monkeypatch.setattr(tilelang_attention, "takes_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(tilelang_attention, "multiprocessors", lambda _: 3)
    tilelang_attention._bwd_requests.cache_clear()
    yield launches
    tilelang_attention._bwd_requests.cache_clear()


@pytest.mark.parametrize("with_dlse", [False, True])
def test_two_launches_make_a_backward_for_hopper(hopper_launches, poisoned_memory, with_dlse):
    q, k, v = make_qkv(2, 4, 2, 300, 100, 64, device="cpu")
    dout, out, lse = torch.empty_like(q), torch.empty_like(q), q.new_empty((2, 4, 300))
    dlse = torch.empty_like(lse) if with_dlse else None
    grads = tilelang_attention._bwd(dout, dlse, q, k, v, out, lse, True, 0.5, [True] * 3)
    names, (prepare, hopper) = zip(*hopper_launches, strict=True)
    assert names == ("attention_bwd_prepare", "attention_bwd_hopper")
    stats, turns, taken = prepare[4:]
    assert [id(t) for t in prepare[:4]] == [
        id(t) for t in (out, dout, lse, dlse if with_dlse else lse)
    ]
    assert (stats.shape, stats.dtype) == ((2, 4, 2, 384), torch.float32)
    assert (turns.shape, turns.dtype) == ((2 * 4 * 3,), torch.int32)  # 3 tiles of 128 queries
    assert [id(t) for t in hopper[:5]] == [id(t) for t in (q, k, v, dout, stats)]
    assert [id(t) for t in hopper[5:8]] == [id(t) for t in grads]
    dq_sum = hopper[8]
    assert (dq_sum.shape, dq_sum.dtype) == ((2 * 4 * 3, 8192), torch.float32)
    assert hopper[9] is turns
    assert (taken.shape, taken.dtype) == ((1,), torch.int32)
    assert (hopper[10], *hopper[12:]) == (taken.data_ptr(), 2, 0.5, 0.5)
    # The first 200 queries see no key, and no block comes to the first tile.
    assert not grads[0][:, :, :128].any()
    assert grads[0][:, :, 128:].isnan().all()


@pytest.mark.parametrize(
    ("Sq", "heads", "num_blocks"),
    [
        (1024, 2, 3),  # 4 tiles of 128 keys; there are 3 multiprocessors
        (8192, 2, 3),
        (1024, 1, 2),  # no more blocks than tasks
        (8193, 2, 4),  # a block for each task
        (16384, 2, 4),
    ],
)
def test_blocks_stay_where_queries_are_few(hopper_launches, Sq, heads, num_blocks):
    """On a GPU results are the same either way: without this, what stays could go untested there.

    The length up to which they stay was measured; whoever moves it moves these numbers.
    """
    q, k, v = make_qkv(1, heads, heads, Sq, 256, 64, device="cpu")
    tilelang_attention._bwd(q, None, q, k, v, q, q[..., 0], True, 0.5, [True] * 3)
    (_, hopper) = hopper_launches[-1]
    assert hopper[11] == num_blocks


def test_both_tiles_are_asked_for_before_either_is_awaited():
    # Compiled, not run: no GPU is needed, but nvcc.
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    target = tilelang_runtime.Target("cuda", "sm_90a")
    key = {"dtype": "bfloat16", "HEAD_DIM": 128, "WITH_DLSE": True}
    kernel = tilelang_runtime.compile_kernel(build_attention_bwd_prepare, target, **key)
    before, _, after = kernel.source.partition(".wait(0)")
    assert before.count("tma_load(") == 2
    assert ".wait(" not in after
    assert "turns[" in before
