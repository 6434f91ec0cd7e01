"""eval.png, drawn from eval.json's content, and one picture of several kernels' evaluations.

Both are readable without the text beside them.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minitx.eval_report import model_name
from minitx.plots import COLOURS, _finish, _pyplot, save_figure

Report = dict[str, Any]
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot(report: Report, path: Path) -> None:
    """One picture of a report; panels without data are left out. No file where all are."""
    passkey = [row for row in report["passkey"] if row["status"] == "ok"]
    panels: list[Callable[[Any], None]] = []
    if passkey:
        for kernel in dict.fromkeys(row["kernel"] for row in passkey):
            own = [row for row in passkey if row["kernel"] == kernel]
            panels.append(lambda axis, own=own: _passkey(axis, own))
    contexts = [row for row in report["contexts"] if row["status"] == "ok"]
    if contexts:
        trained = report["trained_context"]
        panels.append(lambda axis: _perplexity(axis, contexts, trained))
        panels.append(lambda axis: _positions(axis, report["positions"]))
        if report["paired"] and report["paired"]["contexts"]:
            panels.append(lambda axis: _paired(axis, report["paired"]))
        panels.append(lambda axis: _by_length(axis, contexts, "tok_per_s", "tokens read a second"))
        panels.append(lambda axis: _by_length(axis, contexts, "peak_gib", "peak memory (GiB)"))
        compared = [row for row in report["comparisons"] if row["delta_nll"] is not None]
        if compared:
            panels.append(lambda axis: _parity(axis, compared))
    if panels:
        _draw(panels, _title(report), path)


def plot_kernels(rows: list[Report], path: Path) -> None:
    """Loss, speed, memory and parity of several kernels by context, from the rows of bench eval.

    A kernel that ran out of memory says in its label from which context on.
    """
    done = [row for row in rows if row["status"] == "ok"]
    labels = {}
    for kernel, own in _by_kernel(rows).items():
        lost = [row["context_length"] for row in own if row["status"] != "ok"]
        labels[kernel] = f"{kernel} (out of memory: {_tokens(min(lost))})" if lost else kernel
    trained = rows[0]["trained_context"]
    panels: list[Callable[[Any], None]] = [
        lambda axis: _perplexity(axis, done, trained),
        lambda axis: _by_length(axis, done, "tok_per_s", "tokens read a second", labels),
        lambda axis: _by_length(axis, done, "peak_gib", "peak memory (GiB)", labels),
    ]
    compared = [
        row | {"budget": row["nll_budget"], "passed": row["parity_passed"]}
        for row in done
        if row["delta_nll"] is not None
    ]
    if compared:
        panels.append(lambda axis: _parity(axis, compared))
    head = rows[0]
    texts = ", ".join(dict.fromkeys(f"{row['text']} ({row['split']})" for row in done))
    title = f"{head['checkpoint']}, {head['dtype']}, {head['device']}\n{texts}"
    _draw(panels, title, path)


def _draw(panels: Sequence[Callable[[Any], None]], title: str, path: Path) -> None:
    plt = _pyplot()
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.6 * columns, 4.2 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel(axis)
    figure.suptitle(title)
    save_figure(figure, path, dpi=110)
    plt.close(figure)


def _title(report: Report) -> str:
    title = f"{model_name(report)}, {report['dtype']}"
    title += f", {report['environment']['device']}"
    if text := report.get("text"):
        title += f"\n{text['tokens']:,} tokens of {text['source']} ({text['split']})"
    return title + (" (interrupted)" if report["interrupted"] else "")


def _tokens(value: float, _position: object = None) -> str:
    """1024 -> 1K, 1048576 -> 1M; other numbers as they are."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if value >= size and value % size == 0:
            return f"{int(value) // size}{unit}"
    return f"{value:g}"


def _length_axis(axis: Any, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(lengths)))
    axis.xaxis.set_major_formatter(_tokens)
    axis.minorticks_off()


def _by_kernel(rows: list[Report]) -> dict[str, list[Report]]:
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    return {
        kernel: sorted(
            (row for row in rows if row["kernel"] == kernel),
            key=lambda row: row["context_length"],
        )
        for kernel in kernels
    }


def _lines(axis: Any, rows: list[Report], key: str, labels: dict[str, str] | None = None) -> None:
    """One line a kernel; the first is drawn broad, so that one that lies upon it is seen."""
    for i, (kernel, own) in enumerate(_by_kernel(rows).items()):
        kept = [row for row in own if math.isfinite(row[key])]
        axis.plot(
            [row["context_length"] for row in kept],
            [row[key] for row in kept],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linewidth=4 if i == 0 else 1.5,
            alpha=0.5 if i == 0 else 1.0,
            label=(labels or {}).get(kernel, kernel),
        )
    _length_axis(axis, [row["context_length"] for row in rows])


