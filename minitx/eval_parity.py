"""Does a kernel give the same losses as another one, within what rounding explains?

The truth is the model one precision up: eager in float32 without autocast; for float32 runs, the
reference in float64. On a sample of the windows

    error(kernel) = root mean square over tokens of |nll(kernel) - nll(truth)|
    error(kernel) <= 2 error(eager) + rounding

with eager in the run's own dtype, and over all tokens, where there is no truth,

    |mean nll(kernel) - mean nll(baseline)| <= 3 error(eager) + rounding

which is the triangle inequality: two errors of eager's for the kernel, one for the baseline. The
error of a mean is smaller than the mean of errors, so a broken kernel breaks the second, and not an
unlucky one. Rounding is float32's eps times the truth's root mean square: losses are float32.

Truth and eager read the sample in chunks behind a key/value cache, so that neither needs the
memory of eager attention over the whole context.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minitx.eval_stats import root_mean_square
from minitx.model import GPT
from minitx.scoring import Documents, How, Scores, score_windows
from minitx.windows import Window

# Scores of one chunk, in elements over all heads: 1 GiB in float64.
CHUNK_ELEMENTS = 2**27


@dataclass
class KernelParity:
    """The verdict on one kernel at one context length. Nats throughout."""

    kernel: str
    baseline: str
    context_length: int
    dtype: str
    sample_tokens: int  # targets of the sample
    sample_context: int  # tokens read by its longest window; the context unless --oracle_tokens
    kernel_error: float
    eager_error: float
    error_budget: float
    delta_nll: float | None  # None where the baseline ran out of memory
    budget: float
    max_token_difference: float | None  # kernel against baseline, any one token
    speedup: float | None
    kernel_peak_gib: float
    baseline_peak_gib: float | None
    passed: bool


def sample_windows(windows: Sequence[Window], max_tokens: int) -> list[Window]:
    """The first of the longest windows, max_tokens to read in all; one is cut short if it must."""
    chosen: list[Window] = []
    left = max_tokens
    for window in sorted(windows, key=lambda w: -w.read):
        if window.read <= left:
            chosen.append(window)
            left -= window.read
        elif not chosen:
            end = window.begin + max_tokens
            chosen.append(Window(window.document, window.begin, end, window.begin + 1))
            break
    return chosen


def sample_errors(
    model: GPT, kernel: str, documents: Documents, sample: Sequence[Window], how: How
) -> tuple[float, float, float]:
    """error(kernel), error(eager) and the truth's root mean square over the sample."""
    longest = max(window.read for window in sample)
    chunk = max(1, CHUNK_ELEMENTS // (model.config.n_head * longest))
    chunked = dataclasses.replace(how, batch_size=1, prefill_chunk=chunk)

    def nll(run_model: GPT, name: str, run_how: How) -> np.ndarray:
        run_model.set_kernel(name)
        return score_windows(run_model, documents, sample, run_how).nll

    of_kernel = nll(model, kernel, how)
    of_eager = nll(model, "eager", chunked)
    if how.is_autocast:
        truth = nll(model, "eager", dataclasses.replace(chunked, dtype=torch.float32))
    else:
        exact = copy.deepcopy(model).double()
        truth = nll(exact, "reference", dataclasses.replace(chunked, dtype=torch.float64))
    model.set_kernel(kernel)
    return (
        root_mean_square(of_kernel - truth),
        root_mean_square(of_eager - truth),
        root_mean_square(truth),
    )


def judge(
    *,
    kernel: str,
    baseline: str,
    context_length: int,
    how: How,
    sample: Sequence[Window],
    errors: tuple[float, float, float],
    kernel_scores: Scores,
    baseline_scores: Scores | None,
    kernel_peak_gib: float,
    baseline_peak_gib: float | None,
) -> KernelParity:
    """The module's two conditions; NaN passes neither. Without a baseline, the first alone."""
    kernel_error, eager_error, size = errors
    rounding = torch.finfo(torch.float32).eps * size
    error_budget, budget = 2 * eager_error + rounding, 3 * eager_error + rounding
    passed = kernel_error <= error_budget
    delta = difference = speedup = None
    if baseline_scores is not None:
        delta = abs(kernel_scores.mean_nll - baseline_scores.mean_nll)
        difference = float(np.abs(kernel_scores.nll - baseline_scores.nll).max())
        speedup = kernel_scores.tok_per_s / baseline_scores.tok_per_s
        passed = passed and delta <= budget
    return KernelParity(
        kernel=kernel,
        baseline=baseline,
        context_length=context_length,
        dtype=str(how.dtype).removeprefix("torch."),
        sample_tokens=sum(window.counted for window in sample),
        sample_context=max(window.read for window in sample),
        kernel_error=kernel_error,
        eager_error=eager_error,
        error_budget=error_budget,
        delta_nll=delta,
        budget=budget,
        max_token_difference=difference,
        speedup=speedup,
        kernel_peak_gib=kernel_peak_gib,
        baseline_peak_gib=baseline_peak_gib,
        passed=passed,
    )
