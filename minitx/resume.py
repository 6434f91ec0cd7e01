"""Where a run goes, and where it goes on from."""

import os
import shutil
from pathlib import Path
from typing import Any

from minitx.checkpoint import find_checkpoint, load_state
from minitx.config import TrainConfig, differences, to_dict
from minitx.run_files import make_out_dir

CONFIG = "config.yaml"  # what makes a folder a run's

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
HARMLESS_GROUPS = ("log.", "checkpoint.", "debug.")
# What train.py adds to a checkpoint, and cannot go on without.
NEEDED = (
    "config",
    "step",
    "tokens_seen",
    "stream",
    "scaler",
    "skipped_steps",
    "best_val_loss",
    "random_state",
)


def choose_out_dir(config: TrainConfig) -> Path:
    """Makes and returns the folder of a fresh run. What is there is left for `clear_out_dir`."""
    if config.resume == "auto":
        path = auto_folder(config)
    else:
        path = Path(config.out_dir) if config.out_dir else _next_folder(config)
    make_out_dir(path)
    return path


def clear_out_dir(path: Path, config: TrainConfig) -> None:
    """Empties the folder of a fresh run, which this process must hold. Nothing that is there is
    touched unasked.

    With --resume auto it may hold a run that was killed before its first checkpoint, which stays.
    Raises ValueError for a folder that holds anything else, unless --overwrite.
    """
    is_run = (path / CONFIG).is_file()
    if (config.resume == "auto" and is_run) or not any(path.iterdir()):
        return
    if not config.overwrite:
        raise ValueError(
            f"--out_dir {path} is not empty; choose another, go on with --resume {path}, "
            "or empty it with --overwrite"
        )
    # Only a run's own folder is ever emptied: a slip such as --out_dir ~ loses nothing.
    if not is_run:
        raise ValueError(f"--overwrite: {path} holds no {CONFIG}, so it is not a run's folder")
    # What says whose folder it is goes last, so that one that was half emptied can be emptied.
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == CONFIG):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def auto_folder(config: TrainConfig) -> Path:
    """The folder that --resume auto means: the same at every start."""
    return Path(config.out_dir) if config.out_dir else Path("runs") / config.kernel


def _next_folder(config: TrainConfig) -> Path:
    base = path = Path("runs") / config.kernel
    number = 1
    while path.exists() and not config.overwrite:
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def find_resume(config: TrainConfig) -> Path | None:
    """The checkpoint folder that --resume means, or None for a fresh start.

    Raises ValueError where there is none to be found, or where settings that change the result
    differ from the run's and --resume_allow was not given.
    """
    checkpoint = newest_checkpoint(config)
    if checkpoint is None:
        return None
    path = _resumed_folder(config)
    if run_of(checkpoint) is None:
        raise ValueError(
            f"--resume {path}: {checkpoint} does not lie in a run's folder, "
            "RUN/checkpoints/step_...; give a run, or a checkpoint in one"
        )
    state = load_state(checkpoint)
    if missing := [name for name in NEEDED if name not in state]:
        raise ValueError(
            f"--resume {path}: {checkpoint} was not saved by train.py, it lacks "
            f"{', '.join(missing)}; give a run's checkpoint"
        )
    run, given = run_of(checkpoint), config.out_dir
    assert run is not None
    # A run's own setting is where it was begun, from which it may have been moved.
    if given not in (None, state["config"].get("out_dir")) and not _same_folder(Path(given), run):
        raise ValueError(
            f"--out_dir {given}: a resumed run stays in its own folder, {run}; leave it out"
        )
    changed = changed_settings(state["config"], to_dict(config))
    if changed:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        if not config.resume_allow:
            raise ValueError(
                f"--resume {path}: settings that change the result differ ({listed}); give the "
                "run's own, or --resume_allow to go on with these"
            )
        print(f"resuming with other settings: {listed}")
    return checkpoint


def newest_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint folder that --resume means just now, whatever its settings; None as above.
    Raises ValueError."""
    if config.resume is None:
        return None
    path = _resumed_folder(config)
    if config.resume == "auto" and not any((path / "checkpoints").glob("step_*/state.json")):
        return None
    return find_checkpoint(path)


def _resumed_folder(config: TrainConfig) -> Path:
    assert config.resume is not None
    return auto_folder(config) if config.resume == "auto" else Path(config.resume)


def _same_folder(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint folder lies in, if it lies in one."""
    checkpoints = Path(os.path.abspath(checkpoint)).parent
    if checkpoints.name != "checkpoints":
        return None
    # As the user wrote it where that is possible: it is printed.
    run = checkpoint.parent.parent
    return run if checkpoint.parent.name == "checkpoints" else checkpoints.parent


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple]:
    """Settings that differ and change the result: dotted name -> (old, new).

    A setting that the old run's minitx did not have yet counts as left at its default.
    """
    defaults = to_dict(TrainConfig())
    before = _with_defaults(old, defaults)
    changed = differences(before, new)
    if "device" in changed and _kind(before["device"]) == _kind(new["device"]):
        del changed["device"]  # another GPU of this machine
    return {
        name: values
        for name, values in changed.items()
        if name not in HARMLESS and not name.startswith(HARMLESS_GROUPS)
    }


def _kind(device: str) -> str:
    return device.split(":")[0]


def _with_defaults(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    whole = dict(defaults)
    for name, value in settings.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _with_defaults(value, default)
        whole[name] = value
    return whole
