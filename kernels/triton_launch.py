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

A TMA descriptor is encoded by its address, shape and strides, and step after step has the same
addresses: Triton encodes it anew at every launch, in Python that takes longer than CUDA does to
launch. With the releases in EXPANDED_RELEASES what Triton makes of a descriptor is kept by address,
and what it calls with it, a function in C, is called directly.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs

from minitx.kernels import kept
from minitx.kernels.triton_runtime import IS_INTERPRETED, launching_on

RUN_RELEASES = ("3.6", "3.8", "3.9")  # those whose source was read for it
EXPANDED_RELEASES = ("3.6",)  # and for that of what takes a descriptor apart
MAX_EXPANDED = 8192  # descriptors that are kept, of half a KiB each
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
        # Where descriptors are kept as what Triton makes of them, its function in C.
        self._launch_expanded: Callable[..., None] | None = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        addresses: list[Any] = []  # which Triton takes as they are
        bits = 0
        for t in tensors:
            address = None if t is None else t.data_ptr()
            addresses.append(address)
            bits |= address or 0
        if self._compiled is None or bits % ALIGNMENT != 0 or self._is_watched():
            self._launch_by_triton(tensors, is_aligned=bits % ALIGNMENT == 0)
        elif self.device.index == torch.cuda.current_device():
            self._run(tensors, addresses)
        else:
            with torch.cuda.device(self.device):
                self._run(tensors, addresses)

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
            self._launch_expanded = _expanded_launcher(compiled) if described else None
            self._compiled = compiled

    def _run(self, tensors: tuple[torch.Tensor | None, ...], addresses: list[Any]) -> None:
        compiled, stream = self._compiled, _current_stream(self.device.index)  # type: ignore[misc]
        n = len(self._descriptors)
        if self._launch_expanded is None:
            described = map(_of_another, self._descriptors, tensors)
            # The grid's three sizes, the stream, what to launch; what a profiler would be told, and
            # whom to tell it before and after; then every parameter of the kernel.
            compiled.run(
                self.n_programs, 1, 1, stream, compiled.function, compiled.packed_metadata,
                None, None, None, *described, *addresses[n:], *self._after_tensors,
            )  # fmt: skip
            return
        arguments: list[Any] = []
        for i in range(n):
            key = (self, i, addresses[i])
            arguments += _expanded.get(key) or self._expand(key, tensors[i])
        # As above, but for two ways of launching and two kinds of scratch memory, all unused.
        self._launch_expanded(
            self.n_programs, 1, 1, stream, compiled.function, False, False, None, None,
            compiled.packed_metadata, None, None, None,
            *arguments, *addresses[n:], *self._after_tensors,
        )  # fmt: skip

    def _expand(self, key: tuple, t: torch.Tensor | None) -> list[Any]:
        """What Triton makes of the descriptor with t in it, kept under the key."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        i = key[1]
        described = _of_another(self._descriptors[i], t)
        meta = self._compiled.metadata.tensordesc_meta[i]
        made = make_tensordesc_arg(described, meta)  # type: ignore[call-arg]
        if len(_expanded) >= MAX_EXPANDED:
            _expanded.clear()
        _expanded[key] = made
        return made

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


# By launch, place among its descriptors, and address. What is kept has the address, no tensor.
_expanded: dict[tuple, list[Any]] = {}


def _expanded_launcher(compiled: Any) -> Callable[..., None] | None:
    """The function in C that launches the kernel, given descriptors as make_tensordesc_arg makes
    them; None where nothing is known of it."""
    if not CAN_RUN_EXPANDED or None in (compiled.metadata.tensordesc_meta or [None]):
        return None
    launcher = compiled.run
    uses_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
    if uses_scratch or launcher.launch_cooperative_grid or launcher.launch_pdl:
        return None
    outer = launcher.launch  # which takes descriptors apart, and calls the one that is wanted
    if not inspect.isfunction(outer):
        return None
    return inspect.getclosurevars(outer).nonlocals.get("launcher")


def _can_run_again(releases: tuple[str, ...] = RUN_RELEASES) -> bool:
    release = ".".join(triton.__version__.split(".")[:2])
    return not IS_INTERPRETED and torch.version.hip is None and release in releases


CAN_RUN_AGAIN = _can_run_again()
CAN_RUN_EXPANDED = _can_run_again(EXPANDED_RELEASES)
