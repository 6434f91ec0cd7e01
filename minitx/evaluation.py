"""The evaluation run: for each context length the chosen kernel, then the one it is compared with.

Windows are made once for each length and run on both kernels, so that the same tokens are compared.
What a length gave is in eval.json before the next one begins.

Exit codes: 0; 1 where the kernel ran out of memory at every length; 2 for a user's mistake; 3 where
the kernel fails parity; 4 where a later token moved an earlier loss, which stops the run; 6 where
the disk is full or fails; 130 after Ctrl-C, SIGTERM or SIGHUP, with what was finished printed and
written.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from minitx import eval_report
from minitx.cli import EXIT_OUT_OF_MEMORY, EXIT_PARITY_FAILED
from minitx.eval_config import EvalConfig
from minitx.eval_data import EvalText, checkpoint_tokenizer, load_text
from minitx.eval_parity import judge, sample_errors, sample_windows
from minitx.eval_plots import plot
from minitx.eval_setup import check_vocabulary, load_for_contexts
from minitx.eval_stats import (
    bits_per_byte,
    paired_curve,
    perplexity,
    position_buckets,
    scored_bytes,
)
from minitx.kernel_flags import check_kernels
from minitx.metrics import environment, is_out_of_memory, peak_memory_gib, reset_peak_memory
from minitx.model import GPT
from minitx.passkey import Prompt, answer_prompt, make_prompts
from minitx.run_lock import only_run_in
from minitx.scoring import Documents, How, Scores, causality_leak, score_windows
from minitx.signals import Stopped, StopRequest
from minitx.trained import find_trained
from minitx.trainer import resolve_device, resolve_dtype
from minitx.windows import Window, corpus_windows, paired_contexts, paired_windows

EXIT_NOT_CAUSAL = 4
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# The paired curve goes to the longest context that has so many places in the text.
MIN_PAIRED_BLOCKS = 8

Result = TypeVar("Result")


class NotCausalError(RuntimeError):
    """A later token moved an earlier loss: no number that follows would mean anything."""


def evaluate(config: EvalConfig) -> int:
    """Runs what the config says; returns the exit code (module docstring).

    Raises ValueError and KernelUnavailableError, before anything is written, for what cannot run.
    """
    config.validate()
    with StopRequest():
        try:
            return run_evaluation(config)
        except Stopped:  # before the first window, or after the last
            print("stopped before its end; what was finished, if anything, is above")
            return EXIT_INTERRUPTED


def run_evaluation(config: EvalConfig) -> int:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    checkpoint = find_trained(Path(config.checkpoint))
    out_dir = eval_report.choose_out_dir(config.out_dir, checkpoint)
    with only_run_in(out_dir):
        if not config.overwrite:
            eval_report.refuse_to_overwrite(out_dir)
        return evaluate_into(out_dir, config, checkpoint, device, dtype)


def evaluate_into(
    out_dir: Path, config: EvalConfig, checkpoint: Path, device: torch.device, dtype: torch.dtype
) -> int:
    model, state = load_for_contexts(config, checkpoint, device)
    check_kernels(config.kernel, config.compare, model.config, device, dtype)
    tokenizer = checkpoint_tokenizer(checkpoint, config.data.tokenizer)
    check_vocabulary(tokenizer.vocab_size, model, checkpoint)
    lengths = config.lengths(model.config.max_seq_len)
    run = Evaluation(config, model, How(device, dtype, config.batch_size, config.prefill_chunk))
    run.report |= {
        "checkpoint": str(checkpoint),
        "step": state.get("step"),
        "trained_context": model.config.rope_trained_len or model.config.max_seq_len,
        "rope_scaling": model.config.rope_scaling,
        "rope_factor": model.config.rope_factor,
        "dtype": str(dtype).removeprefix("torch."),
        "config": asdict(config),
        "environment": environment(device),
    }
    if config.task == "passkey":
        prompts = {length: make_prompts(tokenizer, length, config.passkey) for length in lengths}
        work: Callable[[], None] = lambda: run.passkey(prompts)  # noqa: E731
    else:
        run_data = state.get("config", {}).get("data", {})
        text = load_text(config.data, run_data, tokenizer, config.max_tokens)
        run.report["text"] = eval_report.describe_text(text)
        work = lambda: run.perplexity(text, lengths)  # noqa: E731
    for line in eval_report.opening_lines(run.report, model, max(lengths)):
        print(line)
    run.save = lambda: eval_report.write_json(run.report, out_dir / "eval.json")
    run.save()  # a folder that cannot be written is better known now
    try:
        work()
    except NotCausalError as error:
        print(f"causality FAILED: {error}")
    except KeyboardInterrupt:
        run.report["interrupted"] = True
    finally:
        run.bar.close()
        run.save()
    for line in eval_report.closing_lines(run.report):
        print(line)
    if config.plots:
        plot(run.report, out_dir / "eval.png")
    print(f"see {out_dir}")
    return run.exit_code()


class Evaluation:
    """One run: a model, what was found so far, and a progress bar over the tokens to read."""

    def __init__(self, config: EvalConfig, model: GPT, how: How) -> None:
        self.config, self.model, self.how = config, model, how
        self.kernels = [config.kernel]
        if config.compare != "none":
            self.kernels.append(config.compare)
        self.probed: set[tuple[str, int]] = set()
        self.bar = tqdm(unit="tok", unit_scale=True, disable=None, leave=False)
        self.save: Callable[[], None] = lambda: None
        self.report: dict[str, Any] = {
            "task": config.task,
            "kernel": config.kernel,
            "baseline": config.compare,
            "interrupted": False,
            "contexts": [],
            "comparisons": [],
            "positions": [],
            "paired": None,
            "passkey": [],
            "causality": [],
        }

    def exit_code(self) -> int:
        done = self.report["contexts"] + self.report["passkey"]
        if not all(probe["passed"] for probe in self.report["causality"]):
            return EXIT_NOT_CAUSAL
        if not all(comparison["passed"] for comparison in self.report["comparisons"]):
            return EXIT_PARITY_FAILED
        if self.report["interrupted"]:
            return EXIT_INTERRUPTED
        own = [row["status"] for row in done if row["kernel"] == self.config.kernel]
        return 0 if "ok" in own else EXIT_OUT_OF_MEMORY

    def attempt(self, run: Callable[[], Result]) -> Result | None:
        """What `run` gives, or None where memory ends. The run goes on with memory given back."""
        try:
            return run()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()  # after the except: the error held the frames, and they the tensors
        if self.how.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def probe(self, kernel: str, tokens: np.ndarray) -> None:
        """Raises NotCausalError where changing later tokens moves an earlier loss."""
        read = len(tokens) - 1
        if read < 2 or (kernel, read) in self.probed:
            return
        self.probed.add((kernel, read))
        vocab_size = self.model.config.vocab_size
        assert vocab_size is not None
        leak = self.attempt(lambda: causality_leak(self.model, tokens, vocab_size, self.how))
        if leak is None:  # what follows runs out of memory as well, and says so
            return
        self.report["causality"].append(
            {"kernel": kernel, "tokens": read, "leak_nats": leak, "passed": leak == 0}
        )
        if leak != 0:
            raise NotCausalError(
                f"on kernel '{kernel}', {read} tokens, changing later tokens moves an earlier loss "
                f"by {leak:.3g} nats"
            )

    # -- perplexity -----------------------------------------------------------------------------

    def perplexity(self, text: EvalText, lengths: Sequence[int]) -> None:
        plans = {
            length: corpus_windows(text.lengths, length, self.config.stride_of(length))
            for length in lengths
        }
        paired = self.plan_paired(text.lengths, max(lengths))
        tokens = sum(w.read for windows in plans.values() for w in windows) * len(self.kernels)
        self.bar.reset(tokens + sum(w.read for windows in paired.values() for w in windows))
        n_bytes = scored_bytes(text.documents, text.tokenizer.byte_counts)
        self.bar.write(eval_report.CONTEXTS_HEADER)
        for length, windows in plans.items():
            scores = [
                self.score(kernel, length, text.documents, windows, n_bytes)
                for kernel in self.kernels
            ]
            if scores[0] is not None:
                self.report["positions"].append(
                    {
                        "kernel": self.config.kernel,
                        "context_length": length,
                        "buckets": position_buckets(scores[0]),
                    }
                )
                if len(scores) > 1:
                    self.compare(length, text.documents, windows, scores[0], scores[1])
            self.save()
        if paired:
            self.paired(paired, text.documents)
        elif self.config.paired_targets:
            self.bar.write("no paired curve: no document is long enough for two contexts")

    def score(
        self,
        kernel: str,
        length: int,
        documents: Documents,
        windows: Sequence[Window],
        n_bytes: int,
    ) -> Scores | None:
        """Runs the windows on a kernel and adds their row; None where memory ended."""
        self.bar.set_description(f"{kernel} {length}")
        self.model.set_kernel(kernel)
        if self.config.probe_tokens:
            longest = max(documents, key=len)
            self.probe(kernel, longest[: min(length, self.config.probe_tokens) + 1])
        reset_peak_memory(self.how.device)
        scores = self.attempt(
            lambda: score_windows(self.model, documents, windows, self.how, self.bar.update)
        )
        row: dict[str, Any] = {
            "kernel": kernel,
            "context_length": length,
            "stride": self.config.stride_of(length),
        }
        if scores is None:
            row["status"] = "out of memory"
        else:
            nll = scores.mean_nll
            row |= {
                "status": "ok",
                "tokens_scored": scores.nll.size,
                "bytes_scored": n_bytes,
                "nll": nll,
                "perplexity": perplexity(nll),
                "bits_per_byte": bits_per_byte(float(scores.nll.sum()), n_bytes),
                "tok_per_s": scores.tok_per_s,
                "peak_gib": peak_memory_gib(self.how.device),
                "tokens_read": scores.tokens_read,
                "mean_context": float(scores.context.mean()),
            }
        self.report["contexts"].append(row)
        self.bar.write(eval_report.context_line(row))
        if scores is not None and not math.isfinite(scores.mean_nll):
            bad = int((~np.isfinite(scores.nll)).sum())
            self.bar.write(
                f"note: {bad:,} of these {scores.nll.size:,} losses are not finite: either the "
                f"checkpoint's weights are not, or {kernel} is at fault; try another kernel"
            )
        return scores

    def compare(
        self,
        length: int,
        documents: Documents,
        windows: Sequence[Window],
        kernel_scores: Scores,
        baseline_scores: Scores | None,
    ) -> None:
        kernel, baseline = self.kernels
        sample = sample_windows(windows, self.config.oracle_tokens)
        errors = self.attempt(
            lambda: sample_errors(self.model, kernel, documents, sample, self.how)
        )
        if errors is None:
            self.bar.write(
                f"no parity at context {length}: its truth ran out of memory; "
                "use fewer --oracle_tokens"
            )
            return
        kernel_row, baseline_row = self.report["contexts"][-2:]
        parity = judge(
            kernel=kernel,
            baseline=baseline,
            context_length=length,
            how=self.how,
            sample=sample,
            errors=errors,
            kernel_scores=kernel_scores,
            baseline_scores=baseline_scores,
            kernel_peak_gib=kernel_row["peak_gib"],
            baseline_peak_gib=baseline_row.get("peak_gib"),
        )
        self.report["comparisons"].append(asdict(parity))

    def plan_paired(self, lengths: Sequence[int], longest: int) -> dict[int, list[Window]]:
        """Windows of the paired curve up to the longest context with enough places; {} for none."""
        if not self.config.paired_targets:
            return {}
        contexts = paired_contexts(longest)
        while len(contexts) > 1:
            windows = paired_windows(lengths, contexts, self.config.paired_targets)
            if len(windows[contexts[0]]) >= MIN_PAIRED_BLOCKS:
                return windows
            contexts.pop()
        return {}

    def paired(self, plan: dict[int, list[Window]], documents: Documents) -> None:
        self.model.set_kernel(self.config.kernel)
        losses: list[np.ndarray] = []
        for context, windows in plan.items():
            self.bar.set_description(f"paired {context}")
            scores = self.attempt(
                lambda w=windows: score_windows(self.model, documents, w, self.how, self.bar.update)
            )
            if scores is None:
                break
            losses.append(scores.nll)
        contexts = list(plan)[: len(losses)]
        block = plan[contexts[0]][0].counted if contexts else 1
        self.report["paired"] = {
            "kernel": self.config.kernel,
            "targets": int(losses[0].size) if losses else 0,
            "targets_a_block": block,
            "contexts": paired_curve(contexts, losses, block),
        }
        self.save()

    # -- passkey --------------------------------------------------------------------------------

    def passkey(self, prompts: dict[int, dict[float, list[Prompt]]]) -> None:
        every = [p for depths in prompts.values() for texts in depths.values() for p in texts]
        self.bar.reset(sum(len(p.tokens) for p in every) * len(self.kernels))
        self.bar.write(eval_report.PASSKEY_HEADER)
        for length, depths in prompts.items():
            for kernel in self.kernels:
                self.bar.set_description(f"{kernel} {length}")
                self.model.set_kernel(kernel)
                first = next(iter(depths.values()))[0].tokens
                if self.config.probe_tokens:
                    self.probe(kernel, first[: self.config.probe_tokens + 1])
                for depth, texts in depths.items():
                    answers = self.attempt(lambda texts=texts: [self.answer(p) for p in texts])
                    row = {"kernel": kernel, "context_length": length, "depth": depth}
                    row["status"] = "out of memory"
                    if answers is not None:
                        row |= {
                            "status": "ok",
                            "trials": len(answers),
                            "accuracy": sum(right for right, _ in answers) / len(answers),
                            "nats": sum(nats for _, nats in answers) / len(answers),
                        }
                    self.report["passkey"].append(row)
                    self.bar.write(eval_report.passkey_line(row))
            self.save()

    def answer(self, prompt: Prompt) -> tuple[bool, float]:
        result = answer_prompt(self.model, prompt, self.how)
        self.bar.update(len(prompt.tokens))
        return result
