"""Launching a Triton kernel once more, without looking again for the compiled kernel.

`kernel[grid](...)` binds its arguments, finds out what is special about each of them and looks the
compiled kernel up under a name made of all that: more work for the host than many a launch is for
the GPU. But a model launches with the same lengths and strides layer after layer, step after step.
So here a compiled kernel is kept under what its choice depends on, and run directly:

    launch(kernel, n_programs, (x, y), (x.stride(), y.stride(), scale), BLOCK_M=64, num_warps=4)

does what kernel[(n_programs,)](x, y, x.stride(), y.stride(), scale, BLOCK_M=64, num_warps=4) does,
on the current device and its current stream.

What is asked of Triton is one method, CompiledKernel.run, in the form that the releases in
RUN_RELEASES share. With another release, in the interpreter, and where a profiler has hooked itself
to launches, every launch goes Triton's own way.
"""

from typing import Any

import torch
import triton
from triton import knobs

from minitx.kernels.triton_runtime import IS_INTERPRETED

RUN_RELEASES = ("3.6", "3.8", "3.9")  # those whose source was read for it
# Triton compiles apart for a pointer that is a multiple of it, and for one that is not.
ALIGNMENT = 16
# Launches that are remembered: of some hundred bytes each, many more than a training step has.
MAX_REMEMBERED = 4096

_remembered: dict[tuple, tuple[Any, tuple]] = {}
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a PyTorch for GPUs has it


def launch(kernel: Any, n_programs: int, tensors: tuple, scalars: tuple, **options: Any) -> None:
    """kernel[(n_programs,)](*tensors, *scalars, **options) on the current device.

    Args:
        kernel: a function of triton.jit or gluon.jit.
        tensors: its first arguments, all on the current device: tensors, TMA descriptors of
            tensors, or None.
        scalars: those that follow: numbers, and tuples of them, each of always the same type.
        options: its constants, in the order of its parameters, and then the compiler's options.
    """
    if not CAN_RUN_AGAIN:
        kernel[(n_programs,)](*tensors, *scalars, **options)
        return
    arguments: list[Any] = []
    dtypes: list[Any] = []
    addresses = 0
    for t in tensors:
        if isinstance(t, torch.Tensor):
            arguments.append(t.data_ptr())  # an address is taken as it is, a tensor looked up
            dtypes.append(t.dtype)
            addresses |= arguments[-1]
        else:
            arguments.append(t)
            dtypes.append(None if t is None else t.base.dtype)
    device_index = torch.cuda.current_device()
    key = (kernel, device_index, *dtypes, scalars, *options.values())
    found = _remembered.get(key)
    if found is None or addresses % ALIGNMENT != 0 or _is_watched(kernel):
        compiled = kernel[(n_programs,)](*tensors, *scalars, **options)
        if addresses % ALIGNMENT == 0:
            _remember(key, compiled, _constants(kernel, len(tensors) + len(scalars), options))
        return
    compiled, constants = found
    # Three sizes of the grid, stream, what to launch, what a profiler would be told and the hooks
    # for telling it; then every parameter.
    compiled.run(
        n_programs, 1, 1, _current_stream(device_index), compiled.function,
        compiled.packed_metadata, None, None, None, *arguments, *scalars, *constants,
    )  # fmt: skip


def _constants(kernel: Any, n_given: int, options: dict[str, Any]) -> tuple:
    """The values of the parameters after the first n_given."""
    return tuple(options[name] for name in kernel.arg_names[n_given:])


def _remember(key: tuple, compiled: Any, constants: tuple) -> None:
    if len(_remembered) >= MAX_REMEMBERED:
        _remembered.clear()
    _remembered[key] = compiled, constants


def _is_watched(kernel: Any) -> bool:
    """Whether a launch of this kernel is to be told to someone: a profiler, or a hook of the
    kernel's own."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A chain of hooks, empty as a rule; or what someone put in its place.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave)) or bool(
        kernel.pre_run_hooks
    )


def _can_run_again() -> bool:
    release = ".".join(triton.__version__.split(".")[:2])
    return not IS_INTERPRETED and torch.version.hip is None and release in RUN_RELEASES


CAN_RUN_AGAIN = _can_run_again()
