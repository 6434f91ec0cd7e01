"""A run that cannot go on: one line, an exit code of its own, and what it had is kept."""

import errno
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from command import run_train, tiny_args
from safetensors import safe_open
from tqdm import tqdm

from minitx.checkpoint import find_checkpoint, load_state
from minitx.kernels import api
from minitx.metrics import read_metrics
from minitx.run import Run
from minitx.trainer import Trainer

NAN_BLOCK = "blocks.1.attn"


@pytest.fixture
def broken_kernel(monkeypatch):
    """sdpa gives a NaN in the second layer, in training, of the batch it sees as its n-th; returns
    a function that sets n."""
    right, seen, at = api._run_attention, 0, math.inf

    def run(kernel, q, k, v, is_causal, scale, return_lse):
        nonlocal seen
        out, lse = right(kernel, q, k, v, is_causal, scale, return_lse)
        if kernel == "sdpa" and torch.is_grad_enabled():
            seen += 1
            if seen == 2 * at:  # two layers
                out = out * torch.tensor(math.nan)
        return out, lse

    def break_at(n: float) -> None:
        nonlocal seen, at
        seen, at = 0, n

    monkeypatch.setattr(api, "_run_attention", run)
    return break_at


def stopped_line(capsys: pytest.CaptureFixture, code: int, returned: int) -> str:
    """The one line on stderr of a run that ended with this exit code."""
    assert returned == code
    error = capsys.readouterr().err
    assert error.startswith("train.py: stopped: ")
    assert error.count("\n") == 1
    return error


# --- A loss or gradient that is not finite ----------------------------------------------------


def test_a_non_finite_step_is_one_line_and_loses_nothing(tmp_path, broken_kernel, capsys):
    """Step 5 breaks: the state before it is saved beside the last checkpoint, and going on from it
    gives the unbroken run."""
    changes = dict(compare="none", batch__micro=2, model__dropout=0.1, log__interval=1)
    assert run_train(tiny_args(tmp_path, "whole", **changes)) == 0
    args = tiny_args(tmp_path, **changes, checkpoint__interval=2, checkpoint__keep=1)
    broken_kernel(9)  # two micro-batches a step: the first of the fifth
    capsys.readouterr()
    run = tmp_path / "run"
    line = stopped_line(capsys, 5, run_train(args))
    assert "step 5: loss nan, gradient norm nan on kernel 'sdpa' in float32" in line
    assert "try a lower --optim.lr" in line
    assert f"go on with: python train.py --resume {run};" in line
    assert f"--debug.replay {run / 'debug_step_00000005.safetensors'}" in line
    assert {p.name for p in (run / "checkpoints").iterdir()} == {
        "step_00000004",
        "latest",
    }
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 4]
    broken_kernel(math.inf)
    assert run_train([*args, "--resume=auto"]) == 0
    weights = [
        (tmp_path / out / "checkpoints/latest/model.safetensors").read_bytes()
        for out in ("whole", "run")
    ]
    assert weights[0] == weights[1]


def test_the_state_before_the_step_is_saved_where_no_checkpoint_is(tmp_path, broken_kernel, capsys):
    args = tiny_args(tmp_path, compare="none", checkpoint__interval=3, checkpoint__keep=1)
    broken_kernel(6)
    assert "step 6: loss nan" in stopped_line(capsys, 5, run_train(args))
    folder = tmp_path / "run" / "checkpoints"
    assert {p.name for p in folder.iterdir()} == {"step_00000003", "step_00000005", "latest"}
    assert load_state(find_checkpoint(tmp_path / "run"))["step"] == 5


