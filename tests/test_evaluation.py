"""The evaluation's arithmetic, on models whose probabilities are known and against plain loops."""

import json
import math

import numpy as np
import pytest
import torch
from eval_models import Bigram, tiny_gpt

from minitx.eval_parity import judge, sample_errors, sample_windows
from minitx.eval_report import to_json
from minitx.eval_stats import (
    bits_per_byte,
    paired_curve,
    perplexity,
    position_buckets,
    scored_bytes,
)
from minitx.scoring import How, Scores, causality_leak, score_windows
from minitx.testing import error_budget
from minitx.tokenizer import train_bpe
from minitx.windows import (
    Window,
    corpus_windows,
)

CPU = How(torch.device("cpu"), torch.float32)


def how(**settings) -> How:
    return How(torch.device("cpu"), torch.float32, **settings)


def random_bigram(V=11, seed=0):
    return Bigram(torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 3)


def text(n, V=11, seed=1):
    return np.random.default_rng(seed).integers(0, V, n)


# -- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize(("L", "s"), [(1, 1), (7, 3), (7, 7), (64, 32), (500, 250)])
def test_a_bigrams_loss_depends_on_no_window(L, s, batch_size):
    model, documents = random_bigram(), [text(100), text(2, seed=2), text(1), text(9, seed=3)]
    log_p = torch.log_softmax(model.output_weight.T.double(), dim=-1).numpy()
    want = np.concatenate([-log_p[x[:-1], x[1:]] for x in documents])
    windows = corpus_windows([len(x) for x in documents], L, s)
    scores = score_windows(model, documents, windows, how(batch_size=batch_size))
    np.testing.assert_allclose(scores.nll, want, atol=2e-6)
    assert scores.mean_nll == pytest.approx(want.mean(), abs=1e-6)
    assert scores.tokens_read == sum(w.read for w in windows)
    assert max(call.shape[0] for call in model.calls) <= batch_size


def test_a_mean_over_tokens_not_over_windows():
    logits = torch.full((3, 3), -100.0)
    logits[0] = torch.tensor([-1.0, -5.0, math.log(1 - math.exp(-1) - math.exp(-5))])
    x = np.array([0] * 11 + [1])  # ten targets of 1 nat, then one of 5 in its own window
    scores = score_windows(Bigram(logits), [x], corpus_windows([12], 10, 10), CPU)
    assert scores.mean_nll == pytest.approx(15 / 11, abs=1e-6)
    assert perplexity(scores.mean_nll) == pytest.approx(3.910, abs=1e-3)


def test_predictions_are_compared_with_the_token_after():
    V = 10
    model = Bigram(torch.eye(V).roll(1, dims=1) * 100)  # t + 1 follows t, for certain
    scores = score_windows(model, [np.arange(50) % V], corpus_windows([50], 8, 4), CPU)
    assert perplexity(scores.mean_nll) == 1.0


def plain_loop(model, x, L, s):
    """Losses of x[1:], each from a forward over nothing but what its window shows before it."""
    nll, context = [], []
    with torch.no_grad():
        for target in range(1, len(x)):
            b = 0  # the first window that predicts the target: it ends at b + L
            while b + L < target:
                b += s
            logits = model(torch.tensor(x[None, b:target]))[0, -1].double()
            nll.append((logits.logsumexp(0) - logits[x[target]]).item())
            context.append(target - b)
    return np.array(nll), np.array(context)


@pytest.mark.parametrize(("L", "s"), [(8, 3), (8, 8), (30, 15)])
def test_a_model_against_a_plain_loop(L, s):
    model, x = tiny_gpt(), text(40, V=50)
    nll, context = plain_loop(model, x, L, s)
    scores = score_windows(model, [x], corpus_windows([40], L, s), how(batch_size=3))
    np.testing.assert_allclose(scores.nll, nll, atol=1e-5)
    assert scores.context.tolist() == context.tolist()


def test_batches_of_one_and_eight_give_the_same():
    model, documents = tiny_gpt(), [text(n, V=50, seed=n) for n in (70, 33, 5, 2)]
    windows = corpus_windows([len(x) for x in documents], 16, 8)
    one = score_windows(model, documents, windows, how(batch_size=1))
    eight = score_windows(model, documents, windows, how(batch_size=8))
    np.testing.assert_allclose(eight.nll, one.nll, atol=1e-5)
    assert eight.context.tolist() == one.context.tolist()


