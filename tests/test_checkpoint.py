"""Checkpoints: exact, whole whatever happens, and refused by name when they are not."""

import copy
import dataclasses
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from minitx import checkpoint as checkpoint_module
from minitx.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_into,
    load_model,
    load_state,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from minitx.model import GPT, GPTConfig
from minitx.step_folders import steps
from minitx.tensor_file import DTYPE_NAMES, write_tensors

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, max_seq_len=16, vocab_size=64, dropout=0.1)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other over tensors this small cost far more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(device="cpu", config=TINY, **options):
    """A model and its AdamW in two groups, as the trainer has them."""
    model = GPT(config, "eager").to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, **options)


def train(model, optimizer, count, device="cpu"):
    """Steps whose batches and dropout come from the global generators."""
    for _ in range(count):
        tokens = torch.randint(TINY.vocab_size, (2, 9)).to(device)
        loss = checkpoint_module.unwrap(model).loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fingerprint(model, optimizer=None):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
        for key, value in sorted(optimizer.state[parameter].items() if optimizer else ()):
            digest.update(key.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def save(run, step=10, model=None, optimizer=None, state=None, **options):
    if model is None:
        model, optimizer = make()
        train(model, optimizer, 1)
    return save_checkpoint(
        run, step=step, model=model, optimizer=optimizer, state=state or {}, **options
    )


def contents(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


# --- Resuming ---------------------------------------------------------------------------------

RESUME = """
import sys
import torch
from pathlib import Path
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from test_checkpoint import *
for name, options in OPTIMIZERS.items():
    torch.manual_seed(123)  # another one than the run's
    model, optimizer = make(**options)
    state = load_into(find_checkpoint(Path({run!r}) / name), model, optimizer)
    restore_random_state(state["random_state"])
    train(model, optimizer, 10)
    print(name, fingerprint(model, optimizer))
"""
OPTIMIZERS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "max": {"amsgrad": True}}


def test_ten_steps_and_ten_more_in_a_fresh_process_are_twenty(tmp_path):
    """Weights and moments bit for bit, with dropout: random states, moments and steps all count."""
    unbroken = {}
    for name, options in OPTIMIZERS.items():
        torch.manual_seed(0)
        model, optimizer = make(**options)
        train(model, optimizer, 10)
        save(tmp_path / name, 10, model, optimizer)
        train(model, optimizer, 10)
        unbroken[name] = fingerprint(model, optimizer)
    script = RESUME.format(tests=str(Path(__file__).parent), run=str(tmp_path))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert dict(line.split() for line in result.stdout.splitlines()) == unbroken


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_resume_on_a_gpu_is_bitwise_and_saving_takes_no_gpu_memory(tmp_path, fused):
    torch.manual_seed(0)
    model, optimizer = make("cuda", fused=fused)
    train(model, optimizer, 10, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    save(tmp_path, 10, model, optimizer)
    assert torch.cuda.max_memory_allocated() == before
    train(model, optimizer, 10, "cuda")

    resumed, its_optimizer = make("cuda", fused=fused)
    state = load_into(find_checkpoint(tmp_path), resumed, its_optimizer)
    assert len(state["random_state"]["cuda"]) == torch.cuda.device_count()
    restore_random_state(state["random_state"])
    train(resumed, its_optimizer, 10, "cuda")
    assert fingerprint(resumed, its_optimizer) == fingerprint(model, optimizer)
    loaded, _ = load_model(tmp_path, device="cuda", dtype=torch.bfloat16)
    assert {t.device.type for t in [*loaded.parameters(), *loaded.buffers()]} == {"cuda"}


def test_random_states_come_back_through_json():
    """Each generator in mid-pair: a normal drawn in twos is half used up."""

    def draw():
        return (
            [random.gauss(0, 1) for _ in range(3)],
            np.random.standard_normal(3).tolist(),
            torch.randn(3).tolist(),
        )

    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1)
    state = json.loads(json.dumps(random_state()))
    expected = draw()
    assert draw() != expected
    restore_random_state(state)
    assert draw() == expected


def test_hyperparameters_are_the_stored_ones_and_how_it_runs_is_its_own(tmp_path):
    model, optimizer = make(fused=True)
    train(model, optimizer, 1)
    optimizer.param_groups[0] |= {"lr": 1 / 3, "initial_lr": 0.7}
    checkpoint = save(tmp_path, 1, model, optimizer)
    model, optimizer = make(foreach=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(1.0)  # as a compiled step wants it
    load_into(checkpoint, model, optimizer)
    first, second = optimizer.param_groups
    assert isinstance(first["lr"], torch.Tensor)
    assert first["lr"] == torch.tensor(1 / 3)
    assert (first["initial_lr"], second["lr"], second["weight_decay"]) == (0.7, 1e-2, 0.0)
    assert first["betas"] == (0.9, 0.999)
    assert isinstance(first["betas"], tuple)
    assert first["foreach"]
    assert not first["fused"]


# --- Names, wrappers, ties, layouts -----------------------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def wrap(model, how):
    match how:
        case "compiled":
            return torch.compile(model, backend="eager")
        case "compiled block":
            model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
            return model
        case "ddp of compiled":
            return nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
        case "compiled ddp":
            return torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    return model


WRAPPINGS = ("plain", "compiled", "compiled block", "ddp of compiled", "compiled ddp")


# Dynamo looks at the .grad of a block's input, which is no leaf, and hides the warning by logging.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", WRAPPINGS)
def test_wrappers_leave_no_trace_in_a_checkpoint(tmp_path, process_group, how):
    plain = GPT(TINY, "eager")
    names = set(plain.state_dict())
    wrapped = wrap(copy.deepcopy(plain), how)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    checkpoint = save(tmp_path / "run", 1, wrapped, optimizer)
    assert set(load_file(checkpoint / "model.safetensors")) == names
    moments = set(load_file(checkpoint / "optimizer.safetensors"))
    assert moments == {f"{n}.{k}" for n in names for k in ("step", "exp_avg", "exp_avg_sq")}

    expected = fingerprint(wrapped, optimizer)
    for other in WRAPPINGS:
        model = wrap(GPT(TINY, "eager"), other)
        its_optimizer = torch.optim.AdamW(model.parameters())
        load_into(checkpoint, model, its_optimizer)
        assert fingerprint(model, its_optimizer) == expected, other
    model, _ = load_model(tmp_path / "run", kernel="eager")
    assert fingerprint(model) == fingerprint(wrapped)


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path):
    checkpoint = save(tmp_path)
    assert "head.weight" not in load_file(checkpoint / "model.safetensors")
    model, _ = load_model(checkpoint, kernel="eager")
    assert model.output_weight is model.tok_embd.weight


class TwoNames(nn.Module):
    """A model with one weight under two names, and a weight stored column by column."""

    def __init__(self):
        super().__init__()
        self.config = TINY
        self.first = nn.Linear(3, 5, bias=False)
        self.second = nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        self.columns = nn.Parameter(torch.randn(4, 6).t())


def test_shared_and_non_contiguous_tensors(tmp_path):
    model = TwoNames()
    checkpoint = save(tmp_path, 1, model, None)
    stored = load_file(checkpoint / "model.safetensors")
    assert set(stored) == {"columns", "first.weight"}
    assert torch.equal(stored["columns"], model.columns)
    other = TwoNames()
    load_into(checkpoint, other)
    assert torch.equal(other.columns, model.columns)
    assert torch.equal(other.second.weight, model.first.weight)
    assert other.second.weight is other.first.weight


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    """Every dtype, a scalar, an empty tensor; each begins at a multiple of its element size."""
    tensors = {name: torch.arange(3).to(dtype) for dtype, name in DTYPE_NAMES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "a": torch.ones(1) > 0}
    tensors["expanded"] = torch.tensor([1.0, 2.0]).expand(3, 2)
    entry = write_tensors(tmp_path / "x.safetensors", tensors)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    stored = load_file(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


# --- load_model -------------------------------------------------------------------------------


def test_load_model_builds_it_from_the_checkpoint(tmp_path):
    config = dataclasses.replace(TINY, tie_embeddings=False, qk_norm=True, n_kv_head=1)
    model, optimizer = make(config=config)
    save(tmp_path, 3, model, optimizer, {"tokens_seen": 7, "best": float("inf")})
    before = random_state()
    loaded, state = load_model(tmp_path, kernel="sdpa")
    assert random_state() == before  # nothing was drawn for weights that are then replaced
    assert (state["step"], state["tokens_seen"], state["best"]) == (3, 7, float("inf"))
    assert state["model_config"] == dataclasses.asdict(config)
    assert set(state["versions"]) == {"python", "minitx", "torch", "numpy", "triton", "tilelang"}
    assert loaded.config == config
    assert not loaded.training
    assert loaded.blocks[0].attn.kernel == "sdpa"
    assert fingerprint(loaded) == fingerprint(model)
    tokens = torch.arange(16)[None]
    loaded.set_kernel("eager")
    assert torch.equal(loaded(tokens), model.eval()(tokens))

    half, _ = load_model(tmp_path, dtype=torch.bfloat16)
    assert half.rope.cos.dtype == torch.float32
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16())


def test_load_model_outlives_its_files(tmp_path):
    """The weights are copies, not windows on a file that may be pruned or written over."""
    checkpoint = save(tmp_path)
    model, _ = load_model(tmp_path)
    expected = fingerprint(model)
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (checkpoint / "model.safetensors").stat().st_size)
    assert fingerprint(model) == expected


