"""Processes that measure for minitx.bench: what they send, how they end, and what a crash costs."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import worker_targets

from minitx.bench import attention as attention_bench
from minitx.bench.attention import measure_all
from minitx.bench.attention_measure import KernelOnCase
from minitx.bench.attention_variants import Case
from minitx.bench.processes import WorkerDied, run_worker

CASE = Case(2, 6, 2, 1, 4, "float32", True, "cpu")


def test_a_worker_sends_and_ends():
    assert list(run_worker(worker_targets.sends_two, (1, ["x"]), 60)) == [1, ["x"]]


@pytest.mark.parametrize(
    ("target", "timeout_s", "message"),
    [
        (worker_targets.raises, 60, "^KeyError: 'no such.*key'$"),
        (worker_targets.exits, 60, "^ended by exit 7$"),
        (worker_targets.is_killed, 60, "^ended by signal 9$"),
        (worker_targets.hangs, 5, "^nothing heard for 5 s$"),
    ],
)
def test_a_worker_that_dies_says_how(target, timeout_s, message):
    worker = run_worker(target, (), timeout_s)
    heard = next(worker)
    with pytest.raises(WorkerDied, match=message):
        next(worker)
    if isinstance(heard, int):  # its process id
        with pytest.raises(ProcessLookupError):
            os.kill(heard, 0)


STARTS_ANOTHER = """
import sys
from pathlib import Path
from minitx.bench.processes import exit_on_signals, run_process
child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
with exit_on_signals():
    run_process([sys.executable, "-c", child], Path(sys.argv[1]), 600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_stop_leaves_no_process(number, tmp_path):
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER, str(log)],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also under nohup
    )
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_text().endswith("\n")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    code, started = process.wait(timeout=60), int(log.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(started, signal.SIGKILL)
    assert code == 128 + number


def test_a_crash_costs_one_kernel_and_no_other(monkeypatch, tmp_path):
    """`bad` crashes on every shape it is tried on; the reference on the third shape."""
    cases = [replace(CASE, seq_len=n) for n in (1, 2, 3, 4, 5)]
    tried = []

    def worker(target, arguments, timeout_s):
        todo, kernels, skips, *_ = arguments
        for case in todo:
            yield "doing", "reference"
            if case.seq_len == 3:
                raise WorkerDied("no reference")
            for kernel in kernels:
                if (case, kernel) not in skips:
                    tried.append((case.seq_len, kernel))
                    yield "doing", kernel
                    if kernel == "bad":
                        raise WorkerDied("boom")
            results = {k: KernelOnCase(k, case, skips.get((case, k), "done")) for k in kernels}
            yield "rows", [row for one in results.values() for row in one.rows()]

    monkeypatch.setattr(attention_bench, "run_worker", worker)
    batches = list(measure_all(cases, ["good", "bad", "last"], 1.0, 1.0, tmp_path))
    found = {(r["seq_len"], r["kernel"]): r["status"] for rows in batches for r in rows}
    gave_up = "failed: crashed on 2 shapes before"
    for length, bad in ((1, "failed: boom"), (2, "failed: boom"), (4, gave_up), (5, gave_up)):
        assert found[length, "good"] == found[length, "last"] == "done"
        assert found[length, "bad"] == bad
    assert {found[3, kernel] for kernel in ("good", "bad", "last")} == {"failed: no reference"}
    assert [one for one in tried if one[1] == "bad"] == [(1, "bad"), (2, "bad")]
