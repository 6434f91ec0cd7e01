"""A resumed run is the unbroken one, bit for bit, and a mistaken resume is refused."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command import run_train, tiny_args

from minitx.kernels import ATTENTION_KERNELS
from minitx.metrics import read_metrics
from minitx.run import Run
from minitx.trainer import Trainer

ROOT = Path(__file__).parent.parent
# Two kilobytes of text are 15 steps an epoch: 24 steps end one and begin another.
EPOCHS = {"compare": "none", "max_steps": 24, "log__interval": 1, "data__max_bytes": 2000}
HARD = {**EPOCHS, "batch__micro": 2, "model__dropout": 0.1}


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM arrives while the metrics of that step are written."""
    original = Run.log_step

    def log_step(self, at, result, seconds):
        line = original(self, at, result, seconds)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return line

    monkeypatch.setattr(Run, "log_step", log_step)


def run_in_parts(args: list[str], stops: list[int]) -> None:
    """Runs, is stopped after each of the steps, and resumes every time."""
    for stop in stops:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, stop)
            assert run_train([*args, "--resume=auto"]) == 0
    assert run_train([*args, "--resume=auto"]) == 0


def final(run: Path, step: int = 24) -> dict[str, bytes]:
    """Weights and moments at the end."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    return {n: (folder / f"{n}.safetensors").read_bytes() for n in ("model", "optimizer")}


def curve(run: Path) -> list[tuple]:
    names = ("kind", "step", "loss", "val_loss", "lr", "grad_norm", "skipped_steps")
    return [tuple(r.get(name) for name in names) for r in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("stops", [[7], [7, 17], [15, 16]], ids=["once", "twice", "epochs-end"])
def test_resuming_is_the_unbroken_run(tmp_path, stops):
    """With accumulation, dropout and evaluations in between."""
    assert run_train(tiny_args(tmp_path, "whole", **HARD)) == 0
    state = json.loads((tmp_path / "whole/checkpoints/latest/state.json").read_text())
    assert state["stream"]["epoch"] == 1
    run_in_parts(tiny_args(tmp_path, "parts", **HARD), stops)
    assert final(tmp_path / "parts") == final(tmp_path / "whole")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_float16_resumes_with_its_loss_scale(tmp_path, monkeypatch):
    """An overflow in steps 3 and 20 halves the scale, before and after the stop."""
    original = Trainer.backward

    def backward(self, batches):
        loss = original(self, batches)
        if self.step_number in (2, 19):
            self.model.blocks[0].mlp.up.weight.grad[0, 0] = float("inf")
        return loss

    monkeypatch.setattr(Trainer, "backward", backward)
    changes = {**HARD, "dtype": "float16"}
    assert run_train(tiny_args(tmp_path, "whole", **changes)) == 0
    run_in_parts(tiny_args(tmp_path, "parts", **changes), [9])
    assert final(tmp_path / "parts") == final(tmp_path / "whole")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    state = json.loads((tmp_path / "parts/checkpoints/latest/state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**14
    assert state["skipped_steps"] == 2


@pytest.mark.slow
def test_a_compiled_run_resumes_too(tmp_path):
    changes = {**HARD, "compile": "true", "max_steps": 6, "log__eval_interval": 2}
    assert run_train(tiny_args(tmp_path, "whole", **changes)) == 0
    run_in_parts(tiny_args(tmp_path, "parts", **changes), [3])
    assert final(tmp_path / "parts", 6) == final(tmp_path / "whole", 6)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


ON_A_GPU = [(kernel, "false") for kernel in ATTENTION_KERNELS[1:]]
ON_A_GPU += [("triton", "true"), ("tilelang", "true")]  # compiled


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "compile"), ON_A_GPU)
def test_resuming_on_a_gpu_is_the_unbroken_run(tmp_path, kernel, compile):
    changes = {**HARD, "kernel": kernel, "compile": compile, "device": "cuda", "dtype": "bfloat16"}
    assert run_train(tiny_args(tmp_path, "whole", **changes)) == 0
    run_in_parts(tiny_args(tmp_path, "parts", **changes), [7, 17])
    assert final(tmp_path / "parts") == final(tmp_path / "whole")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch, torch._dynamo  # the optimizer imports dynamo: once, not in every child
torch.set_num_threads(1)
from command import run_train, tiny_args

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
folder, rng = Path({folder!r}), random.Random(0)
changes = dict({changes!r}, checkpoint__interval=1)

def in_child(out):
    args = [*tiny_args(folder, out, **changes), "--resume=auto"]
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os._exit(run_train(args))
    return child

def finish(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def wait_for_metrics(out):
    path = folder / out / "metrics.jsonl"
    while not (path.is_file() and path.stat().st_size):
        time.sleep(0.001)
    return time.monotonic()

finish(in_child("whole"))  # the first fills the token cache
child, began = in_child("timed"), wait_for_metrics("timed")
finish(child)
seconds = time.monotonic() - began

def is_half_saved(out):
    checkpoints = folder / out / "checkpoints"
    names = [p.name for p in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return any(name.startswith("tmp-") or ".r" in name for name in names), bool(names)

weights = lambda out: (folder / out / "checkpoints/latest/model.safetensors").read_bytes()
saving = between = 0
for i in range({kills}):
    out = f"killed-{{i}}"
    child = in_child(out)
    if i >= 3:  # three are killed wherever they may be in their first moments
        wait_for_metrics(out)
    time.sleep(rng.uniform(0, 0.8 * seconds))
    while i % 5 == 4 and not is_half_saved(out)[0] and not os.waitid(os.P_PID, child, ENDED):
        pass  # on a busy machine chance alone seldom finds a save
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    half, has_any = is_half_saved(out)
    saving += half
    between += has_any and not half
    finish(in_child(out))
    assert weights(out) == weights("whole"), i
print(saving, between)
"""