def test_strides_agree_on_tokens_with_the_same_context():
    model, x = tiny_gpt(), text(64, V=50)
    whole = score_windows(model, [x], corpus_windows([64], 16, 16), CPU)
    half = score_windows(model, [x], corpus_windows([64], 16, 8), CPU)
    common = whole.context == half.context
    assert common.sum() == 16 + 8 * 2 + 7  # the first window, and each later one's second half
    np.testing.assert_allclose(whole.nll[common], half.nll[common], atol=1e-5)
    assert (np.abs(whole.nll - half.nll)[~common] > 1e-4).mean() > 0.9


def test_documents_do_not_see_one_another():
    model, a, b = tiny_gpt(), text(30, V=50), text(21, V=50, seed=5)
    both = score_windows(model, [a, b], corpus_windows([30, 21], 16, 8), how(batch_size=4))
    alone = score_windows(model, [b], corpus_windows([21], 16, 8), how(batch_size=4))
    np.testing.assert_allclose(both.nll[29:], alone.nll, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pos", ["rope", "learned"])
@pytest.mark.parametrize("chunk", [1, 16, 31])
def test_prefill_in_chunks_is_the_whole_within_the_budget(chunk, pos, dtype):
    model, documents = tiny_gpt(pos=pos, n_kv_head=1), [text(60, V=50), text(20, V=50, seed=7)]
    windows = corpus_windows([60, 20], 32, 16)

    def nll(dtype, **settings):
        run = How(torch.device("cpu"), dtype, **settings)
        return torch.from_numpy(score_windows(model, documents, windows, run).nll)

    whole = nll(dtype, batch_size=2)
    chunked = nll(dtype, batch_size=2, prefill_chunk=chunk)
    model.double().set_kernel("reference")
    truth = torch.from_numpy(score_windows(model, documents, windows, CPU).nll)
    error = (chunked - truth).abs().max().item()
    assert error <= error_budget(whole, truth, torch.float32)


def test_no_windows_give_no_number():
    scores = score_windows(random_bigram(), [text(1)], corpus_windows([1], 4, 2), CPU)
    assert (scores.nll.size, scores.tokens_read) == (0, 0)
    assert math.isnan(scores.mean_nll)


# -- causality ----------------------------------------------------------------------------------


class Leaking(Bigram):
    """A bigram whose state also holds a little of the token `ahead` places on."""

    def __init__(self, logits, ahead, size=1e-3):
        super().__init__(logits)
        self.ahead, self.size = ahead, size

    def hidden(self, tokens, cache=None):
        h = super().hidden(tokens)
        later = torch.roll(h, -self.ahead, dims=1)
        later[:, -self.ahead :] = 0
        return h + self.size * later


@pytest.mark.parametrize("ahead", [1, 2, 17, 40])
def test_the_probe_sees_a_look_at_a_later_token(ahead):
    model = Leaking(random_bigram().output_weight.T, ahead)
    assert causality_leak(model, text(65), 11, CPU) > 1e-5


class Noisy(Bigram):
    generator = torch.Generator().manual_seed(0)

    def hidden(self, tokens, cache=None):
        h = super().hidden(tokens)
        return h + 1e-6 * torch.randn(h.shape, generator=self.generator)


class Hiccup(Bigram):
    """Wrong once, in its second call: chance, and no leak."""

    def hidden(self, tokens, cache=None):
        h = super().hidden(tokens)
        return h * 1.001 if len(self.calls) == 2 else h


@pytest.mark.parametrize("n", [3, 4, 65])
def test_the_probe_passes_what_is_causal(n):
    assert causality_leak(random_bigram(), text(n), 11, CPU) == 0
    for kernel in ("eager", "sdpa"):
        model = tiny_gpt(max_seq_len=64)
        model.set_kernel(kernel)
        assert causality_leak(model, text(n, V=50), 50, CPU) == 0
        assert causality_leak(model, text(n, V=50), 50, how(prefill_chunk=30)) == 0
    assert causality_leak(Noisy(random_bigram().output_weight.T), text(300), 11, CPU) == 0
    assert causality_leak(Hiccup(random_bigram().output_weight.T), text(n), 11, CPU) == 0


# -- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nll", "want"), [(0.0, 1.0), (710.0, math.inf), (1e4, math.inf), (math.inf, math.inf)]
)
def test_perplexity_overflows_to_inf(nll, want):
    assert perplexity(nll) == want
    assert math.isnan(perplexity(math.nan))


def test_bits_per_byte_counts_the_scored_text():
    tokenizer = train_bpe([b"the cat sat on the mat, the hat on the cat"] * 3, 280)
    documents = [tokenizer.encode(t) for t in (b"the cat", "é the".encode(), b"\xff")]
    skipped = sum(len(tokenizer.decode(d[:1])) for d in documents)
    want = len(b"the cat") + len("é the".encode()) + 1 - skipped
    assert scored_bytes(documents, tokenizer.byte_counts) == want
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2.0)
    assert math.isnan(bits_per_byte(0.0, 0))


