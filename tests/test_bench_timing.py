"""How benchmarks time a GPU: on a stand-in for one, whose host is late now and then."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from minitx.bench import attention_report, timing
from minitx.bench.timing import Samples

WRITE_MS, LAUNCH_MS, CALL_MS = 0.25, 0.01, 1.0
BUDGET_MS = 50.0


class Machine:
    """Milliseconds that have passed for a host, and those at which its GPU has done all so far."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0
        self.did: list[str] = []

    def launch(self, what: str, host_ms: float, gpu_ms: float) -> None:
        self.did.append(what)
        self.host += host_ms
        self.gpu = max(self.gpu, self.host) + gpu_ms

    def synchronize(self, _device: str = "cuda") -> None:
        self.did.append("wait")
        self.host = max(self.host, self.gpu)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(machine.gpu, machine.host)

        def query(self) -> bool:
            return self.at <= machine.host

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    written = SimpleNamespace(zero_=lambda: machine.launch("write", LAUNCH_MS, WRITE_MS))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: written)
    monkeypatch.setattr(timing, "synchronize", machine.synchronize)
    return machine


def launches(machine, *host_ms):
    """A call whose launches take the host so long, one after the other, for ever."""
    waits = itertools.cycle(host_ms)
    return lambda: machine.launch("call", next(waits), CALL_MS)


def test_a_host_in_time_has_do_benchs_conditions(machine):
    samples = timing.sample(launches(machine, 0.1), "cuda", BUDGET_MS)
    assert samples.ms == pytest.approx([CALL_MS] * len(samples.ms))
    assert not any(samples.late)
    first, one, again, five, timed, after = " ".join(machine.did).split("wait")
    assert (first.split(), after) == (["call"], "")
    assert one == again
    assert (one.split(), five.split()) == (["write", "call"], ["write", "call"] * 5)
    warm_up, each = timed.split().index("write"), WRITE_MS + CALL_MS
    assert timing.WARM_UP_MS - warm_up * each == pytest.approx(each, abs=each)
    assert timed.split()[warm_up:] == ["write", "call"] * len(samples.ms)
    assert BUDGET_MS - len(samples.ms) * each == pytest.approx(each, abs=each)


def test_runs_that_were_launched_late_do_not_count(machine):
    samples = timing.sample(launches(machine, 0.1, 0.1, 0.1, 9.0, 9.0), "cuda", BUDGET_MS)
    found = samples.timing()
    assert found.late_share == pytest.approx(0.4, abs=0.1)
    assert [found.median_ms, found.p20_ms, found.p80_ms] == pytest.approx([CALL_MS] * 3)
    assert max(samples.ms) > CALL_MS


@pytest.mark.parametrize(("host_ms", "writes"), [(1.2, 1), (1.4, 2), (2.0, 8)])
def test_as_much_is_written_as_lets_the_host_be_in_time(machine, host_ms, writes):
    found = timing.measure(launches(machine, host_ms), "cuda", BUDGET_MS)
    assert found.late_share < 0.5
    assert found.p80_ms == pytest.approx(CALL_MS)
    assert machine.did[-writes - 3 :] == ["call", *["write"] * writes, "call", "wait"]


def test_late_runs_count_where_no_writing_helps(machine):
    found = timing.measure(launches(machine, 30.0), "cuda", BUDGET_MS)
    assert found.late_share == 1
    assert found.p20_ms > CALL_MS
    assert machine.did[-2 - timing.MOST_WRITES : -2] == ["write"] * timing.MOST_WRITES


def test_a_call_that_waits_for_the_gpu_says_so(machine):
    launch = launches(machine, 0.1)

    def waits() -> None:
        launch()
        machine.synchronize()

    assert timing.measure(waits, "cuda", BUDGET_MS).late_share == 1


def test_a_long_call_runs_once_and_is_not_late(machine):
    samples = timing.sample(lambda: machine.launch("call", 5.0, 400.0), "cuda", BUDGET_MS)
    assert samples == Samples([pytest.approx(400.0)], [False])
    assert machine.did.count("call") == 5  # the first, two to estimate by, a warm-up, and that


def test_a_host_that_stands_still_once_does_not_make_a_call_long(machine):
    call = launches(machine, 0.1, 30.0, *[0.1] * 1000)
    assert len(timing.sample(call, "cuda", BUDGET_MS).ms) > 10


@pytest.mark.parametrize(
    ("ms", "late", "median_ms", "late_share"),
    [
        ([1.0, 1.0, 9.0], [False, False, True], 1.0, 1 / 3),
        ([1.0, 9.0], [False, True], 1.0, 1 / 2),
        ([1.0, 9.0, 9.0], [False, True, True], 9.0, 2 / 3),
        ([3.0, 5.0, 4.0], [], 4.0, None),
    ],
)
def test_what_counts_of_all_rounds(ms, late, median_ms, late_share):
    rounds = [Samples([t], late[i : i + 1]) for i, t in enumerate(ms)]
    found = sum(rounds, Samples()).timing()
    assert (found.median_ms, found.late_share) == (median_ms, late_share)


def test_a_cpu_is_never_late():
    samples = timing.sample(lambda: time.sleep(1e-3), "cpu", 5.0)
    assert len(samples.ms) >= 3
    assert min(samples.ms) >= 1
    assert samples.timing().late_share is None


def test_a_table_says_where_the_host_is_in_a_time(capsys):
    shape = {"batch": "2", "seq_len": "512", "queries": "512", "q_heads": "4", "kv_heads": "4"}
    row = shape | {"head_dim": "64", "dtype": "float16", "is_causal": "True", "status": "ok"}
    row |= {"kernel": "fa4", "pass": "backward", "tflop_per_s": "3"}
    earlier = row | {"kernel": "fa3"}  # of a CSV that had no such column
    rows = [row | {"late_share": "0.98"}, row | {"kernel": "flex", "late_share": "0.5"}, earlier]
    attention_report.print_tables(rows)
    said = "fa4 backward 2x512 D 64: 98% of runs launched late: the host is in its time"
    assert [line for line in capsys.readouterr().out.splitlines() if "late" in line] == [said]


@pytest.mark.gpu
def test_what_the_host_takes_is_not_the_devices_time():
    x = torch.zeros(1, device="cuda")

    def slow_to_launch():
        time.sleep(2e-4)
        x.add_(1)

    found = timing.measure(slow_to_launch, "cuda", 50)
    assert found.late_share <= 0.5
    assert found.median_ms < 0.1


@pytest.mark.gpu
def test_a_call_that_waits_for_a_real_gpu():
    x = torch.zeros(1, device="cuda")
    assert timing.measure(lambda: x.add_(1).item(), "cuda", 5).late_share == 1
