"""Markers that look at the machine, and the kernels a test can be run on."""

import math
import signal
from collections.abc import Iterator

import pytest
import torch
from attention_contract import KERNELS

from minitx.kernels import kept, supports

pytest_plugins = ["contract_csv", "pytester"]  # --contract-csv, and what tests it

# Tests are tiny: a second thread costs more than it brings, and on a busy machine threads that wait
# for one another in a parallel region make a test a hundred times slower.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    for item in items:
        if "gpu" in item.keywords and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if "huge" in item.keywords and memory < 40 * 2**30:
            item.add_marker(pytest.mark.skip(reason="needs a GPU with 40 GiB"))
        if "two_gpus" in item.keywords and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run here: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, device: str) -> str:
    """The attention contract's kernels, one after the other."""
    probe = torch.zeros(1, 1, 1, 16, device=device)
    support = supports(request.param, probe, probe, probe)
    if not support.ok:
        pytest.skip(support.reason)
    return request.param


@pytest.fixture
def has_lse(kernel: str, device: str) -> bool:
    probe = torch.zeros(1, 1, 1, 16, device=device)
    return supports(kernel, probe, probe, probe, return_lse=True).ok


@pytest.fixture
def lse_kernel(kernel: str, has_lse: bool) -> str:
    if not has_lse:
        pytest.skip("returns no lse")
    return kernel


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""

    def poisoned(make):
        def make_poisoned(*args, **kwargs):
            t = make(*args, **kwargs)
            return t.fill_(math.nan if t.is_floating_point() else 77)

        return make_poisoned

    for owner, name in (
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
        (kept.Empty, "make"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was launched of the Triton attention's kernels for Hopper."""
    from minitx.kernels.triton_launch import Launch

    seen = []
    run = Launch.__call__

    def recording(self: Launch, *tensors: torch.Tensor | None) -> None:
        name = self.kernel.__name__
        if name.endswith("_hopper"):
            seen.append(name)
        run(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", recording)
    return seen


class _Forgetful(dict):
    """Takes in nothing."""

    def __setitem__(self, key, value) -> None:
        pass


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a kernel chooses its tiles and flags anew: for tests that replace the choice."""
    monkeypatch.setattr(kept, "_remembered", _Forgetful())


@pytest.fixture
def hangups_are_heeded() -> Iterator[None]:
    """Also where nohup runs the tests; and one that is not taken ends a test, not all of them."""

    def missed(number, frame):
        raise AssertionError("a hangup that nobody took")

    before = signal.signal(signal.SIGHUP, missed)
    yield
    signal.signal(signal.SIGHUP, before)
