"""python -m minitx.bench attention: what it writes, checks and refuses. Its figures are no test."""

import csv
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minitx.bench import __main__ as bench
from minitx.bench import attention as attention_bench
from minitx.bench import attention_check, attention_measure, attention_variants
from minitx.bench.attention import AttentionBenchConfig, make_cases
from minitx.bench.attention_measure import KernelOnCase, Skips, add_ratios, measure_case
from minitx.bench.attention_report import STYLES
from minitx.bench.attention_variants import HOST_PASSES, KERNELS, Case, Variant, make_variant
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


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- one case ------------------------------------------------------------------------------------


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


# -- the command ---------------------------------------------------------------------------------


def run(tmp_path, *flags):
    return bench.main(["attention", "--device", "cpu", "--out_dir", str(tmp_path), *flags])


def test_csv_tables_and_picture(tmp_path, capsys):
    shapes = ["--seq_lens", "4,6", "--tokens=12", "--heads", "2", "--head_dims=4", "--groups=1,2"]
    flags = [*shapes, "--kernels", "eager,sdpa,sdpa-flash", "--budget_ms=1", "--label", "mine"]
    assert run(tmp_path, *flags) == 0
    rows = read(tmp_path / "attention.csv")
    columns = ("kernel", "pass", "batch", "seq_len", "q_heads", "kv_heads")
    found = {tuple(r[column] for column in columns) for r in rows}
    assert found == {
        (kernel, name, batch, length, "2", kv_heads)
        for kernel in ("eager", "sdpa", "sdpa-flash")
        for name in ("forward", "backward", "both")
        for batch, length in (("3", "4"), ("2", "6"))
        for kv_heads in ("1", "2")
    }
    assert len(rows) == len(found)
    for r in rows:
        assert (r["status"] == "ok") == (r["kernel"] != "sdpa-flash")
        assert (r["torch"], r["label"]) == (torch.__version__, "mine")
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    explained = re.findall(r"\w+", (attention_bench.__doc__ or "").partition("Columns")[2])
    assert set(rows[0]) <= set(explained)
    out = capsys.readouterr().out
    assert "backward, D 4, 2 : 1 heads, float32, causal: TFLOP/s" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 100

    # The picture and the tables are drawn from the CSV alone.
    (tmp_path / "attention.png").unlink()
    assert run(tmp_path, "--plot", str(tmp_path / "attention.csv")) == 0
    assert (tmp_path / "attention.png").exists()
    again = capsys.readouterr().out
    assert again.splitlines()[:-1] == out.splitlines()[1:-1]

    assert run(tmp_path, *flags) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert read(tmp_path / "attention.csv") == rows


def test_a_failure_of_this_projects_kernels_is_the_commands(tmp_path, monkeypatch):
    failing = ["sdpa"]

    def all_rows(cases, kernels, *_):
        for case in cases:
            reasons = {k: "failed: boom" if k in failing else "out of memory" for k in kernels}
            yield [row for k in kernels for row in KernelOnCase(k, case, reasons[k]).rows()]

    monkeypatch.setattr(attention_bench, "measure_all", all_rows)
    flags = ["--kernels", "sdpa,triton", "--overwrite"]
    assert run(tmp_path, *flags) == 0  # a peer's failure, or memory, is no fault of ours
    failing.append("triton")
    assert run(tmp_path, *flags) == 3


@pytest.mark.parametrize("quick", [False, True])
def test_the_shapes_of_a_gpu(quick):
    *cases, host_64, host_128 = make_cases(AttentionBenchConfig(quick=quick), "cuda")
    lengths = [1024, 4096, 16384] if quick else [512 * 2**i for i in range(8)]
    assert [(c.seq_len, c.head_dim) for c in cases] == [(S, D) for S in lengths for D in (64, 128)]
    for c in cases:
        assert c.batch * c.seq_len == max(16384, c.seq_len)
        assert (c.q_heads, c.kv_heads) == ((32, 32) if c.head_dim == 64 else (16, 16))
        assert (c.dtype, c.is_causal) == ("bfloat16", True)
        assert c.passes == (("forward", "backward") if quick else ("forward", "backward", "both"))
    for host, head_dim in ((host_64, 64), (host_128, 128)):
        assert host.passes == HOST_PASSES
        assert (host.head_dim, host.batch, host.q_heads) == (head_dim, 1, 1)
        assert 16 < host.seq_len < 64  # not decoding, which has kernels of its own, and tiny


def test_chunks_of_every_length_and_batch():
    config = AttentionBenchConfig(
        queries=[64, 1, 4096], seq_lens=[4096, 16384], batches=[1, 8], head_dims=[64]
    )
    found = [(c.seq_len, c.batch, c.queries) for c in make_cases(config, "cuda")]
    assert found == [
        *((4096, batch, queries) for batch in (1, 8) for queries in (64, 1)),
        *((16384, batch, queries) for batch in (1, 8) for queries in (64, 1, 4096)),
    ]
    assert {c.passes for c in make_cases(config, "cuda")} == {("forward",)}


