"""python -m minitx.bench attention: attention by length, forward, backward and both, beside peers.

    python -m minitx.bench attention --quick
    python -m minitx.bench attention --kernels triton,sdpa --groups 4 --seq_lens 1024,16384
    python -m minitx.bench attention --queries 1,256,2048 --seq_lens 4096,65536 --batches 1,8
    python -m minitx.bench attention --passes host
    python -m minitx.bench attention --passes start --kernels triton,tilelang
    python -m minitx.bench attention --plot benchmarks/h200/attention.csv

Each result is first checked against float64 at its full length, then timed; kernels of one shape
take turns in one process. What cannot run, runs out of memory, is wrong, crashes or hangs is a row
that says so. Writes attention.csv, growing with every shape, and attention.png.

A time of forward, backward or both is the GPU's alone, under the conditions of Triton's do_bench: a
warm-up, then run after run, 256 MB written before each. Runs that the host launched late do not
count; where most are, more is written, and where that does not help all count.

Columns of attention.csv, a row for each kernel, shape and pass:

    kernel, pass, dtype, is_causal
    batch, seq_len          sequences, and keys of each
    queries                 of each sequence, its last; as many as keys unless --queries is given
    q_heads, kv_heads, head_dim
    status                  ok, or why there are no figures
    median_ms, p20_ms, p80_ms   of a call: the median run, 20th and 80th percentile
    late_share              of the runs, the part that the host launched late; above 0.5 they count
    tflop_per_s             by the median: forward two products, 4 batch q_heads queries seq_len
                            head_dim, less what the causal rule hides; backward 2.5 times as much
    vs_sdpa, vs_best_peer   how many times as fast as sdpa and as the fastest peer of this run
    peak_gib                that a call allocates at its peak beyond what was allocated before
    first_call_s            seconds of the first call, with its compiles where nothing is cached
    max_error, error_budget against float64: of the worst tensor, and how much is allowed
    label, device, torch, triton, tilelang, commit      where the row comes from
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from minitx.bench import _common as common
from minitx.bench.attention_measure import KernelOnCase, Skips, measure_cases
from minitx.bench.attention_report import are_results, plot, print_tables
from minitx.bench.attention_variants import (
    DTYPES,
    HOST_PASSES,
    KERNELS,
    OURS,
    START_PASSES,
    TIMED_PASSES,
    Case,
    why_not,
)
from minitx.bench.processes import WorkerDied, exit_on_signals, run_worker
from minitx.cli import EXIT_PARITY_FAILED, run_cli
from minitx.config import refuse_nothing
from minitx.kernels.checks import MAX_HEAD_DIM

# By device. On a CPU Triton is interpreted: shapes that show that it works.
SEQ_LENS = {"cuda": [512 * 2**i for i in range(8)], "cpu": [16, 50]}  # 512 to 65,536
HEAD_DIMS = {"cuda": [64, 128], "cpu": [32]}
TOKENS = {"cuda": 16384, "cpu": 50}
WIDTH = {"cuda": 2048, "cpu": 64}  # heads times head dim
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
BUDGET_MS = {"cuda": 100.0, "cpu": 5.0}

QUICK_SEQ_LENS = [1024, 4096, 16384]
QUICK_KERNELS = [
    "sdpa",
    "sdpa-cudnn",
    "sdpa-flash",
    "sdpa-efficient",
    "flex",
    "fa3",
    "triton",
    "tilelang",
]
QUICK_PASSES = ["forward", "backward", "host"]
QUICK_BUDGET_MS = 45.0

HOST = "host"  # on the command line, all HOST_PASSES in one
START = "start"  # and all START_PASSES
# Batch, tokens, heads and head dim of a first step: GPT-2's, which on a CPU would take minutes.
START_SHAPE = {"cuda": (2, 1024, 12, 64), "cpu": (1, 50, 2, 32)}
HOST_SEQ_LEN = 32  # with one head: microseconds on a GPU, and yet not what only decoding runs

MOST_CRASHES = 2  # of one kernel, each of which costs a new process; then it is left out


@dataclass
class AttentionBenchConfig:
    """What to measure.

    Args:
        kernels: any of eager, sdpa, sdpa-cudnn, sdpa-flash, sdpa-efficient, flex, fa2, fa3, fa4,
            triton, tilelang, triton-softmax, tilelang-softmax, auto, with commas between; by
            default all that run here (flex on a GPU only).
        seq_lens: tokens a sequence; by default 512 to 65536 on a GPU, two short ones on a CPU.
        tokens: tokens of a batch: sequences of S tokens come in batches of tokens // S, or 1; by
            default 16384 on a GPU.
        batches: sequences of a batch; any list. By default one batch, of `tokens`.
        queries: how many of a sequence's last tokens ask, as when a prompt is read in chunks
            behind a key/value cache, or a token is decoded (1); any list, of which a length takes
            those that it exceeds; forward alone. By default all do.
        head_dims: by default 64 and 128 on a GPU.
        heads: query heads; by default 2048 // head dim on a GPU.
        groups: query heads to one key head; any list.
        dtype: float32, float16 or bfloat16; by default bfloat16 on a GPU, float32 on a CPU.
        passes: any of forward, backward, both; host: what a call takes the host, on tensors so
            small that nothing else counts, and within a CUDA graph; and start: seconds from the
            start of a process to the end of its first forward and backward, with empty caches and
            with full ones, in one shape whatever lengths and heads are given: GPT-2's on a GPU, a
            tiny one on a CPU. By default all but start, on a CPU without host.
        is_causal: each query reads the keys up to its own position, or all.
        budget_ms: milliseconds of measuring a result; by default 100 on a GPU.
        quick: fewer lengths, kernels and passes and shorter timing, where those are not given.
        timeout_s: seconds one kernel may take on one shape before it counts as hung.
        device: cuda or cpu; by default the GPU if there is one.
        out_dir: folder for attention.csv and attention.png.
        overwrite: replace files that are there already.
        label: a word for the CSV's label column.
        plot: draw and print this CSV, and measure nothing.
    """

    kernels: list[str] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    tokens: int | None = None
    batches: list[int] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)
    head_dims: list[int] = field(default_factory=list)
    heads: int | None = None
    groups: list[int] = field(default_factory=lambda: [1])
    dtype: str | None = None
    passes: list[str] = field(default_factory=list)
    is_causal: bool = True
    budget_ms: float | None = None
    quick: bool = False
    timeout_s: float = 180.0
    device: str | None = None
    out_dir: str = "runs/bench"
    overwrite: bool = False
    label: str = ""
    plot: Path | None = None


def make_cases(config: AttentionBenchConfig, device: str) -> list[Case]:
    """Every shape, short ones first, then the tiny ones of the host's time, then the one of first
    steps. Raises ValueError."""
    dtype = config.dtype or DTYPE[device]
    _known("--dtype", [dtype], tuple(DTYPES))
    default_passes = QUICK_PASSES if config.quick else [*TIMED_PASSES, HOST]
    if config.queries:
        default_passes = ["forward"]
    passes = config.passes or [p for p in default_passes if p != HOST or device == "cuda"]
    _known("--passes", passes, (*TIMED_PASSES, HOST, START))
    if config.queries and passes != ["forward"]:
        raise ValueError(f"--queries: only forwards are measured, got --passes {','.join(passes)}")
    quick_lens = QUICK_SEQ_LENS if device == "cuda" else SEQ_LENS["cpu"]
    seq_lens = config.seq_lens or (quick_lens if config.quick else SEQ_LENS[device])
    head_dims = config.head_dims or HEAD_DIMS[device]
    tokens = TOKENS[device] if config.tokens is None else config.tokens
    numbers = {
        "--seq_lens": min(seq_lens),
        "--head_dims": min(head_dims),
        "--groups": min(config.groups),
        "--tokens": tokens,
        "--heads": 1 if config.heads is None else config.heads,
        "--batches": min(config.batches, default=1),
        "--queries": min(config.queries, default=1),
    }
    for flag, number in numbers.items():
        if number < 1:
            raise ValueError(f"{flag} must be 1 or more, got {number}")
    if max(head_dims) > MAX_HEAD_DIM:
        raise ValueError(f"--head_dims must be {MAX_HEAD_DIM} or less, got {max(head_dims)}")
    cases = []
    for head_dim in head_dims:
        q_heads = config.heads or max(WIDTH[device] // head_dim, 1)
        for group in config.groups:
            if q_heads % group:
                raise ValueError(f"--groups {group} does not divide {q_heads} query heads")
            cases += [
                Case(
                    batch=batch,
                    seq_len=seq_len,
                    q_heads=q_heads,
                    kv_heads=q_heads // group,
                    head_dim=head_dim,
                    dtype=dtype,
                    is_causal=config.is_causal,
                    device=device,
                    passes=tuple(name for name in TIMED_PASSES if name in passes),
                    queries=queries,
                )
                for seq_len in seq_lens
                for batch in config.batches or [max(tokens // seq_len, 1)]
                for queries in config.queries or [None]
                if queries is None or queries < seq_len
            ]
    cases = sorted((c for c in cases if c.passes), key=lambda case: case.seq_len)
    if config.queries and not cases:
        raise ValueError(f"--queries: {min(config.queries)} is no fewer than any of --seq_lens")
    if HOST in passes:
        cases += [
            Case(1, HOST_SEQ_LEN, 1, 1, head_dim, dtype, config.is_causal, device, HOST_PASSES)
            for head_dim in head_dims
        ]
    if START in passes:
        batch, seq_len, heads, head_dim = START_SHAPE[device]
        shape = (batch, seq_len, heads, heads, head_dim)
        cases.append(Case(*shape, dtype, config.is_causal, device, START_PASSES))
    return cases


def choose_kernels(config: AttentionBenchConfig, device: str, cases: Sequence[Case]) -> list[str]:
    _known("--kernels", config.kernels, KERNELS)
    if config.kernels:
        return config.kernels
    wanted = list(QUICK_KERNELS if config.quick and device == "cuda" else KERNELS)
    if device == "cpu":
        wanted.remove("flex")  # it compiles for longer than all else takes
    return [kernel for kernel in wanted if why_not(kernel, cases[0], "forward") is None]


def _known(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{flag}: unknown '{name}'; expected any of {', '.join(known)}")


def measure_all(
    cases: Sequence[Case],
    kernels: Sequence[str],
    budget_ms: float,
    timeout_s: float,
    caches: Path,
) -> Iterator[list[common.Row]]:
    """The rows of each case. A kernel that crashes or hangs is left out of that case, which is
    measured again in a new process; after MOST_CRASHES, of all. caches: an empty folder."""
    todo, skips = list(cases), Skips()
    crashes: Counter[str] = Counter()
    while todo:
        doing = "reference"
        try:
            arguments = (tuple(todo), tuple(kernels), skips, budget_ms, caches)
            for kind, content in run_worker(measure_cases, arguments, timeout_s):
                if kind == "rows":
                    todo.pop(0)
                    doing = "reference"
                    yield content
                else:
                    doing = content
        except WorkerDied as error:
            reason = f"failed: {error}"
            if doing == "reference":  # nobody's fault, or everybody's
                case = todo.pop(0)
                yield [row for k in kernels for row in KernelOnCase(k, case, reason).rows()]
                continue
            crashes[doing] += 1
            skips[todo[0], doing] = reason
            if crashes[doing] >= MOST_CRASHES:
                for case in todo[1:]:
                    skips[case, doing] = f"failed: crashed on {MOST_CRASHES} shapes before"


def run(config: AttentionBenchConfig) -> int:
    if config.plot is not None:
        rows = common.read_csv(config.plot)
        if not are_results(rows):
            raise ValueError(f"--plot {config.plot} is no attention.csv of this command; give one")
        print_tables(rows)
        if plot(config.plot, config.plot.with_suffix(".png")):
            print(f"\nwrote {config.plot.with_suffix('.png')}")
        return 0
    device = common.check_device(config.device)
    refuse_nothing({"--budget_ms": config.budget_ms, "--timeout_s": config.timeout_s})
    cases = make_cases(config, device)
    kernels = choose_kernels(config, device, cases)
    budget_ms = config.budget_ms or (QUICK_BUDGET_MS if config.quick else BUDGET_MS[device])
    names = ("attention.csv", "attention.png")
    with common.out_folder(config.out_dir, names, config.overwrite) as folder:
        rows = measure_into(folder, config, device, cases, kernels, budget_ms)
    bad = [r for r in rows if r["status"].startswith(("wrong", "failed"))]
    return EXIT_PARITY_FAILED if any(r["kernel"] in OURS for r in bad) else 0


def measure_into(
    folder: Path,
    config: AttentionBenchConfig,
    device: str,
    cases: Sequence[Case],
    kernels: Sequence[str],
    budget_ms: float,
) -> list[common.Row]:
    """Measures, prints, and leaves attention.csv and attention.png; returns the rows."""
    csv_path, png_path = folder / "attention.csv", folder / "attention.png"
    about = {"label": config.label, **common.environment_columns(device)}
    print(f"{about['device']}, torch {torch.__version__}: {', '.join(kernels)}")
    rows: list[common.Row] = []
    with (
        exit_on_signals(),
        # Where a process was killed, one that it started may write there for a moment yet.
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches,
        tqdm(total=len(cases), unit="shape", disable=None) as bar,
    ):
        for measured in measure_all(cases, kernels, budget_ms, config.timeout_s, Path(caches)):
            rows += [row | about for row in measured]
            common.write_csv(csv_path, rows)
            bar.update()
    print_tables(common.read_csv(csv_path))
    has_picture = plot(csv_path, png_path)
    print(f"\nwrote {csv_path}" + (f" and {png_path}" if has_picture else ""))
    return rows


def main(argv: list[str]) -> int:
    argv = common.bracket_lists(argv, AttentionBenchConfig)
    return run_cli(
        run, AttentionBenchConfig, argv, prog="minitx.bench attention", description=__doc__ or ""
    )
