"""Runs of eval.py for the tests: a checkpoint small enough for any kernel, and what came out."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from minitx.checkpoint import save_checkpoint
from minitx.cli import run_cli
from minitx.data import DataConfig
from minitx.eval_config import EvalConfig
from minitx.evaluation import evaluate
from minitx.model import GPT, GPTConfig
from minitx.tokenizer import ByteTokenizer

TEXT = b"".join(b"def f%d(x): return x + %d  # add\n" % (i, i * 7) for i in range(8))


def make_run(folder: Path, *, tokenizer=None, source="", **settings) -> Path:
    """A run folder as training leaves it, of a random model whose attention is not uniform."""
    tokenizer = tokenizer or ByteTokenizer()
    torch.manual_seed(0)
    config = dict(n_layer=2, n_head=2, n_embd=16, max_seq_len=32, vocab_size=320) | settings
    model = GPT(GPTConfig(**config), "eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(8)
    data = DataConfig(source=source, tokenizer="bytes", val_fraction=0.3)
    state = {"config": {"data": asdict(data)}}
    save_checkpoint(folder, step=7, model=model, optimizer=None, state=state)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def run_eval(*argv, plots=False) -> int:
    """eval.py in this process; without its picture, which takes longer than all the rest."""
    arguments = ["--device=cpu", "--plots", str(plots).lower(), *map(str, argv)]
    return run_cli(evaluate, EvalConfig, arguments, prog="eval.py", description="")


def report_of(out_dir: Path) -> dict:
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads((out_dir / "eval.json").read_text("utf-8"), parse_constant=refuse)


def nll_of(run, text_file, out, *argv) -> list[float]:
    code = run_eval(
        *("--checkpoint", run, "--kernel", "sdpa", "--data.source", text_file),
        *("--paired_targets", 0, "--out_dir", out, *argv),
    )
    assert code == 0
    return [row["nll"] for row in report_of(out)["contexts"]]


def one_line(capsys, kind: str = "error") -> str:
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1, captured.err
    assert "Traceback" not in captured.err
    assert captured.err.startswith(f"eval.py: {kind}: ")
    return captured.err
