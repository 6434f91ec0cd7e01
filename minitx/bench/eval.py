"""python -m minitx.bench eval: a CSV and a picture from what eval.py wrote, one run a kernel.

    python eval.py --checkpoint runs/long --kernel tilelang --compare sdpa --out_dir runs/a ...
    python eval.py --checkpoint runs/long --kernel triton --compare sdpa --out_dir runs/b ...
    python -m minitx.bench eval runs/a runs/b --out benchmarks/eval.csv

One row a kernel and context; the picture lies beside the CSV. All runs must be of one checkpoint,
one dtype and one device, and what they read at one context must be the same tokens. A kernel that
one run was for and another was compared with has the row of its own run; a baseline of several runs
that of the first. Kernels stand in the order of the runs given, baselines without a run behind
them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitx.bench import _common as common
from minitx.cli import EXIT_USER_ERROR, path_argument
from minitx.eval_plots import plot_kernels
from minitx.eval_report import read_json

Report = dict[str, Any]
CsvRow = dict[str, str]
Table = tuple[str, Sequence[str], list[list[str]]]  # title, header, lines

MEASURED = (
    "tokens_scored",
    "bytes_scored",
    "nll",
    "perplexity",
    "bits_per_byte",
    "tok_per_s",
    "peak_gib",
)
# CSV column -> key of eval.json's comparisons
COMPARED = {
    "baseline": "baseline",
    "delta_nll": "delta_nll",
    "nll_budget": "budget",
    "kernel_error": "kernel_error",
    "error_budget": "error_budget",
    "parity_passed": "passed",
}
VERSIONS = ("device", "torch", "triton", "tilelang", "commit")
# What runs must agree in to stand in one table.
SAME = ("checkpoint", "step", "dtype", "device", "trained_context")
# And in what at one context and stride.
SAME_TOKENS = ("text", "split", "tokens_scored", "rope_scaling", "rope_factor")


def find_report(path: Path) -> Path:
    """The eval.json that a path means: the file, its folder, or a run's folder."""
    for candidate in (path, path / "eval.json", path / "eval" / "eval.json"):
        if candidate.is_file():
            return candidate
    raise ValueError(f"{path}: no eval.json there; give one, its folder, or a run that has eval/")


def rows_of(report: Report) -> list[common.Row]:
    """A report's rows, one a kernel and context, in the order they were measured."""
    compared = {(c["kernel"], c["context_length"]): c for c in report["comparisons"]}
    checkpoint, text = Path(report["checkpoint"]), report["text"]
    about = {
        "dtype": report["dtype"],
        "trained_context": report["trained_context"],
        "rope_scaling": report["rope_scaling"],
        "rope_factor": report["rope_factor"],
        # The run's name and the step: where they lay on the machine is no one's concern.
        "checkpoint": "/".join(p for p in checkpoint.parts[-3:] if p not in ("checkpoints", "/")),
        "step": report["step"],
        "text": Path(text["source"]).name if Path(text["source"]).is_absolute() else text["source"],
        "split": text["split"],
        **{name: report["environment"][name] for name in VERSIONS},
    }
    rows = []
    for found in report["contexts"]:
        comparison = compared.get((found["kernel"], found["context_length"]), {})
        row = {name: found[name] for name in ("kernel", "context_length", "stride", "status")}
        row |= {name: found.get(name) for name in MEASURED}
        row |= {column: comparison.get(key) for column, key in COMPARED.items()}
        rows.append(row | about)
    return rows


def collect(paths: Sequence[Path]) -> list[common.Row]:
    """The rows of several reports, each kernel and context once (module docstring).

    Raises ValueError for reports that do not belong together, naming both.
    """
    chosen: dict[tuple[Any, ...], tuple[common.Row, bool, Path]] = {}
    first: tuple[common.Row, Path] | None = None
    for path in paths:
        report = read_json(path)
        if report["task"] != "perplexity" or not report["contexts"]:
            raise ValueError(f"{path} holds no perplexity of any context; run eval.py to its end")
        for row in rows_of(report):
            first = first or (row, path)
            refuse_other(*first, row, path)
            key = tuple(row[n] for n in ("kernel", "context_length", "stride"))
            is_own = row["kernel"] == report["kernel"]
            before = chosen.get(key)
            if before is None or (is_own and not before[1]):
                chosen.pop(key, None)  # to stand where its own run stands
                chosen[key] = (row, is_own, path)
            elif is_own and path != before[2]:
                raise ValueError(
                    f"{before[2]} and {path} both hold kernel {key[0]} at context {key[1]}, stride "
                    f"{key[2]}; leave one out"
                )
    if all(row["status"] != "ok" for row, _, _ in chosen.values()):
        raise ValueError("every kernel ran out of memory at every context: nothing to show")
    refuse_other_tokens([(row, path) for row, _, path in chosen.values()])
    return [row for row, _, _ in sorted(chosen.values(), key=lambda found: not found[1])]


def refuse_other(row: common.Row, path: Path, other: common.Row, other_path: Path) -> None:
    for name in SAME:
        if row[name] != other[name]:
            raise ValueError(
                f"{other_path} has {name} {other[name]}, {path} has {row[name]}; one table takes "
                f"runs of one {name}"
            )


