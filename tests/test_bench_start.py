"""python -m minitx.bench attention --passes start: first steps of new processes."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import worker_targets

from minitx.bench import __main__ as bench
from minitx.bench import attention_measure, start
from minitx.bench.attention import AttentionBenchConfig, make_cases
from minitx.bench.attention_variants import START_PASSES, Case
from minitx.bench.processes import run_worker

CASE = Case(2, 6, 2, 1, 4, "float32", True, "cpu")


def test_first_steps_of_new_processes(tmp_path, capsys):
    flags = ["--passes", "start", "--kernels", "eager", "--device", "cpu"]
    assert bench.main(["attention", *flags, "--out_dir", str(tmp_path)]) == 0
    with open(tmp_path / "attention.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["kernel"], r["pass"], r["status"]) for r in rows] == [
        ("eager", "cold start", "ok"),
        ("eager", "warm start", "ok"),
    ]
    assert all(100 < float(r["median_ms"]) < 100_000 for r in rows)  # it imports PyTorch
    assert all(r["tflop_per_s"] == "" for r in rows)
    printed = capsys.readouterr().out
    assert "From the start of a process to the end of a first step, D 32, 2 heads" in printed
    assert not (tmp_path / "attention.png").exists()


def test_what_no_first_step_needs_is_not_imported():
    """SymPy and torch.compile's half of PyTorch take longer than a kernel's own library."""
    script = (
        "import json, sys; from minitx.bench import start; start.main('sdpa', json.dumps({case}));"
        "print([name for name in ('sympy', 'torch._dynamo', 'triton', 'tilelang') "
        "if name in sys.modules])"
    )
    case = asdict(CASE) | {"passes": ["warm start"]}
    process = subprocess.run(
        [sys.executable, "-c", script.replace("{case}", repr(case))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.stdout.splitlines() == [start.DONE, "[]"], process.stderr


def test_a_cold_start_has_empty_caches_and_a_warm_one_those_of_the_last(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho noise >&2\necho > $TILELANG_CACHE_DIR/kernel\n"
        f"echo {start.DONE}\nif [ $3 = broken ]; then echo because; exit 1; fi\n"
    )
    script.chmod(0o755)
    folder = tmp_path / "caches"
    monkeypatch.setattr(start.sys, "executable", str(script))
    kernel = folder / "tilelang_cache_dir" / "kernel"
    assert start.start_ms("sdpa", CASE, folder, is_warm=True) > 0  # fills them first
    kernel.write_text("mine")
    (folder / "old").write_text("")
    start.start_ms("sdpa", CASE, folder, is_warm=True)
    assert (folder / "old").exists()
    start.start_ms("sdpa", CASE, folder, is_warm=False)
    assert not (folder / "old").exists()
    assert kernel.exists()
    with pytest.raises(RuntimeError, match="a new process failed: because"):
        start.start_ms("broken", CASE, folder, is_warm=False)


def test_a_process_that_hangs_ends_with_its_caller():
    worker = run_worker(worker_targets.starts_what_hangs, (), timeout_s=60)
    started = next(worker)
    os.kill(started, 0)
    worker.close()  # which kills it, as when it is not heard of for too long
    for _ in range(100):
        try:
            os.kill(started, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(started, signal.SIGKILL)
    pytest.fail("it lives on")


def test_caches_lie_in_the_callers_folder(tmp_path, monkeypatch):
    """Which it removes even where the process that measures was killed."""
    asked = []

    def start_ms(kernel, case, folder, is_warm):
        asked.append((kernel, folder, is_warm))
        return 1e6

    monkeypatch.setattr(attention_measure, "start_ms", start_ms)
    case = replace(CASE, passes=START_PASSES)
    attention_measure.measure_case(lambda _: None, case, ["eager"], {}, 1.0, tmp_path)
    assert asked == [("eager", tmp_path / "eager", is_warm) for is_warm in (False, True)]


def test_first_steps_are_measured_where_they_are_asked_for():
    for device in ("cpu", "cuda"):
        by_default = make_cases(AttentionBenchConfig(), device)
        assert all(c.passes != START_PASSES for c in by_default)
    (case,) = make_cases(AttentionBenchConfig(passes=["start"]), "cuda")
    assert (case.batch, case.seq_len, case.q_heads, case.head_dim) == (2, 1024, 12, 64)
