"""The command line: a mistake is one line that names the flag, and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from command import run_train, tiny_args

from minitx import plots
from minitx.bench import __main__ as bench
from minitx.cli import make_parser, parse_config
from minitx.config import TrainConfig

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--no_such_flag=1"], "no_such_flag"),
        (["--model.n_layerr=1"], "model.n_layerr"),
        (["stray"], "stray"),
        (["--optim.lr=fast"], "error: --optim.lr: expected a number, got fast\n"),
        (["--optim.lr=nan"], "error: --optim.lr: expected a number, got nan\n"),
        (["--model.n_layer=2.5"], "error: --model.n_layer: expected a whole number, got 2.5\n"),
        (["--batch.micro=all"], "--batch.micro: expected a whole number or null, got all\n"),
        (["--compile=maybe"], "error: --compile: expected true or false, got maybe\n"),
        (["--optim.schedule=step"], "expected one of cosine, wsd, constant, got step\n"),
        (["--optim={lr: fast}"], "error: --optim.lr: expected a number, got fast\n"),
        (["--optim.lr="], "error: --optim.lr: expected a number, got nothing\n"),
        (["--model=3"], "model"),
        (["--kernel=flash"], "--kernel flash is unknown; expected one of auto, reference, eager"),
        (["--compare=flash"], "--compare flash is unknown"),
        (["--config=nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--data.source=nowhere"], "nowhere"),
        (["--device=tpu"], "--device tpu"),
        (["--device=cuda:99"], "--device cuda:99"),
        (["--batch.tokens=100"], "--batch.tokens 100 is not a multiple of the context of 32"),
        (["--batch.micro=3"], "--batch.micro 3 does not divide the 4 sequences"),
        (["--model.n_head=3"], "n_embd must be a multiple of n_head, got 32 and 3"),
        (["--model.vocab_size=10"], "--model.vocab_size 10 is smaller than the tokenizer's 257"),
        (["--model.pos=learned", "--batch.seq_len=64"], "beyond the 32 learned positions"),
        (["--max_steps=0"], "--max_steps must be at least 1, got 0"),
        (["--optim.lr=-1"], "--optim.lr must not be negative"),
        (["--optim.eps=-1"], "--optim.eps must not be negative"),
        (["--optim.lr=1e-5"], "--optim.min_lr 6e-05 is above --optim.lr 1e-05, which decays to it"),
        (["--batch.seq_len=0"], "--batch.seq_len must be at least 1, got 0"),
        (["--model.vocab_size=0"], "vocab_size must be at least 1, got 0"),
        (["--out_dir="], "--out_dir is empty; give a path, or leave it out"),
        (["--debug.replay="], "--debug.replay is empty; give a path"),
        (["--resume="], "--resume is empty; give a path, or leave it out"),
        (["--data.source="], "--data.source is empty; give a path"),
        (["--optim.beta1=2"], "--optim.beta1 must be at least 0 and below 1, got 2.0"),
        (["--optim.beta2=1"], "--optim.beta2 must be at least 0 and below 1, got 1.0"),
        ([f"--seed={2**64}"], "--seed must be from -2**63 to 2**64 - 1"),
        (["--resume=nowhere"], "nowhere"),
        (["--model.dropout=1.5"], "dropout must be in [0, 1), got 1.5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(args, expected, tmp_path, capsys):
    assert run_train([*tiny_args(tmp_path), *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("train.py: error: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"modell: {}\n", "unknown setting modell"),
        (b"a: [1\n", "bad.yaml: not YAML: while parsing"),
        (b"\xff\xfe", "bad.yaml: not YAML: 'utf-8' codec can't decode"),
        (b"", "bad.yaml: no settings in it; expected lines as 'max_steps: 100'"),
        (b"- max_steps\n", "bad.yaml: no settings in it"),
        (b"model:\n  # n_layer: 2\n", "bad.yaml: model is a group of settings, got nothing"),
        (b"max_steps: 2\noptim: 3\n", "bad.yaml: optim is a group of settings, got 3"),
    ],
)
def test_a_bad_yaml_file_is_one_line(content, expected, tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert run_train([f"--config={path}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert expected in error


@pytest.mark.parametrize(("length", "trains"), [(10, False), (32, False), (33, True)])
def test_a_text_shorter_than_the_context(length, trains, tmp_path, capsys):
    """A context of 32 needs 33 tokens; of a text without validation part, end-of-text is one."""
    args = tiny_args(tmp_path, compare="none", max_steps=2, data__val_fraction=0.0)
    (tmp_path / "text.txt").write_text("x" * (length - 1))
    assert run_train(args) == (0 if trains else 2)
    if not trains:
        error = capsys.readouterr().err.splitlines()[-1]
        expected = f"need at least 33 tokens for a context of 32, got {length}"
        assert error.startswith(f"train.py: error: {expected}")
        assert not (tmp_path / "run").exists()


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("kernel: eager\nmodel:\n  n_layer: 3\n  n_head: 4\n")
    args = ["--config", str(path), "--model.n_layer", "5", "--compile", "--seed", "7"]
    config = parse_config(TrainConfig, args, prog="x", description="")
    assert (config.kernel, config.model.n_layer, config.model.n_head) == ("eager", 5, 4)
    assert (config.compile, config.seed, config.overwrite) == (True, 7, False)


def test_a_run_is_never_overwritten_unasked(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    precious = tmp_path / "run" / "notes.txt"
    precious.write_text("mine")
    args = tiny_args(tmp_path, compare="none", max_steps=1)
    assert run_train(args) == 2
    assert "is not empty" in capsys.readouterr().err
    assert run_train([*args, "--overwrite"]) == 2  # not a run's folder
    assert "holds no config.yaml" in capsys.readouterr().err
    assert precious.read_text() == "mine"
    precious.rename(tmp_path / "run" / "config.yaml")
    assert run_train([*args, "--overwrite"]) == 0


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "else")
    for name, message in (
        ("file", "is a file; expected a folder"),
        ("file/below", "cannot be made: Not a directory; choose one that can be written"),
        ("link", "cannot be made: File exists"),
        ("x" * 300, "cannot be made: File name too long"),
    ):
        assert run_train(tiny_args(tmp_path, out=name, compare="none")) == 2
        assert f"error: --out_dir {tmp_path / name} {message}" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_default_folder_is_a_new_one_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = tiny_args(tmp_path, compare="none", max_steps=1, out_dir=None)
    for _ in range(2):
        assert run_train(args) == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"sdpa", "sdpa-2"}


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (plots.main, [""]),
        (plots.main, ["run", "--out", ""]),
        (bench.main, ["eval", "", "--out=x.csv"]),
        (bench.main, ["eval", "run", "--out="]),
        (bench.main, ["table", ""]),
        (bench.main, ["table", "--readme="]),
        (bench.main, ["auto", ""]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_empty_path_is_not_the_current_folder(main, argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(argv)
    assert exited.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(": is empty; give a path")
    assert not list(tmp_path.iterdir())


def test_help_explains_every_flag():
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert "Tokens a step, over all micro-batches. (type: int," in " ".join(result.stdout.split())


def test_help_keeps_the_lines_of_commands_and_fills_the_others():
    description = "One line\nand another.\n\n    a command\n    another  # as it stands\n\nThe end."
    told = make_parser(TrainConfig, "x", description).format_help().partition("One")[2]
    assert told.startswith(
        " line and another.\n\n    a command\n    another  # as it stands\n\nThe end.\n\noptions:"
    )
    assert "options:" in make_parser(TrainConfig, "x", "").format_help()


def test_importing_minitx_imports_no_compiler():
    code = (
        "import sys, minitx, minitx.kernels, minitx.training; "
        "print([m for m in ('triton', 'tilelang', 'torch._dynamo') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
