"""Numbers about a run: the metrics file, throughput, model FLOP/s utilisation, where it ran."""

import json
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

GIB = 2**30

# Dense bfloat16 tensor-core peaks in FLOP/s, from the vendors' datasheets, by a part of the name
# that torch.cuda.get_device_name gives. A device that is not here has no MFU.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that the device could do at best in bfloat16, or None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MetricsLog:
    """metrics.jsonl: one JSON object a line, appended and never rewritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, the last one of a kind and step winning.

    A run that was killed and resumed from an earlier checkpoint has written some steps twice.
    """
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.endswith("}"):  # the line a kill cut short
            continue
        record = json.loads(line)
        records[record["kind"], record["step"]] = record
    return [records[key] for key in sorted(records, key=lambda key: key[1])]


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
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["device"] = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    )
    found["commit"] = git_commit()
    return found


def git_commit() -> str | None:
    """The commit of the source tree, with -dirty behind it if it is changed; None outside of
    git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
