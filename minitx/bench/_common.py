"""What every benchmark needs beside its timing: the machine's own figures, CSV and tables.

GiB is 2**30 bytes and TB/s 1e12 bytes a second.
"""

import contextlib
import csv
import dataclasses
import gc
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin

import torch

from minitx.config import refuse_empty
from minitx.metrics import git_commit
from minitx.run_files import make_out_dir, written_whole
from minitx.run_lock import only_run_in
from minitx.versions import package_version

Row = dict[str, Any]

TABLE_WIDTH = 100


def peak_gib(call: Callable[[], object], device: str) -> float | None:
    """GiB that a call allocates at its peak beyond what was allocated before; None on a CPU."""
    if device != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronize(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def terabytes_per_s(n_bytes: float, milliseconds: float) -> float:
    return n_bytes / milliseconds / 1e9


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Gives back what no tensor holds any more, also what an exception's traceback held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def environment_columns(device: str) -> dict[str, str]:
    """Where a result comes from: device, versions and the commit of the working tree."""
    versions = {p: package_version(p) or "" for p in ("torch", "triton", "tilelang")}
    return {"device": device_name(device), **versions, "commit": git_commit() or ""}


def bracket_lists(argv: Sequence[str], config_class: type) -> list[str]:
    """`--widths 128,256` as `--widths [128,256]`, which is how jsonargparse spells a list."""
    names = (f.name for f in dataclasses.fields(config_class) if get_origin(f.type) is list)
    flags = {f"--{name}" for name in names}
    words = [word for arg in argv for word in _split_flag(arg, flags)]
    return [
        f"[{word}]" if before in flags and word[:1] not in ("[", "-") else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _split_flag(arg: str, flags: set[str]) -> list[str]:
    """`--widths=128` as two words."""
    flag, equals, value = arg.partition("=")
    return [flag, value] if equals and flag in flags else [arg]


def check_device(device: str | None) -> str:
    """The device to measure on; the GPU if there is one and none was named. Raises ValueError."""
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"--device: unknown '{device}'; expected cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; take cpu")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def out_folder(out_dir: str, names: Iterable[str], overwrite: bool) -> Iterator[Path]:
    """Makes the folder --out_dir names and holds it against other processes, before anything is
    measured.

    Raises ValueError for a folder that cannot be had, and FileExistsError where it has one of
    `names` already, unless `overwrite`.
    """
    refuse_empty({"--out_dir": out_dir})
    folder = Path(out_dir)
    make_out_dir(folder)
    with only_run_in(folder):
        for path in (folder / name for name in names):
            if path.exists() and not overwrite:
                raise FileExistsError(
                    f"{path} exists: choose another --out_dir, or add --overwrite"
                )
        yield folder


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One column for each key of the first row; None becomes an empty cell. What was there before
    is replaced at once, so that a kill leaves one or the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as new, new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned right, the first one left, cut at TABLE_WIDTH characters a line."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    formatted = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        formatted.append("  ".join(cells).rstrip()[:TABLE_WIDTH])
    return "\n".join(formatted)
