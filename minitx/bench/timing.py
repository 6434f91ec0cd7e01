"""How long a call takes: one method for every benchmark, and for all kernels and peers in it.

On a GPU it is the device's time alone, under the conditions of Triton's do_bench: after a warm-up
the runs follow one another, and before each 256 MB are written, which flushes the L2 cache. A run
that the host launched late does not count, as it would in do_bench: within it the GPU has waited.
Where most runs are late, as those of short calls on a busy machine are, more is written before
each, up to 16 GiB. Late runs count only where that does not help either, as with a call that itself
waits for the GPU; `late_share` tells.

No more is written than that, for writes are a part of what is measured: during them a GPU at its
limit of power rests, and the clock that it then runs at is higher.

On a CPU the host's clock is read around each run.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minitx.bench._common import synchronize, terabytes_per_s

FLUSHED_BYTES = 2**28  # do_bench's; beyond any L2 cache
MOST_WRITES = 64  # of as many bytes before a run: on an H200 some 5 ms
WARM_UP_MS, ESTIMATED_RUNS = 10.0, 5  # but two of what takes longer than the warm-up
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # each way; far beyond any cache


@dataclass
class Timing:
    """Milliseconds a call takes: the median, and the percentiles around it.

    late_share: the part of the runs that the host launched late, None of what is no GPU's time. Up
    to a half they do not count; beyond, all runs do, and the host is in the times.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    late_share: float | None


@dataclass
class Samples:
    """Milliseconds of single runs and, of a GPU's, whether the host launched each late."""

    ms: list[float] = field(default_factory=list)
    late: list[bool] = field(default_factory=list)

    def __add__(self, others: "Samples") -> "Samples":
        return Samples(self.ms + others.ms, self.late + others.late)

    @property
    def are_mostly_late(self) -> bool:
        return 2 * sum(self.late) > len(self.late)

    def timing(self) -> Timing:
        """Of the runs that count; quantiles are interpolated linearly."""
        counted = self.ms
        if self.late and not self.are_mostly_late:
            counted = [ms for ms, is_late in zip(self.ms, self.late, strict=True) if not is_late]
        points = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        quantiles = torch.tensor(counted, dtype=torch.float64).quantile(points)
        late_share = sum(self.late) / len(self.late) if self.late else None
        return Timing(*quantiles.tolist(), late_share=late_share)


def late_note(row: Mapping[str, Any]) -> str | None:
    """What is to be said of a CSV's row, if anything; those of earlier versions lack the column."""
    share = float(row.get("late_share") or 0.0)
    if share <= 0.5:
        return None
    return f"{share:.0%} of runs launched late: the host is in its time"


def measure(call: Callable[[], object], device: str, budget_ms: float = 100.0) -> Timing:
    """Times `call` for about `budget_ms`, which on a GPU has room for the writes."""
    return sample(call, device, budget_ms).timing()


def sample(call: Callable[[], object], device: str, budget_ms: float = 100.0) -> Samples:
    """The runs that `measure` is made of; those of several rounds may be added up."""
    if device != "cuda":
        return Samples(_host_ms(call, budget_ms))
    writes = 1
    while True:
        samples = _device_samples(call, writes, budget_ms)
        if writes >= MOST_WRITES or not samples.are_mostly_late:
            return samples
        writes *= 2


def _device_samples(call: Callable[[], object], writes: int, budget_ms: float) -> Samples:
    """Runs of `call` on the GPU, with as many writes before each.

    A run is late if the GPU had come to it before the host had launched all of it.
    """
    written = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int, device="cuda")

    def run(start: torch.cuda.Event, end: torch.cuda.Event) -> bool:
        for _ in range(writes):
            written.zero_()
        start.record()
        call()
        end.record()
        return start.query()

    def events(runs: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Made beforehand: the host is to have little to do between two runs."""
        new = torch.cuda.Event
        return [(new(enable_timing=True), new(enable_timing=True)) for _ in range(runs)]

    def estimate(runs: int) -> float:
        first, last = events(1)[0]
        pairs = events(runs)
        first.record()
        for pair in pairs:
            run(*pair)
        last.record()
        synchronize("cuda")
        return first.elapsed_time(last) / runs

    call()
    synchronize("cuda")
    run_ms = min(estimate(1), estimate(1))  # the host may have stood still in one
    if run_ms < WARM_UP_MS:
        run_ms = estimate(ESTIMATED_RUNS)

    timed = events(max(int(budget_ms / run_ms), 1))
    for _ in range(max(int(WARM_UP_MS / run_ms), 1)):
        call()  # and the host, which goes on without waiting, has a start
    late = [run(*pair) for pair in timed]
    synchronize("cuda")
    return Samples([start.elapsed_time(end) for start, end in timed], late)


def _host_ms(call: Callable[[], object], budget_ms: float) -> list[float]:
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget_ms:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def first_call_seconds(call: Callable[[], object], device: str) -> float:
    """Seconds that the first call takes, compiling included; what an earlier process compiled is
    found in the compiler's cache on disk."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def copy_bandwidth(device: str, budget_ms: float = 100.0) -> float:
    """Bytes read and written a second by a copy within the device's memory, in TB/s."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    timing = measure(lambda: target.copy_(source), device, budget_ms)
    return terabytes_per_s(2 * source.nbytes, timing.median_ms)
