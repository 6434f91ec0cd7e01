"""python -m minitx.bench attention: what it writes, checks and refuses. Its figures are no test."""

import csv
import re
import time

import pytest
import torch

from minitx.bench import __main__ as bench
from minitx.bench import attention as attention_bench
from minitx.bench import attention_measure
from minitx.bench.attention import AttentionBenchConfig, make_cases
from minitx.bench.attention_measure import KernelOnCase
from minitx.bench.attention_report import STYLES
from minitx.bench.attention_variants import HOST_PASSES, KERNELS


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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
        (["--head_dims", "64,257"], "--head_dims must be 256 or less, got 257"),
        (["--budget_ms", "0"], "--budget_ms must be above 0, got 0"),
        (["--timeout_s=-1"], "--timeout_s must be above 0, got -1"),
        (["--groups", "3"], "--groups 3 does not divide"),
        (["--queries", "0"], "--queries must be 1 or more, got 0"),
        (["--batches", "1,0"], "--batches must be 1 or more, got 0"),
        (["--queries", "9", "--seq_lens", "8,9"], "--queries: 9 is no fewer than any of --seq"),
        (["--queries", "4", "--passes", "both"], "--queries: only forwards are measured, got"),
        (["--plot", "nowhere.csv"], "nowhere.csv"),
        (["--plot", __file__], f"--plot {__file__} is no attention.csv of this command; give one"),
        (["--out_dir", ""], "--out_dir is empty; give a path, or leave it out"),
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
