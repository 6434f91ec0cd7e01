"""Numbers about a run: the metrics file, throughput, memory, where it ran."""

import errno
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from minitx.run_files import read_whole, write_whole
from minitx.versions import package_version

GIB = 2**30


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held at once, in GiB: by PyTorch on a GPU; by the process, ever, on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (
        peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
    )  # bytes there, KiB elsewhere


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a class for a GPU's memory, and only words for the CPU's."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MetricsLog:
    """metrics.jsonl: one JSON object a line, appended and never rewritten.

    What a killed run wrote beyond `step`, where it now goes on, is cut off first and kept in
    metrics-superseded.jsonl: so no step stands twice, and nothing is lost.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self.path = path
        if path.is_file():
            self._cut_off(step)
        # Unbuffered: what is written is in the file, whatever happens to this process next.
        self._file = path.open("ab", buffering=0)

    def _cut_off(self, step: int) -> None:
        content = self.path.read_bytes()
        keep = 0
        for line in content.splitlines(keepends=True):
            record = _parse(line) if line.endswith(b"\n") else None
            if record is None or record["step"] > step:
                break
            keep += len(line)
        if keep < len(content):
            with self.path.with_name("metrics-superseded.jsonl").open("ab") as file:
                file.write(content[keep:].rstrip(b"\n") + b"\n")
            os.truncate(self.path, keep)

    def write(self, record: dict[str, Any]) -> None:
        """Raises OSError where the disk is full or fails. JSON has no inf or NaN: they are null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        line = json.dumps(finite).encode() + b"\n"
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        self._file.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record; None for a line that a kill or a full disk cut short, or that is no record
    at all."""
    try:
        record = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    is_record = isinstance(record, dict) and {"kind", "step"} <= record.keys()
    return record if is_record else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, the last one of a kind and step winning."""
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        if record := _parse(line):
            records[record["kind"], record["step"]] = record
    return [records[key] for key in sorted(records, key=lambda key: key[1])]


class TensorBoardLog:
    """The numbers of every record as scalars, KIND/NAME by step, for TensorBoard.

    step: where a resumed run goes on; what is there beyond it is no longer shown.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._writer = _summary_writer()(folder, purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


def require_tensorboard() -> None:
    """Raises ValueError where the package is missing."""
    _summary_writer()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "--log.tensorboard needs the package tensorboard: pip install 'minitx[tensorboard]'"
        ) from error
    return SummaryWriter


class StepTimer:
    """Time spent in training steps, with what lies between them (evaluation, saving) left out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.steps = 0
        self.started: float | None = None

    def start(self) -> None:
        if self.started is None:
            synchronize(self.device)
            self.started = time.perf_counter()

    def count(self) -> None:
        self.steps += 1

    def pause(self) -> None:
        if self.started is not None:
            synchronize(self.device)
            self.seconds += time.perf_counter() - self.started
            self.started = None

    def lap(self) -> float:
        """Seconds a step since the last lap; the clock runs on."""
        self.pause()
        mean = self.seconds / max(1, self.steps)
        self.seconds, self.steps = 0.0, 0
        self.start()
        return mean


def environment(device: torch.device) -> dict[str, Any]:
    """Where a number comes from: versions, device, commit."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("minitx", "torch", "triton", "tilelang", "numpy"):
        found[package] = package_version(package)
    found["cuda"] = torch.version.cuda
    found["device"] = platform.machine()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_gib"] = properties.total_memory / GIB
        found["cudnn"] = torch.backends.cudnn.version()
    return found | git_state()


def git_state() -> dict[str, Any]:
    """`commit` of the source tree, and `changes`, git's lines on what is changed in it; both None
    outside of git."""
    commit = git_commit()
    return {"commit": commit, "changes": commit and _git("diff", "HEAD", "--stat")}


def git_commit() -> str | None:
    """The commit of the source tree, with -dirty behind it if it is changed; None outside of git.
    An installed minitx may lie inside of another project's tree."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=10")


def _git(*arguments: str) -> str | None:
    """git's output, or None where there is none or git fails."""
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def record_environment(path: Path, device: torch.device, step: int, config: dict) -> None:
    """Adds to environment.json, a list: one entry for every start of a run, with its config."""
    entries = read_whole(path, list, [])
    entries.append(
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "command": sys.argv,
            "threads": torch.get_num_threads(),
            **environment(device),
            "config": config,
        }
    )
    write_whole(path, json.dumps(entries, indent=2) + "\n")
