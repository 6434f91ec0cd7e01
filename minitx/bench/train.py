"""python -m minitx.bench train: train.py by kernel, compiled or not, beside nanoGPT's model.

    python -m minitx.bench train --config configs/gpt2-124m.yaml --shapes 32x1024,4x8192,1x65536

Every run is a process of its own with an empty compile cache, so that neither memory nor compiled
code passes from one to the next. A run first proves its loss parity (train.py does), then trains
--max_steps steps. A run that fails or takes too long is a row with its reason. Writes train.csv,
growing with every run, the loss curves over one another, and a log for each run.
"""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from minitx import plots
from minitx.bench import _common as common
from minitx.bench.processes import exit_on_signals, run_process
from minitx.cli import EXIT_PARITY_FAILED, parse_config, run_cli
from minitx.config import TrainConfig, refuse_nothing
from minitx.kernels import ATTENTION_KERNELS
from minitx.trainer import resolve_dtype

ROOT = Path(__file__).resolve().parents[2]
PEERS: tuple[str, ...] = ("nanogpt-sdpa", "nanogpt-flash", "nanogpt-eager")
PEER_VOCAB_SIZE = 50304  # nanoGPT's, where the config names none
# By device.
KERNELS = {"cuda": ["eager", "sdpa", "triton", "tilelang"], "cpu": ["eager", "sdpa", "triton"]}
CONFIGS = {"cuda": "configs/gpt2-124m.yaml", "cpu": "configs/cpu.yaml"}
MEASURED = (
    "tok_per_s",
    "vs_nanogpt",
    "mfu",
    "peak_gib",
    "parity_passed",
    "max_abs_loss_diff",
    "loss_diff_budget",
    "loss",
    "val_loss",
    "steps",
    "parameters",
    "dtype",
    "seconds",
)


@dataclass
class TrainBenchConfig:
    """What to train.

    Args:
        config: a train config, as train.py reads it; by default configs/gpt2-124m.yaml on a GPU and
            configs/cpu.yaml without one.
        kernels: attention kernels, with commas between; by default eager, sdpa, triton and, on a
            GPU, tilelang.
        peers: any of nanogpt-sdpa, nanogpt-flash, nanogpt-eager: nanoGPT's model of the same size,
            compiled, on random tokens; or none. By default all on a GPU, none without one.
        shapes: batch x context, as 32x1024,4x8192; by default what the config says.
        compile: with torch.compile (true), without it (false), or both, where peers run with it
            only; by default both on a GPU, false without one.
        max_steps: steps a run trains.
        compare_steps: steps of the parity comparison before it; 0 skips it.
        extra_args: more arguments for train.py, in one string: --extra_args="--seed=1".
        timeout_s: seconds a run may take, compiling and parity included.
        device: cuda or cpu; by default the GPU if there is one.
        out_dir: folder for train.csv, pictures and the runs.
        overwrite: replace files that are there already.
        label: a word for the CSV's label column.
    """

    config: Path | None = None
    kernels: list[str] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    compile: Literal["both", "true", "false"] | None = None
    max_steps: int = 30
    compare_steps: int = 5
    extra_args: str = ""
    timeout_s: float = 600.0
    device: str | None = None
    out_dir: str = "runs/bench"
    overwrite: bool = False
    label: str = ""


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


@dataclass(frozen=True)
class Variant:
    """One run: a kernel of this project in train.py, or a peer."""

    kernel: str
    compile: bool
    shape: Shape

    @property
    def name(self) -> str:
        return f"{self.kernel}{'-compiled' if self.compile else ''}-{self.shape}"


