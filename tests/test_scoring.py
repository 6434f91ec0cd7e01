"""What scoring costs, and what of it is timed."""

import time

import numpy as np
import pytest
import torch

from minitx.metrics import peak_memory_gib, reset_peak_memory
from minitx.model import GPT, GPTConfig
from minitx.scoring import How, score_windows
from minitx.windows import Window, corpus_windows

CPU = How(torch.device("cpu"), torch.float32)


class SlowStart:
    """A model whose first call takes as long as compiling would."""

    SECONDS = 0.5

    def __init__(self) -> None:
        self.output_weight = torch.zeros(5, 5)
        self.lengths: list[int] = []

    def hidden(self, tokens: torch.Tensor, cache: object = None) -> torch.Tensor:
        if not self.lengths:
            time.sleep(self.SECONDS)
        self.lengths.append(tokens.shape[1])
        return torch.zeros(*tokens.shape, 5)


@pytest.mark.parametrize(
    ("n", "L", "calls", "timed"),
    [
        (601, 600, [256, 600], 600),  # one window: a piece of it goes first
        (101, 50, [50, 50, 50], 100),  # two, shorter than the piece
        (101, 25, [25, 25, 25, 25], 75),  # enough of them to leave one untimed
    ],
)
def test_what_compiles_is_not_timed(n, L, calls, timed):
    model, x = SlowStart(), np.zeros(n, dtype=np.int64)
    scores = score_windows(model, [x], corpus_windows([n], L, L), How(CPU.device, CPU.dtype, 1))
    assert model.lengths == calls
    assert scores.seconds < SlowStart.SECONDS
    assert (scores.timed_tokens, scores.tokens_read) == (timed, n - 1)
    assert scores.nll.size == n - 1


def one_window(tokens: int, kernel: str, device: torch.device) -> float:
    """Scores a window of so many tokens on a small model; returns the peak memory in GiB."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=128, max_seq_len=1024, vocab_size=50_304)
    model = GPT(config, kernel).to(device).eval()
    model.extend_context(tokens)
    x = np.random.default_rng(0).integers(0, 50_304, tokens + 1)
    how = How(device, torch.bfloat16)
    first = score_windows(model, [x], [Window(0, 0, 1000, 1)], how)
    reset_peak_memory(device)
    scores = score_windows(model, [x], [Window(0, 0, tokens, 1)], how)
    peak = peak_memory_gib(device)
    assert scores.nll.size == tokens
    # Nothing that far away is seen from the beginning, and nothing of the end is lost.
    np.testing.assert_allclose(scores.nll[:1000], first.nll, atol=0.05)
    assert np.isfinite(scores.nll).all()
    return peak


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "tilelang"])
def test_a_window_of_a_million_tokens(kernel):
    """The residual stream takes 0.5 GiB in float32; logits whole 98 GiB, scores 4 TiB."""
    assert one_window(2**20, kernel, torch.device("cuda")) < 8
