"""Two processes in one run's folder: the second is refused, and the first loses nothing."""

import subprocess
import sys

import pytest
from command import run_train, tiny_args

from minitx.run_lock import only_run_in

HOLD = """
import sys, time
from pathlib import Path
from minitx.run_lock import only_run_in
with only_run_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
def test_a_folder_that_another_process_trains_in(tmp_path, capsys):
    run = tmp_path / "run"
    assert run_train(tiny_args(tmp_path, compare="none")) == 0
    before = contents(run)
    capsys.readouterr()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for changes in (
            {"resume": run, "out_dir": None},
            {"resume": "auto"},
            {"overwrite": "true"},
        ):
            assert run_train(tiny_args(tmp_path, compare="none", **changes)) == 2
            error = capsys.readouterr().err
            assert f"another process is training in {run}" in error
            assert error.count("\n") == 1
        assert contents(run) == before
        other.kill()
    # Killed, it holds nothing.
    assert run_train(tiny_args(tmp_path, compare="none", resume="auto")) == 0
    assert run_train(tiny_args(tmp_path, compare="none", overwrite="true")) == 0


def test_a_run_lets_go_of_its_folder(tmp_path):
    assert run_train(tiny_args(tmp_path, compare="none")) == 0
    with only_run_in(tmp_path / "run"):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no folders")
def test_two_fresh_runs_at_once(tmp_path, capsys):
    # Both have seen an empty folder; the one that comes second finds it held.
    (tmp_path / "run").mkdir()
    with only_run_in(tmp_path / "run"):
        assert run_train(tiny_args(tmp_path, compare="none")) == 2
    assert "another process is training in" in capsys.readouterr().err
    assert not list((tmp_path / "run").iterdir())
