"""The small files of a run: written whole or not at all, and named where they are damaged."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to, and renames it when that is done: a kill, or a disk
    that is full, leaves the old file. Errors of the disk say which file it was.

    The path is this process's own: of two that write one file at once the last one's stays, whole.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        yield new
        os.replace(new, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # gone already, unless something failed
            new.unlink()


def write_whole(path: Path, text: str) -> None:
    with written_whole(path) as new:
        new.write_text(text, encoding="utf-8")


def read_whole(path: Path, kind: type, missing: Any) -> Any:
    """The JSON of a file, `missing` where there is none. Raises ValueError, naming the file, for
    what is no JSON or not of this kind (dict, list)."""
    if not path.is_file():
        return missing
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON; move it away") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} is damaged: it holds no {kind.__name__}; move it away")
    return content


def make_out_dir(path: Path) -> None:
    """Makes the folder --out_dir names, if it is not there. Raises ValueError where it cannot."""
    try:
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out_dir {path} is a file; expected a folder")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out_dir {path} cannot be made: {error.strerror}; choose one that can be written"
        ) from error