def test_overrides(tmp_path):
    save(tmp_path)
    overrides = {"rope_scaling": "linear", "rope_factor": 2.0}
    model, state = load_model(tmp_path, overrides=overrides)
    plain, _ = load_model(tmp_path)
    assert torch.equal(model.rope.cos[2], plain.rope.cos[1])
    assert state["model_config"]["rope_scaling"] == "none"  # what was saved
    with pytest.raises(CheckpointError, match="no field ropes_scaling; expected some of bias"):
        load_model(tmp_path, overrides={"ropes_scaling": "linear"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_embeddings": False}, r"missing head\.weight; use"),
        ({"n_layer": 1}, r"unexpected blocks\.1\.attn\.proj\.weight, blocks\.1\.attn\.qkv"),
        ({"vocab_size": 65}, r"tok_embd\.weight is \[64, 16\], the model's is \[65, 16\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    checkpoint = save(tmp_path)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors does not fit.*{message}"):
        load_model(tmp_path, overrides=change)
    model, optimizer = make(config=dataclasses.replace(TINY, **change))
    before = fingerprint(model)
    with pytest.raises(CheckpointError, match=message):
        load_into(checkpoint, model)
    with pytest.raises(CheckpointError, match=r"parameter groups|tok_embd"):
        load_into(checkpoint, model, optimizer)
    assert fingerprint(model) == before


def test_load_into_is_exact_or_refuses(tmp_path):
    checkpoint = save(tmp_path)
    with pytest.raises(CheckpointError, match=r"is F32, the model's is BF16"):
        load_into(checkpoint, GPT(TINY).bfloat16())
    model, _ = make()
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"\(9 \+ 5 parameters\) are not this .*\(14\)"):
        load_into(checkpoint, model, one_group)
    model, optimizer = make()
    without = save(tmp_path, 11, model, None)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        load_into(without, model, optimizer)
    with pytest.raises(ValueError, match="not the model's"):
        save(tmp_path, 12, GPT(TINY), optimizer)


def test_state_is_checked_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="agree with step 10"):
        save(tmp_path, state={"step": 9})
    with pytest.raises(ValueError, match="not hold format"):
        save(tmp_path, state={"files": []})
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, state={"path": tmp_path})
    assert list(tmp_path.iterdir()) == []
    given = {"random_state": {"ranks": [1, 2]}, "step": 10}
    assert load_state(save(tmp_path, state=given))["random_state"] == {"ranks": [1, 2]}


