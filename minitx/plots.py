"""Pictures of a run. They are drawn from its files, and so can be drawn again.

python -m minitx.plots RUN [RUN ...] --out loss.png      runs over one another
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitx.cli import EXIT_USER_ERROR, path_argument
from minitx.metrics import read_metrics
from minitx.run_files import read_whole, written_whole

# Okabe and Ito's colours, told apart by the colour-blind too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def _pyplot() -> Any:
    """matplotlib.pyplot, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Writes a picture, whole or not at all, in the format that its ending names; png without."""
    with written_whole(path) as new:
        figure.savefig(new, dpi=dpi, format=path.suffix.removeprefix(".") or "png")


def _finish(axis: Any, xlabel: str, ylabel: str, title: str) -> None:
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)


def plot_losses(runs: dict[str, Path], path: Path, unigram_entropy: float | None = None) -> None:
    """Training (thin) and validation (dots) loss by step, one colour a run.

    runs: label -> metrics.jsonl.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (label, metrics) in enumerate(runs.items()):
        colour = COLOURS[i % len(COLOURS)]
        records = read_metrics(metrics)
        train = [r for r in records if r["kind"] == "train"]
        val = [r for r in records if r["kind"] == "eval"]
        axis.plot(
            [r["step"] for r in train],
            [r["loss"] for r in train],
            color=colour,
            alpha=0.6,
            linewidth=1.2,
            label=f"{label}: training",
        )
        if val:
            axis.plot(
                [r["step"] for r in val],
                [r["val_loss"] for r in val],
                color=colour,
                marker="o",
                label=f"{label}: validation",
            )
    if unigram_entropy is not None:
        axis.axhline(unigram_entropy, color="grey", linestyle="--", linewidth=1)
        axis.annotate(
            "entropy of single tokens",
            (1.0, unigram_entropy),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color="grey",
        )
    _finish(axis, "step", "loss (nats a token)", "Loss by training step")
    save_figure(figure, path, dpi=120)
    plt.close(figure)


def plot_parity(parity: dict[str, Any], path: Path) -> None:
    """The loss curves over one another, and the distance from the truth beside its budget."""
    plt = _pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    steps = range(1, parity["steps"] + 1)
    kernel, baseline = parity["kernel"], parity["baseline"]
    verdict = "passed" if parity["passed"] else "FAILED"
    top.plot(steps, parity["truth_losses"], color="grey", linewidth=5, alpha=0.4, label="truth")
    top.plot(steps, parity["baseline_losses"], color=COLOURS[1], label=baseline)
    top.plot(steps, parity["kernel_losses"], "--", color=COLOURS[0], label=kernel)
    _finish(
        top,
        "",
        "loss (nats a token)",
        f"Parity {verdict}: {kernel} against {baseline}, {parity['dtype']}",
    )
    bottom.plot(steps, parity["token_loss_baseline"], color=COLOURS[1], label=baseline)
    bottom.plot(steps, parity["token_loss_error"], color=COLOURS[0], label=kernel)
    bottom.plot(steps, parity["token_loss_budget"], "k:", label="budget of the kernel")
    bottom.set_yscale("log")
    _finish(bottom, "step", "RMS over tokens of |loss - truth| (nats)", "Distance from the truth")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, path, dpi=120)
    plt.close(figure)


def labels(runs: Sequence[Path]) -> dict[str, Path]:
    """Runs by the shortest ends of their paths that tell them apart."""
    paths = [Path(os.path.abspath(run)) for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        named = {str(Path(*path.parts[-parts:])): path for path in paths}
        if len(named) == len(set(paths)):
            return named
    raise AssertionError("different paths differ somewhere")


def unigram_entropy(runs: Sequence[Path]) -> float | None:
    """What all runs' reports agree on, or None."""
    found = set()
    for path in (run / "report.json" for run in runs):
        found.add(read_whole(path, dict, {}).get("unigram_entropy"))
    return found.pop() if len(found) == 1 else None


def draw(runs: Sequence[Path], out: Path, overwrite: bool) -> None:
    """Writes the picture of the runs' losses; of one run that has one, also its parity's beside it.

    Raises ValueError for a folder that is no run, or has logged nothing, and for a picture that is
    there already.
    """
    for run in runs:
        path = run / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{run} holds no metrics.jsonl; give the folder of a run")
        if not read_metrics(path):
            raise ValueError(f"{path} is empty: the run has not logged a step yet")
    parity = runs[0] / "parity.json"
    pictures = [out]
    if len(runs) == 1 and parity.is_file():
        pictures.append(out.with_name("parity.png"))
    for picture in pictures:
        if picture.exists() and not overwrite:
            raise ValueError(f"{picture} is there already; choose another --out, or --overwrite")
    out.parent.mkdir(parents=True, exist_ok=True)
    metrics = {label: run / "metrics.jsonl" for label, run in labels(runs).items()}
    plot_losses(metrics, out, unigram_entropy(runs))
    if len(pictures) == 2:
        try:
            plot_parity(read_whole(parity, dict, {}), pictures[1])
        except KeyError as error:
            raise ValueError(f"{parity} is damaged: it holds no {error}; move it away") from error
    print(f"wrote {' and '.join(map(str, pictures))}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minitx.plots", description="Draw the losses of runs over one another."
    )
    parser.add_argument("runs", nargs="+", type=path_argument, help="run folders")
    parser.add_argument("--out", type=path_argument, default=Path("loss.png"), help="the picture")
    parser.add_argument("--overwrite", action="store_true", help="replace pictures that are there")
    args = parser.parse_args(argv)
    try:
        draw(args.runs, args.out, args.overwrite)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
