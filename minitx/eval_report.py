"""What an evaluation leaves to read: lines on the terminal, eval.json and eval.png.

JSON has no infinity and no NaN. Where a number is one, eval.json holds null in its place, and the
object it stands in says which under "non_finite": {"perplexity": null, "non_finite":
{"perplexity": "inf"}}.
"""

import json
import math
from pathlib import Path
from typing import Any

from minitx.eval_data import EvalText
from minitx.model import GPT, num_params
from minitx.run_files import make_out_dir, write_whole

CONTEXTS_HEADER = (
    "kernel             context    stride      tokens       nll         ppl  bits/B"
    "       tok/s  peak_gib"
)
PASSKEY_HEADER = "kernel             context   depth  trials  accuracy  nats of the digits"


def choose_out_dir(given: str | None, checkpoint: Path) -> Path:
    """The folder for eval.json and eval.png, made if it is not there: by default eval/ in the run's
    folder, or in the checkpoint's own where it is in no run."""
    if given is not None:
        out_dir = Path(given).expanduser()
    else:
        in_run = checkpoint.parent.name == "checkpoints"
        out_dir = (checkpoint.parent.parent if in_run else checkpoint) / "eval"
    make_out_dir(out_dir)
    return out_dir


def refuse_to_overwrite(out_dir: Path) -> None:
    """Raises ValueError where an evaluation is in the folder already."""
    for name in ("eval.json", "eval.png"):
        if (out_dir / name).exists():
            raise ValueError(
                f"{out_dir / name} exists; give --overwrite true, or another --out_dir"
            )


def to_json(value: Any) -> Any:
    """value with null for infinities and NaN, and their names beside them (module docstring)."""
    if isinstance(value, dict):
        result = {key: to_json(inner) for key, inner in value.items()}
        odd = {k: str(v) for k, v in value.items() if isinstance(v, float) and not math.isfinite(v)}
        return result | ({"non_finite": odd} if odd else {})
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(value: Any) -> Any:
    """What to_json was given: infinities and NaN back in their places."""
    if isinstance(value, dict):
        odd = {key: float(name) for key, name in value.get("non_finite", {}).items()}
        return {k: from_json(inner) for k, inner in value.items() if k != "non_finite"} | odd
    if isinstance(value, list):
        return [from_json(inner) for inner in value]
    return value


def write_json(report: dict[str, Any], path: Path) -> None:
    write_whole(path, json.dumps(to_json(report), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The report that write_json wrote. Raises ValueError for any other file."""
    try:
        report = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON; run eval.py again") from error
    if not isinstance(report, dict) or {"contexts", "rope_scaling"} - report.keys():
        raise ValueError(f"{path} is no eval.json of this eval.py; give one, or its folder")
    return from_json(report)


# -- the terminal -------------------------------------------------------------------------------


def describe_text(text: EvalText) -> dict[str, Any]:
    return {
        "source": text.source,
        "split": text.split,
        "documents": len(text.documents),
        "tokens": sum(text.lengths),
        "longest_document": max(text.lengths),
    }


def model_name(report: dict[str, Any]) -> str:
    """The checkpoint, and its step where it is of a training run."""
    step = "" if report["step"] is None else f", step {report['step']}"
    return f"{report['checkpoint']}{step}"


def opening_lines(report: dict[str, Any], model: GPT, longest: int) -> list[str]:
    config = model.config
    scaling = (
        ""
        if config.rope_scaling == "none"
        else (f", RoPE {config.rope_scaling} x {config.rope_factor:g}")
    )
    lines = [
        f"model: {model_name(report)}, {num_params(model):,} parameters, "
        f"trained at context {config.max_seq_len}{scaling}",
        f"kernel: {report['kernel']}  compare: {report['baseline']}  "
        f"device: {report['environment']['device']}  dtype: {report['dtype']}",
    ]
    text = report.get("text")
    if text is None:
        return lines
    lines.append(
        f"text: {text['source']} ({text['split']}), {text['tokens']:,} tokens in "
        f"{text['documents']:,} documents, the longest of {text['longest_document']:,}"
    )
    if longest >= text["longest_document"]:
        lines.append(
            f"note: no document fills a context of {longest:,} tokens; "
            f"{_what_would_fill_it(text, report['config'])} would"
        )
    return lines


def _what_would_fill_it(text: dict[str, Any], config: dict[str, Any]) -> str:
    limit = config["max_tokens"]
    is_cut = limit is not None and text["tokens"] >= limit
    longer = "a larger --max_tokens" if is_cut else "a longer text"
    is_joined = config["data"]["join_documents"]
    return longer if is_joined else f"{longer} or --data.join_documents true"


def _figure(value: float) -> str:
    """Four decimals, or as many digits as ten columns hold."""
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1e5 else f"{value:.3e}"


def context_line(row: dict[str, Any]) -> str:
    start = f"{row['kernel']:16s} {row['context_length']:9d} {row['stride']:9d}"
    if row["status"] != "ok":
        return f"{start}  {row['status']}"
    return (
        f"{start} {row['tokens_scored']:11,d} {row['nll']:9.4f} {_figure(row['perplexity']):>11s} "
        f"{row['bits_per_byte']:7.4f} {row['tok_per_s']:11,.0f} {row['peak_gib']:9.2f}"
    )


def passkey_line(row: dict[str, Any]) -> str:
    start = f"{row['kernel']:16s} {row['context_length']:9d} {row['depth']:7.0%}"
    if row["status"] != "ok":
        return f"{start}  {row['status']}"
    return f"{start} {row['trials']:7d} {row['accuracy']:9.0%} {row['nats']:20.3f}"


def closing_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    if report["interrupted"]:
        lines.append("interrupted: what was finished is above and in eval.json")
    if report["comparisons"]:
        lines += _comparison_lines(report["comparisons"])
    if report["paired"] and report["paired"]["contexts"]:
        lines += _paired_lines(report["paired"])
    if report["passkey"]:
        digits = report["config"]["passkey"]["digits"]
        lines.append(
            f"a model that knows {digits} digits come, and not which, pays "
            f"{digits * math.log(10):.3f} nats"
        )
    return lines


def _comparison_lines(comparisons: list[dict[str, Any]]) -> list[str]:
    kernel, baseline = comparisons[0]["kernel"], comparisons[0]["baseline"]
    lines = [
        "",
        f"{kernel} against {baseline} (error: RMS a token against the truth, nats)",
        "  context     |Δnll|     budget      error     budget  parity   speed-up   memory (GiB)",
    ]
    for row in comparisons:
        verdict = "passed" if row["passed"] else "FAILED"
        start = f"{row['context_length']:9d}"
        own = f"{row['kernel_error']:10.2e} {row['error_budget']:10.2e}  {verdict}"
        if row["delta_nll"] is None:
            lines.append(
                f"{start} {'-':>10s} {row['budget']:10.2e} {own}  {baseline} ran out of memory"
            )
            continue
        lines.append(
            f"{start} {row['delta_nll']:10.2e} {row['budget']:10.2e} {own} "
            f"{row['speedup']:9.2f}x  {row['kernel_peak_gib']:.2f} / "
            f"{row['baseline_peak_gib']:.2f}"
        )
    return lines


def _paired_lines(paired: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"the same {paired['targets']:,} targets with growing context "
        f"(gain over {paired['contexts'][0]['context']}, ± its standard error)",
        "  context       nll      gain",
    ]
    lines += [
        f"{row['context']:9d} {row['nll']:9.4f} {row['gain']:9.4f} ± {row['gain_se']:.4f}"
        for row in paired["contexts"]
    ]
    return lines