def test_a_comparison_that_is_not_finite_is_one_line(tmp_path, broken_kernel, capsys):
    broken_kernel(2)
    line = stopped_line(capsys, 5, run_train(tiny_args(tmp_path, compare="eager")))
    assert "in the comparison before training: step 2: loss nan" in line
    assert "kernel 'sdpa'" in line


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("step", [1, 5])  # from the initial weights, and from a checkpoint
def test_the_batch_is_replayed(step, dtype, tmp_path, broken_kernel, capsys):
    """The replay sees what the run saw: same loss, same gradient norm, where the kernel is right;
    and says where the first NaN is, where it is not."""
    changes = dict(compare="none", model__dropout=0.1, log__interval=1, dtype=dtype, max_steps=5)
    assert run_train(tiny_args(tmp_path, "whole", **changes)) == 0
    args = tiny_args(tmp_path, **changes)
    broken_kernel(step)
    capsys.readouterr()
    stopped_line(capsys, 5, run_train(args))
    path = tmp_path / "run" / f"debug_step_{step:08d}.safetensors"
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["minitx"])
        assert file.get_tensor("inputs").shape == (1, 4, 32)
        assert torch.equal(file.get_tensor("inputs")[..., 1:], file.get_tensor("targets")[..., :-1])
    assert (about["step"], about["seed"], about["kernel"]) == (step, 0, "sdpa")
    assert about["checkpoint"] == (None if step == 1 else "checkpoints/step_00000004")
    assert path.stat().st_size < 10_000

    broken_kernel(1)
    assert run_train([*args, f"--debug.replay={path}"]) == 5
    out = capsys.readouterr().out
    assert f"replay: step {step} of {tmp_path / 'run'}" in out
    assert f"first non-finite output: {NAN_BLOCK}" in out
    assert "first non-finite gradient: norm.weight" in out
    broken_kernel(math.inf)
    assert run_train([*args, f"--debug.replay={path}"]) == 0
    out = capsys.readouterr().out
    assert "non-finite" not in out
    loss, norm = map(float, re.search(r"loss (\S+), gradient norm (\S+) ", out).groups())
    records = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    record = next(r for r in records if r["kind"] == "train" and r["step"] == step)
    assert (loss, norm) == (record["loss"], record["grad_norm"])
    assert run_train([*args, f"--debug.replay={path}", "--kernel=eager"]) == 0
    assert "on kernel 'eager'" in capsys.readouterr().out


def test_a_gradient_that_breaks_on_its_way_back_is_located(tmp_path, monkeypatch, capsys):
    """The loss is finite, the gradient is NaN from the attention of layer 0 on: what lies behind it
    in the backward is the MLP of layer 0, which is clean."""
    right, seen = api._run_attention, 0

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.nan

    def run(*args):
        nonlocal seen
        out, lse = right(*args)
        seen += 1
        return (Poison.apply(out) if seen % 2 == 1 else out), lse

    monkeypatch.setattr(api, "_run_attention", run)
    args = tiny_args(tmp_path, compare="none")
    line = stopped_line(capsys, 5, run_train(args))
    assert re.search(r"step 1: loss 5\.\d+, gradient norm nan", line)
    path = tmp_path / "run" / "debug_step_00000001.safetensors"
    assert run_train([*args, f"--debug.replay={path}"]) == 5
    out = capsys.readouterr().out
    assert "first non-finite gradient: blocks.0.attn.qkv.weight" in out
    assert "first non-finite output" not in out


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path, monkeypatch, capsys):
    original = Trainer.launch_step

    def launch_step(self):
        original(self)
        if self.step_number == 3:
            with torch.no_grad():
                self.model.norm.weight[0] = math.nan

    monkeypatch.setattr(Trainer, "launch_step", launch_step)
    args = tiny_args(tmp_path, compare="none", checkpoint__interval=2, log__eval_interval=0)
    line = stopped_line(capsys, 5, run_train(args))
    assert "the weights themselves are not finite; go on with:" in line
    assert find_checkpoint(tmp_path / "run").name == "step_00000002"


def test_a_checkpoint_that_is_not_finite_is_not_to_be_gone_on_from(tmp_path, monkeypatch, capsys):
    original = Run.save

    def save(self, is_best=False):
        with torch.no_grad():
            self.trainer.model.norm.weight[0] = math.nan
        original(self, is_best)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", save)
        args = tiny_args(tmp_path, compare="none", log__eval_interval=0)
        assert run_train(args) == 0
    capsys.readouterr()
    again = [*args, f"--resume={tmp_path / 'run'}", "--max_steps=8", "--resume_allow"]
    line = stopped_line(capsys, 5, run_train(again))
    assert line.endswith("those of its checkpoint are not finite: go on from an earlier one\n")


