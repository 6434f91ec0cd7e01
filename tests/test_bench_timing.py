"""How benchmarks time a GPU: on a stand-in for one, whose host is late now and then."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from minitx.bench import _common as common

WRITE_MS, LAUNCH_MS, CALL_MS = 0.25, 0.01, 1.0


class Machine:
    """Milliseconds that have passed for a host, and those at which its GPU has done all so far."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0

    def launch(self, host_ms: float, gpu_ms: float) -> None:
        self.host += host_ms
        self.gpu = max(self.gpu, self.host) + gpu_ms

    def synchronize(self, _device: str) -> None:
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

    written = SimpleNamespace(zero_=lambda: machine.launch(LAUNCH_MS, WRITE_MS))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: written)
    monkeypatch.setattr(common, "synchronize", machine.synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.host / 1e3)
    return machine


def samples(machine, host_ms) -> list[float]:
    """Of calls whose launches take the host so long, one after the other, for ever."""
    waits = itertools.cycle(host_ms)
    return common._device_ms(lambda: machine.launch(next(waits), CALL_MS), "cuda", 50.0)


@pytest.mark.parametrize(
    "host_ms",
    [
        [0.1],
        [0.1, 0.1, 0.1, 0.1, 9.0],  # a host that is late now and then
        [2.0],  # one that needs more to be written before each run
    ],
)
def test_a_late_host_is_in_no_time(machine, host_ms):
    times = samples(machine, host_ms)
    assert len(times) >= 5
    assert times == pytest.approx([CALL_MS] * len(times))


def test_a_call_that_is_always_late_has_the_time_that_it_takes(machine):
    times = samples(machine, [30.0])
    assert len(times) >= 5
    assert min(times) > CALL_MS
