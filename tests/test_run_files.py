"""What a run leaves beside its weights: metrics, TensorBoard, environment, pictures."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import run_train, tiny_args

from minitx import metrics, plots
from minitx.checkpoint import find_checkpoint
from minitx.metrics import MetricsLog, git_state, read_metrics, record_environment
from minitx.run import Run
from minitx.run_files import write_whole, written_whole


def record(step: int, loss: float | None = 1.0, kind: str = "train") -> dict:
    return {"kind": kind, "step": step, "loss": loss}


# --- metrics.jsonl ----------------------------------------------------------------------------


def test_metrics_are_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start in (0, 2):
        log = MetricsLog(path, step=start)
        log.write(record(start + 1))
        log.write(record(start + 2))
        log.close()
    assert read_metrics(path) == [record(step) for step in (1, 2, 3, 4)]


def test_the_last_of_doubled_records_wins_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [record(1, 3.0), record(1, 2.0), record(1, 9.0, "eval")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "train", "st')
    assert read_metrics(path) == lines[1:]


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_what_lies_beyond_the_step_resumed_from_is_moved_aside(step, tmp_path):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics-superseded.jsonl"
    lines = [json.dumps(record(i)) for i in (1, 2, 3)]
    path.write_text("\n".join([*lines, '{"kind": "tr']))
    log = MetricsLog(path, step)
    log.write(record(step + 1, 5.0))
    log.close()
    assert path.read_text().splitlines() == [*lines[:step], json.dumps(record(step + 1, 5.0))]
    assert aside.read_text().splitlines() == [*lines[step:], '{"kind": "tr']
    MetricsLog(path, step).close()  # again: what was moved before stays
    assert aside.read_text().splitlines()[-1] == json.dumps(record(step + 1, 5.0))
    assert len(aside.read_text().splitlines()) == 5 - step


@pytest.mark.parametrize("line", [b"garbage}", b"\xff\xfe}", b'{"a": 1}', b"5", b"[{}]"])
def test_a_line_that_is_no_record_is_moved_aside_and_not_drawn(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = json.dumps(record(1)).encode()
    path.write_bytes(first + b"\n" + line + b"\n")
    assert read_metrics(path) == [record(1)]
    MetricsLog(path, 5).close()
    assert path.read_bytes() == first + b"\n"
    assert (tmp_path / "metrics-superseded.jsonl").read_bytes() == line + b"\n"


@pytest.mark.parametrize("content", ["{", "1"])
def test_a_damaged_file_of_a_run_is_named(content, tmp_path):
    for name, kind, read in (
        ("environment", "list", lambda path: record_environment(path, torch.device("cpu"), 0, {})),
        ("report", "dict", lambda path: plots.unigram_entropy([path.parent])),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        what = "it is no JSON" if content == "{" else f"it holds no {kind}"
        with pytest.raises(ValueError, match=f"{name}.json is damaged: {what}; move it away"):
            read(path)
        assert path.read_text() == content


def test_a_damaged_parity_is_named_when_the_run_ends(tmp_path, capsys):
    assert run_train(tiny_args(tmp_path, compare_steps=1, max_steps=2)) == 0
    capsys.readouterr()
    path = tmp_path / "run" / "parity.json"
    path.write_text("[")
    resume = f"--resume={tmp_path / 'run'}"
    assert run_train([*tiny_args(tmp_path, max_steps=4), resume, "--resume_allow"]) == 2
    assert capsys.readouterr().err.endswith(f"{path} is damaged: it is no JSON; move it away\n")
    assert find_checkpoint(tmp_path / "run").name == "step_00000004"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "notes.txt"
    write_whole(path, "old")

    def break_off(error: BaseException) -> None:
        with written_whole(path) as new:
            new.write_text("half")
            raise error

    with pytest.raises(OSError, match="No space left on device") as caught:
        break_off(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert caught.value.filename == str(path)
    with pytest.raises(KeyboardInterrupt):
        break_off(KeyboardInterrupt())
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_is_named_as_asked(tmp_path):
    assert run_train(tiny_args(tmp_path, compare="none", max_steps=2)) == 0
    run = str(tmp_path / "run")
    for name, start in (("loss", b"\x89PNG"), ("loss.svg", b"<?xml"), ("a.b.png", b"\x89PNG")):
        assert plots.main([run, "--out", str(tmp_path / "pictures" / name)]) == 0
        assert (tmp_path / "pictures" / name).read_bytes().startswith(start)
    assert plots.main([run, "--out", str(tmp_path / "pictures" / "loss.xyz")]) == 2
    assert len(list((tmp_path / "pictures").iterdir())) == 3


def test_json_has_no_nan(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"kind": "train", "step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"kind": "train", "step": 1, "loss": null, "grad_norm": null, "lr": 1.0}\n'


# --- TensorBoard ------------------------------------------------------------------------------


def test_tensorboard_shows_what_the_metrics_say(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = tiny_args(tmp_path, compare="none", max_steps=5, log__interval=1)
    args = [*args, "--log.tensorboard", "--checkpoint.interval=3", "--checkpoint.keep=0"]
    assert run_train(args) == 0
    # Steps 4 and 5 are made again: they are shown once.
    resumed = f"--resume={tmp_path / 'run/checkpoints/step_00000003'}"
    assert run_train([*args, resumed]) == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for kind, name in (("train", "loss"), ("train", "data_ms"), ("eval", "val_loss")):
        shown = [(e.step, e.value) for e in events.Scalars(f"{kind}/{name}")]
        wanted = [(r["step"], r[name]) for r in records if r["kind"] == kind]
        assert [step for step, _ in shown] == [step for step, _ in wanted]
        assert [v for _, v in shown] == pytest.approx([v for _, v in wanted], rel=1e-6)
    assert "train/step" not in events.Tags()["scalars"]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_a_missing_tensorboard_is_one_line_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert run_train([*tiny_args(tmp_path), "--log.tensorboard"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "train.py: error: --log.tensorboard needs the package tensorboard: "
        "pip install 'minitx[tensorboard]'\n"
    )
    assert not (tmp_path / "run").exists()


# --- environment.json -------------------------------------------------------------------------


def test_every_start_says_where_it_ran(tmp_path, monkeypatch):
    args = tiny_args(tmp_path, compare="none", max_steps=2, checkpoint__interval=1)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "train", lambda self, stop: self.save() or 0)
        assert run_train(args) == 0
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", "auto"])
    assert run_train([*args, "--resume=auto"]) == 0
    first, second = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert first["step"] == second["step"] == 0
    assert second["command"] == ["train.py", "--resume", "auto"]
    assert first["started"] <= second["started"]
    for entry in (first, second):
        assert entry["torch"] == torch.__version__
        assert set(entry) >= {"python", "triton", "tilelang", "cuda", "device", "commit", "changes"}
        assert entry["config"]["optim"]["lr"] == 0.01
        assert entry["config"]["resume"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_git_state_is_that_of_the_source(tmp_path, monkeypatch):
    """In a repository of two files, clean, then changed, and with a package that is not its own."""

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *who, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    source = tmp_path / "metrics.py"
    source.write_text("one\n")
    monkeypatch.setattr(metrics, "__file__", str(source))
    assert git_state() == {"commit": None, "changes": None}
    git("init", "-q")
    git("add", "metrics.py")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short=10", "HEAD")
    assert git_state() == {"commit": commit, "changes": None}
    source.write_text("two\n")
    state = git_state()
    assert state["commit"] == f"{commit}-dirty"
    assert "metrics.py | 2 +-" in state["changes"]
    installed = tmp_path / "site-packages" / "metrics.py"
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(metrics, "__file__", str(installed))
    assert git_state() == {"commit": None, "changes": None}


# --- pictures ---------------------------------------------------------------------------------


def fake_run(folder: Path, losses: list[float], entropy: float | None = 3.0) -> Path:
    folder.mkdir(parents=True)
    log = MetricsLog(folder / "metrics.jsonl")
    for step, loss in enumerate(losses, start=1):
        log.write(record(step * 10, loss))
    log.write({"kind": "eval", "step": len(losses) * 10, "val_loss": losses[-1] + 0.1})
    log.close()
    if entropy is not None:
        (folder / "report.json").write_text(json.dumps({"unigram_entropy": entropy}))
    return folder


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """What plot_losses was asked to draw, and the lines that matplotlib was given."""
    seen: dict = {}
    original = plots._finish

    def finish(axis, *args):
        seen["lines"] = {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in axis.lines
        }
        original(axis, *args)

    monkeypatch.setattr(plots, "_finish", finish)
    return seen


def test_runs_are_drawn_over_one_another(tmp_path, drawn, capsys):
    a = fake_run(tmp_path / "x" / "triton", [5.0, 4.0, 3.5])
    b = fake_run(tmp_path / "y" / "triton", [5.0, 4.5, 3.0])
    out = tmp_path / "pictures" / "both.png"
    assert plots.main([str(a), str(b), "--out", str(out)]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert drawn["lines"]["x/triton: training"] == ([10, 20, 30], [5.0, 4.0, 3.5])
    assert drawn["lines"]["y/triton: validation"] == ([30], [3.1])
    assert [3.0, 3.0] in [y for _, y in drawn["lines"].values()]  # the entropy they share


def test_runs_on_other_texts_share_no_entropy(tmp_path, drawn):
    a = fake_run(tmp_path / "a", [5.0, 4.0])
    b = fake_run(tmp_path / "b", [5.0, 4.5], entropy=2.0)
    assert plots.main([str(a), str(b), "--out", str(tmp_path / "c.png")]) == 0
    assert len(drawn["lines"]) == 4


def test_a_picture_is_not_overwritten_unasked(tmp_path, capsys):
    run = fake_run(tmp_path / "a", [5.0, 4.0])
    out = tmp_path / "loss.png"
    out.write_bytes(b"mine")
    assert plots.main([str(run), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"python -m minitx.plots: error: {out} is there already; choose another --out, or "
        "--overwrite\n"
    )
    assert out.read_bytes() == b"mine"
    assert plots.main([str(run), "--out", str(out), "--overwrite"]) == 0
    assert out.read_bytes() != b"mine"


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "metrics.jsonl").touch()
    for name, message in (("empty", "holds no metrics.jsonl"), ("silent", "is empty")):
        assert plots.main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_parity_that_lacks_what_is_drawn_is_one_line(tmp_path, capsys):
    run = fake_run(tmp_path / "a", [5.0, 4.0])
    parity = run / "parity.json"
    parity.write_text('{"steps": 2}')
    assert plots.main([str(run), "--out", str(tmp_path / "loss.png")]) == 2
    assert capsys.readouterr().err == (
        f"python -m minitx.plots: error: {parity} is damaged: it holds no 'kernel'; move it away\n"
    )


def test_the_module_draws_a_real_run_and_its_parity(tmp_path):
    assert run_train(tiny_args(tmp_path, max_steps=2)) == 0
    out = tmp_path / "loss.png"
    command = [sys.executable, "-m", "minitx.plots", str(tmp_path / "run"), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    assert out.is_file()
    assert (tmp_path / "parity.png").is_file()
