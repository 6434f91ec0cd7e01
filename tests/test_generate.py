"""Generation: the cache changes nothing, draws have their probabilities, text streams whole."""

import io
import os
import subprocess
import sys

import pytest
import torch

from minitx import generate as generate_module
from minitx.checkpoint import save_checkpoint
from minitx.generate import Sampler, generate, main, write_stream
from minitx.kernels import supports
from minitx.model import GPT, GPTConfig
from minitx.testing import make_qkv
from minitx.tokenizer import ByteTokenizer

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "max_seq_len": 24, "vocab_size": 320}
CONFIGS = {
    "rope": GPTConfig(n_kv_head=2, qk_norm=True, **SHAPE),
    "learned": GPTConfig(pos="learned", norm="layer", mlp="gelu", bias=True, **SHAPE),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other over tensors this small cost far more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(name="rope", kernel="eager", scale=10.0):
    """A model whose attention matters: weights of 0.02 would leave it next to nothing to say."""
    torch.manual_seed(0)
    model = GPT(CONFIGS[name], kernel).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model


@pytest.mark.parametrize("tokens", [10**14, 10**23])
def test_more_positions_than_memory_holds(tokens):
    with pytest.raises(ValueError, match="position tables do not fit in memory; use a shorter"):
        next(generate(make_model(), [1], max_tokens=tokens))


# --- The cache --------------------------------------------------------------------------------


def greedy_by_hand(model, tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[-count:]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_takes_the_likeliest_token(name, use_cache):
    model = make_model(name)
    expected = greedy_by_hand(model, [5, 6, 7], 20)
    assert len(set(expected)) > 5  # no rut that would hide a mistake
    got = generate(model, [5, 6, 7], max_tokens=20, temperature=0, use_cache=use_cache)
    assert list(got) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "triton", "triton-softmax"])
def test_cached_and_uncached_give_the_same_tokens(kernel, name, temperature):
    q, k, v = make_qkv()
    if not (support := supports(kernel, q, k, v)).ok:
        pytest.skip(support.reason)
    model = make_model(name, kernel)
    count = 4 if kernel.startswith("triton") else 21
    settings = {"max_tokens": count, "temperature": temperature, "top_k": 50, "top_p": 0.95}
    cached = list(generate(model, [1, 2, 3], seed=3, use_cache=True, **settings))
    assert cached == list(generate(model, [1, 2, 3], seed=3, use_cache=False, **settings))
    assert len(cached) == count
    model.set_kernel("eager")
    assert cached == list(generate(model, [1, 2, 3], seed=3, **settings))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "triton", "tilelang", "triton-softmax"])
def test_generation_on_a_gpu(kernel, dtype):
    model = make_model("rope", kernel).to("cuda", dtype)
    settings = {"max_tokens": 40, "temperature": 0.8, "seed": 1}
    cached = list(generate(model, [1, 2, 3], **settings))
    assert len(cached) == 40
    if dtype == torch.float32:
        assert cached == list(generate(model, [1, 2, 3], use_cache=False, **settings))
        on_cpu = make_model("rope", "eager")
        assert cached == list(generate(on_cpu, [1, 2, 3], **settings))


def test_learned_positions_end_it_and_rotary_ones_stretch():
    learned = make_model("learned")
    for use_cache in (True, False):
        got = list(generate(learned, [1] * 20, max_tokens=99, use_cache=use_cache))
        assert len(got) == 5  # 24 positions are read; the last token is only written
    assert len(list(generate(learned, [1] * 24, max_tokens=99))) == 1
    with pytest.raises(ValueError, match="prompt of 25 tokens is beyond the 24 learned positions"):
        generate(learned, [1] * 25, max_tokens=1)
    rotary = make_model("rope")
    assert len(list(generate(rotary, [1] * 30, max_tokens=30))) == 30
    assert rotary.max_context == 59


def test_stop_and_vocab_size():
    model = make_model()
    tokens = list(generate(model, [9], max_tokens=30, temperature=0))
    stopped = list(generate(model, [9], max_tokens=30, temperature=0, stop=tokens[4]))
    assert stopped == tokens[: tokens.index(tokens[4]) + 1]
    drawn = list(generate(model, [9], max_tokens=60, temperature=5.0, vocab_size=8))
    assert set(drawn) == set(range(8))


