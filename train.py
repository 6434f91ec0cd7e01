"""Train a GPT with the attention kernel of your choice, and prove that it learns the same.

    python train.py --kernel triton
    python train.py --config configs/gpt2-124m.yaml --kernel sdpa --compile
    python train.py --kernel triton --compare none --max_steps 50
    python train.py --resume runs/triton

Before training, a few steps on --compare (eager) and on --kernel must give the same losses within
an error budget; exit code 3 says that they did not. `--help` explains every setting.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from minitx.cli import run_cli
from minitx.config import TrainConfig
from minitx.training import train

CONFIGS = Path(__file__).parent / "configs"


def default_config(argv: Sequence[str]) -> Path | None:
    """The YAML file to start from where no --config is given, and a line that says so."""
    flags = dict(itertools.pairwise(argv))
    flags |= {a.split("=", 1)[0]: a.split("=", 1)[1] for a in argv if "=" in a}
    if "--config" in flags or {"-h", "--help"} & set(argv):
        return None
    resumed = flags.get("--resume")
    if resumed not in (None, "auto"):
        folder = Path(resumed)
        for run in (folder, folder.parent.parent):
            if (run / "config.yaml").is_file():
                print(f"config: {run / 'config.yaml'} (of the run that is resumed)")
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
            description="Train a GPT with the attention kernel of your choice.",
            default_config=default_config,
        )
    )
