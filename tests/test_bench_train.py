"""python -m minitx.bench train: what it runs, writes and refuses. Its figures are no test."""

import csv
import json
import math
import os
import textwrap
import time

import pytest
import torch
from command import write_text

from minitx.bench import __main__ as bench
from minitx.bench import nanogpt_peer
from minitx.bench import train as train_bench
from minitx.bench.nanogpt_peer import NanoGPT, PeerConfig
from minitx.model import GPT, GPTConfig

CONFIG = """
model: {n_layer: 1, n_head: 2, n_embd: 16, max_seq_len: 16, vocab_size: 320}
data: {source: TEXT, tokenizer: bytes, cache_dir: CACHE}
batch: {tokens: 64}
optim: {warmup_steps: 2}
log: {eval_tokens: 256}
"""

# Stands for train.py where only the benchmark's side matters: each kernel has a fate of its own.
FAKE_TRAIN = """
    import json, os, signal, subprocess, sys, time
    flags = dict(a.split("=", 1) for a in sys.argv if "=" in a)
    out, kernel = flags["--out_dir"], flags["--kernel"]
    os.makedirs(out + "/checkpoints")
    record = {"kind": "train", "step": 1, "loss": 2.5}
    open(out + "/metrics.jsonl", "w").write(json.dumps(record) + chr(10))
    parity = {"passed": kernel != "triton", "max_abs_loss_diff": 1e-6, "budget": 1e-5}
    open(out + "/parity.json", "w").write(json.dumps(parity))
    match kernel:
        case "eager":
            report = {"tok_per_s": 1234.5, "mfu": None, "peak_gib": 1.5, "loss": 2.5}
            report |= {"val_loss": 2.6, "steps": 3, "parameters": 99, "dtype": "float32"}
            open(out + "/report.json", "w").write(json.dumps(report))
        case "sdpa":
            print("torch.OutOfMemoryError: CUDA out of memory.")
            print("and a last word")
            sys.exit(1)
        case "triton":
            sys.exit(3)
        case "tilelang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(child.pid, flush=True)
            time.sleep(600)
        case "triton-softmax":
            os.kill(os.getpid(), signal.SIGKILL)
        case "tilelang-softmax":
            print("working", file=sys.stderr)
            print("train.py: error: no such thing", file=sys.stderr)
            sys.exit(2)
"""


def write_config(folder):
    path = folder / "config.yaml"
    text = CONFIG.replace("TEXT", str(write_text(folder))).replace("CACHE", str(folder / "cache"))
    path.write_text(text)
    return path


def run(tmp_path, *flags):
    where = ["--device", "cpu", "--out_dir", str(tmp_path / "out")]
    return bench.main(["train", "--config", str(write_config(tmp_path)), *where, *flags])


