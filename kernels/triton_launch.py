"""Launching a Triton kernel once more, without looking again for what to launch.

`kernel[grid](...)` binds its arguments, finds out what is special about each of them and looks the
compiled kernel up under a name made of all that; before it, tiles are chosen and strides looked
at. All of it takes the host longer than a small launch takes the GPU, and comes out the same for
the same lengths and strides: those of layer after layer and step after step. So a `Launch` is made
once for each, kept, and run with other tensors:

    key = ("twice", x.dtype, x.device, x.shape, x.stride())       # all that the launch depends on
    launch = remembered(key)
    if launch is None:
        launch = remember(key, Launch(twice, x.device, n_programs, (x.stride(), 2.0), BLOCK=64))
    launch(x, y)

What is asked of Triton is one method, CompiledKernel.run, in the form that the releases in
RUN_RELEASES share. With another release, and where a profiler has hooked itself to launches, every
launch goes Triton's own way; in the interpreter nothing is kept at all.
"""

from typing import Any

import torch
import triton
from triton import knobs

from minitx.kernels import kept
from minitx.kernels.triton_runtime import IS_INTERPRETED, launching_on

RUN_RELEASES = ("3.6", "3.8", "3.9")  # those whose source was read for it
ALIGNMENT = 16  # bytes: Triton compiles apart for addresses that are multiples of it

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a PyTorch for GPUs has it
remembered = kept.remembered


def remember(key: tuple, launch: Any) -> Any:
    """Keeps a launch, or what makes several, and returns it."""
    return launch if IS_INTERPRETED else kept.remember(key, launch)


class Launch:
    """A Triton kernel with all that a launch is given but its tensors.

    launch(*tensors) is kernel[(n_programs,)](*tensors, *scalars, **options) on `device` and its
    current stream. Every call's tensors are of the same dtypes, shapes and strides, and None in
    the same places.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        n_programs: int,
        scalars: tuple,
        describe: tuple = (),
        **options: Any,
    ) -> None:
        """describe: for each of the first tensors, what makes the TMA descriptor by which the
        kernel reads it. scalars: numbers and tuples of them. options: the kernel's constants and
        the compiler's options."""
        self.kernel, self.device, self.n_programs = kernel, device, n_programs
        self.scalars, self.options, self.describe = scalars, options, describe
        self._compiled: Any = None
        self._descriptors: list[Any] = []
        self._after_tensors: tuple = ()  # scalars and constants, as the kernel's parameters are

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        arguments: list[Any] = []  # addresses, which Triton takes as they are
        bits = 0
        for t in tensors:
            address = None if t is None else t.data_ptr()
            arguments.append(address)
            bits |= address or 0
        if self._compiled is None or bits % ALIGNMENT != 0 or self._is_watched():
            self._launch_by_triton(tensors, is_aligned=bits % ALIGNMENT == 0)
            return
        for i, known in enumerate(self._descriptors):
            arguments[i] = _of_another(known, tensors[i])
        if self.device.index == torch.cuda.current_device():
            self._run(arguments)
        else:
            with torch.cuda.device(self.device):
                self._run(arguments)

    def _launch_by_triton(self, tensors: tuple[torch.Tensor | None, ...], is_aligned: bool) -> None:
        n = len(self.describe)
        described = [make(t) for make, t in zip(self.describe, tensors, strict=False)]
        given = (*described, *tensors[n:], *self.scalars)
        with launching_on(self.device):
            compiled = self.kernel[(self.n_programs,)](*given, **self.options)
        if is_aligned and CAN_RUN_AGAIN:
            constants = (self.options[name] for name in self.kernel.arg_names[len(given) :])
            self._after_tensors = (*self.scalars, *constants)
            self._descriptors = [_of_another(d, None) for d in described]  # keeps no tensor alive
            self._compiled = compiled

    def _run(self, arguments: list[Any]) -> None:
        compiled, stream = self._compiled, _current_stream(self.device.index)  # type: ignore[misc]
        # The grid's three sizes, the stream, what to launch; what a profiler would be told, and
        # whom to tell it before and after; then every parameter of the kernel.
        compiled.run(
            self.n_programs, 1, 1, stream, compiled.function, compiled.packed_metadata,
            None, None, None, *arguments, *self._after_tensors,
        )  # fmt: skip

    def _is_watched(self) -> bool:
        """Whether someone is to be told of launches: a profiler, or a hook of the kernel's own."""
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # Chains of hooks, empty as a rule; or what someone put in the place of one.
        watched = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        return bool(watched or self.kernel.pre_run_hooks)


def _of_another(descriptor: Any, t: torch.Tensor | None) -> Any:
    """The same descriptor, of t: without its constructor, whose checks cost as much as a launch."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__)
    other.base = t
    return other


def _can_run_again() -> bool:
    release = ".".join(triton.__version__.split(".")[:2])
    return not IS_INTERPRETED and torch.version.hip is None and release in RUN_RELEASES


CAN_RUN_AGAIN = _can_run_again()
