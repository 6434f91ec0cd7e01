"""What README.md tells people to type exists, parses and runs."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from minitx.cli import parse_config
from minitx.config import TrainConfig
from minitx.eval_config import EvalConfig
from minitx.generate import GenerateConfig
from minitx.kernels import ATTENTION_KERNELS

ROOT = Path(__file__).parent.parent
DOCS = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")
}
COMMANDS = {"train.py": TrainConfig, "eval.py": EvalConfig, "-m minitx.generate": GenerateConfig}


def commands() -> list[str]:
    """Every `python ...` of the README, in code blocks and in text."""
    blocks = re.findall(r"^(python .+)$", DOCS["README.md"], re.MULTILINE)
    spans = re.findall(r"`(python [^`]+)`", DOCS["README.md"])
    return sorted({line.split("  ")[0] for line in blocks + spans})


def test_there_are_commands_to_check():
    assert len(commands()) >= 8


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command):
    words = shlex.split(command)[1:]
    program, arguments = words[0], words[1:]
    if program == "-m":
        program, arguments = f"-m {words[1]}", words[2:]
    if program in COMMANDS:
        if program != "train.py" and not arguments:
            arguments = ["--checkpoint", "runs/triton"]
        # Unknown flags and bad values raise.
        parse_config(COMMANDS[program], arguments, prog=program, description="")
    elif program == "-m minitx.bench":
        from minitx.bench import __main__ as bench

        assert not arguments or arguments[0] in bench.COMMANDS
    else:
        assert program in ("-m pip", "-m minitx.plots"), command


@pytest.mark.parametrize("name", DOCS)
def test_every_make_target_exists(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # In code only: prose may make what it likes.
    code = re.findall(r"^make ([\w-]+)", DOCS[name], re.MULTILINE)
    code += re.findall(r"`make ([\w-]+)", DOCS[name])
    assert code
    assert set(code) <= targets


@pytest.mark.parametrize("name", DOCS)
def test_every_link_leads_to_a_file(name):
    links = re.findall(r"\]\(([^)#:]+)\)", DOCS[name])
    missing = [link for link in links if not (ROOT / link).exists()]
    assert missing == []


def test_the_ladder_names_every_kernel():
    ladder = DOCS["README.md"].split("## The ladder")[1].split("##")[0]
    names = re.findall(r"^\| [\d-]+ \| `([\w-]+)`", ladder, re.MULTILINE)
    assert sorted(names) == sorted((*ATTENTION_KERNELS, "auto"))


def test_every_config_is_named():
    named = re.findall(r"`configs/` holds starting points: ([^|]+)\|", DOCS["README.md"])[0]
    stems = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert set(re.findall(r"`([\w-]+)`", named)) == stems


def test_the_library_example_runs(device):
    code = re.findall(r"```python\n(.*?)```", DOCS["README.md"], re.DOTALL)
    assert len(code) == 1
    q, k, v = torch.randn(3, 1, 2, 8, 16, device=device)
    scope = {"q": q[None, 0], "k": k[None, 0], "v": v[None, 0], "scores": q @ k.transpose(-1, -2)}
    packed = torch.cat([scope[name] for name in "qkv"], dim=1).transpose(1, 2)
    scope |= {"qkv": packed, "n_head": 2}
    exec(code[0], scope)
    torch.testing.assert_close(scope["same"], scope["out"])
    assert scope["out"].shape == (1, 2, 8, 16)
    assert scope["lse"].shape == (1, 2, 8)
    torch.testing.assert_close(scope["p"].sum(-1), torch.ones(1, 2, 8, device=device))
