"""Model FLOP/s utilisation: the count of a model's operations, the table of peaks, the share."""

import json

import pytest
import torch
from command import run_train, tiny_args

import minitx.mfu
from minitx.metrics import read_metrics
from minitx.mfu import flops_per_token, mfu, peak_flops
from minitx.model import GPTConfig

GPT2 = GPTConfig(pos="learned", norm="layer", mlp="gelu", vocab_size=50257)


def test_flops_of_gpt2_small():
    # 6 * (matrices + head) + 12 * 12 layers * 768 * 1025 / 2
    want = 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1025 / 2
    assert flops_per_token(GPT2, 1024) == want


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),  # which the name of the other is a part of
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Radeon", None),
    ],
)
def test_a_device_is_known_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda", 0)
    assert peak_flops(device) == peak
    share = peak and 5e5 * flops_per_token(GPT2, 1024) / peak
    assert mfu(device, GPT2, 1024, 5e5) == share
    assert mfu(device, GPT2, 1024, None) is None
    assert mfu(torch.device("cpu"), GPT2, 1024, 5e5) is None


def test_a_run_says_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(minitx.mfu, "peak_flops", lambda device: 1e12)
    assert run_train(tiny_args(tmp_path, compare="none")) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    share = report["flops_per_token"] / 1e12
    assert report["mfu"] == pytest.approx(report["tok_per_s"] * share)
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert steps
    printed = capsys.readouterr().out
    for r in steps:
        assert r["mfu"] == pytest.approx(r["tok_per_s"] * share)
        assert f"{r['tok_per_s']:,.0f} {r['mfu']:7.1%} " in printed
