"""Triton kernels launched again: with what, and when Triton is asked anew."""

import dataclasses
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitx.kernels import attention, softmax, supports

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from triton import knobs  # noqa: E402

from minitx.kernels import triton_launch  # noqa: E402
from minitx.kernels.triton_launch import Launch  # noqa: E402
from minitx.testing import make_qkv  # noqa: E402

CURRENT, STREAM = 3, 77  # the device and stream that the stand-ins below say are current
DEVICE = torch.device("cuda", CURRENT)


class Compiled:
    """Stands in for what Triton compiled, and records what it is run with."""

    function, packed_metadata = "function", "metadata"
    metadata = SimpleNamespace(tensordesc_meta=[None])  # of a descriptor that nothing is known of

    def __init__(self) -> None:
        self.runs = []

    def run(self, *args) -> None:
        self.runs.append((torch.cuda.current_device(), *args))


class Kernel:
    """Stands in for a function of triton.jit, which compiles at every launch of Triton's own."""

    arg_names = ("x", "y", "strides", "scale", "BLOCK", "IS_CAUSAL")

    def __init__(self) -> None:
        self.pre_run_hooks = []
        self.asked = []  # (grid, args, options)
        self.compiled = Compiled()

    def __getitem__(self, grid):
        def run(*args, **options):
            self.asked.append((grid, args, options))
            return self.compiled

        return run


class DeviceForAWhile:
    """Stands in for torch.cuda.device."""

    now = CURRENT

    def __init__(self, device: torch.device) -> None:
        self.wanted = device.index

    def __enter__(self) -> None:
        self.before, DeviceForAWhile.now = DeviceForAWhile.now, self.wanted

    def __exit__(self, *_) -> None:
        DeviceForAWhile.now = self.before


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel on a machine where one can be run again."""
    monkeypatch.setattr(triton_launch, "CAN_RUN_AGAIN", True)
    monkeypatch.setattr(triton_launch, "_current_stream", lambda index: STREAM + index - CURRENT)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DeviceForAWhile.now)
    monkeypatch.setattr(torch.cuda, "device", DeviceForAWhile)
    return Kernel()


X, Y, ODD = torch.zeros(64), torch.zeros(64), torch.zeros(65)[1:]
SCALARS = ((8, 1), 0.5)
# Not in the order of the kernel's parameters, and with one of the compiler's options.
OPTIONS = {"IS_CAUSAL": True, "BLOCK": 16, "num_warps": 4}


def test_the_second_launch_runs_what_the_first_compiled(kernel):
    launch = Launch(kernel, DEVICE, 5, SCALARS, **OPTIONS)
    launch(X, Y)
    assert kernel.asked == [((5,), (X, Y, *SCALARS), OPTIONS)]
    x, y = torch.zeros(64), torch.zeros(64)
    launch(x, y)
    launch(x, None)
    assert len(kernel.asked) == 1
    same = (CURRENT, 5, 1, 1, STREAM, "function", "metadata", None, None, None)
    assert kernel.compiled.runs == [
        (*same, x.data_ptr(), y.data_ptr(), *SCALARS, 16, True),
        (*same, x.data_ptr(), None, *SCALARS, 16, True),
    ]


@dataclasses.dataclass
class Described:
    """Stands in for a TMA descriptor."""

    base: torch.Tensor
    shape: tuple

    def __post_init__(self) -> None:
        self.checked = 1


def test_a_descriptor_is_made_once_and_then_only_pointed_elsewhere(kernel):
    made = []

    def describe(t: torch.Tensor) -> Described:
        made.append(Described(t, tuple(t.shape)))
        return made[-1]

    launch = Launch(kernel, DEVICE, 5, SCALARS, describe=(describe,), **OPTIONS)
    launch(X, Y)
    assert kernel.asked[0][1] == (made[0], Y, *SCALARS)
    x = torch.zeros(64)
    launch(x, Y)
    assert len(made) == 1
    assert made[0].base is X
    descriptor, address = kernel.compiled.runs[0][10:12]
    assert isinstance(descriptor, Described)
    assert (descriptor.base.data_ptr(), descriptor.shape) == (x.data_ptr(), (64,))
    assert address == Y.data_ptr()


class LauncherInC:
    """Stands in for Triton 3.6's launcher of a kernel with descriptors: `launch` is a function that
    takes them apart, around one in C."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, record) -> None:
        launcher = self.record = record
        self.launch = lambda *args: launcher("taken apart", *args)

    def __call__(self, *args) -> None:
        self.record("Triton's own way")


