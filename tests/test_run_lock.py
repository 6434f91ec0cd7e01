"""Two processes in one folder: the second is refused, and the first loses nothing."""

import contextlib
import subprocess
import sys

import pytest
from command import run_train, tiny_args
from eval_runs import TEXT, make_run, one_line, run_eval

from minitx import resume, training
from minitx.bench.__main__ import main as bench
from minitx.run_files import written_whole
from minitx.run_lock import only_run_in

HOLD = """
import sys, time
from pathlib import Path
from minitx.run_lock import only_run_in
with only_run_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def held_by_another(folder):
    """The process that holds the folder; it ends with this, if it has not before."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        try:
            yield other
        finally:
            other.kill()


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
def test_a_folder_that_another_process_trains_in(tmp_path, capsys):
    run = tmp_path / "run"
    assert run_train(tiny_args(tmp_path, compare="none")) == 0
    before = contents(run)
    capsys.readouterr()
    with held_by_another(run):
        for changes in (
            {},
            {"resume": run, "out_dir": None},
            {"resume": "auto"},
            {"overwrite": "true"},
        ):
            assert run_train(tiny_args(tmp_path, compare="none", **changes)) == 2
            error = capsys.readouterr().err
            assert f"another process is writing to {run}" in error
            assert error.count("\n") == 1
        assert contents(run) == before
    # Killed, it holds nothing.
    assert run_train(tiny_args(tmp_path, compare="none", resume="auto")) == 0
    assert run_train(tiny_args(tmp_path, compare="none", overwrite="true")) == 0


def test_a_run_lets_go_of_its_folder(tmp_path):
    assert run_train(tiny_args(tmp_path, compare="none")) == 0
    with only_run_in(tmp_path / "run"):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
def test_overwriting_keeps_the_folder_that_is_held(tmp_path, monkeypatch):
    """Another process may have it open, and would hold a folder that is gone."""
    run = tmp_path / "run"
    args = tiny_args(tmp_path, compare="none", max_steps=1)
    assert run_train(args) == 0
    (run / "old").mkdir()
    (run / "old.txt").touch()
    (run / "link").symlink_to(tmp_path)
    folder = run.stat().st_ino
    assert run_train([*args, "--overwrite"]) == 0
    assert run.stat().st_ino == folder
    assert not {"old", "old.txt", "link"} & {path.name for path in run.iterdir()}
    assert (tmp_path / "text.txt").is_file()

    # What says whose folder it is goes last: broken off before, it can be given again.
    def break_off(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resume.shutil, "rmtree", break_off)
        with pytest.raises(KeyboardInterrupt):
            run_train([*args, "--overwrite"])
    assert run_train([*args, "--overwrite"]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
@pytest.mark.parametrize("overwrite", ["false", "true"])
def test_a_folder_that_another_process_evaluates_into(overwrite, tmp_path, capsys):
    out = tmp_path / "run" / "eval"
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    run = make_run(tmp_path / "run")
    args = ["--checkpoint", run, "--data.source", text, "--overwrite", overwrite]
    out.mkdir()
    with held_by_another(out):
        assert run_eval(*args) == 2
        assert f"another process is writing to {out}; wait for its end" in one_line(capsys)
        assert not list(out.iterdir())
        assert run_eval(*args, "--out_dir", tmp_path / "elsewhere") == 0
    with held_by_another(run):  # which is being trained: its checkpoints may be evaluated
        assert run_eval(*args) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
@pytest.mark.parametrize("command", ["softmax", "attention", "train"])
def test_a_folder_that_another_process_measures_into(command, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    with held_by_another(out):
        assert bench([command, "--device=cpu", f"--out_dir={out}", "--overwrite"]) == 2
        error = capsys.readouterr().err
        assert f"another process is writing to {out}; wait for its end" in error
        assert error.count("\n") == 1
        assert not list(out.iterdir())


def test_two_processes_that_write_one_file(tmp_path):
    """Neither writes into what the other is about to put in place."""
    path = tmp_path / "notes.txt"
    write = "import sys; from pathlib import Path; from minitx.run_files import write_whole; "
    write += "write_whole(Path(sys.argv[1]), 'theirs')"
    with written_whole(path) as new:
        new.write_text("ours")
        subprocess.run([sys.executable, "-c", write, str(path)], check=True)
        assert (path.read_text(), new.read_text()) == ("theirs", "ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
def test_two_fresh_runs_at_once(tmp_path, capsys):
    # Both have seen an empty folder; the one that comes second finds it held.
    (tmp_path / "run").mkdir()
    with only_run_in(tmp_path / "run"):
        assert run_train(tiny_args(tmp_path, compare="none")) == 2
    assert "another process is writing to" in capsys.readouterr().err
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_run_that_is_saved_while_another_waits_to_resume_it(
    saved_before, tmp_path, monkeypatch, capsys
):
    """As where a job starts while the one that it follows still saves."""
    args = tiny_args(tmp_path, compare="none", checkpoint__interval=2)
    if saved_before:
        assert run_train([*args, "--max_steps=2", "--optim.schedule=constant"]) == 0
    args += ["--resume=auto", "--resume_allow"]
    load_data, done = training.load_data, []

    def train_elsewhere(*settings):
        with monkeypatch.context() as patch:
            patch.setattr(training, "load_data", load_data)
            assert run_train(args) == 0
        done.append((tmp_path / "run" / "metrics.jsonl").read_text())
        return load_data(*settings)

    with monkeypatch.context() as patch:
        patch.setattr(training, "load_data", train_elsewhere)
        assert run_train(args) == 2
    error = capsys.readouterr().err
    assert f"another process has saved in {tmp_path / 'run'} meanwhile; give the same" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == done[0]
    assert run_train(args) == 0
    assert "nothing left to train" in capsys.readouterr().out
