"""Tables and a picture of the attention benchmark, all from its CSV."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from minitx.bench import _common as common
from minitx.bench import timing
from minitx.bench.attention_variants import HOST_PASSES, OURS, START_PASSES
from minitx.plots import COLOURS

CsvRow = dict[str, str]

BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS
# Colour, line and marker: fused kernels of this project solid, its row softmaxes dotted, peers
# dashed.
STYLES = {
    "triton": (BLUE, "-", "o"),
    "tilelang": (VERMILION, "-", "s"),
    "auto": (BLACK, "-", "*"),
    "triton-softmax": (BLUE, ":", "o"),
    "tilelang-softmax": (VERMILION, ":", "s"),
    "eager": (BLACK, ":", "x"),
    "sdpa": (GREEN, "--", "D"),
    "sdpa-cudnn": (GREEN, "-.", "d"),
    "sdpa-flash": (ORANGE, "--", "^"),
    "sdpa-efficient": (SKY, "--", "v"),
    "flex": (PINK, "--", "P"),
    "fa2": (ORANGE, "-.", "<"),
    "fa3": (BLACK, "--", ">"),
    "fa4": (BLACK, "-.", "h"),
}


def distinct(values: Iterable) -> list:
    return list(dict.fromkeys(values))


def panel_of(r: CsvRow) -> tuple[str, ...]:
    """What the rows of one panel, or table, have in common; last the queries, if keys are more."""
    queries = r["queries"] if has_fewer_queries(r) else ""
    return (r["head_dim"], r["q_heads"], r["kv_heads"], r["dtype"], r["is_causal"], queries)


def panel_title(panel: tuple[str, ...]) -> str:
    head_dim, q_heads, kv_heads, dtype, is_causal, queries = panel
    heads = f"{q_heads} heads" if q_heads == kv_heads else f"{q_heads} : {kv_heads} heads"
    causal = ", causal" if is_causal == "True" else ""
    last = {"": "", "1": ", the last query"}.get(queries, f", the last {queries} queries")
    return f"D {head_dim}, {heads}, {dtype}{causal}{last}"


def short_status(r: CsvRow) -> str:
    status = r["status"]
    known = {"out of memory": "memory"}
    return known.get(
        status, status.split(":")[0] if status.startswith(("wrong", "failed")) else "-"
    )


def number(value: float) -> str:
    """Three digits at most."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def is_speed(r: CsvRow) -> bool:
    """Whether the row tells what the GPU does in a time, and not the time of the host alone."""
    return r["pass"] not in (*HOST_PASSES, *START_PASSES)


def has_fewer_queries(r: CsvRow) -> bool:
    """Than keys, whose number is seq_len. CSVs of earlier versions have no such rows, nor the
    column."""
    return r.get("queries", r["seq_len"]) != r["seq_len"]


