"""Parity passes a right kernel and stops a slightly wrong one."""

import json
import math

import pytest
import torch
from command import run_train, tiny_args

from minitx.config import TrainConfig
from minitx.kernels import api
from minitx.parity import Curve, judge


def scale_off(q, k, v, *, is_causal, scale):
    """Attention whose scale is 1 % too large."""
    from minitx.kernels.sdpa import sdpa_attention

    return sdpa_attention(q, k, v, is_causal=is_causal, scale=scale * 1.01)


def mask_off_by_one(q, k, v, *, is_causal, scale):
    """Every query also reads the key after it."""
    S = q.shape[2]
    scores = (q @ k.transpose(-1, -2)) * scale
    mask = torch.ones(S, S, dtype=torch.bool).tril(1)
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1) @ v


@pytest.mark.parametrize("wrong", [scale_off, mask_off_by_one])
def test_a_wrong_kernel_fails_with_exit_code_3(wrong, tmp_path, monkeypatch, capsys):
    right = api._run_attention

    def run(kernel, q, k, v, is_causal, scale, return_lse):
        if kernel == "sdpa":
            return wrong(q, k, v, is_causal=is_causal, scale=scale), None
        return right(kernel, q, k, v, is_causal, scale, return_lse)

    monkeypatch.setattr(api, "_run_attention", run)
    assert run_train(tiny_args(tmp_path)) == 3
    parity = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert parity["passed"] is False
    assert "parity FAILED: sdpa against eager" in capsys.readouterr().out
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_right_kernel_passes_and_its_file_says_all(tmp_path, capsys):
    assert run_train(tiny_args(tmp_path)) == 0
    parity = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert parity["passed"] is True
    assert parity["max_abs_loss_diff"] <= parity["budget"] < 1e-4
    assert (parity["kernel"], parity["baseline"], parity["steps"]) == ("sdpa", "eager", 4)
    assert parity["dtype"] == "float32"
    assert parity["kernel_tok_per_s"] > 0
    assert parity["speedup"] == pytest.approx(
        parity["kernel_tok_per_s"] / parity["baseline_tok_per_s"]
    )
    # The three curves are real: they fall, and start at a uniform guess over 320 rows.
    for curve in ("kernel_losses", "baseline_losses", "truth_losses"):
        assert parity[curve][0] == pytest.approx(math.log(320), abs=0.3)
        assert parity[curve][-1] < parity[curve][0]
    out = capsys.readouterr().out
    assert "parity passed: sdpa against eager over 4 steps" in out
    assert "speed-up" in out


def test_compare_none_skips_it(tmp_path):
    assert run_train(tiny_args(tmp_path, compare="none", max_steps=2)) == 0
    assert not (tmp_path / "run" / "parity.json").exists()


def curve(errors: list[float], gradient_error: float) -> Curve:
    """A curve whose four tokens are off by errors[step] from a truth of 2.0."""
    return Curve(
        losses=[2.0 + e for e in errors],
        token_losses=[torch.full((4,), 2.0 + e, dtype=torch.float64) for e in errors],
        gradients={"w": torch.tensor([3.0, 4.0], dtype=torch.float64) + gradient_error},
        seconds=[1.0] * len(errors),
    )


@pytest.mark.parametrize(
    ("errors", "gradient_error", "passed"),
    [
        ([1e-3, 1e-3], 1e-3, True),
        ([1.9e-3, 1e-3], 1e-3, True),  # within twice the baseline's
        ([1e-3, 2.1e-3], 1e-3, False),  # beyond it at one step
        ([1e-3, 1e-3], 2.1e-3, False),  # right losses, wrong gradient
        ([1e-3, math.nan], 1e-3, False),
        ([1e-3, 1e-3], math.nan, False),
    ],
)
def test_the_budget_is_twice_the_baselines_error(errors, gradient_error, passed):
    truth, baseline = curve([0.0, 0.0], 0.0), curve([1e-3, 1e-3], 1e-3)
    parity = judge(TrainConfig(), "float32", curve(errors, gradient_error), baseline, truth)
    assert parity.passed is passed


def test_a_perfect_baseline_leaves_one_rounding():
    """Loss rounding is float32's eps of 1.19e-7 times 2.0; the gradient's is eps times its norm of
    5."""
    truth, exact = curve([0.0], 0.0), curve([0.0], 0.0)
    assert judge(TrainConfig(), "float32", curve([2e-7], 1e-7), exact, truth).passed
    assert not judge(TrainConfig(), "float32", curve([3e-7], 1e-7), exact, truth).passed
    assert not judge(TrainConfig(), "float32", curve([2e-7], 1e-6), exact, truth).passed
    assert judge(TrainConfig(), "bfloat16", curve([2e-7], 1e-6), exact, truth).passed
