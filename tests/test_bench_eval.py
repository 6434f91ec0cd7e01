"""python -m minitx.bench eval: the CSV, its tables and picture against the eval.json they come of.

The runs are eval.py's own on a tiny model; what a GPU would add (memory that ends) is put in.
"""

import json
import shutil
from pathlib import Path

import pytest
from eval_runs import TEXT, make_run, report_of, run_eval

from minitx import eval_plots
from minitx.bench import __main__ as bench
from minitx.bench._common import read_csv
from minitx.bench.eval import collect
from minitx.bench.table import render


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Path]:
    """eval.py on three kernels, two of them compared with the third, at two contexts."""
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "tiny")
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    settings = ("--checkpoint", run, "--data.source", text, "--context_lengths", "64,8")
    settings += ("--rope_scaling", "yarn", "--paired_targets", 0, "--probe_tokens", 0)
    out = {name: folder / name for name in ("sdpa", "auto", "eager")}
    compare = {"sdpa": "eager", "auto": "eager", "eager": "none"}
    for kernel in out:
        which = ("--kernel", kernel, "--compare", compare[kernel], "--out_dir", out[kernel])
        assert run_eval(*settings, *which) == 0
    return out


@pytest.fixture
def runs(measured, tmp_path) -> dict[str, Path]:
    """Copies that a test may change."""
    return {
        name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in measured.items()
    }


def change(folder: Path, edit) -> None:
    report = report_of(folder)
    edit(report)
    (folder / "eval.json").write_text(json.dumps(report))


def run_bench(runs, csv_path: Path, *flags: str) -> int:
    return bench.main(["eval", *map(str, runs), "--out", str(csv_path), *flags])


def test_the_csv_holds_what_eval_json_holds(runs, tmp_path, capsys):
    path = tmp_path / "gpu" / "eval.csv"
    # A run's folder, an eval.json and the folder of one, all mean the same.
    (tmp_path / "run").mkdir()
    shutil.copytree(runs["auto"], tmp_path / "run" / "eval")
    found = [tmp_path / "run", runs["sdpa"] / "eval.json", runs["eager"]]
    assert run_bench(found, path) == 0
    assert capsys.readouterr().out == f"wrote {path} and {path.with_suffix('.png')}\n"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = read_csv(path)
    assert sorted((r["kernel"], r["context_length"]) for r in rows) == sorted(
        (kernel, length) for kernel in runs for length in ("8", "64")
    )
    for row in rows:
        report = report_of(runs[row["kernel"]])  # of its own run, not where it was a baseline
        length = int(row["context_length"])
        (want,) = (
            r
            for r in report["contexts"]
            if (r["kernel"], r["context_length"]) == (row["kernel"], length)
        )
        for name in ("nll", "perplexity", "bits_per_byte", "tok_per_s", "peak_gib"):
            assert float(row[name]) == want[name]
        for name in ("stride", "tokens_scored", "bytes_scored"):
            assert int(row[name]) == want[name]
        for name in ("device", "torch", "triton", "tilelang", "commit"):
            assert row[name] == str(report["environment"][name] or "")
        assert (row["status"], row["trained_context"], row["step"]) == ("ok", "32", "7")
        assert (row["rope_scaling"], row["rope_factor"]) == ("yarn", "2.0")
        assert (row["checkpoint"], row["text"]) == ("tiny/step_00000007", "text.txt")
        parity = {c["context_length"]: c for c in report["comparisons"]}.get(length)
        if row["kernel"] == "eager":
            assert parity is None
            assert row["baseline"] == row["delta_nll"] == row["nll_budget"] == ""
            assert row["parity_passed"] == ""
            continue
        assert parity is not None
        assert (row["baseline"], row["parity_passed"]) == ("eager", "True")
        assert float(row["delta_nll"]) == parity["delta_nll"]
        assert float(row["nll_budget"]) == parity["budget"]


def test_memory_that_ended_and_parity_that_failed(runs, tmp_path):
    def no_memory(report):
        long = report["contexts"][0]
        report["contexts"][0] = {n: long[n] for n in ("kernel", "context_length", "stride")}
        report["contexts"][0]["status"] = "out of memory"

    def fail(report):
        report["comparisons"][1] |= {"passed": False, "delta_nll": 0.5}

    def infinite(report):
        report["contexts"][2] |= {"perplexity": None, "non_finite": {"perplexity": "inf"}}
        report["contexts"][2]["nll"] += 0.25  # the first kernel's need not be the lowest

    change(runs["eager"], no_memory)
    change(runs["sdpa"], fail)
    change(runs["auto"], infinite)
    path = tmp_path / "eval.csv"
    assert run_bench([runs[name] for name in ("auto", "sdpa", "eager")], path) == 0
    rows = {(r["kernel"], r["context_length"]): r for r in read_csv(path)}
    lost = rows["eager", "64"]
    assert (lost["status"], lost["nll"], lost["tok_per_s"]) == ("out of memory", "", "")
    assert rows["auto", "8"]["perplexity"] == "inf"
    assert (rows["sdpa", "8"]["parity_passed"], rows["sdpa", "8"]["delta_nll"]) == ("False", "0.5")

    losses, speeds, memories = (part.splitlines() for part in render(path).split("\n\n")[1:6:2])
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in losses[2:]]
    assert [[*line[:3], *line[4:6]] for line in cells] == [
        ["8", "4", "yarn x 2", f"{len(TEXT) - 1}", "inf"],
        [
            "64",
            "32",
            "yarn x 2",
            f"{len(TEXT) - 1}",
            f"{float(rows['auto', '64']['perplexity']):.4f}",
        ],
    ]
    assert {line[3] for line in cells} == {"text.txt (all)"}
    budget = float(rows["sdpa", "8"]["nll_budget"])
    assert cells[0][8] == f"FAILED 5.0e-01 ({budget:.1e})"
    nll = [float(rows[k, "8"]["nll"]) for k in runs]
    assert cells[0][9] == f"{max(nll) - min(nll):.1e}"
    assert speeds[0] == memories[0] == "| context | auto | sdpa | eager |"
    assert speeds[3].endswith("| out of memory |")
    assert memories[3].endswith("| out of memory |")
    peak = float(rows["sdpa", "8"]["peak_gib"])
    assert memories[2].split("|")[3].strip() == f"{peak:.2f}"


