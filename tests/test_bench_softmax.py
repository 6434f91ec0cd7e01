"""python -m minitx.bench softmax: what it writes, checks and refuses. Its figures are no test."""

import csv
import re
import sys
import types

import pytest
import torch

from minitx.bench import __main__ as bench
from minitx.bench import softmax as softmax_bench
from minitx.bench import timing

SMALL = ["--device", "cpu", "--elements", "400", "--budget_ms", "1"]


@pytest.fixture(autouse=True)
def small_copy(monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**16)


def run(tmp_path, *flags):
    return bench.main(["softmax", *SMALL, "--out_dir", str(tmp_path), *flags])


def read(tmp_path):
    with open(tmp_path / "softmax.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_table_and_picture(tmp_path, capsys):
    assert run(tmp_path, "--kernels", "torch,eager", "--widths=20,40", "--dtypes", "float16") == 0
    rows = read(tmp_path)
    found = {(r["kernel"], r["is_causal"], r["columns"], r["direction"]) for r in rows}
    assert found == {
        (kernel, causal, columns, direction)
        for kernel in ("torch", "eager")
        for causal in ("False", "True")
        for columns in ("20", "40")
        for direction in ("forward", "backward", "both")
    }
    for r in rows:
        assert r["status"] == "ok"
        assert float(r["p20_ms"]) <= float(r["median_ms"]) <= float(r["p80_ms"])
        assert float(r["tb_per_s"]) == pytest.approx(
            int(r["bytes"]) / float(r["median_ms"]) / 1e9, rel=1e-6
        )
        assert float(r["max_error"]) <= float(r["error_budget"])
        assert r["torch"] == torch.__version__
        assert float(r["first_call_s"]) > 0
    explained = re.findall(r"\w+", (softmax_bench.__doc__ or "").partition("Columns")[2])
    assert set(rows[0]) <= set(explained)
    assert (tmp_path / "softmax.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "float16 backward, causal: TB/s" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 100


def test_bytes_that_must_move():
    full = softmax_bench.Case("float32", False, 10, 40, "cpu")
    assert full.shape == (1, 4, 10)
    # 40 elements of 4 bytes: one read and one write; two reads and one write.
    assert [full.bytes_that_must_move(d) for d in softmax_bench.DIRECTIONS] == [320, 480, 800]
    causal = softmax_bench.Case("bfloat16", True, 4, 32, "cpu")
    assert causal.shape == (2, 4, 4)
    # Of 2 x 16 elements 2 x 10 are visible: 20 + 32 elements of 2 bytes, and 40 + 32.
    assert [causal.bytes_that_must_move(d) for d in softmax_bench.DIRECTIONS] == [104, 144, 248]


def test_out_of_memory_and_failures_are_rows(tmp_path, monkeypatch, capsys):
    errors = {
        "torch": torch.OutOfMemoryError("no memory"),
        "eager": RuntimeError("no luck\nat all"),
    }

    def broken(kernel, case):
        raise errors[kernel]

    monkeypatch.setattr(softmax_bench, "make_softmax", broken)
    # A kernel of this project that fails is a failure of the run; a peer's memory is not.
    assert run(tmp_path, "--kernels", "torch,eager", "--widths", "20") == 3
    statuses = {r["kernel"]: r["status"] for r in read(tmp_path)}
    assert statuses == {"torch": "out of memory", "eager": "failed: no luck"}
    assert "memory  failed" in capsys.readouterr().out


def test_quack_gets_rows_and_is_asked_for_nothing_it_lacks(tmp_path, monkeypatch, capsys):
    seen = []

    def quack(x):
        seen.append(tuple(x.shape))
        return torch.softmax(x, -1)

    package = types.ModuleType("quack.softmax")
    package.softmax = quack  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.softmax", package)
    monkeypatch.setattr(softmax_bench, "QUACK_MAX_WIDTH", 20)
    monkeypatch.setattr(softmax_bench, "QUACK_DEVICE", "cpu")
    assert run(tmp_path, "--kernels", "torch,quack", "--widths=20,40", "--dtypes", "float32") == 0
    assert set(seen) == {(20, 20)}  # [rows, N], though a tensor of the benchmark has three dims
    statuses = {
        (r["columns"], r["is_causal"]): r["status"]
        for r in read(tmp_path)
        if r["kernel"] == "quack"
    }
    assert statuses.pop(("20", "False")) == "ok"
    assert set(statuses.values()) == {
        "a cluster has no room for a row of y and one of dy",
        "it has no causal softmax",
    }
    assert "rows x columns  torch  quack" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["values", "gradient", "masked"])
def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch, where):
    def wrong(kernel, case):
        def function(x):
            y = torch.softmax(x, -1)
            if where == "values":
                return y + 1e-3
            if where == "gradient":
                return y.detach() + 2 * (y - y.detach())
            return y  # right, but for the causal mask

        return function

    monkeypatch.setattr(softmax_bench, "make_softmax", wrong)
    causal = "true" if where == "masked" else "false"
    flags = ["--kernels", "eager", "--widths", "20", "--dtypes", "float32", "--causal", causal]
    assert run(tmp_path, *flags) == 3
    for r in read(tmp_path):
        assert (r["status"], r["median_ms"]) == ("wrong", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kernels", "fast"], "--kernels: unknown 'fast'; expected any of torch"),
        (["--dtypes", "int8"], "--dtypes: unknown 'int8'"),
        (["--widths", "0"], "must be 1 or more"),
        (["--elements", "0"], "must be 1 or more"),
        (["--budget_ms", "0"], "--budget_ms must be above 0, got 0"),
        (["--device", "tpu"], "--device: unknown 'tpu'; expected cuda or cpu"),
        (["--out_dir", ""], "--out_dir is empty; give a path, or leave it out"),
        (["--kernle", "torch"], "unrecognized arguments: --kernle"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, flags, message):
    assert run(tmp_path, *flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("minitx.bench softmax: error: ")


def test_results_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "softmax.csv").write_text("kept")
    assert run(tmp_path, "--kernels", "torch", "--widths", "20") == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert (tmp_path / "softmax.csv").read_text() == "kept"
    assert run(tmp_path, "--kernels", "torch", "--widths", "20", "--overwrite") == 0
    assert len(read(tmp_path)) == 12


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["sofmax"], 2), (["--help"], 0)])
def test_the_dispatcher(capsys, argv, code):
    assert bench.main(argv) == code
    captured = capsys.readouterr()
    assert "softmax" in (captured.err if code else captured.out)
