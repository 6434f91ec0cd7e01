"""Negative log-likelihoods of windows: the part of the evaluation that runs the model.

A model here is whatever has `hidden(tokens, cache) -> [B, S, E]`, `output_weight` [V, E] and, for
prefill in chunks, `config`: a GPT, or a stub with known probabilities. Nothing is averaged here;
every counted target keeps its own number, so that sums, buckets and pairs are all made from one
run.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minitx.kernels import linear_cross_entropy
from minitx.metrics import synchronize
from minitx.model import GPT, KVCache
from minitx.windows import Window, batches

Documents = Sequence[np.ndarray]  # token ids, 1-D, any integer type

WARM_UP_TOKENS = 256  # enough for every kernel to be compiled and loaded


@dataclass(frozen=True)
class How:
    """How windows are run. None of it changes what is computed, beyond rounding."""

    device: torch.device
    dtype: torch.dtype  # autocast to it if it has 16 bits; else the model's own
    batch_size: int | None = None  # windows at a time; None: what holds windows.BATCH_TOKENS
    prefill_chunk: int | None = None  # tokens at a time, over a key/value cache; None: all

    @property
    def is_autocast(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    def autocast(self) -> contextlib.AbstractContextManager:
        if not self.is_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


@dataclass
class Scores:
    """What a list of windows gave: one entry a counted target, window after window."""

    nll: np.ndarray  # float64, nats
    context: np.ndarray  # int64, tokens that the prediction was made from
    tokens_read: int
    seconds: float  # spent on `timed_tokens` of them
    timed_tokens: int

    @property
    def mean_nll(self) -> float:
        """Nats a token: a float64 sum, divided once."""
        if self.nll.size == 0:
            return float("nan")
        return float(self.nll.sum()) / self.nll.size

    @property
    def tok_per_s(self) -> float:
        """Tokens read a second; windows that overlap read a token more than once."""
        return self.timed_tokens / self.seconds if self.seconds > 0 else float("nan")


def hidden_chunks(model: GPT, tokens: torch.Tensor, how: How) -> Iterator[tuple[int, torch.Tensor]]:
    """(start, hidden states [B, C, E] of tokens[:, start : start + C]), in order.

    With a prefill chunk the model reads that many tokens at a time behind a key/value cache. This
    is bottom-right causality at work: the chunk's queries are the last of all tokens so far.
    """
    B, S = tokens.shape
    if how.prefill_chunk is None or how.prefill_chunk >= S:
        yield 0, model.hidden(tokens)
        return
    dtype = how.dtype if how.is_autocast else model.output_weight.dtype
    cache = KVCache(model.config, B, S, device=tokens.device, dtype=dtype)
    for start in range(0, S, how.prefill_chunk):
        yield start, model.hidden(tokens[:, start : start + how.prefill_chunk], cache)


@torch.no_grad()
def window_nll(model: GPT, inputs: torch.Tensor, targets: torch.Tensor, how: How) -> torch.Tensor:
    """nll [K] of all targets that are not -100, row after row.

    inputs, targets: [B, S] int64; targets[b, i] is what follows inputs[b, i]. The output head sees
    only the hidden states whose target counts.
    """
    pieces: list[list[torch.Tensor]] = [[] for _ in range(len(inputs))]
    with how.autocast():
        for start, hidden in hidden_chunks(model, inputs, how):
            wanted = targets[:, start : start + hidden.shape[1]]
            counted = wanted != -100
            if not counted.any():
                continue
            nll = linear_cross_entropy(
                hidden[counted], model.output_weight, wanted[counted], reduction="none"
            )
            for row, piece in zip(pieces, nll.split(counted.sum(1).tolist()), strict=True):
                row.append(piece)
    return torch.cat([piece for row in pieces for piece in row])


def stack_windows(
    documents: Documents, windows: Sequence[Window]
) -> tuple[torch.Tensor, torch.Tensor]:
    """inputs and targets [B, S] int64 of windows; targets that do not count are -100.

    A window shorter than the longest is filled up behind its end: with causal attention nothing
    before sees it.
    """
    S = max(window.read for window in windows)
    inputs = np.zeros((len(windows), S), dtype=np.int64)
    targets = np.full((len(windows), S), -100, dtype=np.int64)
    for row, (document, begin, end, first) in enumerate(windows):
        tokens = documents[document][begin : end + 1].astype(np.int64)
        inputs[row, : end - begin] = tokens[:-1]
        targets[row, first - 1 - begin : end - begin] = tokens[first - begin :]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def score_windows(
    model: GPT,
    documents: Documents,
    windows: Sequence[Window],
    how: How,
    on_batch: Callable[[int], object] = lambda tokens_read: None,
) -> Scores:
    """Runs the model over windows; on_batch is told the tokens read, batch after batch.

    Time is taken around whole batches with the device at rest. The first of three batches or more
    warms up (compilation, the allocator's growth) and is not timed; where there are fewer, the
    first tokens of one are read beforehand, and every batch is timed.
    """
    offsets = np.cumsum([0, *(window.counted for window in windows)])
    nll = np.full(offsets[-1], np.nan)
    context = np.concatenate(
        [np.empty(0, dtype=np.int64)]
        + [np.arange(w.first - w.begin, w.end - w.begin + 1) for w in windows]
    )
    order = list(batches(windows, how.batch_size))
    skipped = 1 if len(order) >= 3 else 0
    if order and not skipped:
        warm_up(model, documents, windows[order[0][0]], how)
    read = timed = 0
    seconds = 0.0
    for i, batch in enumerate(order):
        chosen = [windows[j] for j in batch]
        inputs, targets = (t.to(how.device) for t in stack_windows(documents, chosen))
        synchronize(how.device)
        started = time.perf_counter()
        values = window_nll(model, inputs, targets, how).double().cpu().numpy()
        elapsed = time.perf_counter() - started
        for j, part in zip(
            batch, np.split(values, np.cumsum([w.counted for w in chosen])[:-1]), strict=True
        ):
            nll[offsets[j] : offsets[j + 1]] = part
        tokens = sum(window.read for window in chosen)
        read += tokens
        if i >= skipped:
            timed += tokens
            seconds += elapsed
        on_batch(tokens)
    return Scores(nll, context, read, seconds, timed)


def warm_up(model: GPT, documents: Documents, window: Window, how: How) -> None:
    """Runs the first tokens of a window, so that no compilation is timed."""
    document, begin, end, _ = window
    short = Window(document, begin, min(end, begin + WARM_UP_TOKENS), begin + 1)
    inputs, targets = (t.to(how.device) for t in stack_windows(documents, [short]))
    window_nll(model, inputs, targets, how)


@torch.no_grad()
def causality_leak(model: GPT, tokens: np.ndarray, vocab_size: int, how: How) -> float:
    """By how much, in nats, later tokens move an earlier loss: 0 for a causal model.

    All inputs from place p on are changed, the targets stay: the losses of what stands before p
    may not move by a bit. p is once half-way, where tiles end, and once inside a tile. A kernel
    need not give the same bits twice: what moved must move again, and by more than twice what the
    unchanged inputs vary by.
    """
    inputs = torch.from_numpy(tokens[None, :-1].astype(np.int64)).to(how.device)
    targets = torch.from_numpy(tokens[None, 1:].astype(np.int64)).to(how.device)
    S = inputs.shape[1]
    base = window_nll(model, inputs, targets, how)
    leak = 0.0
    for p in sorted({S // 2, S // 3 | 1}):
        if not 0 < p < S:
            continue
        changed = inputs.clone()
        changed[:, p:] = (changed[:, p:] + 1) % vocab_size
        moved = _differences(window_nll(model, changed, targets, how)[:p], base[:p])
        if moved.any():
            again = window_nll(model, inputs, targets, how)[:p]
            noise = _differences(again, base[:p]).max()
            once_more = _differences(window_nll(model, changed, targets, how)[:p], again)
            moved = torch.minimum(moved, once_more).max()
            leak = max(leak, moved.item() if moved > 2 * noise else 0.0)
    return leak


def _differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|, inf where one alone is NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
