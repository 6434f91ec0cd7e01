"""What calls with tensors of the same dtypes, shapes and strides have in common, kept from one to
the next; and uninitialised tensors, sooner than torch.empty gives them.

To choose tiles, look at strides and find what was compiled takes the host longer than a small
kernel takes the GPU, and comes out the same in layer after layer and step after step.
"""

from typing import Any, NamedTuple

import torch

MAX_REMEMBERED = 4096  # of some KiB each; many more than a model has shapes

_remembered: dict[tuple, Any] = {}
# How the code that torch.compile makes gets its memory: past the dispatcher, in half of the time.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided_cuda = getattr(_guards, "_empty_strided_cuda", None)


def remembered(key: tuple) -> Any:
    """What was remembered under the key, or None."""
    return _remembered.get(key)


def remember(key: tuple, made: Any) -> Any:
    """Keeps what was made, and returns it. key: all that it depends on.

    Threads that make the same at once each keep theirs, the last one for good: any of them serves.
    """
    if len(_remembered) >= MAX_REMEMBERED:
        _remembered.clear()
    _remembered[key] = made
    return made


class Empty(NamedTuple):
    """An uninitialised tensor yet to be made. shape and strides are tuples, no torch.Size."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, t: torch.Tensor) -> "Empty":
        """One with t's very strides; t may be on another device."""
        return cls(tuple(t.shape), t.stride(), t.dtype, t.device)

    @classmethod
    def contiguous(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> "Empty":
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        return cls(shape, tuple(reversed(strides)), dtype, device)

    def make(self) -> torch.Tensor:
        """Only for kernels, which run where nothing looks on: past PyTorch's dispatcher."""
        shape, strides, dtype, device = self
        is_cuda = device.index is not None  # a CPU has none
        if is_cuda and _empty_strided_cuda and device.index == torch.cuda.current_device():
            return _empty_strided_cuda(shape, strides, dtype)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
