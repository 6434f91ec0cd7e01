"""Versions of what a result depends on: one answer for checkpoints, reports and benchmarks."""

import functools
from importlib.metadata import PackageNotFoundError, version

import torch


@functools.cache  # reading a package's metadata takes milliseconds, and a save waits for them
def package_version(package: str) -> str | None:
    """An installed package's version, None where it is missing. PyTorch's names its build too, as
    2.11.0+cu130, which its metadata may leave out."""
    if package == "torch":
        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return None
