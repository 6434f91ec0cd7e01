"""From per-token losses to what is reported: perplexity, bits per byte, loss by position, pairs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minitx.scoring import Documents, Scores


def perplexity(nll: float) -> float:
    """exp(nll), inf beyond what a float holds (nll > 709.78) and NaN for NaN."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def bits_per_byte(total_nll: float, n_bytes: int) -> float:
    """Bits for each byte of the scored text, which no choice of tokens changes; NaN of no bytes."""
    return total_nll / math.log(2) / n_bytes if n_bytes else math.nan


def scored_bytes(documents: Documents, byte_counts: np.ndarray) -> int:
    """Bytes of all tokens but each document's first, the ones that strided windows score."""
    return sum(int(byte_counts[document[1:]].sum()) for document in documents)


def position_buckets(scores: Scores) -> list[dict[str, Any]]:
    """Loss by the number of tokens a prediction was made from, in buckets [2^k, 2^(k+1)).

    se is the standard error of the bucket's mean as if tokens were independent; they are not
    quite, so it is a little small.
    """
    if scores.nll.size == 0:
        return []
    bucket = np.floor(np.log2(scores.context)).astype(np.int64)
    rows = []
    for k in np.unique(bucket).tolist():
        nll = scores.nll[bucket == k]
        rows.append(
            {
                "context_from": 2**k,
                "context_to": min(2 ** (k + 1) - 1, int(scores.context.max())),
                "count": int(nll.size),
                "nll": float(nll.mean()),
                "se": standard_error(nll),
            }
        )
    return rows


def standard_error(values: np.ndarray) -> float:
    """Of the mean of independent values; NaN for fewer than two."""
    if values.size < 2:
        return math.nan
    return float(values.std(ddof=1)) / math.sqrt(values.size)


def paired_curve(
    contexts: Sequence[int], nll: Sequence[np.ndarray], targets_a_block: int
) -> list[dict[str, Any]]:
    """Mean loss of the same targets at each context, and what it gains over the shortest context.

    nll: for each context the losses of the same targets, in blocks of neighbours. gain_se is the
    standard error over blocks of the mean difference: what all targets have in common, being hard
    or easy, is not in it.
    """
    rows = []
    for context, values in zip(contexts, nll, strict=True):
        gain = (nll[0] - values).reshape(-1, targets_a_block).mean(axis=1)
        blocks = values.reshape(-1, targets_a_block).mean(axis=1)
        rows.append(
            {
                "context": context,
                "nll": float(values.mean()),
                "se": standard_error(blocks),
                "gain": float(gain.mean()),
                "gain_se": standard_error(gain),
            }
        )
    return rows


def root_mean_square(values: np.ndarray) -> float:
    return math.sqrt(float(np.square(values).mean())) if values.size else math.nan