def train_arguments(config: TrainBenchConfig, device: str, variant: Variant) -> list[str]:
    """train.py's arguments for a variant; --extra_args come last and win."""
    path = config.config or ROOT / CONFIGS[device]
    shape = variant.shape
    compare = ["--compare_steps", str(config.compare_steps)]
    settings = {
        "kernel": variant.kernel,
        "compile": str(variant.compile).lower(),
        "max_steps": config.max_steps,
        "device": device,
        "batch.tokens": shape.batch * shape.context,
        "batch.seq_len": shape.context,
        "model.max_seq_len": shape.context,
        "log.interval": max(1, config.max_steps // 6),
        "log.eval_interval": 0,
        "log.plots": "false",
        "checkpoint.interval": 0,
        "out_dir": run_folder(config, variant),
    }
    return [
        "--config",
        str(path),
        *(f"--{name}={value}" for name, value in settings.items()),
        *(compare if config.compare_steps else ["--compare", "none"]),
        *shlex.split(config.extra_args),
    ]


def peer_arguments(train: TrainConfig, device: str, variant: Variant, out: Path) -> list[str]:
    """The peer's arguments: the config's model size, dtype and steps."""
    settings = {
        "attention": variant.kernel.removeprefix("nanogpt-"),
        "batch": variant.shape.batch,
        "context": variant.shape.context,
        "steps": train.max_steps,
        "n_layer": train.model.n_layer,
        "n_head": train.model.n_head,
        "n_embd": train.model.n_embd,
        "vocab_size": train.model.vocab_size or PEER_VOCAB_SIZE,
        "dtype": str(resolve_dtype(train.dtype, torch.device(device))).removeprefix("torch."),
        "device": device,
        "compile": str(variant.compile).lower(),
        "out": out,
    }
    return [f"--{name}={value}" for name, value in settings.items()]


def run_folder(config: TrainBenchConfig, variant: Variant) -> Path:
    return Path(config.out_dir) / "train" / variant.name


def failure_reason(code: int | None, log: Path, timeout_s: float) -> str:
    """Why a run has no result, in a line."""
    if code is None:
        return f"failed: took more than {timeout_s:g} s"
    text = log.read_text(encoding="utf-8", errors="replace")
    # A peer's trace; train.py's line.
    if "OutOfMemoryError" in text or "stopped: out of memory" in text:
        return "out of memory"
    if code < 0:
        return f"failed: ended by signal {-code}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"failed: {lines[-1][:200] if lines else f'exit code {code}'}"


def measure(
    config: TrainBenchConfig, train: TrainConfig, device: str, variant: Variant
) -> common.Row:
    """Runs a variant and returns its row."""
    folder = run_folder(config, variant)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    if variant.kernel in PEERS:
        folder.mkdir()
        arguments = peer_arguments(train, device, variant, folder / "report.json")
        command = ["-m", "minitx.bench.nanogpt_peer", *arguments]
    else:
        command = [str(ROOT / "train.py"), *train_arguments(config, device, variant)]
    started = time.perf_counter()
    code = run_process([sys.executable, *command], log, config.timeout_s)
    seconds = time.perf_counter() - started
    report, parity = (_read_json(folder / f"{name}.json") for name in ("report", "parity"))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a benchmark's weights are no use
    if parity and not parity["passed"]:
        status = "parity failed"
    else:
        status = "ok" if code == 0 and report else failure_reason(code, log, config.timeout_s)
    return {
        "kernel": variant.kernel,
        "compile": variant.compile,
        "batch": variant.shape.batch,
        "context": variant.shape.context,
        "status": status,
        **dict.fromkeys(MEASURED),
        **{name: report[name] for name in MEASURED if name in report},
        "parity_passed": parity.get("passed"),
        "max_abs_loss_diff": parity.get("max_abs_loss_diff"),
        "loss_diff_budget": parity.get("budget"),
        "seconds": seconds,
    }


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def add_ratios(rows: list[common.Row]) -> None:
    """vs_nanogpt: tok/s as a multiple of nanogpt-sdpa's at the same shape, where that was
    measured."""
    peers = {(r["batch"], r["context"]): r["tok_per_s"] for r in rows if r["kernel"] == PEERS[0]}
    for r in rows:
        peer = peers.get((r["batch"], r["context"]))
        r["vs_nanogpt"] = r["tok_per_s"] / peer if peer and r["tok_per_s"] else None


HEADER = ("kernel", "compile", "tok/s", "x", "MFU", "GiB", "parity", "|dloss|", "loss", "val loss")


def table_cells(r: common.Row) -> list[str]:
    """A row under HEADER, as text."""
    name = f"{r['kernel']} ({r['label']})" if r.get("label") else r["kernel"]
    cells = [name, "yes" if r["compile"] else "no"]
    if r["status"] not in ("ok", "parity failed"):
        return [*cells, {"out of memory": "memory"}.get(r["status"], "failed"), *["-"] * 7]
    formats = {
        "tok_per_s": "{:,.0f}",
        "vs_nanogpt": "{:.2f}",
        "mfu": "{:.1%}",
        "peak_gib": "{:.2f}",
        "parity_passed": "",
        "max_abs_loss_diff": "{:.1e}",
        "loss": "{:.4f}",
        "val_loss": "{:.4f}",
    }
    for name, form in formats.items():
        if name == "parity_passed":
            cells.append({True: "passed", False: "FAILED", None: "-"}[r[name]])
        else:
            cells.append("-" if r[name] is None else form.format(r[name]))
    return cells


def print_tables(rows: list[common.Row]) -> None:
    for batch, context in dict.fromkeys((r["batch"], r["context"]) for r in rows):
        chosen = [r for r in rows if (r["batch"], r["context"]) == (batch, context)]
        print(f"\n{batch} x {context} tokens a step (x: tok/s against {PEERS[0]})")
        print(common.format_table(HEADER, [table_cells(r) for r in chosen]))
    for r in rows:
        if r["status"] not in ("ok", "out of memory"):
            print(f"{r['kernel']}, compile {r['compile']}, {r['context']}: {r['status']}")


def plot(config: TrainBenchConfig, rows: list[common.Row], shapes: list[Shape]) -> list[Path]:
    """The loss curves of all runs of a shape over one another, a picture for each shape."""
    pictures = []
    for shape in shapes:
        curves = {}
        for r in rows:
            variant = Variant(r["kernel"], r["compile"], Shape(r["batch"], r["context"]))
            metrics_path = run_folder(config, variant) / "metrics.jsonl"
            if variant.shape == shape and r["status"] == "ok" and metrics_path.is_file():
                curves[r["kernel"] + (", compiled" if r["compile"] else "")] = metrics_path
        if curves:
            pictures.append(Path(config.out_dir) / f"train-{shape}.png")
            plots.plot_losses(curves, pictures[-1])
    return pictures


def run(config: TrainBenchConfig) -> int:
    device = common.check_device(config.device)
    refuse_nothing({"--timeout_s": config.timeout_s})
    kernels, peers = check_names(config, device)
    if config.max_steps < 1 or config.compare_steps < 0:
        raise ValueError("--max_steps must be 1 or more, and --compare_steps 0 or more")
    if not (ROOT / "train.py").is_file():
        raise ValueError(f"there is no train.py in {ROOT}; run from a checkout of the project")
    shapes = [parse_shape(text) for text in config.shapes] or [own_shape(config, device)]
    compiles = {"both": [False, True], "true": [True], "false": [False]}[
        config.compile or ("both" if device == "cuda" else "false")
    ]
    runs = [
        (variant, read_train_config(config, device, variant))
        for shape in shapes
        for variant in [
            *(Variant(peer, compiles[-1], shape) for peer in peers),
            *(Variant(kernel, compile, shape) for kernel in kernels for compile in compiles),
        ]
    ]
    names = ("train.csv", "train")
    with common.out_folder(config.out_dir, names, config.overwrite) as folder:
        rows = measure_into(folder / "train.csv", config, device, runs, shapes)
    ours = [r for r in rows if r["kernel"] not in PEERS]
    return 0 if all(r["status"] in ("ok", "out of memory") for r in ours) else EXIT_PARITY_FAILED


def measure_into(
    csv_path: Path,
    config: TrainBenchConfig,
    device: str,
    runs: Sequence[tuple[Variant, TrainConfig]],
    shapes: list[Shape],
) -> list[common.Row]:
    """Runs all, prints, and leaves train.csv and pictures beside it; returns the rows."""
    about = {"label": config.label, **common.environment_columns(device)}
    rows: list[common.Row] = []
    with exit_on_signals(), tqdm(runs, unit="run", disable=None) as bar:
        for variant, train in bar:
            bar.set_postfix_str(variant.name)
            rows.append(measure(config, train, device, variant) | about)
            add_ratios(rows)
            common.write_csv(csv_path, rows)
            bar.write("  ".join(table_cells(rows[-1])))
    print_tables(rows)
    pictures = plot(config, rows, shapes)
    print(f"\nwrote {', '.join(map(str, [csv_path, *pictures]))}")
    return rows


def check_names(config: TrainBenchConfig, device: str) -> tuple[list[str], list[str]]:
    """Kernels and peers to run. Raises ValueError for an unknown one."""
    kernels = config.kernels or KERNELS[device]
    peers = config.peers or (list(PEERS) if device == "cuda" else ["none"])
    peers = [] if peers == ["none"] else peers
    for flag, names, known in (
        ("--kernels", kernels, ("auto", *ATTENTION_KERNELS)),
        ("--peers", peers, PEERS),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{flag}: unknown '{name}'; expected any of {', '.join(known)}")
    return kernels, peers


def parse_shape(text: str) -> Shape:
    batch, cross, context = text.partition("x")
    if not (cross and batch.isdecimal() and context.isdecimal() and int(batch) * int(context)):
        raise ValueError(f"--shapes: '{text}' is not batch x context; expected as in 32x1024")
    return Shape(int(batch), int(context))


def own_shape(config: TrainBenchConfig, device: str) -> Shape:
    """The shape that the train config has by itself."""
    path = config.config or ROOT / CONFIGS[device]
    argv = ["--config", str(path), *shlex.split(config.extra_args)]
    train = parse_config(TrainConfig, argv, prog="train.py", description="")
    return Shape(train.batch.tokens // train.seq_len, train.seq_len)


def read_train_config(config: TrainBenchConfig, device: str, variant: Variant) -> TrainConfig:
    """What train.py would read; a mistake in it then shows before anything has run."""
    kernel = variant.kernel if variant.kernel not in PEERS else "auto"
    arguments = train_arguments(config, device, Variant(kernel, variant.compile, variant.shape))
    train = parse_config(TrainConfig, arguments, prog="train.py", description="")
    train.validate()
    return train


def main(argv: list[str]) -> int:
    argv = common.bracket_lists(argv, TrainBenchConfig)
    return run_cli(
        run, TrainBenchConfig, argv, prog="minitx.bench train", description=__doc__ or ""
    )
