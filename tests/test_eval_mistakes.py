"""What eval.py says to a user's mistake: one line, exit code 2, and nothing written."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from eval_runs import TEXT, make_run, nll_of, one_line, report_of, run_eval

from minitx import evaluation
from minitx.checkpoint import find_checkpoint
from minitx.tokenizer import train_bpe

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stride", "0"], "--stride must be at least 1, got 0"),
        (["--stride", "33"], "--stride 33 is beyond the context of 32 tokens"),
        (["--context_lengths", "64,16", "--stride", "32"], "beyond the context of 16 tokens"),
        (["--context_lengths", "0"], "--context_lengths must be at least 1, got 0"),
        (["--context_lengths", "8,x"], "--context_lengths 8,x must be whole numbers"),
        (["--context_lengths", "8,,9"], "must be whole numbers with commas"),
        (["--context_lengths", "[]"], "--context_lengths [] must be whole numbers with commas"),
        (["--context_lengths", "1" + 14 * "0"], "do not fit in memory; use a shorter one"),
        (["--context_lengths", 23 * "9"], "do not fit in memory; use a shorter one"),
        (["--max_tokens", "0"], "--max_tokens must be at least 1, got 0"),
        (["--max_tokens", "1"], "no document of two tokens or more (1 tokens in all)"),
        (["--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        (["--prefill_chunk", "0"], "--prefill_chunk must be at least 1, got 0"),
        (["--probe_tokens", "-1"], "--probe_tokens must not be negative, got -1"),
        (["--kernel", "flash"], "--kernel flash is unknown; expected one of auto, reference"),
        (["--compare", "flash"], "--compare flash is unknown"),
        (["--rope_factor", "2"], "--rope_factor needs --rope_scaling"),
        (["--rope_scaling", "yarn", "--rope_factor", "0.5"], "rope_factor must be at least 1"),
        (["--rope_scaling", "longer"], "rope_scaling"),
        (["--checkpoint", ""], "--checkpoint is empty; give a path"),
        (["--out_dir", ""], "--out_dir is empty; give a path"),
        (["--data.tokenizer", ""], "--data.tokenizer is empty; give a path"),
        (["--data.source", ""], "--data.source is empty; give a path"),
        (["--device", "tpu"], "--device tpu is unknown"),
        (["--data.source", "no/such/file.txt"], "no such file or folder: no/such/file.txt"),
        (["--data.tokenizer", "no.json"], "no.json"),
        (["--passkey.depths", "[2]"], "--passkey.depths must be from 0 to 1"),
        (["--task", "passkey", "--context_lengths", "20"], "context of at least"),
        (["--strides", "4"], "strides"),
        (["--data.sauce", "x"], "sauce"),
        (["--config", "no.yaml"], "no.yaml: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_setting_is_one_line_and_exit_2(
    argv, message, run_folder, text_file, tmp_path, capsys
):
    out = tmp_path / "out"
    base = ["--checkpoint", run_folder, "--out_dir", out]
    if "--data.source" not in argv:
        base += ["--data.source", text_file]
    assert run_eval(*base, *argv) == 2
    assert message in one_line(capsys)
    assert not (out / "eval.json").exists()


def test_a_folder_that_cannot_be_made(run_folder, text_file, tmp_path, capsys):
    base = ("--checkpoint", run_folder, "--data.source", text_file, "--out_dir")
    assert run_eval(*base, text_file) == 2
    assert f"--out_dir {text_file} is a file; expected a folder" in one_line(capsys)
    assert run_eval(*base, text_file / "below") == 2
    assert f"--out_dir {text_file / 'below'} cannot be made: Not a directory" in one_line(capsys)
    assert text_file.read_bytes() == TEXT


@pytest.mark.parametrize("write", [1, 3])
def test_a_full_disk_is_one_line_and_exit_6(
    write, run_folder, text_file, tmp_path, monkeypatch, capsys
):
    """What was there of eval.json stays whole, and no half of another beside it."""
    original, written = Path.write_text, []

    def write_text(path, text, **options):
        written.append(path)
        if len(written) < write:
            return original(path, text, **options)
        original(path, text[:10], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_text)
    out = tmp_path / "out"
    base = ("--checkpoint", run_folder, "--data.source", text_file, "--out_dir", out)
    assert run_eval(*base, "--context_lengths", "8,16") == 6
    message = one_line(capsys, "stopped")
    assert f"{out / 'eval.json'}: No space left on device; see to the disk" in message
    assert [path.name for path in out.iterdir()] == ["eval.json"][: write - 1]
    if write > 1:
        assert [row["context_length"] for row in report_of(out)["contexts"]] == [8]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ([], "a longer text or --data.join_documents true would"),
        (["--data.join_documents", "true"], "a longer text would"),
        (["--max_tokens", "40"], "a larger --max_tokens or --data.join_documents true would"),
        (["--max_tokens", "40", "--data.join_documents", "true"], "a larger --max_tokens would"),
    ],
)
def test_a_text_that_fills_no_context_is_told(flags, advice, run_folder, tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_bytes(TEXT[:60])
    base = ("--checkpoint", run_folder, "--data.source", tmp_path / "texts")
    out = ("--out_dir", tmp_path / "out", "--context_lengths", "1000", "--paired_targets", "0")
    assert run_eval(*base, *out, *flags) == 0
    expected = f"note: no document fills a context of 1,000 tokens; {advice}\n"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"x"])
def test_a_text_too_short(content, run_folder, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_bytes(content)
    assert run_eval("--checkpoint", run_folder, "--data.source", path) == 2
    assert "short.txt" in one_line(capsys)
    path.write_bytes(b"xy")
    nll_of(run_folder, path, tmp_path / "out")
    assert report_of(tmp_path / "out")["contexts"][0]["tokens_scored"] == 1


def test_a_tokenizer_of_another_vocabulary(run_folder, tmp_path, text_file, capsys):
    other = train_bpe([TEXT], 300)
    other.save(tmp_path / "other.json")
    args = ("--data.source", text_file, "--out_dir", tmp_path / "out")
    given = ("--data.tokenizer", tmp_path / "other.json")
    assert run_eval("--checkpoint", run_folder, *args, *given) == 2
    message = one_line(capsys)
    assert "another vocabulary" in message
    assert "(257 ids)" in message
    small = make_run(tmp_path / "small", vocab_size=128)
    assert run_eval("--checkpoint", small, *args) == 2
    message = one_line(capsys)
    assert "the tokenizer has 257 ids" in message
    assert "a vocabulary of 128" in message
    # A checkpoint without a tokenizer takes the one that is given, and says so without one.
    bare = make_run(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert run_eval("--checkpoint", bare, *args) == 2
    assert "tokenizer.json" in one_line(capsys)
    assert run_eval("--checkpoint", bare, *args, "--data.tokenizer", "bytes") == 0


def test_checkpoints_that_are_none(run_folder, tmp_path, text_file, capsys):
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    shutil.copytree(run_folder, damaged, symlinks=True)
    weights = find_checkpoint(damaged) / "model.safetensors"
    cut = weights.read_bytes()[:-40]
    weights.write_bytes(cut)
    for path, words in (
        (tmp_path / "empty", "no checkpoint in it"),
        (tmp_path / "nowhere", "no such folder"),
        (text_file, "not a folder"),
        (damaged, "model.safetensors"),
    ):
        assert run_eval("--checkpoint", path, "--data.source", text_file) == 2
        message = one_line(capsys)
        assert words in message
        assert str(path) in message
    assert run_eval("--data.source", text_file) == 2
    assert "checkpoint" in one_line(capsys)


def test_the_script_under_another_locale(run_folder, tmp_path):
    """A process of its own: UTF-8 whatever the locale, and a traceback for no mistake."""
    path = tmp_path / "é😀.txt"
    path.write_bytes("naïve café 😀 ".encode() * 3)
    settings = {"context_lengths": [8, 16], "out_dir": str(tmp_path / "out"), "plots": False}
    (tmp_path / "eval.yaml").write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, str(REPOSITORY / "eval.py"), "--checkpoint", str(run_folder)]
    command += ["--data.source", str(path), "--config", str(tmp_path / "eval.yaml")]
    environment = os.environ | {"LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = report_of(tmp_path / "out")["contexts"]
    assert [row["context_length"] for row in rows] == [8, 16]
    assert rows[0]["bytes_scored"] == 3 * len("naïve café 😀 ".encode()) - 1


def test_losses_that_are_not_finite_are_told(run_folder, text_file, tmp_path, monkeypatch, capsys):
    load = evaluation.load_for_contexts

    def broken(*args):
        model, state = load(*args)
        model.norm.weight.data.fill_(float("nan"))
        return model, state

    monkeypatch.setattr(evaluation, "load_for_contexts", broken)
    base = ["--checkpoint", run_folder, "--data.source", text_file, "--out_dir", tmp_path / "out"]
    run_eval(*base, "--probe_tokens", "0", "--paired_targets", "0", "--kernel", "eager")
    out = capsys.readouterr().out
    (note,) = [line for line in out.splitlines() if line.startswith("note: ")]
    assert "losses are not finite" in note
    assert "eager is at fault" in note