@pytest.fixture
def in_c(kernel, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the function in C is called with, on a machine where descriptors are kept taken
    apart: a descriptor's address, and how many had been taken apart with it."""
    from triton.backends.nvidia import driver

    made = []

    def make(descriptor: Described, metadata) -> list:
        made.append(descriptor.base.data_ptr())
        return [f"{metadata} {made[-1]} {len(made)}", *descriptor.shape]

    calls: list[tuple] = []
    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    monkeypatch.setattr(triton_launch, "CAN_RUN_EXPANDED", True)
    monkeypatch.setattr(triton_launch, "_expanded", {})
    kernel.compiled.run = LauncherInC(lambda *args: calls.append(args))
    kernel.compiled.metadata = SimpleNamespace(tensordesc_meta=["map of"])
    return calls


def described(t: torch.Tensor) -> Described:
    return Described(t, tuple(t.shape))


def test_what_triton_makes_of_a_descriptor_is_kept_by_address(kernel, in_c, monkeypatch):
    launch = Launch(kernel, DEVICE, 5, SCALARS, describe=(described,), **OPTIONS)
    launch(X, Y)
    x, y = torch.zeros(64), torch.zeros(64)
    for t in (x, y, x):
        launch(t, Y)
    same = (5, 1, 1, STREAM, "function", False, False, None, None, "metadata", None, None, None)
    after = (64, Y.data_ptr(), *SCALARS, 16, True)
    expected = [f"map of {x.data_ptr()} 1", f"map of {y.data_ptr()} 2", f"map of {x.data_ptr()} 1"]
    assert in_c == [(*same, made, *after) for made in expected]
    other = Launch(kernel, DEVICE, 5, SCALARS, describe=(described,), **OPTIONS)
    other(X, Y)
    other(x, Y)  # of other strides, it may be
    assert in_c[-1][13] == f"map of {x.data_ptr()} 3"
    monkeypatch.setattr(triton_launch, "MAX_EXPANDED", 4)
    kept_alive = [torch.zeros(64) for _ in range(10)]
    for t in kept_alive:
        launch(t, Y)
        assert len(triton_launch._expanded) <= 4
    assert in_c[-1][13] == f"map of {t.data_ptr()} 13"


@pytest.mark.parametrize(
    "what",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"launch": print},
        {"tensordesc_meta": [None]},
        {"CAN_RUN_EXPANDED": False},
    ],
    ids=lambda what: next(iter(what)),
)
def test_what_nothing_is_known_of_triton_takes_apart_itself(kernel, in_c, monkeypatch, what):
    for name, value in what.items():
        for place in (kernel.compiled.run, kernel.compiled.metadata, triton_launch):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, value)
    launch = Launch(kernel, DEVICE, 5, SCALARS, describe=(described,), **OPTIONS)
    launch(X, Y)
    launch(X, Y)
    assert in_c == [("Triton's own way",)]


def test_a_launch_keeps_no_tensor_alive(kernel):
    x = torch.zeros(64)
    launch = Launch(kernel, DEVICE, 5, SCALARS, describe=(lambda t: Described(t, ()),), **OPTIONS)
    launch(x, x)
    kernel.asked.clear()
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_on_another_device_than_the_current_one(kernel):
    launch = Launch(kernel, torch.device("cuda", CURRENT + 1), 5, SCALARS, **OPTIONS)
    launch(X, Y)
    launch(X, Y)
    assert [run[:5] for run in kernel.compiled.runs] == [(CURRENT + 1, 5, 1, 1, STREAM + 1)]
    assert torch.cuda.current_device() == CURRENT


def test_an_odd_address_is_for_triton_to_see(kernel):
    assert ODD.data_ptr() % 16 == 4
    launch = Launch(kernel, DEVICE, 5, SCALARS, **OPTIONS)
    launch(X, ODD)
    launch(X, ODD)
    launch(X, Y)  # what was compiled for odd addresses is not kept for this one
    assert len(kernel.asked) == 3
    launch(X, Y)
    assert len(kernel.asked) == 3
    launch(ODD, Y)
    assert len(kernel.asked) == 4


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks"])
def test_hooks_see_every_launch(kernel, monkeypatch, name):
    def hook(*args, **kwargs):
        raise AssertionError("for Triton to call")

    launch = Launch(kernel, DEVICE, 5, SCALARS, **OPTIONS)
    launch(X, Y)
    hooks = kernel.pre_run_hooks if name == "pre_run_hooks" else getattr(knobs.runtime, name).calls
    hooks.append(hook)
    try:
        launch(X, Y)
        assert len(kernel.asked) == 2
    finally:
        hooks.remove(hook)
    launch(X, Y)
    assert len(kernel.asked) == 2
    if name != "pre_run_hooks":  # in place of the chain
        monkeypatch.setattr(knobs.runtime, name, hook)
        launch(X, Y)
        assert len(kernel.asked) == 3
        monkeypatch.setattr(knobs.runtime, name, None)
        launch(X, Y)
        assert len(kernel.asked) == 3