def test_tables_of_chunks_and_no_picture(tmp_path, capsys):
    flags = ["--queries", "1,3", "--seq_lens", "6,8", "--batches=1,2", "--heads=2", "--head_dims=4"]
    assert run(tmp_path, *flags, "--kernels", "eager,sdpa", "--budget_ms=1") == 0
    rows = read(tmp_path / "attention.csv")
    assert {(r["seq_len"], r["queries"], r["batch"], r["status"]) for r in rows} == {
        (keys, queries, batch, "ok") for keys in "68" for queries in "13" for batch in "12"
    }
    out = capsys.readouterr().out
    for last in ("the last query", "the last 3 queries"):
        title = f"forward, D 4, 2 heads, float32, causal, {last}: TFLOP/s"
        header, *lines = out.partition(title)[2].split("\n\n")[0].strip().splitlines()
        assert header.split() == ["1x6", "2x6", "1x8", "2x8"]
        assert [line.split()[0] for line in lines] == ["eager", "sdpa"]
        assert all(len(line.split()) == 5 for line in lines)
    assert not (tmp_path / "attention.png").exists()


def test_the_hosts_time_alone(tmp_path, capsys):
    flags = ["--passes", "host", "--kernels", "sdpa,eager", "--head_dims", "16,32"]
    started = time.perf_counter()
    assert run(tmp_path, *flags, "--budget_ms", "1") == 0
    whole_ms = (time.perf_counter() - started) * 1e3
    rows = read(tmp_path / "attention.csv")
    assert [(r["head_dim"], r["kernel"], r["pass"]) for r in rows] == [
        (head_dim, kernel, name)
        for head_dim in ("16", "32")
        for kernel in ("sdpa", "eager")
        for name in HOST_PASSES
    ]
    for r in rows:
        timed = r["pass"] != "graph forward"  # which needs a GPU
        assert (r["status"] == "ok") == timed
        assert not timed or 0 < float(r["median_ms"]) < whole_ms / attention_measure.HOST_CALLS
    printed = capsys.readouterr().out
    assert "Tiny tensors, D 16, so that the host's work is all that counts" in printed
    assert "Tiny tensors, D 32" in printed
    assert not (tmp_path / "attention.png").exists()  # it would show lengths, and there are none
    assert run(tmp_path, "--plot", str(tmp_path / "attention.csv")) == 0
    assert not (tmp_path / "attention.png").exists()


def test_a_cpu_times_its_host_where_it_is_asked_to():
    assert all(c.passes != HOST_PASSES for c in make_cases(AttentionBenchConfig(), "cpu"))
    (host,) = make_cases(AttentionBenchConfig(passes=["host"]), "cpu")
    assert host.passes == HOST_PASSES


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kernels", "fast"], "--kernels: unknown 'fast'; expected any of eager, sdpa"),
        (["--dtype", "int8"], "--dtype: unknown 'int8'"),
        (["--passes", "sideways"], "--passes: unknown 'sideways'"),
        (["--seq_lens", "8,0"], "--seq_lens must be 1 or more, got 0"),
        (["--heads", "0"], "--heads must be 1 or more, got 0"),
        (["--groups", "3"], "--groups 3 does not divide"),
        (["--queries", "0"], "--queries must be 1 or more, got 0"),
        (["--batches", "1,0"], "--batches must be 1 or more, got 0"),
        (["--queries", "9", "--seq_lens", "8,9"], "--queries: 9 is no fewer than any of --seq"),
        (["--queries", "4", "--passes", "both"], "--queries: only forwards are measured, got"),
        (["--plot", "nowhere.csv"], "nowhere.csv"),
        (["--kernle", "sdpa"], "unrecognized arguments: --kernle"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, flags, message):
    assert run(tmp_path, *flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("minitx.bench attention: error: ")


def test_every_kernel_has_a_line_of_its_own():
    assert set(STYLES) == set(KERNELS)
    assert len({style[:2] for style in STYLES.values()}) == len(STYLES)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    kernels = ["eager", "sdpa", "sdpa-flash", "sdpa-efficient", "flex", "triton", "tilelang"]
    flags = ["--seq_lens", "256,1000", "--tokens", "2000", "--head_dims", "64", "--heads", "4"]
    out = ["--out_dir", str(tmp_path), "--groups=1,4", "--budget_ms", "5"]
    assert bench.main(["attention", *flags, *out, "--kernels", ",".join(kernels)]) == 0
    rows = read(tmp_path / "attention.csv")
    for r in rows:
        if r["kernel"] in ("eager", "sdpa", "triton", "tilelang"):
            assert r["status"] == "ok"
            assert r["pass"] in HOST_PASSES or float(r["peak_gib"]) > 0
            assert (r["late_share"] == "") == (r["pass"] in ("host forward", "host both"))
    kernels.remove("flex")  # which compiles for every shape
    chunks = [*flags, *out, "--overwrite", "--queries", "1,70", "--kernels", ",".join(kernels)]
    assert bench.main(["attention", *chunks]) == 0
    for r in read(tmp_path / "attention.csv"):
        # That one takes no grouped heads.
        assert r["status"] == "ok" or r["kernel"] == "sdpa-efficient"
