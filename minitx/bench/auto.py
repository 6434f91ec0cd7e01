"""python -m minitx.bench auto CSV: the table of kernels/auto_choice.py, from a measurement.

    python -m minitx.bench attention --kernels sdpa,triton,tilelang --out_dir runs/bench
    python -m minitx.bench auto runs/bench/attention.csv      prints it as Python

One CSV gives the table of grouped heads (--groups 4) or that of others: whichever it holds.
Neighbouring lengths with the same choices become one. Between two measured lengths the shorter
one's choices hold up to their geometric mean.

A time is the 20th percentile: where the host launches late, which a busy one does at short lengths,
the median is the host's. Training is the pass `both`, or forward and backward added up in a CSV
that has none.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from minitx.bench import _common as common
from minitx.kernels.auto_choice import UNMEASURED, UNMEASURED_LSE, Choice

PASSES = ("forward", "backward", "both")


def choices(rows: Sequence[dict[str, str]]) -> dict[int, tuple[Choice, ...]]:
    """By head dim, from the causal rows in a 16-bit dtype. Raises ValueError where a length lacks
    a pass, or rows of grouped heads and of others are mixed."""
    times: dict[tuple[int, int], dict[tuple[str, str], float]] = {}
    kinds: set[bool] = set()
    for r in rows:
        kept = (
            r["status"] == "ok"
            and r["is_causal"] == "True"
            and r["dtype"] in ("bfloat16", "float16")
            and r["pass"] in PASSES
        )
        if kept:
            kinds.add(r["q_heads"] != r["kv_heads"])
            shape = (int(r["head_dim"]), int(r["seq_len"]))
            times.setdefault(shape, {})[r["kernel"], r["pass"]] = float(r["p20_ms"])
    if len(kinds) > 1:
        raise ValueError("has grouped heads and others; measure each in a run of its own")
    found: dict[int, list[Choice]] = {}
    lengths: dict[int, int] = {}
    for (head_dim, length), measured in sorted(times.items()):
        has_both = any(name == "both" for _, name in measured)
        uses = ("forward",), ("both",) if has_both else ("forward", "backward")
        fastest = [
            _fastest(measured, among, names, length)
            for among in (UNMEASURED, UNMEASURED_LSE)
            for names in uses
        ]
        previous = found.setdefault(head_dim, [])
        if not previous:
            previous.append(Choice(0, *fastest))
        elif previous[-1][1:] != tuple(fastest):
            start = round(math.sqrt(lengths[head_dim] * length))
            previous.append(Choice(start, *fastest))
        lengths[head_dim] = length
    return {head_dim: tuple(of_dim) for head_dim, of_dim in found.items()}


def _fastest(
    measured: dict[tuple[str, str], float],
    among: Sequence[str],
    names: Sequence[str],
    length: int,
) -> str:
    """The kernel whose passes `names` take least together."""
    totals = {
        kernel: sum(measured[kernel, name] for name in names)
        for kernel in among
        if all((kernel, name) in measured for name in names)
    }
    if not totals:
        raise ValueError(f"no '{names[-1]}' of {', '.join(among)} at {length} tokens")
    return min(totals, key=lambda kernel: totals[kernel])


def main(argv: list[str]) -> int:
    description = (__doc__ or "").splitlines()[0].partition(": ")[2]
    parser = argparse.ArgumentParser(prog="minitx.bench auto", description=description)
    parser.add_argument("csv", type=Path, help="a CSV of python -m minitx.bench attention")
    arguments = parser.parse_args(argv)
    try:
        found = choices(common.read_csv(arguments.csv))
    except (OSError, ValueError, KeyError) as error:
        print(f"minitx.bench auto: error: {arguments.csv}: {error}", file=sys.stderr)
        return 2
    for head_dim, of_dim in found.items():
        print(f"{head_dim}: (")
        for choice in of_dim:
            print(f"    Choice({choice.min_keys}, {', '.join(repr(k) for k in choice[1:])}),")
        print("),")
    return 0
