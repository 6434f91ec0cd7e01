"""What of the TileLang attention is compiled, and when: only what is asked for, one kernel for all
lengths, several at once, and ahead of time."""

import itertools
import threading

import pytest
import torch

from minitx.kernels import KernelUnavailableError, attention, packed_attention, supports
from minitx.testing import make_qkv, run_attention

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import (  # noqa: E402
    tilelang_attention,
    tilelang_attention_tiles,
    tilelang_runtime,
)
from minitx.kernels.tilelang_attention_bwd import build_attention_bwd_stats  # noqa: E402

CPU = torch.device("cpu")
RESULTS = ("out", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_only_the_kernels_asked_for_are_launched(device, monkeypatch, nothing_remembered, needs):
    launched = []
    get_kernels = tilelang_attention.get_kernels

    def recording(device, requests):
        launched.extend((b.__name__.removeprefix("build_attention_"), key) for b, key in requests)
        return get_kernels(device, requests)

    inputs = make_qkv(1, 2, 1, 40, 40, 16, device=device)
    dout = torch.ones_like(inputs[0])
    full = run_attention("tilelang", *inputs, dout, is_causal=True)
    monkeypatch.setattr(tilelang_attention, "get_kernels", recording)
    leaves = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    out = attention(*leaves, kernel="tilelang")
    if any(needs):
        out.backward(dout)
    for leaf, need, name in zip(leaves, needs, ("dq", "dk", "dv"), strict=True):
        assert (leaf.grad is not None) == need
        assert not need or torch.equal(leaf.grad, getattr(full, name))
    need_dq, need_dk, need_dv = needs
    expected = ["bwd_stats"] * any(needs)
    expected += ["bwd_dkdv"] * (need_dk or need_dv) + ["bwd_dq"] * need_dq
    assert [name for name, _ in launched] == expected
    for name, key in launched:
        if name == "bwd_dkdv":
            assert (key["WITH_DK"], key["WITH_DV"]) == (need_dk, need_dv)


def test_kernels_asked_for_together_compile_at_the_same_time(monkeypatch):
    both_begun = threading.Barrier(2, timeout=60)

    def compiled(build, target, key, when_built):
        when_built()
        both_begun.wait()  # one after the other they would never meet
        return (build, key)

    monkeypatch.setattr(tilelang_runtime, "_kernels", {})
    monkeypatch.setattr(tilelang_runtime, "_compile", compiled)
    requests = [("one", {"D": 1}), ("other", {"D": 2})]
    for _ in range(2):  # compiled, then found
        found = tilelang_runtime.get_kernels(torch.device("cpu"), requests)
        assert found == requests


def test_what_is_needed_soon_compiles_beside_what_is_needed_now(monkeypatch):
    both_begun = threading.Barrier(2, timeout=60)

    def compiled(build, target, key, when_built):
        when_built()
        both_begun.wait()  # were the other to wait for this one's end they would never meet
        return (build, key)

    monkeypatch.setattr(tilelang_runtime, "_kernels", {})
    monkeypatch.setattr(tilelang_runtime, "_compile", compiled)
    asked = []

    def soon():
        asked.append(True)
        return [("now", {"D": 1}), ("soon", {"D": 2})]

    for _ in range(2):  # compiled, then found
        assert tilelang_runtime.get_kernel("now", CPU, soon=soon, D=1) == ("now", {"D": 1})
        assert tilelang_runtime.get_kernel("soon", CPU, D=2) == ("soon", {"D": 2})
    assert asked == [True]


def test_what_is_needed_soon_waits_until_what_is_needed_now_is_built(device, monkeypatch):
    """Builders run one at a time: the one that is waited for must not stand in line."""
    steps = []

    def build(lang, **key):
        steps.append("built")
        return build_attention_bwd_stats(lang, **key)

    def soon():
        steps.append("soon")
        return []

    monkeypatch.setattr(tilelang_runtime, "_kernels", {})
    key = {"dtype": "float32", "HEAD_DIM": 32, "WITH_DLSE": False, "USE_TMA": False}
    for _ in range(2):  # compiled, then found
        tilelang_runtime.get_kernel(build, torch.device(device), soon=soon, **key)
        assert steps == ["built", "soon"]


@pytest.mark.parametrize("error", [KernelUnavailableError, AttributeError])
def test_what_does_not_compile_ahead_is_an_error_where_it_is_asked_for(error, monkeypatch):
    """And there alone: no thread prints one, not even of a kind that compile_kernel lets through,
    such as a TileLang that lacks a function."""
    printed = []

    def compiled(build, target, key, when_built):
        when_built()
        if build == "soon":
            raise error("it does not compile")
        return build

    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(tilelang_runtime, "_kernels", {})
    monkeypatch.setattr(tilelang_runtime, "_compile", compiled)
    before = set(threading.enumerate())
    assert tilelang_runtime.get_kernel("now", CPU, soon=lambda: [("soon", {})]) == "now"
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert printed == []
    with pytest.raises(error, match="does not compile"):
        tilelang_runtime.get_kernel("soon", CPU)


def test_a_first_forward_on_hopper_prepares_other_lengths_and_the_backward(monkeypatch):
    monkeypatch.setattr(tilelang_attention_tiles, "takes_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(tilelang_attention, "takes_hopper_kernels", lambda *_: True)
    monkeypatch.setattr(tilelang_attention, "has_tma", lambda _: True)
    where = 64, torch.bfloat16, torch.device("cuda", 77), True  # no such device: nothing is cached

    def names(*needs):
        requests = tilelang_attention._soon_requests(*where, needs)
        return [build.__name__.removeprefix("build_attention_") for build, _ in requests]

    forwards = ["fwd_hopper"] * 2
    assert names(False, False, False) == forwards
    assert names(True, True, True) == ["bwd_hopper", "bwd_prepare", *forwards]
    assert names(False, False, True) == ["bwd_stats", "bwd_dkdv", *forwards]
    for has_many_keys in (False, True):
        request = tilelang_attention._fwd_request(*where, has_many_keys)
        assert request in tilelang_attention._soon_requests(*where, (False,) * 3)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_packed_forward_says_whether_a_backward_will_follow(
    device, monkeypatch, nothing_remembered, wanted
):
    needs = []
    get_kernel = tilelang_attention.get_kernel

    def asking(build, device, soon=list, **key):
        soon()
        return get_kernel(build, device, **key)

    monkeypatch.setattr(tilelang_attention, "get_kernel", asking)
    monkeypatch.setattr(tilelang_attention, "_soon_requests", lambda *args: needs.append(args[-1]))
    qkv = torch.randn(1, 20, 4, 16, device=device, requires_grad=wanted)
    packed_attention(qkv, 2, kernel="tilelang")
    assert needs == [(wanted,) * 3]


def test_one_compile_for_all_lengths_batches_heads_and_strides(device):
    shapes = [
        {"Sq": 64},
        {"Sq": 70, "Skv": 33, "B": 1, "Hq": 6, "Hkv": 2},
        {"Sq": 5, "D": 24, "layout": "bshd"},
        {"Sq": 33, "layout": "step2"},
        {"Sq": 1, "B": 1, "Hq": 1, "D": 31},
    ]
    compiled = []
    for shape in shapes:
        q, k, v = make_qkv(**{"D": 32, **shape}, device=device)
        run_attention("tilelang", q, k, v, torch.ones_like(q), is_causal=True)
        compiled.append(set(tilelang_runtime._kernels))
    assert all(names == compiled[0] for names in compiled)


@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="tilelang")
def test_threads_on_a_cold_cache(device, monkeypatch, nothing_remembered):
    monkeypatch.setattr(tilelang_runtime, "_kernels", {})
    q, k, v = make_qkv(1, 2, 2, 40, 40, 16, device=device)
    dout = torch.ones_like(q)
    results = []

    def run():
        results.append(run_attention("tilelang", q, k, v, dout, is_causal=True))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result, name in itertools.product(results, RESULTS):
        assert torch.equal(getattr(result, name), getattr(results[0], name)), name


# The tiles
