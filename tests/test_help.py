"""--help names every exit code."""

import re
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
    def described(script: str) -> set[int]:
        text = help_of(str(ROOT / script)).partition("options:")[0].partition("Exit codes:")[2]
        return {int(code) for code in re.findall(r"(?:^|;) (\d+) ", " ".join(["", *text.split()]))}

    common = {0, cli.EXIT_OUT_OF_MEMORY, 2, cli.EXIT_PARITY_FAILED, cli.EXIT_NOT_WRITTEN}
    assert described("train.py") == common | {cli.EXIT_NON_FINITE}
    assert described("eval.py") == common | {EXIT_NOT_CAUSAL, EXIT_INTERRUPTED}
    assert "exit codes: 0 done; 2 a mistake" in help_of("-m", "minitx.bench")