# --- Damage -----------------------------------------------------------------------------------


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "header", "gone", "foreign"])
def test_damage_is_refused_by_the_file_name(tmp_path, name, damage):
    checkpoint = save(tmp_path / "a", state={"tokens_seen": 1})
    path = checkpoint / name
    size = path.stat().st_size
    match damage:
        case "truncated":
            os.truncate(path, size - 2)  # the last byte of state.json is a line feed
        case "emptied":
            os.truncate(path, 0)
        case "flipped":
            flip(path, size - size // 4)
        case "header":
            flip(path, 20)
        case "gone":
            path.unlink()
        case "foreign":  # as large, but another run's
            other = save(tmp_path / "b", state={"tokens_seen": 2})
            shutil.copy(other / name, path)
    model, optimizer = make()
    before = fingerprint(model)
    with pytest.raises(CheckpointError) as raised:
        load_into(checkpoint, model, optimizer)
    # A foreign state.json is whole; the files beside it are not those it lists.
    expected = "model.safetensors" if (name, damage) == ("state.json", "foreign") else name
    assert str(checkpoint / expected) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert fingerprint(model) == before
    with pytest.raises(CheckpointError, match=expected):
        load_state(checkpoint)
    if name == "optimizer.safetensors":
        load_model(checkpoint)  # which does not read it
    else:
        with pytest.raises(CheckpointError, match=expected):
            load_model(checkpoint)


def test_no_flipped_bit_of_the_state_goes_unseen(tmp_path):
    checkpoint = save(tmp_path, state={"text": "é", "number": 0.1, "flag": True})
    path = checkpoint / "state.json"
    whole, expected = path.read_bytes(), load_state(checkpoint)
    rng = random.Random(0)
    seen = 0
    for _ in range(300):
        flip(path, rng.randrange(len(whole)), rng.randrange(8))
        try:
            assert load_state(checkpoint) == expected  # white space for white space
        except CheckpointError as error:
            seen += 1
            assert "state.json" in str(error)  # noqa: PT017
        path.write_bytes(whole)
    assert seen > 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "not written by minitx"),
        ('{"log_history": []}', "not written by minitx"),
        ('{"format": "minitx-checkpoint", "format_version": 99}', "has format version 99"),
    ],
)
def test_a_state_of_something_else(tmp_path, text, message):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


