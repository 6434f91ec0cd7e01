"""train.py's run: what it writes, what it computes, and what it refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from command import make_trainer, run_train, tiny_args, tiny_config, weights

from minitx.config import BatchConfig, TrainConfig, differences
from minitx.data import load_data
from minitx.metrics import read_metrics
from minitx.trainer import NonFiniteError, Trainer

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return tiny_config(tmp_path)


def test_a_run_leaves_its_folder(tmp_path, capsys):
    assert run_train(tiny_args(tmp_path, log__plots="true")) == 0
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml",
        "environment.json",
        "tokenizer.json",
        "parity.json",
        "parity.png",
        "metrics.jsonl",
        "checkpoints",
        "loss.png",
        "report.json",
    }
    assert (run / "checkpoints" / "step_00000006" / "model.safetensors").is_file()
    for picture in ("loss.png", "parity.png"):
        assert (run / picture).read_bytes()[:4] == b"\x89PNG"
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["n_embd"] == 32
    assert saved["optim"]["beta2"] == 0.95  # defaults are written too
    assert (saved["dtype"], saved["batch"]["micro"]) == ("float32", 4)  # and what was derived

    records = read_metrics(run / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == [2, 4, 6]
    assert [r["step"] for r in records if r["kind"] == "eval"] == [4, 6]
    last = [r for r in records if r["kind"] == "train"][-1]
    assert last["tokens"] == 6 * 128
    assert last["tok_per_s"] == pytest.approx(128 / (last["ms_per_step"] / 1e3))
    assert 0 < last["data_ms"] < last["ms_per_step"]
    report = json.loads((run / "report.json").read_text())
    assert report["val_loss"] == [r for r in records if r["kind"] == "eval"][-1]["val_loss"]
    assert report["parity_passed"] is True
    assert report["mfu"] is None  # a CPU is in no table
    assert report["environment"]["torch"] == torch.__version__
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["step", "loss"] for line in lines)


def test_it_learns(tmp_path):
    args = tiny_args(tmp_path, compare="none", max_steps=40, log__interval=40, log__eval_interval=0)
    assert run_train(args) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["val_loss"] < report["unigram_entropy"] - 0.3


def test_the_unigram_entropy_is_that_of_the_text(tmp_path):
    """Two letters, three to one: -(3/4 ln 3/4 + 1/4 ln 1/4) = 0.5623 without the end-of-text
    token."""
    from minitx.report import unigram_entropy

    class Fake:
        train = torch.tensor([0, 0, 0, 1]).numpy()

        class tokenizer:
            vocab_size = 2

    assert unigram_entropy(Fake) == pytest.approx(0.5623351)


def test_accumulated_gradients_equal_those_of_one_batch(config):
    """4 sequences in 1, 2 and 4 micro-batches, with left-out targets spread unevenly."""
    whole = make_trainer(config)
    (x, y) = whole.next_batches()[0]
    y = y.clone()
    y[0] = -100
    y[2, ::2] = -100
    whole.backward([(x, y)])
    want = {name: p.grad.clone() for name, p in whole.model.named_parameters()}
    for pieces in (2, 4):
        split = make_trainer(config)
        split.backward(list(zip(x.chunk(pieces), y.chunk(pieces), strict=True)))
        for name, p in split.model.named_parameters():
            torch.testing.assert_close(p.grad, want[name], rtol=0, atol=1e-6)


def test_the_whole_loss_is_the_mean_over_targets(config):
    trainer = make_trainer(config)
    batches = trainer.next_batches()
    (x, y) = batches[0]
    losses = trainer.model.token_losses(x, y)
    assert trainer.backward(batches).item() == pytest.approx(losses.mean().item(), rel=1e-6)


def test_the_first_step_moves_the_weights(config):
    trainer = make_trainer(config)
    before = weights(trainer)
    result = trainer.step()
    assert result.lr == pytest.approx(1e-2 / 3)
    assert all(not torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_clipping_bounds_the_gradient_and_reports_the_whole(config):
    config.optim.grad_clip = 0.01
    trainer = make_trainer(config)
    loss = trainer.backward(trainer.next_batches())
    norms = torch.stack([p.grad.norm() for p in trainer.model.parameters()])
    seen = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item()
        )
    )
    result = trainer.update(loss)
    assert result.grad_norm == pytest.approx(norms.norm().item(), rel=1e-5)
    assert seen == [pytest.approx(0.01, rel=1e-3)]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_gradient_stops_before_the_weights(config, poison):
    trainer = make_trainer(config)
    trainer.step()
    before = weights(trainer)
    loss = trainer.backward(trainer.next_batches())
    trainer.model.blocks[0].mlp.up.weight.grad[0, 0] = poison
    with pytest.raises(NonFiniteError, match=r"step 2: loss .* kernel 'sdpa' in float32"):
        trainer.update(loss)
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_float16_skips_an_overflow_and_halves_the_scale(config, device):
    trainer = make_trainer(config, dtype=torch.float16, device=device)
    scale = trainer.scaler.get_scale()
    before = weights(trainer)
    loss = trainer.backward(trainer.next_batches())
    trainer.model.blocks[0].mlp.up.weight.grad[0, 0] = math.inf
    result = trainer.update(loss)
    assert result.skipped
    assert trainer.skipped_steps == 1
    assert trainer.scaler.get_scale() == scale / 2
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())
    assert not trainer.step().skipped


def test_float16_stops_when_no_scale_is_small_enough(config):
    """Skipping for ever would look like training: at a scale of 1 it is the gradient itself."""
    trainer = make_trainer(config, dtype=torch.float16)

    def poisoned_step():
        loss = trainer.backward(trainer.next_batches())
        trainer.model.blocks[0].mlp.up.weight.grad[0, 0] = math.nan
        trainer.update(loss)

    with pytest.raises(NonFiniteError, match=r"kernel 'sdpa' in float16"):  # noqa: PT012
        for _ in range(40):
            poisoned_step()
    assert trainer.skipped_steps == 16  # from 65536 to 1


@pytest.mark.parametrize("device", DEVICES)
def test_float16_reports_and_clips_the_unscaled_norm(config, device):
    """Clipped to half its norm of about 2: of the scaled gradient nothing would be left."""
    config.optim.grad_clip = 1.0
    float32, float16 = (
        make_trainer(config, dtype=dtype, device=device) for dtype in (torch.float32, torch.float16)
    )
    norms, clipped = [], []
    for trainer in (float32, float16):
        loss = trainer.backward(trainer.next_batches())
        trainer.optimizer.register_step_pre_hook(
            lambda optimizer, *_: clipped.append(
                torch.stack(
                    [p.grad.norm() for g in optimizer.param_groups for p in g["params"]]
                ).norm()
                # What a fused one divides by; None after GradScaler.unscale_.
                / (getattr(optimizer, "grad_scale", None) or 1.0)
            )
        )
        norms.append(trainer.update(loss).grad_norm)
    assert norms[0] > 1.5
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)
    assert [c.item() for c in clipped] == [pytest.approx(1.0, rel=1e-2)] * 2


def test_evaluation_scores_every_token_once_and_draws_no_random_number(config):
    config.model.dropout = 0.2
    trainer = make_trainer(config)
    tokens = load_data(config.data).val[:106]
    state = torch.random.get_rng_state()
    loss, count = trainer.evaluate(tokens, max_tokens=10_000)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert trainer.model.training
    assert count == 105
    trainer.model.eval()
    total = 0.0
    for b in range(0, 105, 32):  # windows of 32, the last of 9
        window = torch.from_numpy(tokens[b : min(b + 33, 106)].astype("int64"))[None]
        total += trainer.model.token_losses(window[:, :-1], window[:, 1:]).double().sum().item()
    assert loss == pytest.approx(total / 105, rel=1e-6)
    assert trainer.evaluate(tokens, max_tokens=50)[1] == 50


def test_the_mean_of_nothing_is_no_validation_loss(tmp_path, capsys):
    args = tiny_args(tmp_path, compare="none", max_steps=2, data__val_fraction=0.0)
    assert run_train(args) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["val_loss"] is None
    assert report["loss"] > 0
    assert "no validation text" in capsys.readouterr().out


@pytest.mark.parametrize("best", ["true", "false"])
def test_the_best_is_kept_apart_when_asked_for(best, tmp_path, monkeypatch):
    """The validation losses are 3, 2, 4, 5: step 2 is the best, and only with --checkpoint.best."""
    losses = iter([3.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda self, tokens, n: (next(losses), 1))
    args = tiny_args(
        tmp_path,
        compare="none",
        max_steps=4,
        log__eval_interval=1,
        checkpoint__best=best,
        checkpoint__interval=1,
        checkpoint__keep=1,
    )
    assert run_train(args) == 0
    folder = tmp_path / "run" / "checkpoints"
    names = {p.name for p in folder.iterdir()}
    if best == "true":
        assert names == {"step_00000002", "step_00000004", "latest", "best"}
        assert (folder / "best").resolve().name == "step_00000002"
    else:
        assert names == {"step_00000004", "latest"}


def test_evaluation_lets_go_of_the_pages_it_has_read(config, tmp_path):
    """A file of 32 MiB is read and at most 8 MiB of it stay resident."""
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("needs /proc")
    trainer = make_trainer(config)
    trainer.model.token_losses = lambda x, y: torch.zeros(x.shape)
    path = tmp_path / "tokens.bin"
    np.zeros(1 << 24, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    config.batch.seq_len, config.batch.micro = 4096, 64

    def resident_mib() -> float:
        line = next(x for x in status.read_text().splitlines() if x.startswith("RssFile"))
        return int(line.split()[1]) / 1024

    before = resident_mib()
    trainer.evaluate(tokens, max_tokens=1 << 24)
    assert resident_mib() - before < 8


def test_waiting_for_batches_is_measured(config):
    """A stream that takes 50 ms a batch, and a step of two: 100 ms are waited, and nothing else
    counts."""
    import time

    config.batch.micro = 2
    trainer = make_trainer(config)
    batch = trainer.stream.next()
    trainer.stream.next = lambda: time.sleep(0.05) or batch
    trainer.step()
    assert 0.1 <= trainer.data_seconds < 0.5


@pytest.mark.gpu
def test_the_loader_does_not_hold_up_a_gpu(tmp_path):
    """16 micro-batches a step: all are read while the step before is computed."""
    changes = {
        "device": "cuda",
        "compare": "none",
        "max_steps": 30,
        "log__interval": 10,
        "log__eval_interval": 0,
        "model__n_embd": 512,
        "model__max_seq_len": 512,
        "batch__tokens": 32768,
        "batch__micro": 4,
    }
    assert run_train(tiny_args(tmp_path, **changes)) == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    last = [r for r in records if r["kind"] == "train"][-1]
    assert last["data_ms"] < 0.05 * last["ms_per_step"]


def test_evaluating_in_between_changes_nothing_that_is_learned(tmp_path):
    losses = []
    for out, interval in (("a", 0), ("b", 1)):
        args = tiny_args(
            tmp_path, out, compare="none", log__eval_interval=interval, model__dropout=0.1
        )
        assert run_train(args) == 0
        records = read_metrics(tmp_path / out / "metrics.jsonl")
        losses.append([r["loss"] for r in records if r["kind"] == "train"])
    assert losses[0] == losses[1]


CONFIGS = ["cpu", "gpt2-124m", "llama-124m", "long-context", "million-tokens"]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_loads_and_is_consistent(name):
    from minitx.cli import parse_config

    path = ROOT / "configs" / f"{name}.yaml"
    assert {p.stem for p in path.parent.glob("*.yaml")} == set(CONFIGS)
    config = parse_config(TrainConfig, [f"--config={path}"], prog="train.py", description="")
    config.validate()
    assert config.accumulation * config.micro_batch * config.seq_len == config.batch.tokens


def test_batches_are_derived_and_misfits_refused():
    config = TrainConfig(batch=BatchConfig(tokens=4096, seq_len=256, micro=4))
    config.validate()
    assert (config.accumulation, config.micro_batch) == (4, 4)
    for batch, message in (
        (BatchConfig(tokens=4000, seq_len=256), "not a multiple .* try 3840"),
        (BatchConfig(tokens=4096, seq_len=256, micro=3), "--batch.micro 3 does not divide the 16"),
        (BatchConfig(tokens=100, seq_len=256), "not a multiple .* try 256"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(batch=batch).validate()


def test_differences_are_named_by_their_flags():
    old = {"seed": 0, "optim": {"lr": 1.0, "eps": 1e-8}}
    new = {"seed": 0, "optim": {"lr": 2.0, "eps": 1e-8}, "dtype": "auto"}
    assert differences(old, new) == {"optim.lr": (1.0, 2.0), "dtype": (None, "auto")}
