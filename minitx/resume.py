"""Where a run goes, where it goes on from, and how it is asked to stop."""

import shutil
import signal
from pathlib import Path
from types import FrameType

from minitx.checkpoint import find_checkpoint, load_state
from minitx.config import TrainConfig, differences, to_dict

# Settings that change what is printed or kept, and not what is learned.
HARMLESS = {
    "out_dir",
    "overwrite",
    "resume",
    "resume_allow",
    "compare",
    "compare_steps",
    "data.cache_dir",
}
HARMLESS_GROUPS = ("log.", "checkpoint.")


def choose_out_dir(config: TrainConfig) -> Path:
    """Makes and returns the folder of a fresh run. Nothing that is there is touched unasked.

    Raises ValueError for a folder that holds something, unless --overwrite.
    """
    if config.out_dir is None:
        base = path = Path("runs") / config.kernel
        number = 1
        while path.exists() and not config.overwrite:
            number += 1
            path = base.with_name(f"{base.name}-{number}")
    else:
        path = Path(config.out_dir)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out_dir {path} is a file; expected a folder")
        if path.is_dir() and any(path.iterdir()) and not config.overwrite:
            raise ValueError(
                f"--out_dir {path} is not empty; choose another, go on with --resume {path}, "
                "or empty it with --overwrite"
            )
    if config.overwrite and path.is_dir():
        # Only a run's own folder is ever emptied: a slip such as --out_dir ~ loses nothing.
        if any(path.iterdir()) and not (path / "config.yaml").is_file():
            raise ValueError(
                f"--overwrite: {path} holds no config.yaml, so it is not a run's folder"
            )
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def find_resume(config: TrainConfig) -> Path | None:
    """The checkpoint folder that --resume means, or None for a fresh start.

    Raises ValueError where there is none to be found, or where settings that change the result
    differ from the run's and --resume_allow was not given.
    """
    if config.resume is None:
        return None
    if config.resume == "auto":
        path = Path(config.out_dir) if config.out_dir else Path("runs") / config.kernel
        if not any((path / "checkpoints").glob("step_*")):
            return None
    else:
        path = Path(config.resume)
    checkpoint = find_checkpoint(path)
    changed = differences(load_state(checkpoint)["config"], to_dict(config))
    changed = {
        name: values
        for name, values in changed.items()
        if name not in HARMLESS and not name.startswith(HARMLESS_GROUPS)
    }
    if changed:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        if not config.resume_allow:
            raise ValueError(
                f"--resume {path}: settings that change the result differ ({listed}); give the "
                "run's own, or --resume_allow to go on with these"
            )
        print(f"resuming with other settings: {listed}")
    return checkpoint


class StopRequest:
    """While entered, SIGINT and SIGTERM set `requested`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self.previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise SystemExit(128 + number)
        self.requested = True
