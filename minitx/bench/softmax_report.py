"""Tables and a picture of python -m minitx.bench softmax, from its rows or from its CSV."""

from collections.abc import Sequence
from pathlib import Path

from minitx.bench import _common as common

COLOURS = {
    "torch": "#7f7f7f",
    "torch.compile": "#000000",
    "quack": "#E69F00",
    "triton": "#0072B2",
    "tilelang": "#D55E00",
}
SHORT = {"out of memory": "memory", "wrong": "wrong", "failed": "failed"}

Table = tuple[str, Sequence[str], list[list[str]]]  # title, header, lines


def tables(rows: Sequence[common.Row]) -> list[Table]:
    """TB/s by width, a table for each dtype, direction and causal or not; and what the causal rule
    saves."""
    kernels = list(dict.fromkeys(r["kernel"] for r in rows))
    copy = f"{float(rows[0]['copy_tb_per_s']):.2f}"
    groups: dict[tuple, dict[str, dict[str, str]]] = {}
    for r in rows:
        lines = groups.setdefault((r["dtype"], _is_causal(r), r["direction"]), {})
        lines.setdefault(f"{r['rows']} x {r['columns']}", {})[r["kernel"]] = _rate(r)
    found = []
    for (dtype, is_causal, direction), lines in groups.items():
        causal = ", causal" if is_causal else ""
        title = f"{dtype} {direction}{causal}: TB/s of bytes that must move (a copy: {copy})"
        found.append((title, ["rows x columns", *kernels], _cells(lines, kernels)))
    times = _causal_times(rows)
    if times:
        title = "Causal rows: time for each score, visible or not, over that of full rows"
        found.append((title, ["columns", *kernels], _cells(times, kernels)))
    return found


def _causal_times(rows: Sequence[common.Row]) -> dict[str, dict[str, str]]:
    """Line -> kernel -> ratio, of what was measured both ways."""
    times: dict[tuple, dict[bool, float]] = {}
    for r in rows:
        if r["status"] == "ok":
            case = (f"{r['dtype']} {r['direction']}, {r['columns']}", r["kernel"])
            scores = int(r["rows"]) * int(r["columns"])
            times.setdefault(case, {})[_is_causal(r)] = float(r["median_ms"]) / scores
    lines: dict[str, dict[str, str]] = {}
    for (line, kernel), by_causal in times.items():
        if len(by_causal) == 2:
            lines.setdefault(line, {})[kernel] = f"{by_causal[True] / by_causal[False]:.2f}"
    return lines


def _cells(lines: dict[str, dict[str, str]], kernels: Sequence[str]) -> list[list[str]]:
    return [[name, *(line.get(k, "-") for k in kernels)] for name, line in lines.items()]


def _rate(row: common.Row) -> str:
    if row["status"] == "ok":
        return f"{float(row['tb_per_s']):.2f}"
    return SHORT.get(row["status"].partition(":")[0], "-")


def _is_causal(row: common.Row) -> bool:
    """Of a row measured now, or one from a CSV."""
    return str(row["is_causal"]) == "True"


def plot(csv_path: Path, png_path: Path) -> None:
    """Draws the CSV: TB/s by width, a panel for each dtype, direction and causal or not."""
    from matplotlib.figure import Figure

    rows = [r for r in common.read_csv(csv_path) if r["direction"] != "both"]
    lines = list(dict.fromkeys((r["dtype"], r["is_causal"]) for r in rows))
    figure = Figure(figsize=(10, 3.2 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), 2, squeeze=False, sharex=True)
    for (dtype, is_causal), axes in zip(lines, panels, strict=True):
        for direction, axis in zip(("forward", "backward"), axes, strict=True):
            chosen = (dtype, is_causal, direction)
            here = [r for r in rows if (r["dtype"], r["is_causal"], r["direction"]) == chosen]
            measured = [r for r in here if r["status"] == "ok"]
            for kernel in dict.fromkeys(r["kernel"] for r in measured):
                points = [r for r in measured if r["kernel"] == kernel]
                axis.plot(
                    [int(r["columns"]) for r in points],
                    [float(r["tb_per_s"]) for r in points],
                    marker="o",
                    markersize=4,
                    color=COLOURS.get(kernel),
                    label=kernel,
                )
            if measured:
                axis.set_xscale("log", base=2)
            axis.axhline(
                float(here[0]["copy_tb_per_s"]), color="#bbbbbb", linestyle="--", label="copy"
            )
            axis.set_ylim(bottom=0)
            axis.set_title(f"{dtype} {direction}{', causal' if is_causal == 'True' else ''}")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("TB/s of bytes that must move")
    for axis in panels[-1]:
        axis.set_xlabel("columns")
    panels[0][0].legend(frameon=False, fontsize="small")
    figure.suptitle(f"Row softmax, {rows[0]['device']}, torch {rows[0]['torch']}")
    figure.savefig(png_path, dpi=150)