def test_position_buckets():
    context = np.array([1, 2, 3, 4, 5, 6, 2])
    nll = np.array([5.0, 1.0, 2.0, 4.0, 6.0, 8.0, 3.0])
    rows = position_buckets(Scores(nll, context, 0, 0.0, 0))
    assert [(r["context_from"], r["context_to"], r["count"], r["nll"]) for r in rows] == [
        (1, 1, 1, 5.0),
        (2, 3, 3, 2.0),
        (4, 6, 3, 6.0),
    ]
    assert math.isnan(rows[0]["se"])
    assert rows[1]["se"] == pytest.approx(1 / math.sqrt(3))  # standard deviation 1, of 3


def test_the_paired_curve_takes_differences_before_it_takes_errors():
    """Blocks differ by 10 nats and gain 1 and 3: the error is the gain's, not the blocks'."""
    short = np.array([1.0, 3.0, 11.0, 13.0])
    long = short - [1, 1, 3, 3]
    rows = paired_curve([8, 16], [short, long], targets_a_block=2)
    assert [r["context"] for r in rows] == [8, 16]
    assert [r["nll"] for r in rows] == [7.0, 5.0]
    assert [r["gain"] for r in rows] == [0.0, 2.0]
    assert rows[0]["se"] == pytest.approx(5.0)
    assert rows[1]["gain_se"] == pytest.approx(1.0)


def test_json_holds_no_bare_infinity():
    report = {"a": math.inf, "b": [math.nan, 1.0, {"c": -math.inf, "d": 2}], "e": "inf"}
    found = to_json(report)
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "a": None,
        "b": [None, 1.0, {"c": None, "d": 2, "non_finite": {"c": "-inf"}}],
        "e": "inf",
        "non_finite": {"a": "inf"},
    }


# -- parity -------------------------------------------------------------------------------------


def test_the_sample_is_the_longest_windows_within_its_tokens():
    windows = [Window(0, 0, 4, 1), Window(0, 2, 10, 5), Window(1, 0, 8, 1), Window(1, 8, 11, 9)]
    assert sample_windows(windows, 17) == [windows[1], windows[2]]
    assert sample_windows(windows, 20) == [windows[1], windows[2], windows[0]]
    assert sample_windows(windows, 5) == [Window(0, 2, 7, 3)]  # cut: all it predicts counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.05, False)])
def test_parity_passes_rounding_and_fails_a_wrong_scale(monkeypatch, factor, passes, dtype):
    import minitx.model

    true_attention = minitx.model.attention

    def attention(q, k, v, *, kernel, **settings):
        if kernel == "sdpa":
            q = q * factor
        return true_attention(q, k, v, kernel=kernel, **settings)

    monkeypatch.setattr(minitx.model, "attention", attention)
    model, documents = tiny_gpt(max_seq_len=64), [text(300, V=50)]
    windows = corpus_windows([300], 64, 32)
    run = How(torch.device("cpu"), dtype, batch_size=4)
    scores = {}
    for kernel in ("sdpa", "eager"):
        model.set_kernel(kernel)
        scores[kernel] = score_windows(model, documents, windows, run)
    sample = sample_windows(windows, 128)
    errors = sample_errors(model, "sdpa", documents, sample, run)
    verdict = judge(
        kernel="sdpa",
        baseline="eager",
        context_length=64,
        how=run,
        sample=sample,
        errors=errors,
        kernel_scores=scores["sdpa"],
        baseline_scores=scores["eager"],
        kernel_peak_gib=1.0,
        baseline_peak_gib=1.0,
    )
    assert verdict.passed == passes
    assert (verdict.kernel_error <= verdict.error_budget) == passes
    assert verdict.sample_tokens == 64 + 32
    assert 0 < verdict.eager_error < (1e-4 if dtype == torch.float32 else 0.5)
    # The model is in float32 again, on its kernel.
    assert model.tok_embd.weight.dtype == torch.float32


@pytest.mark.parametrize("errors", [(0.0, 1.0, 1.0), (math.nan, 1.0, 1.0)])
def test_parity_is_not_passed_by_nan(errors):
    scores = Scores(np.array([math.nan]), np.array([1]), 1, 1.0, 1)
    verdict = judge(
        kernel="sdpa",
        baseline="eager",
        context_length=1,
        how=CPU,
        sample=[Window(0, 0, 1, 1)],
        errors=errors,
        kernel_scores=scores,
        baseline_scores=None if math.isnan(errors[0]) else scores,
        kernel_peak_gib=0.0,
        baseline_peak_gib=0.0,
    )
    assert not verdict.passed
