"""Triton kernels launched again: what is kept for it, and when Triton is asked anew."""

import dataclasses
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from minitx.kernels import attention, softmax, supports

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from triton import knobs  # noqa: E402

from minitx.kernels import kept, triton_attention, triton_launch  # noqa: E402
from minitx.kernels.triton_launch import Launch, remember, remembered  # noqa: E402
from minitx.testing import make_qkv  # noqa: E402

CURRENT, STREAM = 3, 77  # the device and stream that the stand-ins below say are current
DEVICE = torch.device("cuda", CURRENT)


class Compiled:
    """Stands in for what Triton compiled, and records what it is run with."""

    function, packed_metadata = "function", "metadata"

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


def test_a_launch_keeps_no_tensor_alive(kernel):
    x = torch.zeros(64)
    launch = Launch(kernel, DEVICE, 5, SCALARS, describe=(lambda t: Described(t, ()),), **OPTIONS)
    launch(x, x)
    kernel.asked.clear()
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_what_is_remembered_of_attention_keeps_no_tensor_alive(remembering):
    calls = _calls()
    attention_results("triton", **calls["nothing"])
    references = [weakref.ref(calls["nothing"][name]) for name in "qkv"]
    calls.clear()
    assert kept._remembered
    assert [reference() for reference in references] == [None] * 3


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


def test_not_more_is_remembered_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(kept, "_remembered", {})
    monkeypatch.setattr(kept, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", False)
    for n in range(10):
        assert remembered((n,)) is None
        assert remember((n,), str(n)) == str(n)
        assert remembered((n,)) == str(n)
        assert len(kept._remembered) <= 3
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", True)  # where tiles depend on more
    assert remember(("new",), "launch") == "launch"
    assert remembered(("new",)) is None


# What is remembered of a call


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, where a launch told apart too little has the wrong strides."""
    monkeypatch.setattr(kept, "_remembered", {})
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", False)


def other_strides(t: torch.Tensor) -> torch.Tensor:
    """t's values, with its last dim the outermost in memory."""
    return t.detach().movedim(-1, 0).contiguous().movedim(0, -1)


def attention_results(kernel, q, k, v, dout, dlse, needs, **settings) -> list[torch.Tensor]:
    """out, lse, and the gradients that are needed."""
    leaves = [t.detach().requires_grad_(need) for t, need in zip((q, k, v), needs, strict=True)]
    out, lse = attention(*leaves, kernel=kernel, return_lse=True, **settings)
    results, grads = ((out, lse), (dout, dlse)) if dlse is not None else ((out,), (dout,))
    wanted = [t for t in leaves if t.requires_grad]
    return [out, lse, *torch.autograd.grad(results, wanted, grads)]


def _calls() -> dict[str, dict]:
    """By what they differ in from the first: the arguments of attention_results."""
    device = _probe.device.type
    # Cut out of longer ones, so that their lengths can change and their strides stay.
    long_q, long_k, long_v = make_qkv(2, 2, 1, 12, 12, 16, device=device)
    q, k, v = long_q[:, :, :8], long_k[:, :, :8], long_v[:, :, :8]
    dout, dlse = torch.randn(2, 2, 8, 16, device=device), torch.randn(2, 2, 8, device=device)
    first = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, "needs": (True, True, True)}
    others: dict[str, dict] = {
        "nothing": {},
        "q's strides": {"q": other_strides(q)},
        "heads of q that are one": {"q": q[:, :1].expand(2, 2, 8, 16)},  # whose out is as before
        "k's strides": {"k": other_strides(k)},
        "v's strides": {"v": other_strides(v)},
        "dout's strides": {"dout": other_strides(dout)},
        "dlse's strides": {"dlse": dlse.mT.contiguous().mT},
        "dlse": {"dlse": None},
        "Skv": {"k": long_k, "v": long_v},
        "scale": {"scale": 0.7},
        "no causal rule": {"is_causal": False},
        "no dq": {"needs": (False, True, True)},
        "no dk": {"needs": (True, False, True)},
        "no dv": {"needs": (True, True, False)},
        "Sq": {"q": q[:, :, :5], "dout": dout[:, :, :5], "dlse": dlse[..., :5]},
    }
    return {name: first | other for name, other in others.items()}


def test_calls_of_attention_that_differ_are_told_apart(remembering):
    calls = _calls()
    for name, call in calls.items():
        attention_results("triton", **calls["nothing"])
        actual = attention_results("triton", **call)
        expected = attention_results("reference", **call)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    number = len(kept._remembered)
    attention_results("triton", **calls["nothing"])
    assert len(kept._remembered) == number > len(calls)


def test_gradients_that_lie_otherwise_are_told_apart(remembering, monkeypatch):
    call = _calls()["nothing"]

    def apart(q, k, v, needs):
        return tuple(other_strides(torch.empty_like(t)) for t in (q, k, v))

    expected = attention_results("triton", **call)
    monkeypatch.setattr(triton_attention, "empty_grads", apart)
    actual = attention_results("triton", **call)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_calls_of_softmax_that_differ_are_told_apart(remembering):
    scores = torch.randn(6, 40, device=_probe.device)
    grad = torch.randn_like(scores)
    for x, dy, is_causal in (
        (scores, grad, False),
        (other_strides(scores), grad, False),
        (scores, other_strides(grad), False),
        (scores, grad, True),
        (scores[:, :30], grad[:, :30], False),
        (scores[:5], grad[:5], False),
    ):
        results = []
        for kernel in ("triton", "reference"):
            leaf = x.detach().requires_grad_()
            y = softmax(leaf, is_causal=is_causal, kernel=kernel)
            results.append((y, *torch.autograd.grad(y, leaf, dy)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


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