@pytest.mark.parametrize("content", [None, b"", b"not a tensor file"])
def test_a_file_that_replays_nothing_is_refused(content, tmp_path, capsys):
    path = tmp_path / "debug_step_00000001.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert run_train([*tiny_args(tmp_path), f"--debug.replay={path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train.py: error: --debug.replay {path} cannot be used")
    assert error.count("\n") == 1


# --- A disk that is full, memory that runs out ------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_save_that_fails_stops_the_run_and_keeps_the_last(code, tmp_path, monkeypatch, capsys):
    args = tiny_args(tmp_path, compare="none", checkpoint__interval=2, log__interval=1)
    fsync, calls = os.fsync, 0

    def failing(handle):
        nonlocal calls
        calls += 1
        if calls > 7:  # seven make the first checkpoint and its folder
            raise OSError(code, os.strerror(code))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        line = stopped_line(capsys, 6, run_train(args))
    run = tmp_path / "run"
    assert f"step_00000004 could not be written: {os.strerror(code)}" in line
    assert "the previous checkpoint is whole" in line
    checkpoint = find_checkpoint(run)
    assert (checkpoint.name, load_state(checkpoint)["step"]) == ("step_00000002", 2)
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"] == [
        1,
        2,
        3,
        4,
    ]
    assert run_train([*args, "--resume=auto"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_metrics_that_cannot_be_written_save_the_run_first(tmp_path, monkeypatch, capsys):
    """The disk is full for the metrics alone: 3 steps of work are saved before the run stops."""
    from minitx.metrics import MetricsLog

    def on_a_full_disk(self, path, step=0):
        self.path = path
        self._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115

    monkeypatch.setattr(MetricsLog, "__init__", on_a_full_disk)
    args = tiny_args(tmp_path, compare="none", log__interval=3)
    line = stopped_line(capsys, 6, run_train(args))
    run = tmp_path / "run"
    assert f"{run / 'metrics.jsonl'} could not be written: No space left on device" in line
    assert f"go on with: python train.py --resume {run}" in line
    assert load_state(find_checkpoint(run))["step"] == 3


def test_lines_that_nobody_takes_cost_no_step(tmp_path, monkeypatch, capsys):
    written = []

    def write(bar, line):
        written.append(line)
        if len(written) > 2:  # the header, and a step's line
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(tqdm, "write", write)
    args = tiny_args(tmp_path, compare="none", log__interval=2, log__eval_interval=0)
    line = stopped_line(capsys, 6, run_train(args))
    run = tmp_path / "run"
    assert "its lines cannot be printed: Broken pipe; go on with: python train.py" in line
    assert load_state(find_checkpoint(run))["step"] == 4
    monkeypatch.undo()
    assert run_train([*args, f"--resume={run}"]) == 0
    assert [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"] == [
        2,
        4,
        6,
    ]


@pytest.mark.parametrize(
    "name", ["config.yaml", "environment.json", "parity.json", "tokenizer.json"]
)
def test_a_folder_that_cannot_be_written_is_one_line(name, tmp_path, monkeypatch, capsys):
    original = Path.write_text

    def write_text(path, text, **options):
        if path != tmp_path / "run" / f"{name}.{os.getpid()}.new":
            return original(path, text, **options)
        original(path, text[:10], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_text)
    line = stopped_line(capsys, 6, run_train(tiny_args(tmp_path, compare_steps=1)))
    path = tmp_path / "run" / name
    assert f"{path} could not be written: No space left on device; see to the disk" in line
    assert "there is no checkpoint" in line
    assert not path.exists()
    assert not list(path.parent.glob("*.new"))


def test_a_written_line_that_is_short_is_an_error(tmp_path):
    """A disk that fills up takes a part of the line first, and says so only by its length."""
    from minitx.metrics import MetricsLog

    log = MetricsLog(tmp_path / "metrics.jsonl")
    log._file.close()
    log._file = type("Short", (), {"write": lambda self, data: len(data) - 1})()
    with pytest.raises(OSError, match="No space left on device"):
        log.write({"kind": "train", "step": 1})


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. You tried to allocate 20 bytes.\nmore"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20 bytes."),
    ],
    ids=["gpu", "cpu"],
)
@pytest.mark.parametrize("compare", ["none", "eager"])
def test_running_out_of_memory_is_one_line(error, compare, tmp_path, monkeypatch, capsys):
    def backward(self, batches):
        raise error

    monkeypatch.setattr(Trainer, "backward", backward)
    line = stopped_line(capsys, 1, run_train(tiny_args(tmp_path, compare=compare)))
    assert "ou tried to allocate 20 bytes" in line
    assert "--batch.micro (now 4)" in line
