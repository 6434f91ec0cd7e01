"""What every benchmark needs: timing, the machine's own figures, CSV and tables.

Times are in milliseconds, medians with the 20th and 80th percentile; GiB is 2**30 bytes and TB/s
1e12 bytes a second.
"""

import csv
import dataclasses
import gc
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_origin

import torch

from minitx.metrics import git_commit
from minitx.versions import package_version

Row = dict[str, Any]

COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # each way; far beyond any cache
FEWEST_WRITES, MOST_WRITES = 2, 16  # of as many bytes, before a run that is timed on a GPU
TABLE_WIDTH = 100


@dataclasses.dataclass
class Timing:
    """Milliseconds a call takes: the median, and the percentiles around it."""

    median_ms: float
    p20_ms: float
    p80_ms: float


def measure(call: Callable[[], object], device: str, budget_ms: float = 100.0) -> Timing:
    """Times `call`, which has run before, for about `budget_ms`.

    On a GPU what counts is the device's time alone: before each run memory is written for long
    enough that the host, which launches the run meanwhile, is never waited for. That flushes the
    L2 cache too.
    """
    samples = (_device_ms if device == "cuda" else sample_ms)(call, device, budget_ms)
    return summarise(samples)


def _device_ms(call: Callable[[], object], device: str, budget_ms: float) -> list[float]:
    """Milliseconds on the GPU of single runs of `call`; the budget has room for the writes.

    A run counts if all of it was launched before the GPU came to it: on a busy machine the host may
    be late, and the GPU waits. Where most runs are late, more is written before each. All count if
    that does not help, as for a call that itself waits for the GPU."""
    written = torch.empty(COPY_BYTES["cuda"], dtype=torch.uint8, device=device)

    def run(writes: int) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(writes):
            written.zero_()
        start.record()
        call()
        end.record()
        return start, end, not start.query()

    def timed(runs: int, writes: int) -> tuple[list[float], bool]:
        """Times, and whether they are of most runs, in time, or else of all."""
        events = [run(writes) for _ in range(runs)]
        synchronize(device)
        in_time = [e for e in events if e[2]]
        are_most = 2 * len(in_time) > runs
        return [e[0].elapsed_time(e[1]) for e in (in_time if are_most else events)], are_most

    writes = FEWEST_WRITES
    timed(3, writes)  # which warms up
    began = time.perf_counter()
    while not timed(3, writes)[1] and writes < MOST_WRITES:
        writes *= 2
        began = time.perf_counter()
    seconds = (time.perf_counter() - began) / 3
    return timed(max(int(budget_ms / 1e3 / seconds), 5), writes)[0]


def sample_ms(call: Callable[[], object], device: str, budget_ms: float = 100.0) -> list[float]:
    """Milliseconds of single runs of `call`.

    On a GPU they are Triton's do_bench's: 256 MB are written before each run, and a host that has
    not launched it by then is in its time. `measure` counts no such run."""
    if device == "cuda":
        from triton.testing import do_bench

        rep = max(int(budget_ms), 1)
        times: Any = do_bench(call, warmup=10, rep=rep, return_mode="all")
        return times
    times = []
    while len(times) < 3 or sum(times) < budget_ms:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def summarise(times: Sequence[float]) -> Timing:
    """Quantiles of the runs, interpolated linearly."""
    samples = torch.tensor(times, dtype=torch.float64)
    quantiles = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    return Timing(*samples.quantile(quantiles).tolist())


def first_call_seconds(call: Callable[[], object], device: str) -> float:
    """Seconds that the first call takes, compiling included; what an earlier process compiled is
    found in the compiler's cache on disk."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def peak_gib(call: Callable[[], object], device: str) -> float | None:
    """GiB that a call allocates at its peak beyond what was allocated before; None on a CPU."""
    if device != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronize(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def copy_bandwidth(device: str, budget_ms: float = 100.0) -> float:
    """Bytes read and written a second by a copy within the device's memory, in TB/s."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    timing = measure(lambda: target.copy_(source), device, budget_ms)
    return terabytes_per_s(2 * source.nbytes, timing.median_ms)


def terabytes_per_s(n_bytes: float, milliseconds: float) -> float:
    return n_bytes / milliseconds / 1e9


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Gives back what no tensor holds any more, also what an exception's traceback held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def environment_columns(device: str) -> dict[str, str]:
    """Where a result comes from: device, versions and the commit of the working tree."""
    versions = {p: package_version(p) or "" for p in ("torch", "triton", "tilelang")}
    return {"device": device_name(device), **versions, "commit": git_commit() or ""}


def bracket_lists(argv: Sequence[str], config_class: type) -> list[str]:
    """`--widths 128,256` as `--widths [128,256]`, which is how jsonargparse spells a list."""
    names = (f.name for f in dataclasses.fields(config_class) if get_origin(f.type) is list)
    flags = {f"--{name}" for name in names}
    words = [word for arg in argv for word in _split_flag(arg, flags)]
    return [
        f"[{word}]" if before in flags and word[:1] not in ("[", "-") else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _split_flag(arg: str, flags: set[str]) -> list[str]:
    """`--widths=128` as two words."""
    flag, equals, value = arg.partition("=")
    return [flag, value] if equals and flag in flags else [arg]


def check_device(device: str | None) -> str:
    """The device to measure on; the GPU if there is one and none was named. Raises ValueError."""
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"--device: unknown '{device}'; expected cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; take cpu")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def refuse_to_overwrite(paths: Iterable[Path], overwrite: bool) -> None:
    """Before anything is measured. Raises FileExistsError."""
    for path in paths:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists: choose another --out_dir, or add --overwrite")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One column for each key of the first row; None becomes an empty cell. What was there before
    is replaced at once, so that a kill leaves one or the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned right, the first one left, cut at TABLE_WIDTH characters a line."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    formatted = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        formatted.append("  ".join(cells).rstrip()[:TABLE_WIDTH])
    return "\n".join(formatted)