def test_killed_at_20_random_moments_every_run_ends_with_the_same_weights(tmp_path):
    """SIGKILL while loading, training, evaluating and saving after every step; the run that is
    resumed ends as if nothing had been."""
    script = KILLS.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path), changes=HARD, kills=20
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    saving, between = map(int, result.stdout.split())
    assert saving >= 2, result.stdout  # or no kill hit what it is about
    assert between >= 2, result.stdout


def test_no_step_stands_twice_and_none_is_lost(tmp_path):
    """Resumed from an earlier checkpoint, as after a kill: what was written beyond it gives way."""
    args = tiny_args(tmp_path, **HARD, checkpoint__interval=10, checkpoint__keep=0)
    assert run_train(args) == 0
    path = tmp_path / "run" / "metrics.jsonl"
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "st')  # what a kill leaves
    checkpoint = tmp_path / "run/checkpoints/step_00000010"
    assert run_train([*args, f"--resume={checkpoint}"]) == 0
    lines = path.read_bytes().splitlines()
    steps = [(r["kind"], r["step"]) for r in map(json.loads, lines)]
    assert len(set(steps)) == len(steps)
    assert [r["step"] for r in map(json.loads, lines) if r["kind"] == "train"] == [*range(1, 25)]
    kept = [line for line in before.splitlines() if json.loads(line)["step"] <= 10]
    assert lines[: len(kept)] == kept  # not rewritten
    superseded = (tmp_path / "run" / "metrics-superseded.jsonl").read_bytes().splitlines()
    assert kept + superseded[:-1] == before.splitlines()


def test_auto_starts_afresh_where_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = tiny_args(tmp_path, compare="none", max_steps=3, out_dir=None, log__interval=1)
    args.append("--resume=auto")
    assert run_train(args) == 0
    run = tmp_path / "runs" / "sdpa"
    # A run that was killed before its first checkpoint has left the rest.
    shutil.rmtree(run / "checkpoints")
    assert run_train(args) == 0
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["sdpa"]
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"] == [
        1,
        2,
        3,
    ]
    assert (run / "checkpoints/latest").exists()


