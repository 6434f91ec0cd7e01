"""Checks and times the kernels on one case after another: the part that runs in a process of its
own."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from minitx.bench import _common as common
from minitx.bench import timing
from minitx.bench.attention_check import Truth
from minitx.bench.attention_variants import (
    HOST_PASSES,
    PEERS,
    START_PASSES,
    TIMED_PASSES,
    WITH_BACKWARD,
    Case,
    Variant,
    make_variant,
    why_not,
)
from minitx.bench.start import start_ms
from minitx.metrics import is_out_of_memory

MEASURED = (
    "median_ms",
    "p20_ms",
    "p80_ms",
    "late_share",
    "tflop_per_s",
    "vs_sdpa",
    "vs_best_peer",
    "peak_gib",
    "first_call_s",
    "max_error",
    "error_budget",
)
ALL_PASSES = (*TIMED_PASSES, *HOST_PASSES, *START_PASSES)
ROUNDS = 4
# What a kernel, or its compiler, may raise for a case that it cannot do. Anything else ends the
# process, and is told by the one that started it.
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)
HOST_CALLS = 50  # timed together, so that reading the clock does not count
GRAPH_CALLS = 10

Skips = dict[tuple[Case, str], str]
Send = Callable[[tuple[str, Any]], None]


def measure_cases(
    send: Send,
    cases: Sequence[Case],
    kernels: Sequence[str],
    skips: Skips,
    budget_ms: float,
    caches: Path,
) -> None:
    """Sends ("doing", kernel) before each step and ("rows", rows) after each case.

    skips: why a kernel is not to be tried on a case. caches: a folder for those of the processes
    that START_PASSES start; the caller's, for this process may be killed.
    """
    for case in cases:
        rows = measure_case(send, case, kernels, skips, budget_ms, caches)
        send(("rows", rows))
        common.free_memory(case.device)


def measure_case(
    send: Send,
    case: Case,
    kernels: Sequence[str],
    skips: Skips,
    budget_ms: float,
    caches: Path,
) -> list[common.Row]:
    """A row for each kernel and pass; what cannot be done is a row that says why."""
    send(("doing", "reference"))
    truth = Truth(case)
    measured = {kernel: KernelOnCase(kernel, case, skips.get((case, kernel))) for kernel in kernels}
    for kernel, one in measured.items():
        if one.left():
            send(("doing", kernel))
            one.check(truth)
    del truth
    # Kernels take turns, so that a clock or temperature that drifts does so for all of them.
    passes: dict[str, list[str]] = {}
    for number in range(ROUNDS):
        if number % 2 == 0:
            passes = {kernel: one.owed(budget_ms) for kernel, one in measured.items()}
        for kernel in in_turn(kernels, number):
            if passes[kernel]:
                send(("doing", kernel))
                measured[kernel].sample(passes[kernel], budget_ms, caches / kernel)
    rows = [row for one in measured.values() for row in one.rows()]
    add_ratios(rows)
    return rows


def in_turn(kernels: Sequence[str], number: int) -> list[str]:
    """The order of a round: each begins further on, and every other one goes backwards.

    A GPU at its limit of power runs a kernel the faster the less power the one before it took, so
    none should always follow the same one, nor itself.
    """
    first = -(-number * len(kernels) // ROUNDS)  # of three kernels, too, another one each time
    order = [*kernels[first:], *kernels[:first]]
    return order[::-1] if number % 2 else order


class KernelOnCase:
    """One kernel's results on one case, by pass."""

    def __init__(self, kernel: str, case: Case, skip: str | None) -> None:
        self.kernel, self.case = kernel, case
        self.status = {name: skip or why_not(kernel, case, name) or "ok" for name in case.passes}
        self.samples = {name: timing.Samples() for name in case.passes}
        self.facts: dict[str, dict[str, float | None]] = {name: {} for name in case.passes}

    def left(self, among: Sequence[str] = ALL_PASSES) -> list[str]:
        """Passes without a reason not to measure them."""
        return [name for name, status in self.status.items() if status == "ok" and name in among]

    @contextlib.contextmanager
    def guarded(self, passes: Sequence[str]) -> Iterator[None]:
        """What may be raised within becomes the status of those of `passes` that were left."""
        try:
            yield
        except REFUSALS as error:
            if is_fatal(error):
                raise
            reason = "out of memory"
            if not is_out_of_memory(error):
                text = " ".join(str(error).split())[:200] or type(error).__name__
                reason = f"failed: {text}"
            self.status |= dict.fromkeys(self.left(passes), reason)
            error.__traceback__ = None  # it holds tensors
            common.free_memory(self.case.device)

    def check(self, truth: Truth) -> None:
        """First calls, correctness and memory. A pass whose result is wrong is not timed."""
        with self.guarded(ALL_PASSES):
            started = time.perf_counter()
            self.variant = make_variant(self.kernel, self.case)
            with self.variant.pinned():
                self._check_forward(truth, started)
        if self.left(WITH_BACKWARD):
            with self.guarded(WITH_BACKWARD), self.variant.pinned():
                self._check_backward(truth)
        if self.left(["both"]):
            with self.guarded(["both"]), self.variant.pinned():
                calls = Calls(self.variant, self.case)
                self.facts["both"]["peak_gib"] = common.peak_gib(calls.both, self.case.device)

    def _check_forward(self, truth: Truth, started: float) -> None:
        calls = Calls(self.variant, self.case)
        out = calls.forward()
        common.synchronize(self.case.device)
        seconds = time.perf_counter() - started
        self._judge(ALL_PASSES, "forward", seconds, truth.check_out(self.variant.common(out)))
        if self.left(["forward"]):
            peak = common.peak_gib(calls.forward, self.case.device)
            self.facts["forward"]["peak_gib"] = peak

    def _check_backward(self, truth: Truth) -> None:
        calls = Calls(self.variant, self.case)
        calls.record()
        seconds = timing.first_call_seconds(calls.backward, self.case.device)
        dq, dk, dv = (self.variant.common(gradient) for gradient in calls.backward())
        checked = truth.check_gradients((dq, dk, dv))
        for name in ("backward", "both"):
            self._judge(WITH_BACKWARD, name, seconds, checked)
        if self.left(["backward"]):
            peak = common.peak_gib(calls.backward, self.case.device)
            self.facts["backward"]["peak_gib"] = peak

    def _judge(
        self, affected: Sequence[str], name: str, seconds: float, checked: tuple[float, float, str]
    ) -> None:
        """Notes a pass's first call and error; if it is wrong, so is what is built on it."""
        error, budget, tensor = checked
        if name in self.facts:
            self.facts[name] |= {
                "first_call_s": seconds,
                "max_error": error,
                "error_budget": budget,
            }
        if not error <= budget:
            reason = f"wrong: {tensor} errs by {error:.2e}, its budget is {budget:.2e}"
            self.status |= dict.fromkeys(self.left(affected), reason)

    def owed(self, budget_ms: float) -> list[str]:
        """Passes that are left and have not had their time."""
        return [name for name in self.left() if sum(self.samples[name].ms) < budget_ms]

    def sample(self, passes: Sequence[str], budget_ms: float, caches: Path) -> None:
        """Adds a round of runs to those of `passes` that are left."""
        for name in self.left(passes):
            if name in START_PASSES and self.samples[name].ms:
                continue  # once is enough: seconds, each of a process of its own
            with self.guarded([name]), self.variant.pinned():
                self.samples[name] += self._sample(name, budget_ms / ROUNDS, caches)

    def _sample(self, name: str, budget_ms: float, caches: Path) -> timing.Samples:
        if name in START_PASSES:
            start = start_ms(self.kernel, self.case, caches, is_warm=name == "warm start")
            return timing.Samples([start])
        calls, device = Calls(self.variant, self.case), self.case.device
        match name:
            case "forward":
                return timing.sample(calls.forward, device, budget_ms)
            case "backward":
                calls.record()
                return timing.sample(calls.backward, device, budget_ms)
            case "both":
                return timing.sample(calls.both, device, budget_ms)
            case "host forward":
                return timing.Samples(host_ms(calls.forward, device, budget_ms))
            case "host both":
                return timing.Samples(host_ms(calls.both, device, budget_ms))
            case "graph forward":
                return graph_samples(calls.forward, budget_ms)
        raise AssertionError(f"pass '{name}' has no branch")

    def rows(self) -> list[common.Row]:
        rows = []
        for name in self.case.passes:
            row = {
                "kernel": self.kernel,
                "pass": name,
                "dtype": self.case.dtype,
                "is_causal": self.case.is_causal,
                "batch": self.case.batch,
                "seq_len": self.case.seq_len,
                "queries": self.case.num_queries,
                "q_heads": self.case.q_heads,
                "kv_heads": self.case.kv_heads,
                "head_dim": self.case.head_dim,
                "status": self.status[name],
                **dict.fromkeys(MEASURED),
                **self.facts[name],
            }
            if self.status[name] == "ok":
                row |= vars(self.samples[name].timing())
                flops = self.case.flops(name)
                if flops is not None:
                    row["tflop_per_s"] = flops / row["median_ms"] / 1e9
            rows.append(row)
        return rows


