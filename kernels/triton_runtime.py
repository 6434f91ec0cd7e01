"""Launching Triton kernels on the tensors' own device, compiled or in the interpreter."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
import triton
from triton import knobs

from minitx.kernels.runtime import triton_is_interpreted

# Decided when triton is imported, for CPU and GPU tensors alike.
IS_INTERPRETED = knobs.runtime.interpret
triton_is_interpreted()  # which says so, once

# The interpreter replaces functions of triton.language while a kernel runs: one kernel at a time.
_interpreter_lock = threading.RLock()


def device_function(fn: Callable) -> Callable:
    """triton.jit for functions that kernels call.

    In the interpreter they stay plain Python: there each call of a jitted function patches all of
    triton.language anew, which takes longer than what the function does.
    """
    return fn if IS_INTERPRETED else triton.jit(fn)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """One thread at a time, and silent where the maths meets inf and NaN, as a GPU is."""
    with _interpreter_lock, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        # What triton 3.6 makes of `if` and `while` on a scalar.
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        yield


def launching_on(device: torch.device) -> contextlib.AbstractContextManager:
    """The context to launch Triton kernels in, for tensors on `device`.

    Triton launches on the current device and its current stream: where the tensors' device is
    another, it is made current for the while.
    """
    if IS_INTERPRETED:
        return _interpreting()
    if device.index == torch.cuda.current_device():
        return _on_this_device
    return torch.cuda.device(device)


_on_this_device = contextlib.nullcontext()