# --- Finding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("links", ["symlinks", "text files"])
def test_find_checkpoint(tmp_path, monkeypatch, links):
    if links == "text files":

        def refuse(*args, **kwargs):
            raise OSError(errno.EPERM, "no symlinks here")

        monkeypatch.setattr(os, "symlink", refuse)
    first = save(tmp_path, 5, is_best=True)
    second = save(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    assert (folder / "latest").is_symlink() == (links == "symlinks")
    for path in (tmp_path, folder, folder / "latest", second, str(tmp_path)):
        assert find_checkpoint(path) == second
    for path in (first, folder / "best"):
        assert find_checkpoint(path) == first
    # `latest` decides, not the number: an earlier step may be the later save.
    third = save(tmp_path, 7)
    assert find_checkpoint(tmp_path) == third
    (folder / "latest").unlink()
    assert find_checkpoint(tmp_path) == second
    (folder / "latest").write_text("step_00000099\n")
    assert find_checkpoint(folder) == second


def test_leftovers_are_not_taken_and_the_next_save_removes_them(tmp_path):
    first = save(tmp_path, 5)
    folder = tmp_path / "checkpoints"
    leftover = folder / "tmp-step_00000009-123"
    shutil.copytree(first, leftover)
    (folder / "tmp-latest").symlink_to("step_00000009")
    (folder / "latest").unlink()
    (folder / "step_00000008").mkdir()  # nothing in it
    assert find_checkpoint(tmp_path) == first
    with pytest.raises(CheckpointError, match="interrupted save left this"):
        find_checkpoint(leftover)
    os.replace(first, folder / "step_00000005.replaced")  # killed while it was written again
    assert load_state(find_checkpoint(tmp_path))["step"] == 5
    save(tmp_path, 6)
    names = {p.name for p in folder.iterdir()}
    assert names == {"step_00000005", "step_00000006", "step_00000008", "latest"}


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda p: None, "no such folder; give a run folder or a checkpoint folder"),
        (lambda p: p.write_text(""), "not a folder; give a run folder"),
        (lambda p: p.mkdir(), r"no checkpoint in it .*; give a run folder that has saved"),
        (lambda p: (p / "checkpoints").mkdir(parents=True), "no checkpoint in it"),
    ],
)
def test_nothing_to_find(tmp_path, make_it, message):
    make_it(tmp_path / "run")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / 'run'}: {message}"):
        find_checkpoint(tmp_path / "run")