def speed_table(rows: Sequence[CsvRow]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: kernels down, batch x length across, TFLOP/s; then this project's kernels
    as multiples of sdpa and of the fastest peer. `rows` are of one panel and pass."""
    shapes = distinct((int(r["batch"]), int(r["seq_len"])) for r in rows)
    cell = {(r["kernel"], int(r["batch"]), int(r["seq_len"])): r for r in rows}

    def line(name: str, kernel: str, column: str) -> list[str]:
        texts = [name]
        for shape in shapes:
            r = cell.get((kernel, *shape))
            if r is not None and r["status"] == "ok" and r[column]:
                texts.append(number(float(r[column])))
            else:
                texts.append("" if r is None or column != "tflop_per_s" else short_status(r))
        return texts

    kernels = distinct(r["kernel"] for r in rows)
    lines = [line(k, k, "tflop_per_s") for k in kernels]
    for kernel in kernels:
        if kernel in OURS and "softmax" not in kernel:
            lines.append(line(f"{kernel} / sdpa", kernel, "vs_sdpa"))
            lines.append(line(f"{kernel} / best peer", kernel, "vs_best_peer"))
    lines = [texts for texts in lines if any(texts[1:])]
    return ["", *(f"{batch}x{seq_len}" for batch, seq_len in shapes)], lines


def call_table(
    rows: Sequence[CsvRow], passes: Sequence[str], title: str, per_ms: float
) -> tuple[list[str], list[list[str]]]:
    """Header and lines: kernels down, the time of a call by pass across, in units of which a
    millisecond has per_ms."""
    cell = {(r["kernel"], r["pass"]): r for r in rows}
    lines = []
    for kernel in distinct(r["kernel"] for r in rows):
        texts = [kernel]
        for name in passes:
            r = cell[kernel, name]
            is_ok = r["status"] == "ok"
            texts.append(f"{float(r['median_ms']) * per_ms:.1f}" if is_ok else short_status(r))
        lines.append(texts)
    return [title, *passes], lines


def tables(rows: Sequence[CsvRow]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, lines) of every table that the rows hold."""
    found = []
    timed = [r for r in rows if is_speed(r)]
    for panel, name in distinct((panel_of(r), r["pass"]) for r in timed):
        chosen = [r for r in timed if (panel_of(r), r["pass"]) == (panel, name)]
        found.append((f"{name}, {panel_title(panel)}: TFLOP/s", *speed_table(chosen)))
    host = [r for r in rows if r["pass"] in HOST_PASSES]
    for head_dim in distinct(r["head_dim"] for r in host):
        title = f"Tiny tensors, D {head_dim}, so that the host's work is all that counts"
        chosen = [r for r in host if r["head_dim"] == head_dim]
        found.append((title, *call_table(chosen, HOST_PASSES, "µs a call", 1e3)))
    starts = [r for r in rows if r["pass"] in START_PASSES]
    for panel in distinct(panel_of(r) for r in starts):
        title = f"From the start of a process to the end of a first step, {panel_title(panel)}"
        chosen = [r for r in starts if panel_of(r) == panel]
        found.append((title, *call_table(chosen, START_PASSES, "s", 1e-3)))
    return found


def are_results(rows: Sequence[CsvRow]) -> bool:
    """Whether these are rows of an attention.csv."""
    return bool(rows) and "head_dim" in rows[0]


def print_tables(rows: Sequence[CsvRow]) -> None:
    for title, header, lines in tables(rows):
        print(f"\n{title}")
        print(common.format_table(header, lines))
    bad = [r for r in rows if r["status"].startswith(("wrong", "failed"))]
    for text in distinct(
        f"{r['kernel']} {r['seq_len']} D {r['head_dim']}: {r['status']}" for r in bad
    ):
        print(text[: common.TABLE_WIDTH])
    for r in rows:
        if note := timing.late_note(r):
            shape = f"{r['batch']}x{r['seq_len']} D {r['head_dim']}"
            print(f"{r['kernel']} {r['pass']} {shape}: {note}")


def plot(csv_path: Path, png_path: Path) -> bool:
    """TFLOP/s by length: a row of panels for each pass, a column for each head dim and group.
    `auto` has no line where there are others, as it would lie on one of them. Nothing is drawn of
    the host's time, nor of fewer queries than keys, which have no one length: returns whether there
    was anything else."""
    from matplotlib.figure import Figure

    rows = [r for r in common.read_csv(csv_path) if is_speed(r) and not has_fewer_queries(r)]
    if not rows:
        return False
    rows = [r for r in rows if r["kernel"] != "auto"] or rows
    panels = distinct(panel_of(r) for r in rows)
    passes = [name for name in distinct(r["pass"] for r in rows) if name != "both"] or ["both"]
    size = (5.5 * len(panels) + 1.5, 3.8 * len(passes) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(passes), len(panels), squeeze=False)
    lines = {}
    for i, name in enumerate(passes):
        for j, panel in enumerate(panels):
            axis = grid[i][j]
            here = [r for r in rows if r["pass"] == name and panel_of(r) == panel]
            for kernel in distinct(r["kernel"] for r in here):
                points = sorted(
                    (int(r["seq_len"]), float(r["tflop_per_s"]))
                    for r in here
                    if r["kernel"] == kernel and r["status"] == "ok"
                )
                if not points:
                    continue
                colour, dash, marker = STYLES[kernel]
                lines[kernel] = axis.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    linestyle=dash,
                    marker=marker,
                    markersize=4,
                    linewidth=2.2 if dash == "-" else 1.3,
                    zorder=3 if dash == "-" else 2,
                )[0]
            lengths = sorted({int(r["seq_len"]) for r in here})
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [str(length) for length in lengths], fontsize="small")
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.set_title(f"{name}, {panel_title(panel)}", fontsize="medium")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        grid[i][0].set_ylabel("TFLOP/s")
    for axis in grid[-1]:
        axis.set_xlabel("tokens a sequence")
    if lines:
        figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False)
    first = rows[0]
    figure.suptitle(f"Attention, {first['device']}, torch {first['torch']}", fontsize="medium")
    figure.savefig(png_path, dpi=150)
    return True