def test_a_seed_is_a_text_and_the_global_generator_is_left_alone():
    model = make_model()
    before = torch.get_rng_state()
    first, again, other = (
        list(generate(model, [1], max_tokens=20, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_ids_come_one_at_a_time():
    model = make_model()
    stream = generate(model, [1], max_tokens=3)
    next(stream)
    assert torch.is_grad_enabled()  # what generation switches off is on again between two ids
    assert len(list(stream)) == 2


# --- The draws --------------------------------------------------------------------------------

LOGITS = torch.tensor([0.15, 0.5, 0.05, 0.3]).log() + 3.0  # the constant must not matter


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.15, 0.5, 0.05, 0.3]),
        ({"temperature": 0.5}, [0.0225, 0.25, 0.0025, 0.09]),  # squares
        ({"top_k": 2}, [0, 0.5, 0, 0.3]),
        ({"top_k": 99}, [0.15, 0.5, 0.05, 0.3]),
        ({"top_p": 0.79}, [0, 0.5, 0, 0.3]),
        ({"top_p": 0.81}, [0.15, 0.5, 0, 0.3]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        # top_k first: 0.5 and 0.3 are 0.625 and 0.375 of what is left of them.
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"temperature": 0.0, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"temperature": 1e-310}, [0, 1, 0, 0]),
        ({"temperature": 1e300}, [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_draws_have_their_probabilities(settings, expected):
    sampler = Sampler(**{"temperature": 1.0, "top_k": None, "top_p": 1.0, "seed": 0} | settings)
    n = 8000
    counts = torch.bincount(torch.tensor([sampler.draw(LOGITS) for _ in range(n)]), minlength=4)
    p = torch.tensor(expected, dtype=torch.float64) / sum(expected)
    spread = 4 * (n * p * (1 - p)).sqrt()  # four standard deviations; 0 where p is 0 or 1
    assert ((counts - n * p).abs() <= spread + 1e-6).all(), counts


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = torch.zeros(5)
    logits[3] = bad
    with pytest.raises(ValueError, match=f"largest logit is {bad}; try --dtype float32"):
        Sampler(temperature, None, 1.0, 0).draw(logits)
    logits[3] = -float("inf")
    assert Sampler(temperature, None, 1.0, 0).draw(logits) != 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be a finite number from 0 on, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be .* got 1.01"),
        ({"seed": -1}, "seed must be from 0"),
    ],
    ids=str,
)
def test_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        generate(make_model(), [1], **{"max_tokens": 5} | settings)


def test_a_model_in_training_or_no_prompt_is_refused():
    with pytest.raises(ValueError, match="training mode"):
        generate(make_model().train(), [1], max_tokens=1)
    with pytest.raises(ValueError, match="no token"):
        generate(make_model(), [], max_tokens=1)


# --- The command ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    save_checkpoint(tmp_path, step=1, model=make_model(), optimizer=None, state={})
    return tmp_path


def command(*args):
    return main([str(arg) for arg in args])


def test_the_command_prints_prompt_and_text(run, capsys):
    base = ("--checkpoint", run, "--max_tokens", 12, "--device", "cpu", "--dtype", "float32")
    assert command(*base, "--prompt", "Hé", "--kernel", "eager", "--seed", 4) == 0
    out, err = capsys.readouterr()
    ids = generate(make_model(), list("Hé".encode()), max_tokens=12, seed=4, vocab_size=257)
    text = bytes(i for i in ids if i < 256).decode(errors="replace")
    assert out.removeprefix("Hé").rstrip("\n") == text.rstrip("\n")
    assert err.startswith("12 tokens, ")
    assert "kernel eager" in err

    uncached = (*base, "--prompt", "Hé", "--kernel", "sdpa", "--seed", 4, "--use_cache", "false")
    assert command(*uncached) == 0
    assert capsys.readouterr().out == out
    # An empty prompt begins where documents begin: after an end-of-text token.
    assert command(*base, "--temperature", 0) == 0
    ids = generate(make_model(), [256], max_tokens=12, temperature=0, vocab_size=257)
    assert capsys.readouterr().out == bytes(ids).decode(errors="replace") + "\n"


def test_the_first_token_is_made_ahead_of_the_text(run, monkeypatch):
    """A terminal shows what the model's first call logs, such as auto's choice, before the text."""
    order = []

    def generate(*args, **settings):
        order.append("model")
        yield ord("A")

    monkeypatch.setattr(generate_module, "generate", generate)
    monkeypatch.setattr(generate_module, "write_stream", order.extend)
    assert command("--checkpoint", run, "--prompt", "Hi") == 0
    assert order == ["model", b"Hi", b"A"]


@pytest.mark.parametrize("prompt", ["123", "null", "[1, 2]", "a: b", "1e3", "\udcff"])
def test_a_prompt_is_text_whatever_it_looks_like(run, capsys, prompt):
    assert command("--checkpoint", run, "--max_tokens", 1, f"--prompt={prompt}") == 0
    shown = prompt.replace("\udcff", "\ufffd")
    assert capsys.readouterr().out.startswith(shown)