def test_keep(tmp_path):
    """The newest, even if its step is lower, and the best stay; the best is one above the count."""

    def left():
        names = (p.name for p in (tmp_path / "checkpoints").iterdir() if not p.is_symlink())
        return sorted(int(name[5:]) for name in names)

    for step in (1, 2, 3, 4):
        save(tmp_path, step, is_best=step == 2)
    assert left() == [1, 2, 3, 4]
    save(tmp_path, 5, keep=2)
    assert left() == [2, 4, 5]
    save(tmp_path, 6, keep=1, is_best=True)
    assert left() == [6]
    save(tmp_path, 3, keep=1)
    assert left() == [3, 6]
    assert find_checkpoint(tmp_path).name == "step_00000003"


def test_a_removal_that_stops_halfway_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def halfway(path, ignore_errors=False):
        if Path(path).exists():
            (Path(path) / "model.safetensors").unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", halfway)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(tmp_path, 2, keep=1)
    left = steps(tmp_path / "checkpoints")
    assert [load_state(path)["step"] for path in left] == [2]


# --- Failing disks and kills ------------------------------------------------------------------


def test_a_full_disk_at_any_moment(tmp_path, monkeypatch):
    """The n-th flush fails, for every n until all succeed."""
    first = save(tmp_path, 5)
    before = contents(first)
    fsync, failures = os.fsync, 0
    for fail_at in range(1, 100):
        calls = 0

        def full(handle, fail_at=fail_at):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", full)
        try:
            save(tmp_path, 10)
        except CheckpointError as error:
            failures += 1
            message = "could not be written: No space left on device; the previous checkpoint is "
            assert message + "whole" in str(error)  # noqa: PT017
            assert contents(first) == before
            assert not [p for p in (tmp_path / "checkpoints").iterdir() if "tmp" in p.name]
            load_state(find_checkpoint(tmp_path))
        else:
            break
    assert failures == 6  # three files, the folder, the step's name, latest
    assert find_checkpoint(tmp_path).name == "step_00000010"


def test_a_write_that_fails(tmp_path):
    """A real one: the system refuses files beyond a size."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model, optimizer = make()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; there is no earlier checkpoint"):
            save(tmp_path, 5, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    save(tmp_path, 5, model, optimizer)


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from test_checkpoint import *

run, rng = Path({run!r}), random.Random(0)
model, optimizer = make()
train(model, optimizer, 1)

def saver(pipe, step):
    # All numbers of a state are its serial number, so that a mixture of two shows. Steps are
    # saved twice each: the second time replaces a folder.
    while True:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)
                optimizer.state[p]["exp_avg"].fill_(step)
        save(run, step // 2, model, optimizer, {{"serial": step}}, keep=2, is_best=step % 5 == 0)
        os.write(pipe, step.to_bytes(4, "little"))
        step += 1

newest, interrupted = 1, 0
for _ in range({kills}):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        saver(writer, newest + 1)
    os.close(writer)
    reported = os.read(reader, 4)  # one whole save at least
    time.sleep(rng.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4):
        reported = more
    os.close(reader)
    folder = run / "checkpoints"
    interrupted += any(p.name.startswith("tmp-") or ".r" in p.name for p in folder.iterdir())
    state = load_into(find_checkpoint(run), model, optimizer)
    serial = state["serial"]
    assert int.from_bytes(reported, "little") <= serial, (reported, serial)
    for p in model.parameters():
        assert (p == serial).all(), serial
        assert (optimizer.state[p]["exp_avg"] == serial).all(), serial
    load_state(find_checkpoint(folder / "best"))
    for whole in steps(folder):
        load_state(whole)
    newest = serial  # the next save starts from what this kill left
print(interrupted)
"""


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL at 25 random moments of a process that does nothing but save."""
    save(tmp_path, 0, is_best=True)
    script = KILLS.format(tests=str(Path(__file__).parent), run=str(tmp_path), kills=25)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 3, "all kills came between saves: the test tests nothing"