class Calls:
    """The calls that are timed, on tensors of their own in the variant's layout."""

    def __init__(self, variant: Variant, case: Case) -> None:
        self.variant = variant
        *inputs, dout = (variant.own_layout(t) for t in case.make_inputs())
        self.inputs = tuple(t.requires_grad_() for t in inputs)
        self.dout = dout
        self.recorded: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.variant.call(*self.inputs)

    def record(self) -> None:
        """A forward whose graph stays for `backward` to walk, again and again."""
        self.recorded = None
        self.recorded = self.variant.call(*self.inputs)

    def backward(self) -> tuple[torch.Tensor, ...]:
        assert self.recorded is not None
        return torch.autograd.grad(self.recorded, self.inputs, self.dout, retain_graph=True)

    def both(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.variant.call(*self.inputs), self.inputs, self.dout)


def is_fatal(error: BaseException) -> bool:
    """An error of the device itself: nothing more runs in this process. Such errors come late, so
    the kernel that is told may not be the one that did it."""
    if is_out_of_memory(error):
        return False
    device_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, device_error) or "CUDA error" in str(error)


def host_ms(call: Callable[[], object], device: str, budget_ms: float) -> list[float]:
    """Milliseconds a call takes the host, which does not wait for the device."""
    times: list[float] = []
    spent = 0.0
    while len(times) < 5 or spent < budget_ms:
        common.synchronize(device)
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        lap = (time.perf_counter() - started) * 1e3
        spent += lap
        times.append(lap / HOST_CALLS)
    return times


def graph_samples(call: Callable[[], object], budget_ms: float) -> timing.Samples:
    """Times of a call within a CUDA graph of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm, as PyTorch's guide to CUDA graphs asks
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    replays = timing.sample(graph.replay, "cuda", budget_ms)
    return timing.Samples([ms / GRAPH_CALLS for ms in replays.ms], replays.late)


def add_ratios(rows: Sequence[common.Row]) -> None:
    """How many times as fast as sdpa, and as the fastest peer, on the same case and pass."""
    for name in dict.fromkeys(r["pass"] for r in rows):
        timed = [r for r in rows if r["pass"] == name and r["status"] == "ok"]
        sdpa = [r["median_ms"] for r in timed if r["kernel"] == "sdpa"]
        peers = [r["median_ms"] for r in timed if r["kernel"] in PEERS]
        for r in timed:
            r["vs_sdpa"] = sdpa[0] / r["median_ms"] if sdpa else None
            r["vs_best_peer"] = min(peers) / r["median_ms"] if peers else None
