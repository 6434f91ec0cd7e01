"""Folders of checkpoints, changed so that a kill or a loss of power leaves whole ones.

step_00000100/           a checkpoint: appears by renaming, so it is whole
step_00000100.replaced/  an older one of that step, while the new one takes its place
tmp-*                    being written, or being removed
latest, best             links to a step's folder (text files where symlinks cannot be)
"""

import os
import re
import shutil
from pathlib import Path

STATE = "state.json"
STEP_FOLDER = re.compile(r"step_(\d{8,})(\.replaced)?")
TEMPORARY, REPLACED = "tmp-", ".replaced"


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes new and changed names in `folder` survive a loss of power."""
    if os.name != "posix":  # Windows opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def steps(folder: Path) -> list[Path]:
    """Checkpoints in `folder` by rising step. One that was moved aside counts while its place is
    empty."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):  # step_X comes before step_X.replaced
        match = STEP_FOLDER.fullmatch(path.name)
        if match and (path / STATE).is_file():
            found.setdefault(int(match[1]), path)
    return [found[step] for step in sorted(found)]


def clear_leftovers(folder: Path) -> None:
    """Removes what a killed save left, and puts back what it had moved aside."""
    for path in list(folder.iterdir()):
        if path.name.startswith(TEMPORARY):
            _remove(path)
        elif path.name.endswith(REPLACED) and STEP_FOLDER.fullmatch(path.name):
            place = path.with_name(path.name.removesuffix(REPLACED))
            if place.exists():
                _remove(path)
            else:
                os.replace(path, place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def put_in_place(temporary: Path, target: Path) -> None:
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():  # a folder that is not empty cannot be replaced in one step
        os.replace(target, replaced)
    os.replace(temporary, target)
    sync_folder(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def point(link: Path, name: str) -> None:
    """Lets `link` name a step's folder, in one step."""
    new = link.with_name(TEMPORARY + link.name)
    try:
        os.symlink(name, new)
    except OSError:  # no symlinks on this disk; if it is full, the next line says so
        write_text(new, name + "\n")
    os.replace(new, link)
    sync_folder(link.parent)


def pointed_at(link: Path) -> str | None:
    """The name of the step's folder that `latest` or `best` leads to."""
    if link.is_symlink():
        return Path(os.readlink(link)).name
    return link.read_text(encoding="utf-8").strip() if link.is_file() else None


def remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Leaves `newest`, the best, and of the others the keep - 1 of the highest steps."""
    others = [path for path in steps(folder) if path != newest]
    for path in others[: max(0, len(others) - (keep - 1))]:
        if path.name != pointed_at(folder / "best"):
            doomed = path.with_name(TEMPORARY + path.name)
            os.replace(path, doomed)  # a kill halfway must not leave half a checkpoint
            shutil.rmtree(doomed)
