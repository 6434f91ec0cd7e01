"""python -m minitx.bench table: Markdown tables from the benchmarks' and the contract's CSV files.

    python -m minitx.bench table benchmarks/train.csv           prints them
    python -m minitx.bench table --readme README.md             fills them in between markers

A marker names a CSV of benchmarks/, and may choose rows by the values of a column:

    <!-- table:attention pass=forward,backward head_dim=128 -->
    <!-- /table -->
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from minitx.bench import _common as common
from minitx.bench import attention_report, softmax_report, train
from minitx.bench import eval as bench_eval
from minitx.cli import path_argument

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
OPENING = re.compile(r"<!-- table:(?P<name>\S+)(?P<filters>[^\n]*?) -->\n")
CLOSING = "<!-- /table -->"

CsvRow = dict[str, str]
Table = tuple[str, Sequence[str], list[list[str]]]  # title, header, lines


def render(path: Path, filters: dict[str, list[str]] | None = None) -> str:
    """Every table of a CSV in Markdown, and a line on where it was measured.

    filters: column -> values; other rows are left out.
    """
    rows = common.read_csv(path)
    for column, values in (filters or {}).items():
        if rows and column not in rows[0]:
            raise ValueError(f"{path} has no column '{column}'; it has {', '.join(rows[0])}")
        rows = [r for r in rows if r[column] in values]
    if not rows:
        raise ValueError(f"{path}: no rows are left to show")
    parts = [
        f"{title}\n\n{markdown(header, lines)}\n" for title, header, lines in tables(rows, path)
    ]
    return "\n".join([*parts, f"({where(rows)})\n"])


def tables(rows: Sequence[CsvRow], path: Path) -> Sequence[Table]:
    """What the kind of CSV calls for; each kind has a column that no other has."""
    if attention_report.are_results(rows):
        return attention_report.tables(rows)
    if "perplexity" in rows[0]:
        return bench_eval.tables(rows)
    if "vs_nanogpt" in rows[0]:
        return train_tables(rows)
    if "tb_per_s" in rows[0]:
        return softmax_report.tables(rows)
    if "skip_reasons" in rows[0]:
        return [contract_table(rows)]
    raise ValueError(f"{path} is no CSV of python -m minitx.bench")


def where(rows: Sequence[CsvRow]) -> str:
    r = rows[0]
    versions = [f"{package} {r[package]}" for package in ("torch", "triton", "tilelang")]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if row["commit"]))
    return ", ".join([r["device"], *versions, *([f"commit {commits}"] if commits else [])])


def train_tables(rows: Sequence[CsvRow]) -> list[Table]:
    found = []
    for batch, context in dict.fromkeys((r["batch"], r["context"]) for r in rows):
        chosen = [r for r in rows if (r["batch"], r["context"]) == (batch, context)]
        title = f"{batch} x {context} tokens a step (x: tok/s against {train.PEERS[0]})"
        found.append((title, train.HEADER, [train.table_cells(typed(r)) for r in chosen]))
    return found


def typed(row: CsvRow) -> common.Row:
    """Empty cells as None, truth values and numbers as what they are."""
    words = {"": None, "True": True, "False": False}

    def value(text: str) -> object:
        if text in words:
            return words[text]
        return float(text) if re.fullmatch(r"-?\d+(\.\d*)?(e[-+]?\d+)?", text) else text

    return {name: value(text) for name, text in row.items()}


def contract_table(rows: Sequence[CsvRow]) -> Table:
    """Of the CSV that `pytest --contract-csv` writes: the tests that passed by rule and kernel, and
    where none ran the reasons."""
    kernels = list(dict.fromkeys(r["kernel"] for r in rows))
    lines: dict[str, dict[str, str]] = {}
    for r in rows:
        passed, failed = int(r["passed"]), int(r["failed"])
        cell = f"{passed} of {passed + failed}" if failed else str(passed)
        if passed == failed == 0:
            cell = re.sub(r"(^|; )\d+ ", r"\1", r["skip_reasons"])
        lines.setdefault(r["rule"], {})[r["kernel"]] = cell
    table = [[rule, *(cells.get(k, "-") for k in kernels)] for rule, cells in lines.items()]
    return "Tests that passed", ["rule", *kernels], table


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") or " " for cell in line) + " |"
        for line in (header, rule, *lines)
    )


def fill(text: str, folder: Path = FOLDER) -> str:
    """The text with every marked table drawn anew from folder/NAME.csv. Raises ValueError."""
    filled, position = [], 0
    for opening in OPENING.finditer(text):
        closing = text.find(CLOSING, opening.end())
        following = OPENING.search(text, opening.end())
        if closing < 0 or (following is not None and following.start() < closing):
            raise ValueError(f"the marker {opening.group().strip()} has no {CLOSING} after it")
        path = folder / f"{opening['name']}.csv"
        if not path.is_file():
            raise ValueError(f"the marker {opening.group().strip()} names {path}, which is missing")
        filters = {}
        for word in opening["filters"].split():
            column, _, values = word.partition("=")
            filters[column] = values.split(",")
        filled += [text[position : opening.end()], "\n", render(path, filters), "\n"]
        position = closing
    return "".join([*filled, text[position:]])


def main(argv: list[str]) -> int:
    description = (__doc__ or "").splitlines()[0].partition(": ")[2]
    parser = argparse.ArgumentParser(prog="minitx.bench table", description=description)
    parser.add_argument(
        "csv", nargs="*", type=path_argument, help="CSV files whose tables to print"
    )
    parser.add_argument(
        "--readme", type=path_argument, help="file whose marked tables to draw anew"
    )
    arguments = parser.parse_args(argv)
    if not arguments.csv and arguments.readme is None:
        parser.error("nothing to do; expected CSV files or --readme FILE")
    try:
        for path in arguments.csv:
            print(render(path))
        if arguments.readme is not None:
            text = arguments.readme.read_text(encoding="utf-8")
            arguments.readme.write_text(fill(text), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"minitx.bench table: error: {error}", file=sys.stderr)
        return 2
    return 0
