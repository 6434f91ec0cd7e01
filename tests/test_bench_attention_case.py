"""Attention's benchmark on one case: what is checked and timed, and what becomes of a failure."""

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minitx.bench import attention_check, attention_measure, attention_variants
from minitx.bench.attention_measure import Skips, add_ratios, measure_case
from minitx.bench.attention_variants import HOST_PASSES, Case, Variant, make_variant
from minitx.kernels import attention
from minitx.testing import make_qkv, oracle_attention, run_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASE = Case(2, 6, 2, 1, 4, "float32", True, DEVICE)
NO_FA3 = {"cpu": "it runs on GPUs only", "cuda": "it computes float16 and bfloat16 only"}[DEVICE]


def measure(case, *kernels, skips=None):
    """{(kernel, pass): row}"""
    with tempfile.TemporaryDirectory() as caches:
        rows = measure_case(lambda _: None, case, kernels, skips or Skips(), 1.0, Path(caches))
    return {(r["kernel"], r["pass"]): r for r in rows}


def test_flops():
    # 2 batches, 3 heads, 8 x 8 scores, 4 wide, 2 products of 2 operations: 6144.
    full = Case(2, 8, 3, 3, 4, "float32", False, "cpu")
    assert [full.flops(name) for name in full.passes] == [6144, 15360, 21504]
    causal = replace(full, is_causal=True)
    assert [causal.flops(name) for name in causal.passes] == [3072, 7680, 10752]
    assert causal.flops("host forward") is None
    # Of 8 keys the last 2 queries see 7 and 8, each counted as half a key fewer: 14.
    chunk = replace(causal, queries=2)
    assert [chunk.flops(name) for name in chunk.passes] == [
        2 * 3 * 14 * 16 * n for n in (1, 2.5, 3.5)
    ]
    assert replace(full, queries=2).flops("forward") == 2 * 3 * 16 * 16


def test_rows_are_checked_timed_and_set_in_relation():
    rows = measure(CASE, "eager", "sdpa", "triton-softmax")
    assert len(rows) == 9
    for (_, name), r in rows.items():
        assert r["status"] == "ok"
        assert 0 < r["p20_ms"] <= r["median_ms"] <= r["p80_ms"]
        assert (r["late_share"] is None) == (DEVICE == "cpu")  # which waits for no host
        assert r["tflop_per_s"] == pytest.approx(CASE.flops(name) / r["median_ms"] / 1e9)
        assert 0 <= r["max_error"] <= r["error_budget"] < 1e-4
        assert r["first_call_s"] > 0
        peers = [rows[peer, name]["median_ms"] for peer in ("eager", "sdpa")]
        assert r["vs_sdpa"] == pytest.approx(peers[1] / r["median_ms"])
        assert r["vs_best_peer"] == pytest.approx(min(peers) / r["median_ms"])


@pytest.mark.parametrize(("sample_ms", "rounds"), [(100.0, 2), (60.0, 2), (20.0, 4)])
def test_kernels_take_turns(monkeypatch, sample_ms, rounds):
    """Until each has had its 100 ms, but as many rounds forwards as backwards."""
    kernels = ("eager", "sdpa", "triton-softmax", "auto")
    timed = []

    def sample(one, name, budget_ms, _caches):
        assert budget_ms == 25.0
        timed.append((one.kernel, name))
        return attention_measure.timing.Samples([sample_ms])

    monkeypatch.setattr(attention_measure.KernelOnCase, "_sample", sample)
    case = replace(CASE, passes=("forward", "backward"))
    measure_case(lambda _: None, case, kernels, Skips(), 100.0, Path())
    orders = ["0123", "0321", "2301", "2103"][:rounds]
    turns = [kernels[int(kernel)] for order in orders for kernel in order]
    assert timed == [(kernel, name) for kernel in turns for name in case.passes]


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 8])
def test_no_kernel_follows_itself(count):
    kernels = [f"kernel {number}" for number in range(count)]
    rounds = range(attention_measure.ROUNDS)
    turns = [each for number in rounds for each in attention_measure.in_turn(kernels, number)]
    assert all(a != b for a, b in itertools.pairwise(turns))


def test_no_ratio_without_the_row_it_stands_on():
    rows = [
        {"kernel": "sdpa", "pass": "forward", "status": "failed: x", "median_ms": None},
        {"kernel": "triton", "pass": "forward", "status": "ok", "median_ms": 2.0},
    ]
    add_ratios(rows)
    assert (rows[1]["vs_sdpa"], rows[1]["vs_best_peer"]) == (None, None)


