"""Checkpoints on a disk: found, refused when damaged, whole after a kill or a full disk."""

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_cases import contents, fingerprint, make, save

from minitx.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_into,
    load_model,
    load_state,
)
from minitx.step_folders import steps


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other over tensors this small cost far more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
from checkpoint_cases import make, save, train
from minitx.checkpoint import find_checkpoint, load_into, load_state
from minitx.step_folders import steps

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
