"""The learning rate as a pure function of the step, and what AdamW decays."""

import pytest
import torch
from torch import nn

from minitx.config import OptimConfig
from minitx.optim import learning_rate, make_optimizer


def test_warm_up_starts_above_zero_and_reaches_the_peak():
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    assert [learning_rate(step, config, 100) for step in range(5)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0]
    )


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_schedule_ends_at_min_lr_and_stays_there(schedule):
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4, schedule=schedule)
    assert learning_rate(100, config, 100) == pytest.approx(0.1)
    assert learning_rate(1000, config, 100) == pytest.approx(0.1)
    rates = [learning_rate(step, config, 100) for step in range(4, 101)]
    assert rates == sorted(rates, reverse=True)


def test_cosine_is_half_way_at_half_time():
    config = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=0)
    assert learning_rate(50, config, 100) == pytest.approx(0.5)
    assert learning_rate(25, config, 100) == pytest.approx(0.8535534)  # (1 + cos(pi/4)) / 2


def test_wsd_is_flat_and_then_linear():
    config = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=10, schedule="wsd", decay_fraction=0.2)
    assert {learning_rate(step, config, 100) for step in range(10, 81)} == {1.0}
    assert learning_rate(90, config, 100) == pytest.approx(0.5)


def test_no_warm_up_and_constant():
    config = OptimConfig(lr=0.5, warmup_steps=0, schedule="constant")
    assert {learning_rate(step, config, 10) for step in range(20)} == {0.5}


def test_only_matrices_decay():
    """With a zero gradient AdamW's step is the decay alone."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        expected = old * 0.95 if p.dim() >= 2 else old
        torch.testing.assert_close(p.detach(), expected)
