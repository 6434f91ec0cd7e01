"""Passkey retrieval: a number hidden in a long text, asked for at its end (arXiv:2305.16300).

    FILLER ... The pass key is 48213. Remember it: the pass key is 48213. ... FILLER
    What is the pass key? The pass key is 48213
                                          ^^^^^ predicted: greedily (accuracy), and in nats

The filler is made by a seeded generator, so every kernel and model of one tokenizer reads the same
text. Where the key is, is the depth: 0 at the start, 1 just before the question. Knowing that
digits come, but not which, costs digits * ln 10 nats.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from minitx.model import GPT
from minitx.scoring import How, hidden_chunks
from minitx.tokenizer import Tokenizer

SUBJECTS = ("The river", "A merchant", "The old road", "My neighbour", "The lamp", "A letter")
VERBS = ("passes", "remembers", "follows", "leaves", "watches", "outlasts")
OBJECTS = ("the hills", "a quiet town", "the harbour", "an early frost", "the garden", "his coat")
TAILS = ("in the morning", "without a word", "again and again", "before the rain", "for years")


@dataclass
class PasskeyConfig:
    """What --task passkey asks."""

    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """Where the key lies in the text, from 0 (start) to 1 (end)."""
    trials: int = 10
    """Texts at each length and depth."""
    digits: int = 5
    """Digits of a key."""
    seed: int = 0
    """Seed of filler and keys."""

    def validate(self) -> None:
        """Raises ValueError, naming the flag, for a setting out of range."""
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"--passkey.depths must be from 0 to 1, got {self.depths}")
        if self.trials < 1:
            raise ValueError(f"--passkey.trials must be at least 1, got {self.trials}")
        if not 1 <= self.digits <= 18:
            raise ValueError(f"--passkey.digits must be from 1 to 18, got {self.digits}")
        if self.seed < 0:
            raise ValueError(f"--passkey.seed must not be negative, got {self.seed}")


@dataclass(frozen=True)
class Prompt:
    """Token ids of text and answer, and the index of each token that holds digits of the answer."""

    tokens: np.ndarray
    answer: np.ndarray


def filler_sentences(tokenizer: Tokenizer) -> list[np.ndarray]:
    """Every sentence that the filler is drawn from, as tokens."""
    words = itertools.product(SUBJECTS, VERBS, OBJECTS, TAILS)
    return tokenizer.encode_batch([f"{' '.join(sentence)}.\n".encode() for sentence in words])


def make_prompt(
    tokenizer: Tokenizer,
    filler: list[np.ndarray],
    length: int,
    depth: float,
    trial: int,
    config: PasskeyConfig,
) -> Prompt:
    """A text of which at most `length` tokens are read, as many as whole sentences fill.

    Raises ValueError where the length holds no more than the key and the question.
    """
    rng = np.random.default_rng([config.seed, length, round(depth * 1000), trial])
    key = "".join(map(str, rng.integers(0, 10, config.digits)))

    def encode(text: str) -> np.ndarray:
        return tokenizer.encode(text.encode())

    needle = encode(f"The pass key is {key}. Remember it: the pass key is {key}.\n")
    question = encode("\nWhat is the pass key? The pass key is")
    answer = encode(f" {key}")
    room = length + 1 - len(needle) - len(question) - len(answer)  # the last token is not read
    if room < 0:
        raise ValueError(
            f"--task passkey needs a context of at least {length - room} tokens, got {length}"
        )
    sentences: list[np.ndarray] = []
    while True:
        sentence = filler[rng.integers(len(filler))]
        if len(sentence) > room:
            break
        room -= len(sentence)
        sentences.append(sentence)
    place = round(depth * len(sentences))
    tokens = np.concatenate([*sentences[:place], needle, *sentences[place:], question, answer])
    has_digit = [any(48 <= byte <= 57 for byte in tokenizer.decode([t])) for t in answer]
    return Prompt(tokens, len(tokens) - len(answer) + np.flatnonzero(has_digit))


@torch.no_grad()
def answer_prompt(model: GPT, prompt: Prompt, how: How) -> tuple[bool, float]:
    """Whether greedy decoding gives every digit, and the nats of all digits together.

    Both come from one forward over text and answer: greedy decoding reads the right digits for as
    long as it gives them.
    """
    inputs = torch.from_numpy(prompt.tokens[None, :-1].astype(np.int64)).to(how.device)
    rows: list[torch.Tensor] = []
    with how.autocast():
        for start, hidden in hidden_chunks(model, inputs, how):
            here = [i - 1 - start for i in prompt.answer if 0 <= i - 1 - start < hidden.shape[1]]
            if here:
                rows.append(F.linear(hidden[0, here], model.output_weight))
    logits = torch.cat(rows).double()  # [digit tokens, V]
    targets = torch.from_numpy(prompt.tokens[prompt.answer].astype(np.int64)).to(how.device)
    nats = F.cross_entropy(logits, targets, reduction="sum").item()
    return bool((logits.argmax(-1) == targets).all()), nats


def make_prompts(
    tokenizer: Tokenizer, length: int, config: PasskeyConfig
) -> dict[float, list[Prompt]]:
    """All prompts of one length, by depth."""
    filler = filler_sentences(tokenizer)
    trials = range(config.trials)
    return {
        depth: [make_prompt(tokenizer, filler, length, depth, i, config) for i in trials]
        for depth in config.depths
    }
