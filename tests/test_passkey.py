"""Passkey retrieval: prompts that hold what they ask for, and answers graded by their digits."""

import math

import numpy as np
import pytest
import torch
from eval_models import Bigram, tiny_gpt

from minitx.passkey import PasskeyConfig, answer_prompt, make_prompts
from minitx.scoring import How
from minitx.tokenizer import ByteTokenizer, train_bpe

CPU = How(torch.device("cpu"), torch.float32)
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "bpe": train_bpe(
        [b"The pass key is 12. Remember the river passes the hills for years.\n"], 300
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_holds_its_key_where_it_should(name):
    tokenizer = TOKENIZERS[name]
    config = PasskeyConfig(depths=[0.0, 0.5, 1.0], trials=2)
    prompts = make_prompts(tokenizer, 600, config)
    keys = set()
    for depth, texts in prompts.items():
        for prompt in texts:
            whole = tokenizer.decode(prompt.tokens)
            key = whole[-5:]
            assert key.isdigit()
            assert whole.count(key) == 3
            assert tokenizer.decode(prompt.tokens[prompt.answer]).strip() == key
            assert 500 < len(prompt.tokens) <= 601  # the last token is predicted, not read
            place = whole.index(key) / whole.rindex(b"What is the pass key")
            assert place == pytest.approx(depth, abs=0.15)
            keys.add(key)
    assert len(keys) == 6
    again = make_prompts(tokenizer, 600, config)
    assert all(
        np.array_equal(a.tokens, b.tokens)
        for depth in prompts
        for a, b in zip(prompts[depth], again[depth], strict=True)
    )


def test_a_prompt_reads_all_but_a_sentence_of_its_context_and_no_more():
    config = PasskeyConfig(depths=[0.5], trials=1)
    lengths = range(300, 340)
    read = [len(make_prompts(ByteTokenizer(), n, config)[0.5][0].tokens) - 1 for n in lengths]
    unread = [n - r for n, r in zip(lengths, read, strict=True)]
    assert min(unread) == 0
    assert max(unread) < 60


class Knows(Bigram):
    """Puts `size` on the token that follows in a text it was given; 0 knows nothing."""

    def __init__(self, tokens, V, size):
        super().__init__(torch.eye(V) * size)
        self.following = torch.from_numpy(tokens[None, 1:])

    def hidden(self, tokens, cache=None):
        return super().hidden(self.following)


def test_answers_are_graded_by_the_digits_alone():
    (prompt,) = make_prompts(ByteTokenizer(), 400, PasskeyConfig(depths=[0.5], trials=1))[0.5]
    knows = answer_prompt(Knows(prompt.tokens, 257, 100.0), prompt, CPU)
    assert knows == (True, pytest.approx(0.0, abs=1e-6))
    right, nats = answer_prompt(Knows(prompt.tokens, 257, 0.0), prompt, CPU)
    assert nats == pytest.approx(5 * math.log(257))
    wrong = prompt.tokens.copy()
    wrong[-3] = (wrong[-3] - 48 + 1) % 10 + 48  # one digit of five
    right, nats = answer_prompt(Knows(wrong, 257, 100.0), prompt, CPU)
    assert not right
    assert nats == pytest.approx(100.0)


def test_prefill_in_chunks_answers_alike():
    (prompt,) = make_prompts(ByteTokenizer(), 300, PasskeyConfig(depths=[0.2], trials=1))[0.2]
    model = tiny_gpt(vocab_size=257, max_seq_len=512)
    want = answer_prompt(model, prompt, CPU)
    for chunk in (64, len(prompt.tokens) - 3):  # the second cuts the answer in two
        in_chunks = How(torch.device("cpu"), torch.float32, prefill_chunk=chunk)
        assert answer_prompt(model, prompt, in_chunks)[1] == pytest.approx(want[1], abs=1e-4)


def test_a_context_too_short_for_a_key():
    with pytest.raises(ValueError, match=r"needs a context of at least \d+ tokens, got 40"):
        make_prompts(ByteTokenizer(), 40, PasskeyConfig())
    with pytest.raises(ValueError, match=r"--passkey.depths must be from 0 to 1, got \[1.5\]"):
        PasskeyConfig(depths=[1.5]).validate()
