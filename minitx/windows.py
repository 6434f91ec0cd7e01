"""Which tokens a model reads at a time, and which of those it predicts are counted.

A window reads x[begin] .. x[end - 1] of a document and predicts the token after each, x[begin + 1]
.. x[end]. Strided windows begin at 0, s, 2s, ... and read L tokens; each counts only the targets
that no earlier one has counted, so every token but a document's first counts exactly once:

    n = 10, L = 4, s = 2     x: 0 1 2 3 4 5 6 7 8 9
    window 0 reads 0..3         r r r r                 counts 1 2 3 4
    window 1 reads 2..5             r r r r             counts 5 6      (each sees 3 or 4 tokens)
    window 2 reads 4..7                 r r r r         counts 7 8
    window 3 reads 6..8                     r r r       counts 9

Targets are labels as well as inputs of the next position; whoever cuts a window of L tokens and
shifts inside it loses one target a window. Here the target x[end] lies outside of what is read.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Enough to fill a GPU at once, and little memory for eager attention.
BATCH_TOKENS = 16_384


class Window(NamedTuple):
    """Reads x[begin:end] of a document and counts the targets x[first] .. x[end]."""

    document: int
    begin: int
    end: int
    first: int

    @property
    def read(self) -> int:
        """Tokens read."""
        return self.end - self.begin

    @property
    def counted(self) -> int:
        """Targets counted."""
        return self.end - self.first + 1


def default_stride(context_length: int) -> int:
    return max(1, context_length // 2)


def check_stride(context_length: int, stride: int) -> None:
    """Raises ValueError unless 1 <= stride <= context_length."""
    if context_length < 1:
        raise ValueError(f"--context_lengths must be at least 1, got {context_length}")
    if stride < 1:
        raise ValueError(f"--stride must be at least 1, got {stride}")
    if stride > context_length:
        raise ValueError(
            f"--stride {stride} is beyond the context of {context_length} tokens and would skip "
            f"tokens; use at most {context_length}"
        )


def strided_windows(
    n: int, context_length: int, stride: int, document: int = 0
) -> Iterator[Window]:
    """Windows over a document of n tokens; none where there is nothing to predict (n < 2).

    Raises ValueError unless 1 <= stride <= context_length.
    """
    check_stride(context_length, stride)
    counted = 0  # last target counted so far; target 0 has no context and never counts
    for begin in range(0, n - 1, stride):
        end = min(begin + context_length, n - 1)
        yield Window(document, begin, end, counted + 1)
        counted = end
        if end == n - 1:
            return


def corpus_windows(lengths: Sequence[int], context_length: int, stride: int) -> list[Window]:
    """Strided windows over documents of these lengths, each document on its own."""
    return [
        window
        for document, n in enumerate(lengths)
        for window in strided_windows(n, context_length, stride, document)
    ]


def paired_contexts(longest: int, shortest: int = 256) -> list[int]:
    """Contexts of the paired curve: shortest * 2^k below `longest`, then `longest` itself.

    Where `longest` is not beyond `shortest`, its eighth, quarter, half and whole.
    """
    if longest <= shortest:
        return sorted({c for c in (longest // 8, longest // 4, longest // 2, longest) if c > 0})
    contexts = []
    context = shortest
    while context < longest:
        contexts.append(context)
        context *= 2
    return [*contexts, longest]


def paired_windows(
    lengths: Sequence[int], contexts: Sequence[int], max_targets: int
) -> dict[int, list[Window]]:
    """Windows that show the same targets to the model with each of the contexts.

    A block is the last `m` targets of a window, m being half of the shortest context, so that its
    targets see from c - m + 1 to c tokens. Blocks lie evenly over all places with the longest
    context before them, do not overlap, and hold about max_targets targets. Lists of one result
    go together: their i-th windows count the same targets. They are empty where no document is
    longer than the longest context.
    """
    longest, m = max(contexts), max(1, min(contexts) // 2)
    places = [
        (document, last)
        for document, n in enumerate(lengths)
        for last in range(longest, n, m)  # `last` is a block's last target
    ]
    blocks = min(len(places), max(1, max_targets // m))
    chosen = [places[i * len(places) // blocks] for i in range(blocks)]
    return {
        c: [Window(document, last - c, last, last - m + 1) for document, last in chosen]
        for c in contexts
    }


def batches(windows: Sequence[Window], batch_size: int | None) -> Iterator[list[int]]:
    """Indices of windows to run together, longest first, so that little is padded and what does
    not fit in memory shows at once.

    batch_size: windows at a time; None: as many as hold BATCH_TOKENS tokens, one at least.
    """
    order = sorted(range(len(windows)), key=lambda i: -windows[i].read)
    start = 0
    while start < len(order):
        longest = max(1, windows[order[start]].read)
        size = batch_size or max(1, BATCH_TOKENS // longest)
        yield order[start : start + size]
        start += size