def test_the_notes(run, capsys, tmp_path):
    assert command("--checkpoint", run, "--max_tokens", 1, "--prompt", "a" * 24) == 0
    assert "beyond 24 tokens: longer than the model was trained on\n" in capsys.readouterr().err
    model = make_model("learned")
    save_checkpoint(tmp_path, step=2, model=model, optimizer=None, state={})
    assert command("--checkpoint", tmp_path, "--max_tokens", 30, "--prompt", "ab") == 0
    err = capsys.readouterr().err
    assert err.startswith("stopped: the 24 learned positions of this model are full\n23 tokens")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--checkpoint", ""], "--checkpoint is empty; give a path"),
        (["--checkpoint", "nowhere"], "nowhere: no such folder; give a run folder"),
        (["--kernel", "tritom"], "unknown kernel 'tritom'; expected one of auto"),
        (["--top_p", "0"], "top_p must be above 0"),
        (["--device", "cuda:99"], "--device cuda:99: this machine has"),
        (["--dtype", "float8"], "dtype"),
        (["--tempature", "1"], "tempature"),
        ([], "checkpoint"),
    ],
)
def test_a_mistake_is_one_line(run, capsys, args, message):
    given = args if "--checkpoint" in args or not args else ["--checkpoint", str(run), *args]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_lost_tokenizer_is_named(run, capsys):
    os.rename(run / "tokenizer.json", run / "checkpoints" / "step_00000001" / "tokenizer.json")
    assert command("--checkpoint", run, "--max_tokens", 1) == 0  # beside the weights will do
    (run / "checkpoints" / "step_00000001" / "tokenizer.json").unlink()
    assert command("--checkpoint", run) == 2
    assert f"{run / 'tokenizer.json'}: no such file; copy" in capsys.readouterr().err


def one_byte_at_a_time(text):
    return (bytes([byte]) for byte in text)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("é€😀a\n".encode(), "é€😀a\n"),
        (b"a\xffb", "a\ufffdb"),
        ("€".encode()[:2], "\ufffd"),  # the end comes within a character
        (b"\x1b[31m\x00", "\x1b[31m\x00"),  # not a terminal: as it is
    ],
)
def test_characters_go_out_whole(capsys, written, shown):
    write_stream(one_byte_at_a_time(written))
    assert capsys.readouterr().out == shown + "\n"


class Terminal(io.TextIOWrapper):
    """Counts what is on the screen at each moment, in a code page of one's choice."""

    def __init__(self, encoding):
        super().__init__(io.BytesIO(), encoding=encoding, newline="")
        self.moments = []

    def isatty(self):
        return True

    def flush(self):
        super().flush()
        self.moments.append(self.buffer.getvalue())


def test_a_terminal(monkeypatch):
    terminal = Terminal("utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)
    write_stream(one_byte_at_a_time("aé\x1b\x9b\t".encode()))
    esc, tab = "\u241b", "\t"  # no escape code reaches it; "\x9b" is one too
    seen = ["a", "a", "aé", f"aé{esc}", f"aé{esc}", f"aé{esc}\ufffd", f"aé{esc}\ufffd{tab}"]
    shown = [moment.decode() for moment in terminal.moments if moment]
    assert shown[:7] == seen  # each as soon as it is whole
    narrow = Terminal("ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    write_stream(iter(["é".encode()]))
    assert narrow.moments[-1] == b"?\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_runs_as_the_flags_say(run, monkeypatch, dtype):
    def look(model, tokens, **settings):
        assert model.tok_embd.weight.dtype == getattr(torch, dtype)
        assert model.blocks[0].attn.kernel == "sdpa"
        assert not model.training
        return iter([65])

    monkeypatch.setattr(generate_module, "generate", look)
    assert command("--checkpoint", run, "--dtype", dtype, "--kernel", "sdpa") == 0


def test_ctrl_c_ends_the_line_and_says_nothing(run, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        yield ord("x")
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "generate", interrupted)
    assert command("--checkpoint", run, "--prompt", "ab") == 130
    assert capsys.readouterr() == ("abx\n", "")


def test_as_a_program_into_a_pipe_that_closes(run):
    args = [sys.executable, "-m", "minitx.generate", "--checkpoint", str(run), "--prompt", "abc"]
    args += ["--kernel", "sdpa"]  # auto would say what it chose
    with subprocess.Popen(
        [*args, "--max_tokens", "3000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b"abc"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
