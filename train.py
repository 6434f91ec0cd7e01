"""Train a GPT with the attention kernel of your choice, and prove that it learns the same.

    python train.py --kernel triton
    python train.py --config configs/gpt2-124m.yaml --kernel sdpa --compile
    python train.py --kernel triton --compare none --max_steps 50
    python train.py --resume runs/triton
    python train.py --debug.replay runs/triton/debug_step_00000012.safetensors --kernel eager

Before training, a few steps on --compare (eager) and on --kernel must give the same losses within
an error budget; exit code 3 says that they did not. Ctrl-C, SIGTERM and a closed terminal (SIGHUP,
unless nohup has it ignored) save and stop; a second Ctrl-C or SIGTERM stops at once. `--help`
explains every setting and exit code.
"""

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # until the run takes signals itself, Ctrl-C just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from minitx.cli import run_cli
from minitx.config import TrainConfig
from minitx.training import train

DESCRIPTION = """Train a GPT with the attention kernel of your choice. Exit codes: 0 done, or
stopped by a signal and saved; 1 out of memory; 2 a mistake in the settings; 3 no parity; 5 a loss
or gradient that is not finite; 6 the disk is full or fails."""
CONFIGS = Path(__file__).parent / "configs"


def default_config(argv: Sequence[str]) -> Path | None:
    """The YAML file to start from where no --config is given, and a line that says so: the run's
    own where a run is resumed or its batch replayed, else one for this machine."""
    flags = dict(itertools.pairwise(argv))
    flags |= {a.split("=", 1)[0]: a.split("=", 1)[1] for a in argv if "=" in a}
    if "--config" in flags or {"-h", "--help"} & set(argv):
        return None
    own: list[Path] = []
    if flags.get("--resume", "auto") != "auto":
        folder = Path(os.path.abspath(flags["--resume"]))
        own = [folder, folder.parent, folder.parent.parent]  # RUN, RUN/checkpoints, .../step_...
    if "--debug.replay" in flags:
        own = [Path(flags["--debug.replay"]).parent]
    for run in own:
        if (run / "config.yaml").is_file():
            print(f"config: {run / 'config.yaml'} (the run's own)")
            return run / "config.yaml"
    import torch

    name, why = ("gpt2-124m", "a GPU") if torch.cuda.is_available() else ("cpu", "no GPU")
    print(f"config: configs/{name}.yaml (this machine has {why}; --config chooses another)")
    return CONFIGS / f"{name}.yaml"


if __name__ == "__main__":
    sys.exit(
        run_cli(
            train,
            TrainConfig,
            prog="train.py",
            description=DESCRIPTION,
            default_config=default_config,
        )
    )