def test_auto_does_not_start_in_a_folder_that_is_no_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert run_train([*tiny_args(tmp_path, compare="none"), "--resume=auto"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_resumed_run_stays_in_its_folder(tmp_path, capsys):
    assert run_train(tiny_args(tmp_path, compare="none", max_steps=2)) == 0
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    own = [f"--config={moved / 'config.yaml'}", f"--resume={moved}"]
    capsys.readouterr()
    assert run_train([*own, f"--out_dir={tmp_path / 'other'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"stays in its own folder, {moved}" in error
    assert not (tmp_path / "other").exists()
    assert run_train(own) == 0  # its config.yaml still names the folder it was begun in
    assert run_train([*own, f"--out_dir={moved}"]) == 0


def test_tokens_are_counted_as_each_step_had_them(tmp_path):
    assert run_train(tiny_args(tmp_path, compare="none", max_steps=2, log__interval=1)) == 0
    run = tmp_path / "run"
    more = {"compare": "none", "max_steps": 4, "log__interval": 1, "batch__tokens": 256}
    assert run_train([*tiny_args(tmp_path, resume=run, **more), "--resume_allow"]) == 0
    records = read_metrics(run / "metrics.jsonl")
    tokens = [r["tokens"] for r in records if r["kind"] == "train"]
    state = json.loads((run / "checkpoints/latest/state.json").read_text())
    first = tokens[0]
    assert tokens == [first, 2 * first, 2 * first + 256, 2 * first + 512]
    assert first != 256
    assert state["tokens_seen"] == tokens[-1]


def test_resuming_with_other_settings_says_which(tmp_path, capsys):
    assert run_train(tiny_args(tmp_path, compare="none", max_steps=2)) == 0
    run = tmp_path / "run"
    again = tiny_args(
        tmp_path, compare="none", max_steps=4, resume=run, optim__lr=0.5, out_dir=None
    )
    capsys.readouterr()
    assert run_train(again) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "max_steps 2 -> 4, optim.lr 0.01 -> 0.5" in error
    assert run_train([*again, "--resume_allow"]) == 0
    # The run's file now says what it goes by, and what was allowed once is not allowed for ever.
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert (settings["optim"]["lr"], settings["resume_allow"]) == (0.5, False)
    starts = json.loads((run / "environment.json").read_text())
    assert [(s["step"], s["config"]["optim"]["lr"]) for s in starts] == [(0, 0.01), (2, 0.5)]
    capsys.readouterr()
    assert run_train([f"--config={run / 'config.yaml'}", f"--resume={run}"]) == 0
    assert "nothing left to train: step 4 of --max_steps 4" in capsys.readouterr().out


def test_a_setting_of_a_newer_minitx_counts_as_its_default(tmp_path):
    from minitx.config import TrainConfig, to_dict
    from minitx.resume import changed_settings

    new = to_dict(TrainConfig())
    old = {name: value for name, value in new.items() if name != "deterministic"}
    old["optim"] = {name: value for name, value in new["optim"].items() if name != "eps"}
    assert changed_settings(old, new) == {}
    new["optim"]["eps"] = 1.0
    assert changed_settings(old, new) == {"optim.eps": (1e-8, 1.0)}


def test_a_resumed_runs_report_is_of_the_whole_run(tmp_path):
    args = tiny_args(tmp_path, max_steps=6, log__interval=1)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 4)
        assert run_train(args) == 0
    assert not (tmp_path / "run/report.json").exists()
    assert run_train([*args, "--resume=auto"]) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["parity_passed"] is True
    assert report["speedup"] > 0
    assert report["steps"] == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: shutil.move(run / "checkpoints/step_00000002", run / "moved"), "RUN/checkp"),
        (lambda run: foreign_checkpoint(run), "was not saved by train.py, it lacks config"),
    ],
    ids=["outside", "foreign"],
)
def test_a_checkpoint_that_is_not_a_runs_is_refused(tmp_path, capsys, change, message):
    args = tiny_args(tmp_path, compare="none", max_steps=2)
    assert run_train(args) == 0
    checkpoint = change(tmp_path / "run")
    files = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert run_train([*args, f"--resume={checkpoint}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == files


def foreign_checkpoint(run: Path) -> Path:
    from checkpoint_cases import save

    return save(run, 3)


def test_overwriting_and_resuming_contradict_each_other(tmp_path, capsys):
    assert run_train([*tiny_args(tmp_path), "--overwrite", "--resume=auto"]) == 2
    assert "--overwrite and --resume contradict each other" in capsys.readouterr().err


def test_the_scripts_own_config_is_the_runs(tmp_path, capsys):
    """`python train.py --resume RUN` alone goes on with the run's settings."""
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 4)
        assert run_train(tiny_args(tmp_path, **EPOCHS)) == 0
    run = tmp_path / "run"
    for folder in (run, run / "checkpoints", run / "checkpoints/latest"):
        capsys.readouterr()
        path = script.default_config(["--resume", str(folder)])
        assert path == run / "config.yaml"
        assert "(the run's own)" in capsys.readouterr().out
        assert run_train([f"--config={path}", f"--resume={folder}"]) == 0
    assert final(run)
