"""Ctrl-C, SIGTERM and SIGHUP in eval.py: what was finished is printed and written, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eval_runs import TEXT, make_run, report_of, run_eval

from minitx import evaluation

ROOT = Path(__file__).parent.parent
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

pytestmark = pytest.mark.usefixtures("hangups_are_heeded")


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    run = make_run(tmp_path / "run")
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT * 200)  # windows of 1024 tokens on eager: some ten seconds' work
    settings = {
        "checkpoint": run,
        "kernel": "eager",
        "context_lengths": "8,1024",
        "data.source": text,
        "probe_tokens": 0,
        "out_dir": tmp_path / "out",
    }
    return [f"--{name}={value}" for name, value in settings.items()]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_that_is_told_to_stop(number, arguments, tmp_path):
    command = [sys.executable, str(ROOT / "eval.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        report = tmp_path / "out" / "eval.json"
        while not (report.is_file() and report_of(tmp_path / "out")["contexts"]):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted: what was finished is above and in eval.json" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("eager ")] == [
        ["eager", "8"]
    ]
    saved = report_of(tmp_path / "out")
    assert saved["interrupted"]
    assert [row["context_length"] for row in saved["contexts"]] == [8]
    assert (tmp_path / "out" / "eval.png").is_file()


@pytest.mark.parametrize("script", [["eval.py"], ["-m", "minitx.generate"]], ids=lambda s: s[-1])
def test_ctrl_c_during_imports_is_no_traceback(script):
    command = [sys.executable, "-X", "importtime", *script, "--help"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:  # one for each module that was imported
            if line.endswith(" torch._C\n"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in rest


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", ["load_for_contexts", "plot"])
def test_before_the_first_window_and_after_the_last(
    name, number, arguments, tmp_path, monkeypatch, capsys
):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    original = getattr(evaluation, name)

    def kill(*args):
        os.kill(os.getpid(), number)
        return original(*args)

    monkeypatch.setattr(evaluation, name, kill)
    lengths = ("--context_lengths=8", "--paired_targets=0")
    assert run_eval(*arguments, *lengths, plots=True) == 130
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("stopped before its end; what was finished")
    assert "Traceback" not in captured.err
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    finished = name == "plot"
    assert (tmp_path / "out" / "eval.json").is_file() == finished
    if finished:
        assert report_of(tmp_path / "out")["contexts"][0]["status"] == "ok"
