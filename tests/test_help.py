"""--help names every exit code."""

import subprocess
import sys
from pathlib import Path

from minitx import cli
from minitx.evaluation import EXIT_INTERRUPTED, EXIT_NOT_CAUSAL

ROOT = Path(__file__).parent.parent


def help_of(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, *command, "--help"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help_explains_every_exit_code():
    def described(script: str) -> str:
        return " ".join(help_of(str(ROOT / script)).partition("options:")[0].split())

    trained = described("train.py")
    for code in (cli.EXIT_OUT_OF_MEMORY, 2, 3, cli.EXIT_NON_FINITE, cli.EXIT_NOT_WRITTEN):
        assert f"{code} " in trained
    evaluated = described("eval.py")
    for code in (
        cli.EXIT_OUT_OF_MEMORY,
        2,
        3,
        EXIT_NOT_CAUSAL,
        cli.EXIT_NOT_WRITTEN,
        EXIT_INTERRUPTED,
    ):
        assert f"{code} " in evaluated
    assert "exit codes: 0 done; 2 a mistake" in help_of("-m", "minitx.bench")
