"""Ctrl-C, SIGTERM and SIGHUP at every stage of a run: saved or nothing to save, in one line."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from command import run_train, tiny_args

from minitx import checkpoint, report, training
from minitx.checkpoint import find_checkpoint, load_state
from minitx.metrics import read_metrics
from minitx.trainer import Trainer

ROOT = Path(__file__).parent.parent
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

pytestmark = pytest.mark.usefixtures("hangups_are_heeded")


def kill_in(monkeypatch, owner, name: str, number: int, at_call: int = 1, then=None) -> None:
    """The signal arrives inside the at_call-th call of owner.name; `then` may raise."""
    original, calls = getattr(owner, name), 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at_call:
            os.kill(os.getpid(), number)
            if then is not None:
                raise then
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("owner", "name", "at_call"),
    [
        (training, "load_data", 1),
        (Trainer, "backward", 3),  # in the parity comparison, of 12 steps
        (Trainer, "backward", 13),  # in the first step, as while it compiles
    ],
    ids=["loading", "parity", "first-step"],
)
def test_before_a_step_is_made_there_is_nothing_to_save(
    owner, name, at_call, number, tmp_path, monkeypatch, capsys
):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    with monkeypatch.context() as patch:
        kill_in(patch, owner, name, number, at_call)
        assert run_train(tiny_args(tmp_path)) == 0
    captured = capsys.readouterr()
    line = captured.out.splitlines()[-1]
    assert line == (
        "stopped before a step was made, nothing to save; give the same command and --overwrite"
    )
    assert "Traceback" not in captured.err
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    # As the line says.
    assert run_train([*tiny_args(tmp_path, compare="none", max_steps=1), "--overwrite"]) == 0


STAGES = {  # where the signal arrives, and the step that is then saved
    "step": (Trainer, "launch_step", 3, 3),
    "evaluation": (Trainer, "evaluate", 1, 4),
    "saving": (checkpoint, "write_tensors", 3, 4),  # the third file: the model of step 4
    "moving-latest": (checkpoint, "point", 1, 2),
}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_run_is_saved_and_says_how_to_go_on(stage, number, tmp_path, monkeypatch, capsys):
    owner, name, at_call, step = STAGES[stage]
    args = tiny_args(tmp_path, compare="none", checkpoint__interval=2, log__eval_interval=4)
    with monkeypatch.context() as patch:
        kill_in(patch, owner, name, number, at_call)
        assert run_train(args) == 0
    captured = capsys.readouterr()
    run = tmp_path / "run"
    assert captured.out.splitlines()[-1] == (
        f"stopped at step {step}, saved; go on with: python train.py --resume {run}"
    )
    assert "Traceback" not in captured.err
    assert load_state(find_checkpoint(run))["step"] == step
    # What was due at that step was finished first, so a resumed run's metrics have no hole.
    assert any(r["kind"] == "eval" for r in read_metrics(run / "metrics.jsonl")) == (step == 4)
    assert run_train([*args, "--resume=auto"]) == 0
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "eval"] == [4, 6]


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_nohup_ignores_stays_ignored(first, tmp_path, monkeypatch, capsys):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    kill_in(monkeypatch, Trainer, "launch_step", first, at_call=2)
    found = []
    original = checkpoint.write_tensors

    def write_tensors(*args):  # after a signal, which has the system's own action put back
        found.append(signal.getsignal(signal.SIGHUP))
        return original(*args)

    monkeypatch.setattr(checkpoint, "write_tensors", write_tensors)
    assert run_train(tiny_args(tmp_path, compare="none")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("done: 6 steps" if first == signal.SIGHUP else "stopped at step 2, ")
    assert set(found) == {signal.SIG_IGN}


def test_after_the_last_step_the_run_is_finished(tmp_path, monkeypatch, capsys):
    kill_in(monkeypatch, report, "finish", signal.SIGTERM)
    assert run_train(tiny_args(tmp_path, compare="none")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("done: 6 steps")
    assert (tmp_path / "run" / "report.json").is_file()


def test_a_compiler_that_took_the_signal_too_is_no_traceback(tmp_path, monkeypatch, capsys):
    """In a terminal Ctrl-C goes to every process of the run: the compiler's end is an error in the
    midst of a step."""
    broken = RuntimeError("g++ was killed")
    kill_in(monkeypatch, Trainer, "backward", signal.SIGINT, at_call=4, then=broken)
    assert run_train(tiny_args(tmp_path, compare="none", checkpoint__interval=2)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"stopped in the middle of step 4; go on with: python train.py --resume {tmp_path / 'run'}"
    )
    assert find_checkpoint(tmp_path / "run").name == "step_00000002"


def test_an_error_without_a_signal_is_not_swallowed(tmp_path, monkeypatch):
    def backward(self, batches):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Trainer, "backward", backward)
    with pytest.raises(RuntimeError, match="a bug"):
        run_train(tiny_args(tmp_path, compare="none"))


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)


def test_the_script_saves_and_says_how_to_go_on(tmp_path):
    args = tiny_args(tmp_path, compare="none", max_steps=100_000, log__eval_interval=0)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs/cpu.yaml"), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    last = out.splitlines()[-1]
    assert last.startswith("stopped at step ")
    assert last.endswith(f"saved; go on with: python train.py --resume {tmp_path / 'run'}")
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_a_terminal_that_is_closed_loses_nothing(tmp_path):
    """As when a connection ends: a signal comes, and what is printed from then on is an error."""
    args = tiny_args(tmp_path, compare="none", max_steps=100_000, log__eval_interval=0)
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs/cpu.yaml"), *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    os.close(ours)
    process.wait(timeout=60)
    assert load_state(find_checkpoint(tmp_path / "run"))["step"] > 0


SLOW_EVALUATION = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from command import run_train, tiny_args
from minitx.trainer import Trainer

def evaluate(self, tokens, max_tokens):
    (Path({folder!r}) / "evaluating").write_text("yes")
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        time.sleep(0.1)

Trainer.evaluate = evaluate
run_train(tiny_args(Path({folder!r}), compare="none", checkpoint__interval=1))
"""


def test_a_second_signal_exits_at_once(tmp_path):
    script = SLOW_EVALUATION.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "evaluating", process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)  # the evaluation is to be finished
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in err
    assert find_checkpoint(tmp_path / "run").name == "step_00000003"


HANGS_UP_TWICE = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from command import run_train, tiny_args
from minitx import checkpoint
from minitx.trainer import Trainer

def hang_up(owner, name, at_call):
    original, calls = getattr(owner, name), []
    def call(*args):
        calls.append(args)
        if len(calls) == at_call:
            os.kill(os.getpid(), signal.SIGHUP)
        return original(*args)
    setattr(owner, name, call)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
hang_up(Trainer, "launch_step", 3)
hang_up(checkpoint, "write_tensors", 1)
sys.exit(run_train(tiny_args(Path({folder!r}), compare="none")))
"""


def test_a_second_hangup_does_not_keep_a_run_from_being_saved(tmp_path):
    """A shell that is hung up hands that on; as it ends, the system hangs up what is in front."""
    script = HANGS_UP_TWICE.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert load_state(find_checkpoint(tmp_path / "run"))["step"] == 3


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_ctrl_c_while_the_script_is_importing_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--max_steps=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and maps.exists() and "libtorch" not in maps.read_text():
        time.sleep(0.01)  # torch is being imported, before it nothing takes time
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")
