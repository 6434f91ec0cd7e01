"""Triton kernels launched again: what is kept for it, and when Triton is asked anew."""

import pytest
import torch

from minitx.kernels import attention, softmax, supports

_probe = torch.zeros(1, 1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
_support = supports("triton", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from triton import knobs  # noqa: E402

from minitx.kernels import triton_launch  # noqa: E402
from minitx.kernels.triton_launch import launch  # noqa: E402
from minitx.testing import make_qkv  # noqa: E402

DEVICE, STREAM = 3, 77  # that the stand-ins below say are current


class Compiled:
    """Stands in for what Triton compiled, and records what it is run with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs = []

    def run(self, *args) -> None:
        self.runs.append(args)


class Kernel:
    """Stands in for a function of triton.jit: compiles at every launch of Triton's own."""

    arg_names = ("x", "y", "strides", "scale", "BLOCK", "IS_CAUSAL")

    def __init__(self) -> None:
        self.pre_run_hooks = []
        self.asked = []  # (grid, args, options)
        self.compiled = []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.asked.append((grid, args, options))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel on a machine where one can be run again."""
    monkeypatch.setattr(triton_launch, "CAN_RUN_AGAIN", True)
    monkeypatch.setattr(triton_launch, "_remembered", {})
    monkeypatch.setattr(triton_launch, "_current_stream", lambda index: STREAM + index - DEVICE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    return Kernel()


X = torch.zeros(64)
Y = torch.zeros(64)
SCALARS = ((8, 1), 0.5)
# Not in the order of the kernel's parameters, and with one of the compiler's options.
OPTIONS = {"IS_CAUSAL": True, "BLOCK": 16, "num_warps": 4}


def test_the_second_launch_runs_what_the_first_compiled(kernel):
    launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
    assert kernel.asked == [((5,), (X, Y, *SCALARS), OPTIONS)]
    x, y = torch.zeros(64), torch.zeros(64)
    launch(kernel, 6, (x, y), SCALARS, **OPTIONS)
    assert len(kernel.asked) == 1
    (run,) = kernel.compiled[0].runs
    assert run[:9] == (6, 1, 1, STREAM, "function", "metadata", None, None, None)
    assert run[9:] == (x.data_ptr(), y.data_ptr(), *SCALARS, 16, True)


class Described:
    """Stands in for a TMA descriptor."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base


@pytest.mark.parametrize(
    ("tensors", "scalars", "options"),
    [
        ((X, Y.half()), SCALARS, OPTIONS),
        ((X, None), SCALARS, OPTIONS),
        ((X, Described(Y)), SCALARS, OPTIONS),
        ((X, Y), ((16, 1), 0.5), OPTIONS),
        ((X, Y), ((8, 1), 0.25), OPTIONS),
        ((X, Y), SCALARS, OPTIONS | {"BLOCK": 32}),
        ((X, Y), SCALARS, OPTIONS | {"num_warps": 8}),
    ],
    ids=["dtype", "None", "descriptor", "stride", "scale", "constant", "option"],
)
def test_what_a_kernel_is_compiled_for_is_told_apart(kernel, tensors, scalars, options):
    if tensors[1] is not None and isinstance(tensors[1], Described):
        launch(kernel, 5, (X, Described(Y.half())), SCALARS, **OPTIONS)
    else:
        launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
    for _ in range(2):
        launch(kernel, 5, tensors, scalars, **options)
    assert len(kernel.asked) == 2
    (run,) = kernel.compiled[1].runs
    second = tensors[1].data_ptr() if isinstance(tensors[1], torch.Tensor) else tensors[1]
    assert run[9:] == (
        X.data_ptr(), second, *scalars, options["BLOCK"], options["IS_CAUSAL"],
    )  # fmt: skip


def test_each_device_and_kernel_has_its_own(kernel, monkeypatch):
    launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
    other = Kernel()
    launch(other, 5, (X, Y), SCALARS, **OPTIONS)
    assert len(other.asked) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE + 1)
    for _ in range(2):
        launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
    assert len(kernel.asked) == 2
    assert [run[3] for run in kernel.compiled[1].runs] == [STREAM + 1]


def test_an_odd_address_is_for_triton_to_see(kernel):
    odd = torch.zeros(65)[1:]
    assert odd.data_ptr() % 16 == 4
    for _ in range(2):
        launch(kernel, 5, (X, odd), SCALARS, **OPTIONS)
    assert len(kernel.asked) == 2
    launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)  # what those compiled is not for aligned tensors
    assert len(kernel.asked) == 3
    launch(kernel, 5, (X, odd), SCALARS, **OPTIONS)
    assert len(kernel.asked) == 4


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks"])
def test_hooks_see_every_launch(kernel, monkeypatch, name):
    def hook(*args, **kwargs):
        raise AssertionError("for Triton to call")

    launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
    if name == "pre_run_hooks":
        kernel.pre_run_hooks.append(hook)
    else:
        getattr(knobs.runtime, name).add(hook)
    try:
        launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
        assert len(kernel.asked) == 2
    finally:
        if name == "pre_run_hooks":
            kernel.pre_run_hooks.clear()
        else:
            getattr(knobs.runtime, name).remove(hook)
    launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
    assert len(kernel.asked) == 2
    if name != "pre_run_hooks":  # in place of the chain, as older profilers set it
        monkeypatch.setattr(knobs.runtime, name, hook)
        launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
        assert len(kernel.asked) == 3


def test_an_unknown_triton_goes_its_own_way(kernel, monkeypatch):
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)
    for release, expected in (("3.6.0", True), ("3.9.1", True), ("3.60.0", False), ("4.0", False)):
        monkeypatch.setattr(triton_launch.triton, "__version__", release)
        assert triton_launch._can_run_again() == expected
    monkeypatch.setattr(triton_launch, "CAN_RUN_AGAIN", False)
    for _ in range(2):
        launch(kernel, 5, (X, Y), SCALARS, **OPTIONS)
    assert len(kernel.asked) == 2


def test_not_more_is_kept_than_a_model_needs(kernel, monkeypatch):
    monkeypatch.setattr(triton_launch, "MAX_REMEMBERED", 3)
    for length in range(10):
        launch(kernel, length, (X, Y), ((length, 1), 0.5), **OPTIONS)
        assert len(triton_launch._remembered) <= 3
    launch(kernel, 9, (X, Y), ((9, 1), 0.5), **OPTIONS)
    assert len(kernel.asked) == 10


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])  # 128: the kernels for Hopper, whose tensors are described
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