def test_a_baseline_without_memory_is_held_to_the_truth(runs, tmp_path):
    """Its row and the comparison's empty half come from one eval.json."""

    def no_baseline(report):
        del report["contexts"][1]["nll"]
        report["contexts"][1]["status"] = "out of memory"
        report["comparisons"][0]["delta_nll"] = None

    change(runs["sdpa"], no_baseline)
    path = tmp_path / "eval.csv"
    assert run_bench([runs["sdpa"]], path) == 0
    first_long = render(path).splitlines()[5]
    assert first_long.startswith("| 64 |")
    budget = report_of(runs["sdpa"])["comparisons"][0]["budget"]
    assert first_long.endswith(f"| - ({budget:.1e}) | - |")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.update(step=8), "step 8"),
        (lambda r: r.update(dtype="bfloat16"), "dtype bfloat16"),
        (lambda r: r["text"].update(source="other.txt"), "text other.txt"),
        (lambda r: r["environment"].update(device="another"), "device another"),
        (lambda r: r["contexts"][0].update(tokens_scored=9), "tokens_scored"),
        (lambda r: r.update(rope_factor=4.0), "rope_factor"),
        (lambda r: r.update(contexts=[]), "holds no perplexity"),
        (lambda r: r.pop("rope_scaling"), "is no eval.json of this eval.py"),
    ],
)
def test_runs_that_do_not_belong_together(runs, tmp_path, capsys, edit, message):
    change(runs["sdpa"], edit)
    path = tmp_path / "eval.csv"
    assert run_bench([runs["auto"], runs["sdpa"]], path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(runs["sdpa"]) in error
    assert error.count("\n") == 1
    assert not path.exists()


def test_another_context_may_be_of_another_text(runs, tmp_path):
    """A window that is longer than the validation text, say."""

    def other(report):
        report["text"] |= {"source": "hf:long", "split": "train"}
        report["rope_factor"] = 4.0
        report["contexts"] = [r | {"context_length": 512} for r in report["contexts"][:2]]
        report["comparisons"] = []

    change(runs["auto"], other)
    path = tmp_path / "eval.csv"
    assert run_bench([runs["sdpa"], runs["auto"]], path) == 0
    lines = render(path).splitlines()
    assert [line.split(" | ")[2:4] for line in lines[4:7]] == [
        ["yarn x 2", "text.txt (all)"],
        ["yarn x 2", "text.txt (all)"],
        ["yarn x 4", "hf:long (train)"],
    ]


def test_the_same_kernel_twice(runs, tmp_path, capsys):
    other = shutil.copytree(runs["sdpa"], tmp_path / "again")
    assert run_bench([runs["sdpa"], other], tmp_path / "eval.csv") == 2
    assert "both hold kernel sdpa at context 64" in capsys.readouterr().err
    # As a baseline it may come again: the first one stays.
    rows = collect([runs["sdpa"] / "eval.json", runs["auto"] / "eval.json"])
    (eager,) = (r for r in rows if (r["kernel"], r["context_length"]) == ("eager", 8))
    (want,) = (
        r
        for r in report_of(runs["sdpa"])["contexts"]
        if (r["kernel"], r["context_length"]) == ("eager", 8)
    )
    assert eager["tok_per_s"] == want["tok_per_s"]


def test_mistakes_are_one_line(runs, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "eval.json").write_bytes(b'{"contexts": [')
    change(runs["eager"], lambda r: [row.update(status="out of memory") for row in r["contexts"]])
    there = tmp_path / "there.csv"
    there.write_text("kept")
    for reports, path, message in (
        ([tmp_path / "nowhere"], tmp_path / "a.csv", "no eval.json there"),
        ([damaged], tmp_path / "a.csv", "it is no JSON"),
        ([runs["eager"]], tmp_path / "a.csv", "every kernel ran out of memory"),
        ([runs["sdpa"]], tmp_path / "a.txt", "must end in .csv"),
        ([runs["sdpa"]], there, "exists; choose another --out"),
    ):
        assert run_bench(reports, path) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert there.read_text() == "kept"
    assert run_bench([runs["sdpa"]], there, "--overwrite") == 0


def test_the_picture_says_where_memory_ended(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(eval_plots, "_draw", lambda panels, title, path: drawn.append(panels))
    change(runs["eager"], lambda r: r["contexts"][0].update(status="out of memory"))
    paths = [runs[name] / "eval.json" for name in ("sdpa", "eager")]
    eval_plots.plot_kernels(collect(paths), tmp_path / "eval.png")
    (panels,) = drawn
    plt = eval_plots._pyplot()
    figure, axes = plt.subplots(1, 4)
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis)
    speed = axes[1].get_legend_handles_labels()
    assert speed[1] == ["sdpa", "eager (out of memory: 64)"]
    assert [list(line.get_xdata()) for line in speed[0]] == [[8, 64], [8]]
    assert axes[3].get_legend_handles_labels()[1] == ["sdpa against eager", "its budget"]
    plt.close(figure)
