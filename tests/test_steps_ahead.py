"""Steps that are launched before the last one was looked at: nothing is lost when one breaks."""

import math

import pytest
import torch
from command import make_trainer, tiny_config, weights

from minitx import trainer as trainer_module
from minitx.trainer import NonFiniteError, Trainer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path, model__dropout=0.1)


@pytest.fixture
def make(config, monkeypatch):
    """Makes trainers that look a step later: on a CPU, too, by the optimizer's fused form there.
    Each seeds the generator that all share: make one, and let it run, before the next."""
    right = trainer_module.make_optimizer

    def fused(model, optim):
        optimizer = right(model, optim)
        groups = [{k: v for k, v in g.items() if k != "fused"} for g in optimizer.param_groups]
        return torch.optim.AdamW(groups, fused=True)

    monkeypatch.setattr(trainer_module, "make_optimizer", fused)

    def make(device: str = "cpu", **how) -> Trainer:
        trainer = make_trainer(config, device=device, **how)
        assert trainer.looks_later == (how.get("dtype") != torch.float16)
        return trainer

    return make


def poison(trainer: Trainer, at: int, where: str) -> None:
    """Makes the gradient or the loss of the at-th step NaN."""
    right, calls = trainer.backward, 0

    def backward(batches):
        nonlocal calls
        calls += 1
        loss = right(batches)
        if calls == at and where == "gradient":
            trainer.model.blocks[0].mlp.up.weight.grad[0, 0] = math.nan
        return loss * math.nan if calls == at and where == "loss" else loss

    trainer.backward = backward


def optimizer_state(trainer: Trainer) -> list[torch.Tensor]:
    states = trainer.optimizer.state_dict()["state"].values()
    return [value.clone() for state in states for value in state.values()]


def assert_same(a: Trainer, b: Trainer) -> None:
    mine, yours = weights(a), weights(b)
    assert all(torch.equal(mine[name], yours[name]) for name in mine)
    for x, y in zip(optimizer_state(a), optimizer_state(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_ahead_are_the_steps_that_are_waited_for(make, device):
    ahead = make(device)
    for _ in range(5):
        ahead.launch_step()
    waited = make(device)
    for _ in range(5):
        result = waited.step()
    assert ahead.settle() == result
    assert ahead.settle() == result  # asked twice
    assert ahead.step_number == waited.step_number == 5
    assert_same(ahead, waited)


@pytest.mark.parametrize("grad_clip", [0.1, 0.0])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_fused_optimizer_clips(config, make, device, grad_clip, param_dtype):
    """As after clip_grad_norm_: gradients of about 2, clipped to 0.1 or not. Its moments tell:
    AdamW's steps would be as long without. In float64, too, parity's truth for float32 runs: the
    fused form refuses a divisor in anything but float32."""
    config.optim.grad_clip = grad_clip
    how = dict(kernel="reference", param_dtype=param_dtype)
    fused = make(device, **how)
    for _ in range(3):
        norm = fused.step().grad_norm
    plain = make(device, **how)
    plain.looks_later = False
    del plain.optimizer.found_inf
    for _ in range(3):
        want = plain.step().grad_norm
    assert norm == pytest.approx(want, rel=1e-4)
    assert norm > 0.5
    for mine, yours in zip(optimizer_state(fused), optimizer_state(plain), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_step_and_those_after_it_change_nothing(make, device, where):
    """Step 3 breaks. Step 4 is launched before that is seen, with a gradient that is fine."""
    whole = make(device)
    for _ in range(2):
        whole.step()
    state = whole.state_dict()
    batches = whole.next_batches()
    broken = make(device)
    poison(broken, 3, where)
    for _ in range(3):
        broken.launch_step()
    with pytest.raises(NonFiniteError, match="step 3: loss ") as raised:
        broken.launch_step()
    assert_same(broken, whole)
    error = raised.value
    assert error.before == state
    assert math.isnan(error.result.loss if where == "loss" else error.result.grad_norm)
    for got, want in zip(error.batches, batches, strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert broken.step_number == 2


@pytest.mark.parametrize("ask", ["settle", "state_dict", "evaluate"])
def test_who_asks_sees_a_broken_step_at_once(make, ask):
    """A state that is saved, or a loss that is logged, is never that of a step that was skipped."""
    broken = make()
    poison(broken, 2, "gradient")
    broken.launch_step()
    broken.launch_step()
    arguments = [broken.stream._tokens, 10] if ask == "evaluate" else []
    with pytest.raises(NonFiniteError, match="step 2: loss "):
        getattr(broken, ask)(*arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_the_run_goes_on_from_before_the_broken_step(make, device):
    """The same trainer, set back to where it stood, gives the run that never broke."""
    whole = make(device)
    for _ in range(5):
        whole.step()
    broken = make(device)
    poison(broken, 3, "gradient")
    with pytest.raises(NonFiniteError) as raised:  # noqa: PT012
        for _ in range(4):
            broken.launch_step()
    broken.optimizer.zero_grad()
    broken.load_state_dict(raised.value.before)
    for _ in range(3):
        broken.launch_step()
    assert broken.settle() == whole.last
    assert_same(broken, whole)


def test_float16_is_waited_for(make):
    """Its scale depends on what the step gave."""
    trainer = make(dtype=torch.float16)
    poison(trainer, 1, "gradient")
    trainer.launch_step()
    assert trainer.settle().skipped
    assert trainer.skipped_steps == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_no_step_waits_for_the_gpu(make):
    trainer = make("cuda", dtype=torch.bfloat16)
    for _ in range(3):
        trainer.launch_step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            trainer.launch_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.settle().loss > 0


def test_the_copy_is_waited_for_on_the_trainers_own_device(make, monkeypatch):
    """Nothing makes cuda:1 the current device: an event of the current stream is cuda:0's, which
    says nothing of a copy from cuda:1."""
    asked, recorded = [], []

    class Event:
        def record(self, stream=None):
            recorded.append(stream)

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device))
    trainer = make()
    loss = trainer.backward(trainer.next_batches())
    trainer.device = torch.device("cuda", 1)
    trainer.update(loss)
    assert asked == [torch.device("cuda", 1)]
    assert len(recorded) == 1