@pytest.mark.parametrize("Sq", [11, 7])
@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_give_what_the_whole_gives(monkeypatch, is_causal, Sq):
    monkeypatch.setattr(attention_check, "BLOCK_ELEMENTS", 3 * 11 * 2)  # 3 queries of 11 keys
    q, k, v = make_qkv(1, 2, 1, Sq, 11, 4)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3))
    whole = {
        "oracle": oracle_attention(q, k, v, dout, is_causal=is_causal),
        "eager": run_attention("eager", q, k, v, dout, is_causal=is_causal, return_lse=False),
    }
    for how, tolerance in (("oracle", 1e-12), ("eager", 1e-5)):
        blocks = attention_check.in_blocks(how, q, k, v, dout, is_causal=is_causal)
        for name in ("out", "dq", "dk", "dv"):
            got, want = getattr(blocks, name), getattr(whole[how], name)
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def top_left(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def test_fewer_queries_than_keys(monkeypatch):
    case = replace(CASE, queries=3, passes=("forward",))
    rows = measure(case, "eager", "sdpa")
    for r in rows.values():
        assert (r["status"], r["queries"], r["seq_len"]) == ("ok", 3, 6)
        assert r["tflop_per_s"] == pytest.approx(case.flops("forward") / r["median_ms"] / 1e9)
    assert {r["queries"] for r in measure(CASE, "eager").values()} == {6}
    broken(top_left, monkeypatch)
    assert measure(case, "triton")["triton", "forward"]["status"].startswith("wrong: out")


def test_pytorchs_own_object_for_the_last_queries():
    """Which a backend takes in place of a mask: it means what this project's causal rule does."""
    q, k, v = make_qkv(2, 4, 2, 5, 9, 8)
    out = attention_variants._sdpa_lower_right(q, k, v)
    torch.testing.assert_close(out, right(q, k, v))


@pytest.mark.parametrize("kernel", ["sdpa", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient"])
@pytest.mark.parametrize("queries", [None, 1, 3])
def test_efficient_is_asked_without_a_mask_for_the_last_queries(monkeypatch, kernel, queries):
    asked = []
    monkeypatch.setattr(attention_variants, "_sdpa_lower_right", lambda q, k, v: asked.append(q))
    monkeypatch.setattr(attention_variants, "_attention", lambda *_: None)
    make_variant(kernel, replace(CASE, queries=queries)).call("q", "k", "v")
    assert bool(asked) == (queries == 3 and kernel == "sdpa-efficient")


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is a little too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        return dout * 1.01


class NoGradient(WrongGradient):
    @staticmethod
    def backward(ctx, dout):
        raise RuntimeError("no luck\nat all")


def broken(call, monkeypatch):
    """Makes `call` the kernel under the name triton."""

    def make(kernel, case):
        return Variant(call) if kernel == "triton" else make_variant(kernel, case)

    monkeypatch.setattr(attention_measure, "make_variant", make)


def right(q, k, v):
    return attention(q, k, v, kernel="eager")


def off_in_one_element(q, k, v):
    out = right(q, k, v).clone()
    out[-1, -1, -1, -1] += 1e-4  # the last head of the last batch, at the last position
    return out


@pytest.mark.parametrize(
    ("call", "wrong_tensor"),
    [
        (off_in_one_element, "out"),
        (lambda q, k, v: attention(q, k, v, kernel="eager", is_causal=False), "out"),
        (lambda q, k, v: right(WrongGradient.apply(q), k, v), "dq"),
        (lambda q, k, v: right(q, WrongGradient.apply(k), v), "dk"),
        (lambda q, k, v: right(q, k, WrongGradient.apply(v)), "dv"),
    ],
    ids=["one element", "not causal", "dq", "dk", "dv"],
)
def test_a_wrong_result_is_not_timed(monkeypatch, call, wrong_tensor):
    broken(call, monkeypatch)
    rows = measure(CASE, "sdpa", "triton")
    for name in CASE.passes:
        r = rows["triton", name]
        if name == "forward" and wrong_tensor != "out":
            assert r["status"] == "ok"
        else:
            assert r["status"].startswith(f"wrong: {wrong_tensor} errs by ")
            assert (r["median_ms"], r["tflop_per_s"]) == (None, None)
        assert rows["sdpa", name]["status"] == "ok"
    host = measure(replace(CASE, passes=HOST_PASSES), "triton")
    assert host["triton", "host both"]["status"].startswith(f"wrong: {wrong_tensor}")


def test_what_fails_is_a_row_and_no_more_than_that(monkeypatch):
    broken(lambda q, k, v: right(NoGradient.apply(q), k, v), monkeypatch)
    rows = measure(CASE, "triton", "sdpa", "fa3", skips={(CASE, "sdpa"): "failed: it crashed"})
    statuses = {key: r["status"] for key, r in rows.items()}
    assert statuses == {
        ("triton", "forward"): "ok",
        ("triton", "backward"): "failed: no luck at all",
        ("triton", "both"): "failed: no luck at all",
        **{("sdpa", name): "failed: it crashed" for name in CASE.passes},
        **{("fa3", name): NO_FA3 for name in CASE.passes},
    }
    assert rows["triton", "forward"]["vs_sdpa"] is None


def test_out_of_memory_is_a_row(monkeypatch):
    def no_memory(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory. CUDA error: never mind")

    broken(no_memory, monkeypatch)
    assert {r["status"] for r in measure(CASE, "triton").values()} == {"out of memory"}


def test_an_error_of_the_device_ends_the_process(monkeypatch):
    """Nothing that comes after it can be trusted."""

    def illegal(q, k, v):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    broken(illegal, monkeypatch)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(CASE, "triton")


def test_host_overhead():
    rows = measure(replace(CASE, passes=HOST_PASSES, device="cpu"), "sdpa")
    for name in ("host forward", "host both"):
        assert rows["sdpa", name]["status"] == "ok"
        assert 0 < rows["sdpa", name]["median_ms"] < 100
        assert rows["sdpa", name]["tflop_per_s"] is None
    assert rows["sdpa", "graph forward"]["status"] == "CUDA graphs need a GPU"