def _perplexity(axis: Any, rows: list[Report], trained: int) -> None:
    _lines(axis, rows, "perplexity")
    lengths = [row["context_length"] for row in rows]
    if min(lengths) <= trained <= max(lengths):
        axis.axvline(trained, color="grey", linestyle="--", label="trained context")
    _finish(axis, "context length (tokens)", "perplexity", "Perplexity by context length")


def _by_length(
    axis: Any, rows: list[Report], key: str, label: str, labels: dict[str, str] | None = None
) -> None:
    """labels: names of the kernels in the legend; with them the axis is logarithmic, since kernels
    of several runs differ by orders of magnitude."""
    _lines(axis, rows, key, labels)
    if labels:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    title = label[0].upper() + label[1:]
    _finish(axis, "context length (tokens)", label, f"{title} by context length")


def _positions(axis: Any, positions: list[Report]) -> None:
    ticks: set[int] = set()
    for i, of_length in enumerate(positions):
        buckets = [b for b in of_length["buckets"] if math.isfinite(b["nll"])]
        axis.errorbar(
            [math.sqrt(b["context_from"] * b["context_to"]) for b in buckets],
            [b["nll"] for b in buckets],
            yerr=[b["se"] if math.isfinite(b["se"]) else 0.0 for b in buckets],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
            capsize=2,
            label=f"windows of {_tokens(of_length['context_length'])}",
        )
        ticks |= {b["context_from"] for b in buckets[::2]}
    _length_axis(axis, sorted(ticks) or [1])
    _finish(
        axis,
        "tokens before the target",
        "loss (nats a token)",
        "Loss by position, ± standard error",
    )


def _paired(axis: Any, paired: Report) -> None:
    rows = paired["contexts"]
    axis.errorbar(
        [row["context"] for row in rows],
        [row["gain"] for row in rows],
        yerr=[row["gain_se"] if math.isfinite(row["gain_se"]) else 0.0 for row in rows],
        color=COLOURS[0],
        marker="o",
        capsize=3,
        label=f"{paired['targets']:,} targets, {paired['kernel']}",
    )
    axis.axhline(0, color="grey", linewidth=1)
    _length_axis(axis, [row["context"] for row in rows])
    _finish(
        axis,
        "context seen by the same targets (tokens)",
        f"gain over {rows[0]['context']} tokens (nats a token)",
        "Does more context help? (up: yes)",
    )


def _parity(axis: Any, rows: list[Report]) -> None:
    """|Δ loss| and its budget, dotted, of every kernel that was compared."""
    lengths = [row["context_length"] for row in rows]
    smallest = min(row["budget"] for row in rows) * 1e-4  # a log axis has no 0
    for i, (kernel, own) in enumerate(_by_kernel(rows).items()):
        style = {"color": COLOURS[i % len(COLOURS)]}
        own_lengths = [row["context_length"] for row in own]
        differences = [max(row["delta_nll"], smallest) for row in own]
        label = f"{kernel} against {own[0]['baseline']}"
        axis.plot(own_lengths, differences, marker=MARKERS[i % len(MARKERS)], label=label, **style)
        axis.plot(own_lengths, [row["budget"] for row in own], ":", label="its budget", **style)
    axis.set_yscale("log")
    _length_axis(axis, lengths)
    verdict = "passed" if all(row["passed"] for row in rows) else "FAILED"
    _finish(axis, "context length (tokens)", "|Δ loss| (nats a token)", f"Parity {verdict}")


def _passkey(axis: Any, rows: list[Report]) -> None:
    lengths = sorted({row["context_length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    table = [[math.nan] * len(lengths) for _ in depths]
    for row in rows:
        i, j = depths.index(row["depth"]), lengths.index(row["context_length"])
        table[i][j] = row["accuracy"]
        axis.text(
            j,
            i,
            f"{row['accuracy']:.0%}\n{row['nats']:.2f} nats",
            ha="center",
            va="center",
            color="black" if row["accuracy"] > 0.5 else "white",
        )
    axis.imshow(table, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
    axis.set_xticks(range(len(lengths)), [_tokens(length) for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axis.set(
        xlabel="context length (tokens)",
        ylabel="depth of the key in the text",
        title=f"Passkeys found by {rows[0]['kernel']}",
    )