def test_an_unknown_triton_goes_its_own_way(kernel, monkeypatch):
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)
    for release, expected in (("3.6.0", True), ("3.9.1", True), ("3.60.0", False), ("4.0", False)):
        monkeypatch.setattr(triton_launch.triton, "__version__", release)
        assert triton_launch._can_run_again() == expected
    monkeypatch.setattr(torch.version, "hip", "6.0")
    monkeypatch.setattr(triton_launch.triton, "__version__", "3.6.0")
    assert not triton_launch._can_run_again()
    monkeypatch.setattr(triton_launch, "CAN_RUN_AGAIN", False)
    launch = Launch(kernel, DEVICE, 5, SCALARS, **OPTIONS)
    launch(X, Y)
    launch(X, Y)
    assert len(kernel.asked) == 2


@pytest.mark.parametrize(
    "kernels",
    ["small", pytest.param("attention hopper softmax", marks=pytest.mark.slow)],
)
def test_the_gpu_gets_what_triton_itself_would_launch(kernels):
    if not triton_launch.triton.__version__.startswith(triton_launch.RUN_RELEASES):
        pytest.skip("this Triton always goes its own way")
    # In a process of its own: Triton decides when it is imported whether it interprets.
    script = Path(__file__).with_name("launch_triton_again.py")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), *kernels.split()]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == (1 if kernels == "small" else 19)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("D", [48, 64, 128])  # from 64 those for Hopper, with TMA descriptors
def test_a_profiler_is_told_of_warm_launches(D):
    q, k, v = (
        t.requires_grad_() for t in make_qkv(1, 2, 2, 64, 64, D, device="cuda", dtype=torch.half)
    )
    dout = torch.randn_like(q)

    def step():
        out = attention(q, k, v, kernel="triton")
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    step()
    expected = step()
    told = []

    def hook(metadata):
        told.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        watched = step()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(told) == 3
    assert [name.removesuffix("_hopper") for name in told] == [
        "attention_fwd", "attention_bwd_dq", "attention_bwd_dkdv",
    ]  # fmt: skip
    again = step()
    assert len(told) == 3
    for results in (watched, again):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.gpu
def test_warm_launches_of_other_lengths_addresses_and_layouts():
    # Each shape twice, in turns with others that differ in one thing that is compiled for.
    buffer = torch.randn(2 * 64 * 48 + 1, device="cuda", dtype=torch.half)
    inputs = [
        make_qkv(1, 2, 2, S, S, D, device="cuda", dtype=dtype, layout=layout)
        for S, D, dtype, layout in (
            (64, 64, torch.half, "bhsd"),
            (64, 64, torch.bfloat16, "bhsd"),
            (64, 64, torch.float32, "bhsd"),
            (65, 64, torch.half, "bhsd"),
            (64, 48, torch.half, "bhsd"),
            (64, 64, torch.half, "bshd"),
            (64, 64, torch.half, "step2"),
        )
    ]
    for start in (0, 1):  # at a multiple of 16 bytes, and 2 bytes on
        x = buffer[start : start + 2 * 64 * 48].view(1, 2, 64, 48)
        inputs.append((x, x, x))
    for is_causal in (True, False, True, False):
        for q, k, v in inputs:
            out = attention(q, k, v, kernel="triton", is_causal=is_causal)
            expected = attention(q, k, v, kernel="reference", is_causal=is_causal)
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
            rows = softmax(q, kernel="triton")
            torch.testing.assert_close(rows, q.softmax(-1), rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])  # which are read by TMA on Hopper
@pytest.mark.parametrize("max_expanded", [5, 8192])
def test_warm_launches_at_new_addresses_and_of_new_values_at_old_ones(D, max_expanded, monkeypatch):
    monkeypatch.setattr(triton_launch, "MAX_EXPANDED", max_expanded)
    places = torch.empty(3, 4, 2, 2, 70, D, device="cuda", dtype=torch.half)
    for place in (0, 1, 0, 2, 1, 0):
        *inputs, dout = places[place].normal_()
        results = []
        for kernel in ("triton", "reference"):
            leaves = [t.detach().requires_grad_() for t in inputs]
            out = attention(*leaves, kernel=kernel)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