def refuse_other_tokens(found: Sequence[tuple[common.Row, Path]]) -> None:
    """Losses at one context are only comparable over the same tokens and positions."""
    first: dict[tuple[Any, ...], tuple[common.Row, Path]] = {}
    for row, path in found:
        if row["status"] != "ok":
            continue
        other, other_path = first.setdefault((row["context_length"], row["stride"]), (row, path))
        for name in SAME_TOKENS:
            if row[name] != other[name]:
                raise ValueError(
                    f"at context {row['context_length']} {path} has {name} {row[name]}, "
                    f"{other_path} has {other[name]}; give eval.py the same --data, "
                    "--max_tokens and --rope_factor"
                )


# -- the README's tables ------------------------------------------------------------------------


def tables(rows: Sequence[CsvRow]) -> list[Table]:
    """Loss by context, then speed and memory by context and kernel."""
    kernels = list(dict.fromkeys(r["kernel"] for r in rows))
    lines: dict[tuple[str, ...], dict[str, CsvRow]] = {}
    for r in sorted(rows, key=lambda r: (int(r["context_length"]), int(r["stride"]))):
        key = tuple(r[n] for n in ("context_length", "stride", "rope_scaling", "rope_factor"))
        lines.setdefault(key, {})[r["kernel"]] = r
    pairs = list(dict.fromkeys((r["kernel"], r["baseline"]) for r in rows if r["baseline"]))
    head = rows[0]
    loss_title = (
        f"Trained at {int(head['trained_context']):,} tokens, {head['dtype']}; |dnll| in nats a "
        "token, its budget in brackets"
    )
    loss_header = ["context", "stride", "RoPE", "text", "tokens scored", "perplexity", "bits/byte"]
    loss_header += [f"{kernel} to {baseline}: |dnll|" for kernel, baseline in pairs]
    if len(kernels) > 1:
        loss_header.append("largest |dnll|")
    losses, speeds, memories = [], [], []
    for (context, stride, scaling, factor), cells in lines.items():
        start = f"{int(context):,}"
        rope = "-" if scaling == "none" else f"{scaling} x {float(factor):g}"
        done = [r for r in cells.values() if r["status"] == "ok"]
        line = [start, f"{int(stride):,}", rope, *loss_cells(done)]
        line += [parity_cell(cells.get(kernel), baseline) for kernel, baseline in pairs]
        if len(kernels) > 1:
            line.append(largest_difference(done))
        losses.append(line)
        speeds.append([start, *(measured(cells.get(k), "tok_per_s", ",.0f") for k in kernels)])
        memories.append([start, *(measured(cells.get(k), "peak_gib", ".2f") for k in kernels)])
    header = ["context", *kernels]
    return [
        (loss_title, loss_header, losses),
        ("Tokens read a second", header, speeds),
        ("Peak memory in GiB", header, memories),
    ]


def loss_cells(done: Sequence[CsvRow]) -> list[str]:
    """Text, tokens, perplexity and bits a byte of the first kernel that ran."""
    if not done:
        return ["-"] * 4
    r = done[0]
    perplexity, bits = float(r["perplexity"]), float(r["bits_per_byte"])
    text = f"{r['text']} ({r['split']})"
    return [text, f"{int(r['tokens_scored']):,}", f"{perplexity:.4f}", f"{bits:.4f}"]


def parity_cell(row: CsvRow | None, baseline: str) -> str:
    """A comparison's |dnll| and budget. A budget alone: held to the truth, without a baseline."""
    if row is None or row["baseline"] != baseline:
        return "-"
    difference = f"{float(row['delta_nll']):.1e}" if row["delta_nll"] else "-"
    failed = "" if row["parity_passed"] == "True" else "FAILED "
    return f"{failed}{difference} ({float(row['nll_budget']):.1e})"


def largest_difference(done: Sequence[CsvRow]) -> str:
    """Between any two kernels, compared by eval.py or not."""
    nll = [float(r["nll"]) for r in done]
    return f"{max(nll) - min(nll):.1e}" if len(nll) > 1 else "-"


def measured(row: CsvRow | None, column: str, form: str) -> str:
    if row is None:
        return "-"
    return format(float(row[column]), form) if row["status"] == "ok" else row["status"]


# -- the command --------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    description = (__doc__ or "").splitlines()[0].partition(": ")[2]
    parser = argparse.ArgumentParser(prog="minitx.bench eval", description=description)
    parser.add_argument(
        "reports", nargs="+", type=path_argument, help="eval.json files, or their folders"
    )
    parser.add_argument(
        "--out", type=path_argument, required=True, help="the CSV, as benchmarks/eval.csv"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    arguments = parser.parse_args(argv)
    csv_path: Path = arguments.out
    picture = csv_path.with_suffix(".png")
    try:
        if csv_path.suffix != ".csv":
            raise ValueError(f"--out {csv_path} must end in .csv; the picture lies beside it")
        for path in (csv_path, picture):
            if path.exists() and not arguments.overwrite:
                raise ValueError(f"{path} exists; choose another --out, or add --overwrite")
        rows = collect([find_report(path) for path in arguments.reports])
        common.write_csv(csv_path, rows)
        plot_kernels(rows, picture)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"wrote {csv_path} and {picture}")
    return 0
