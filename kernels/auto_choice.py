"""What `auto` runs: the fastest kernel, by measurement where there is one.

The table holds, for a GPU of a compute capability and 16-bit inputs, which kernel was fastest by
head dim and number of keys; there is one for grouped heads and one for others. Where queries are
fewer than keys, as when a prompt is read in chunks behind a key/value cache or a token is decoded,
other tables say it by the number of queries, too. Each is drawn from a CSV of `python -m
minitx.bench attention`, which times the kernels side by side, by `python -m minitx.bench auto CSV`;
a test holds the two together.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minitx.kernels.runtime import is_eager


class Choice(NamedTuple):
    """From so many keys on, up to the next choice's: the fastest kernel of a forward alone, of a
    forward and backward, and the same of those kernels that return lse."""

    min_keys: int
    forward: str
    training: str
    forward_lse: str
    training_lse: str


class MeasuredTable(NamedTuple):
    """source: where the figures are. choices: by the largest head dim that they hold for; those of
    a head dim from few keys to many."""

    source: str
    choices: dict[int, tuple[Choice, ...]]


class ChunkChoice(NamedTuple):
    """From so many keys on: the fastest kernel of a forward alone, and of those that return lse."""

    min_keys: int
    forward: str
    forward_lse: str


class QueriesChoice(NamedTuple):
    """From so many queries on: the choices by the number of keys, of which there are more."""

    min_queries: int
    choices: tuple[ChunkChoice, ...]


class ChunkTable(NamedTuple):
    """source: where the figures are. choices: by the largest head dim that they hold for."""

    source: str
    choices: dict[int, tuple[QueriesChoice, ...]]


# By compute capability, and whether several query heads read one key head.
TABLES: dict[tuple[tuple[int, int], bool], MeasuredTable] = {
    ((9, 0), False): MeasuredTable(
        "benchmarks/h200/attention.csv",
        {
            64: (Choice(0, "tilelang", "tilelang", "tilelang", "tilelang"),),
            128: (Choice(0, "tilelang", "tilelang", "tilelang", "tilelang"),),
        },
    ),
    ((9, 0), True): MeasuredTable(
        "benchmarks/h200/attention-grouped.csv",
        {
            64: (Choice(0, "tilelang", "tilelang", "tilelang", "tilelang"),),
            128: (Choice(0, "tilelang", "tilelang", "tilelang", "tilelang"),),
        },
    ),
}

ONE_BY_SDPA = QueriesChoice(0, (ChunkChoice(0, "sdpa", "tilelang"),))
CHUNKS_BY_TILELANG = QueriesChoice(8, (ChunkChoice(0, "tilelang", "tilelang"),))
# The same where queries are fewer than keys.
CHUNK_TABLES: dict[tuple[tuple[int, int], bool], ChunkTable] = {
    ((9, 0), False): ChunkTable(
        "benchmarks/h200/attention-chunks.csv",
        {
            64: (ONE_BY_SDPA, CHUNKS_BY_TILELANG),
            128: (
                ONE_BY_SDPA,
                QueriesChoice(
                    8,
                    (
                        ChunkChoice(0, "sdpa", "tilelang"),
                        ChunkChoice(8192, "tilelang", "tilelang"),
                        ChunkChoice(32768, "sdpa", "tilelang"),
                    ),
                ),
                QueriesChoice(128, (ChunkChoice(0, "tilelang", "tilelang"),)),
            ),
        },
    ),
    ((9, 0), True): ChunkTable(
        "benchmarks/h200/attention-chunks.csv",
        {
            64: (ONE_BY_SDPA, CHUNKS_BY_TILELANG),
            128: (ONE_BY_SDPA, CHUNKS_BY_TILELANG),
        },
    ),
}

# In this order where nothing was measured, or what was fastest cannot run.
UNMEASURED = ("sdpa", "triton", "tilelang", "eager")
UNMEASURED_LSE = ("triton", "tilelang", "eager")


def choose_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    return_lse: bool,
    problem: Callable[[str], str | None],
) -> tuple[str, str]:
    """(kernel, why) for q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D].

    problem: why a kernel cannot run these inputs, or None.
    """
    if q.device.type != "cuda":
        return ("eager", "sdpa has no lse") if return_lse else ("sdpa", "fastest on a CPU")
    is_training = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    fastest, why = _fastest(q, k, is_causal, return_lse, is_training)
    others = UNMEASURED_LSE if return_lse else UNMEASURED
    for kernel in (fastest, *others):
        reason = problem(kernel)
        if reason is None:
            return kernel, why
        why = f"'{kernel}' cannot: {reason}"
    return fastest, why  # whose error then says what can be done


def _fastest(
    q: torch.Tensor, k: torch.Tensor, is_causal: bool, return_lse: bool, is_training: bool
) -> tuple[str, str]:
    Sq, Skv = q.shape[2], k.shape[2]
    is_chunk = is_causal and 1 < Sq < Skv  # for which sdpa may make a mask of Sq x Skv
    lse = "_lse" if return_lse else ""
    # The last query reads all keys: alone, it is told nothing by the causal rule.
    if Sq < Skv and (is_causal or Sq == 1) and not is_training:
        choices, why = _choices(CHUNK_TABLES, q, k)
        if choices is not None:
            if is_chunk and not is_eager():  # sdpa was measured without the mask that it makes then
                lse = "_lse"
            return getattr(_last(_last(choices, Sq).choices, Skv), f"forward{lse}"), why
    choices, why = _choices(TABLES, q, k)
    if choices is None:
        if is_chunk:
            return UNMEASURED_LSE[0], "sdpa may make a mask of Sq x Skv"
        return (UNMEASURED_LSE if return_lse else UNMEASURED)[0], why
    if is_chunk:  # kernels that return lse make no mask
        lse, why = "_lse", f"{why} of those that make no mask"
    return getattr(_last(choices, Skv), ("training" if is_training else "forward") + lse), why


def _choices(tables: dict[Any, Any], q: torch.Tensor, k: torch.Tensor) -> tuple[Any, str]:
    """Those of these inputs' GPU, grouping and head dim; or None, and why there are none."""
    capability, is_grouped = _capability(q.device), q.shape[1] != k.shape[1]
    table = tables.get((capability, is_grouped)) or tables.get((capability, False))
    if table is None:
        return None, "no table of measurements for this GPU"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return None, f"{table.source} has no figures for float32"
    head_dim = next((d for d in sorted(table.choices) if d >= q.shape[3]), None)
    if head_dim is None:
        return None, f"{table.source} has no figures for heads of {q.shape[3]}"
    return table.choices[head_dim], f"fastest in {table.source}"


def _last(choices: tuple[Any, ...], length: int) -> Any:
    """The last that begins at this length or before; the first one holds for shorter ones, too."""
    found = choices[0]
    for later in choices[1:]:
        if length < later[0]:
            break
        found = later
    return found


def _capability(device: torch.device) -> tuple[int, int]:
    return _capability_once(device)


_capability_once = functools.cache(torch.cuda.get_device_capability)


# Dynamo then takes the answer as a constant, as `api` says of its own questions to the machine.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