def read(tmp_path):
    with open(tmp_path / "out" / "train.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_kernel_beside_the_peer(tmp_path, capsys):
    flags = ["--kernels", "sdpa", "--peers", "nanogpt-sdpa", "--compile=false", "--shapes=2x24"]
    assert run(tmp_path, *flags, "--max_steps", "3", "--compare_steps", "2") == 0
    peer, ours = read(tmp_path)
    assert (peer["kernel"], ours["kernel"]) == ("nanogpt-sdpa", "sdpa")
    for r in (peer, ours):
        assert (r["status"], r["compile"], r["batch"], r["context"]) == ("ok", "False", "2", "24")
        assert (r["steps"], r["dtype"], r["torch"]) == ("3", "float32", torch.__version__)
        assert float(r["tok_per_s"]) > 0
        assert float(r["peak_gib"]) > 0
    assert float(ours["vs_nanogpt"]) == pytest.approx(
        float(ours["tok_per_s"]) / float(peer["tok_per_s"])
    )
    assert float(peer["vs_nanogpt"]) == 1
    assert (ours["parity_passed"], peer["parity_passed"]) == ("True", "")
    assert float(ours["max_abs_loss_diff"]) <= float(ours["loss_diff_budget"])
    folder = tmp_path / "out" / "train" / "sdpa-2x24"
    report = json.loads((folder / "report.json").read_text())
    for column in ("tok_per_s", "loss", "val_loss"):
        assert float(ours[column]) == report[column]
    assert report["context"] == 24
    assert not (folder / "checkpoints").exists()
    assert (tmp_path / "out" / "train-2x24.png").read_bytes().startswith(b"\x89PNG")
    assert "2 x 24 tokens a step" in capsys.readouterr().out


def test_memory_that_runs_out_is_a_row_and_no_failure(tmp_path):
    """Of train.py itself, asked for a batch that no address space holds."""
    flags = ["--kernels", "sdpa", "--compile=false", "--shapes=1000000000000x24"]
    assert run(tmp_path, *flags, "--compare_steps", "1") == 0
    (ours,) = read(tmp_path)
    assert ours["status"] == "out of memory"


@pytest.fixture
def fake_train(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(textwrap.dedent(FAKE_TRAIN))
    monkeypatch.setattr(train_bench, "ROOT", tmp_path)


def test_each_way_to_fail_is_a_row(tmp_path, fake_train, capsys):
    kernels = "tilelang,eager,sdpa,triton,triton-softmax,tilelang-softmax"
    flags = ["--kernels", kernels, "--compile=true", "--timeout_s", "3", "--label", "mine"]
    assert run(tmp_path, *flags) == 3
    rows = {r["kernel"]: r for r in read(tmp_path)}
    assert {kernel: r["status"] for kernel, r in rows.items()} == {
        "tilelang": "failed: took more than 3 s",
        "eager": "ok",
        "sdpa": "out of memory",
        "triton": "parity failed",
        "triton-softmax": "failed: ended by signal 9",
        "tilelang-softmax": "failed: train.py: error: no such thing",
    }
    assert (rows["eager"]["tok_per_s"], rows["eager"]["val_loss"]) == ("1234.5", "2.6")
    assert rows["triton"]["parity_passed"] == "False"
    assert (rows["triton"]["tok_per_s"], rows["triton"]["label"]) == ("", "mine")

    # What hung has left nothing behind.
    child = int((tmp_path / "out/train/tilelang-compiled-4x16.log").read_text())
    deadline = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 100


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Nobody may have collected it yet.
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_rows_so_far_are_in_the_file(tmp_path, fake_train, monkeypatch):
    measure = train_bench.measure

    def interrupted(config, train, device, variant):
        if variant.kernel == "sdpa":
            raise KeyboardInterrupt
        return measure(config, train, device, variant)

    monkeypatch.setattr(train_bench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--kernels", "eager,sdpa", "--compile", "both")
    assert [(r["kernel"], r["compile"]) for r in read(tmp_path)] == [
        ("eager", "False"),
        ("eager", "True"),
    ]
    # A second run does not touch them unasked.
    assert run(tmp_path, "--kernels", "eager") == 2
    assert len(read(tmp_path)) == 2


def test_arguments_reach_train(tmp_path, fake_train, monkeypatch):
    commands = []

    def note(command, log, timeout_s):
        commands.append(command[1:])
        log.write_text("")
        return 1

    monkeypatch.setattr(train_bench, "run_process", note)
    extra = "--extra_args=--seed=7 --batch.micro 2"
    flags = ["--kernels", "triton", "--peers", "nanogpt-flash", "--compare_steps", "0", extra]
    flags += ["--max_steps", "12", "--compile", "true", "--shapes"]
    assert run(tmp_path, *flags, "4x8,1x32") == 2  # 1 sequence in pieces of 2
    assert commands == []  # the mistake shows before anything has run

    assert run(tmp_path, *flags, "4x8,2x32") == 3
    peer, ours, _, long = commands
    for flag in ("--attention=flash", "--batch=4", "--context=8", "--n_embd=16", "--steps=12"):
        assert flag in peer
    for flag in ("--vocab_size=320", "--compile=true", "--dtype=float32"):
        assert flag in peer
    expected = ["--kernel=triton", "--compile=true", "--batch.tokens=32", "--batch.seq_len=8"]
    for flag in [*expected, "--max_steps=12", "--log.interval=2"]:
        assert flag in ours
    assert ours[ours.index("--compare") + 1] == "none"
    assert ours[-3:] == ["--seed=7", "--batch.micro", "2"]
    assert "--model.max_seq_len=32" in long


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kernels", "fast"], "--kernels: unknown 'fast'; expected any of auto"),
        (["--peers", "gpt"], "--peers: unknown 'gpt'; expected any of nanogpt-sdpa"),
        (["--shapes", "32x"], "--shapes: '32x' is not batch x context; expected as in 32x1024"),
        (["--shapes", "8x0"], "--shapes: '8x0' is not batch x context"),
        (["--max_steps", "0"], "--max_steps must be 1 or more"),
        (["--timeout_s", "0"], "--timeout_s must be above 0, got 0"),
        (["--compile", "maybe"], "maybe"),
        (["--extra_args=--sed=1"], "--sed"),
        (["--extra_args=--optim.lr=-1"], "--optim.lr must not be negative"),
        (["--out_dir", ""], "--out_dir is empty; give a path, or leave it out"),
        (["--device", "tpu"], "--device: unknown 'tpu'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, flags, message):
    assert run(tmp_path, *flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("minitx.bench train: error: ")
    assert not (tmp_path / "out").exists()


def test_ratios_are_to_the_peer_of_the_same_shape():
    def row(kernel, context, tok_per_s):
        return {"kernel": kernel, "batch": 1, "context": context, "tok_per_s": tok_per_s}

    rows = [
        row("nanogpt-sdpa", 8, 100.0),
        row("triton", 8, 150.0),
        row("triton", 16, 150.0),
        row("eager", 8, None),
        row("nanogpt-flash", 8, 50.0),
    ]
    train_bench.add_ratios(rows)
    assert [r["vs_nanogpt"] for r in rows] == [1.0, 1.5, None, None, 0.5]


# -- the peer ------------------------------------------------------------------------------------

PEER = PeerConfig(batch=2, context=12, n_layer=2, n_head=2, n_embd=16, vocab_size=50)


def test_the_peer_is_the_model_of_gpt2_124m():
    """As many weights as the config gives this project's model, at full size."""
    config = PeerConfig()
    ours = GPTConfig(pos="learned", norm="layer", mlp="gelu", vocab_size=50304)
    with torch.device("meta"):
        peer, model = NanoGPT(config), GPT(ours)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (peer, model)]
    assert sizes[0] == sizes[1] == 124_373_760


def test_the_peers_attentions_are_one_function():
    losses, gradients = [], []
    for kind in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = NanoGPT(PeerConfig(**{**vars(PEER), "attention": kind}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)  # far from where all is alike
        window = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))
        loss = model(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, model.parameters()))
    assert losses[0].item() > 1.2 * math.log(50)
    torch.testing.assert_close(losses[0], losses[1])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_peers_loop_is_plain_adamw(monkeypatch):
    """Steps on one batch, beside the same written out: rate, decay, clipping, gradients cleared."""
    window = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(nanogpt_peer.torch, "randint", lambda *args, **kwargs: window)
    monkeypatch.setattr(nanogpt_peer, "LEARNING_RATE", 1e-2)
    config = PeerConfig(**{**vars(PEER), "compile": False, "dtype": "float32"})
    step = nanogpt_peer.make_step(config, torch.device("cpu"))
    losses = [step().item() for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(50), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]

    torch.manual_seed(0)
    model = NanoGPT(config)
    parameters = list(model.parameters())
    means = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for t in range(1, 6):
        loss = model(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        assert loss.item() == pytest.approx(losses[t - 1], rel=1e-4)
        gradients = torch.autograd.grad(loss, parameters)
        norm = sum(g.square().sum() for g in gradients).sqrt()
        for p, g, (m, v) in zip(parameters, gradients, means, strict=True):
            g = g * min(1.0, 1.0 / norm)
            m.lerp_(g, 0.1)
            v.lerp_(g.square(), 0.05)
            update = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            with torch.no_grad():
                p -= 1e-2 * (0.1 * p * (p.dim() == 2) + update)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    where = ["--config", str(write_config(tmp_path)), "--out_dir", str(tmp_path / "out")]
    flags = ["--kernels", "sdpa,triton", "--peers", "nanogpt-sdpa,nanogpt-flash"]
    steps = ["--max_steps", "6", "--compare_steps", "2", "--shapes", "2x128"]
    assert bench.main(["train", *where, *flags, *steps, "--compile", "true"]) == 0
    assert [r["status"] for r in read(tmp_path)] == ["ok"] * 4


@pytest.mark.gpu
def test_an_eager_peer_that_cannot_fit_ends_before_it_is_compiled():
    config = PeerConfig(attention="eager", batch=1, context=131_072)
    started = time.perf_counter()
    with pytest.raises(torch.OutOfMemoryError):
        nanogpt_peer.measure(config)
    assert time.perf_counter() - started < 20
