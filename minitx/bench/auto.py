"""python -m minitx.bench auto CSV: the table of kernels/auto_choice.py, from a measurement.

    python -m minitx.bench attention --kernels sdpa,triton,tilelang --out_dir runs/bench
    python -m minitx.bench auto runs/bench/attention.csv      prints it as Python

There is a table of grouped heads (--groups 4) and one of others, each for as many queries as keys
and for fewer (--queries): one CSV gives those that it holds rows of. Neighbouring lengths with the
same choices become one. Between two measured lengths the shorter one's choices hold up to their
geometric mean.

A time is the 20th percentile: where a busy host launched late, at short lengths, the median may be
the host's, in CSVs without a column `late_share` and where that is above a half. Training is the
pass `both`, or forward and backward added up in a CSV that has none. Of several batches of one
length the geometric mean counts.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TypeVar

from minitx.bench import _common as common
from minitx.bench.attention_report import are_results, has_fewer_queries
from minitx.cli import path_argument
from minitx.kernels.auto_choice import (
    UNMEASURED,
    UNMEASURED_LSE,
    Choice,
    ChunkChoice,
    QueriesChoice,
)

PASSES = ("forward", "backward", "both")
Row = dict[str, str]
Times = dict[tuple[str, str], float]  # by kernel and pass
T = TypeVar("T")


def choices(rows: Sequence[Row]) -> dict[int, tuple[Choice, ...]]:
    """By head dim, from the causal rows in a 16-bit dtype. Raises ValueError where a length lacks
    a pass, or rows of grouped heads and of others are mixed."""
    measured = _times(rows)

    def fastest(times: Times, length: int) -> list[str]:
        has_both = any(name == "both" for _, name in times)
        uses = ("forward",), ("both",) if has_both else ("forward", "backward")
        return [
            _fastest(times, among, names, length)
            for among in (UNMEASURED, UNMEASURED_LSE)
            for names in uses
        ]

    found = {}
    for head_dim in sorted({shape[0] for shape in measured}):
        best = {
            keys: fastest(times, keys) for (d, _, keys), times in measured.items() if d == head_dim
        }
        found[head_dim] = tuple(Choice(start, *names) for start, names in _joined(best))
    return found


def chunk_choices(rows: Sequence[Row]) -> dict[int, tuple[QueriesChoice, ...]]:
    """The same of fewer queries than keys, by head dim and number of queries."""
    measured = _times(rows)
    found = {}
    for head_dim in sorted({shape[0] for shape in measured}):
        by_queries = {}
        for queries in sorted({q for d, q, _ in measured if d == head_dim}):
            best = {
                keys: [_fastest(times, a, ("forward",), keys) for a in (UNMEASURED, UNMEASURED_LSE)]
                for (d, q, keys), times in measured.items()
                if (d, q) == (head_dim, queries)
            }
            by_queries[queries] = tuple(ChunkChoice(n, *names) for n, names in _joined(best))
        found[head_dim] = tuple(QueriesChoice(n, chosen) for n, chosen in _joined(by_queries))
    return found


def _times(rows: Sequence[Row]) -> dict[tuple[int, int, int], Times]:
    """Milliseconds by head dim, queries and keys, of which more than one batch has the mean; a
    kernel that failed with one of them has none."""
    timed = [
        r
        for r in rows
        if r["status"] == "ok"
        and r["is_causal"] == "True"
        and r["dtype"] in ("bfloat16", "float16")
        and r["pass"] in PASSES
    ]
    if len({r["q_heads"] != r["kv_heads"] for r in timed}) > 1:
        raise ValueError("has grouped heads and others; measure each in a run of its own")
    if len({has_fewer_queries(r) for r in timed}) > 1:
        raise ValueError("has fewer queries than keys, and as many; measure each in its own run")
    samples: dict[tuple[int, int, int], dict[tuple[str, str], list[float]]] = {}
    for r in timed:
        shape = (int(r["head_dim"]), int(r.get("queries", r["seq_len"])), int(r["seq_len"]))
        of_shape = samples.setdefault(shape, {})
        of_shape.setdefault((r["kernel"], r["pass"]), []).append(float(r["p20_ms"]))
    times = {}
    for shape, of_shape in samples.items():
        most = max(len(batches) for batches in of_shape.values())
        times[shape] = {
            name: geometric_mean(batches)
            for name, batches in of_shape.items()
            if len(batches) == most
        }
    return times


def _joined(best: Mapping[int, T]) -> list[tuple[int, T]]:
    """(from which length on, what is best there), neighbours that agree as one."""
    found: list[tuple[int, T]] = []
    previous = 0
    for length, names in sorted(best.items()):
        if not found:
            found.append((0, names))
        elif found[-1][1] != names:
            found.append((round(math.sqrt(previous * length)), names))
        previous = length
    return found


def _fastest(times: Times, among: Sequence[str], names: Sequence[str], length: int) -> str:
    """The kernel whose passes `names` take least together."""
    totals = {
        kernel: sum(times[kernel, name] for name in names)
        for kernel in among
        if all((kernel, name) in times for name in names)
    }
    if not totals:
        raise ValueError(f"no '{names[-1]}' of {', '.join(among)} at {length} tokens")
    return min(totals, key=lambda kernel: totals[kernel])


def main(argv: list[str]) -> int:
    description = (__doc__ or "").splitlines()[0].partition(": ")[2]
    parser = argparse.ArgumentParser(prog="minitx.bench auto", description=description)
    parser.add_argument("csv", type=path_argument, help="a CSV of python -m minitx.bench attention")
    arguments = parser.parse_args(argv)
    try:
        rows = common.read_csv(arguments.csv)
        if not are_results(rows):
            raise ValueError("it is no CSV of python -m minitx.bench attention; give one")
        tables = {
            (is_grouped, is_chunk): (chunk_choices if is_chunk else choices)(chosen)
            for is_grouped in (False, True)
            for is_chunk in (False, True)
            if (chosen := of_kind(rows, is_grouped, is_chunk))
        }
    except (OSError, ValueError, KeyError) as error:
        print(f"minitx.bench auto: error: {arguments.csv}: {error}", file=sys.stderr)
        return 2
    for (is_grouped, is_chunk), found in tables.items():
        heads = "grouped heads" if is_grouped else "a key head for each query head"
        print(f"# {heads}, {'fewer queries than' if is_chunk else 'as many queries as'} keys")
        for head_dim, of_dim in found.items():
            print(f"{head_dim}: (")
            for choice in of_dim:
                print(f"    {_written(choice)},")
            print("),")
    return 0


def of_kind(rows: Sequence[Row], is_grouped: bool, is_chunk: bool) -> list[Row]:
    """Those that one table is drawn from."""
    return [
        r
        for r in rows
        if (r["q_heads"] != r["kv_heads"]) == is_grouped and has_fewer_queries(r) == is_chunk
    ]


def _written(choice: tuple) -> str:
    """As Python, without the names of fields."""
    parts = [_written(part) if isinstance(part, tuple) else repr(part) for part in choice]
    if type(choice) is tuple:
        return f"({', '.join(parts)},)"
    return f"{type(choice).__name__}({', '.join(parts)})"
