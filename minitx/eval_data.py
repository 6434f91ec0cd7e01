"""The text of an evaluation: documents, tokenised once with the checkpoint's own tokenizer."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from minitx.checkpoint import CheckpointError
from minitx.data import DataConfig, documents, load_data
from minitx.generate import find_tokenizer
from minitx.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer


@dataclass
class EvalDataConfig:
    """What text to evaluate on. What is not given is as it was in training."""

    source: str | None = None
    """stdlib, a file, a folder, a glob or hf:NAME, as in training; the run's own by default."""
    split: Literal["auto", "val", "train", "all"] = "auto"
    """Which part. auto: the validation documents of the run's own source, all of any other."""
    tokenizer: str | None = None
    """"bytes" or a tokenizer.json, for a checkpoint that has none; it must be the one the model was
    trained with."""
    join_documents: bool = False
    """Read all documents as one stream, an end-of-text token before each, as training does; by
    default no window reaches over a document's ends."""
    val_fraction: float | None = None
    """Share of the text kept for validation; the run's own by default."""
    max_bytes: int | None = None
    """Read no more of the corpus than so many bytes; as in the run by default, for its source."""
    cache_dir: str | None = None
    """Where tokens are kept; by default the same places as in training."""


@dataclass(frozen=True)
class EvalText:
    """Documents of token ids, 1-D each, and what is said about them."""

    documents: list[np.ndarray]
    tokenizer: Tokenizer
    source: str
    split: str

    @property
    def lengths(self) -> list[int]:
        return [len(document) for document in self.documents]


def checkpoint_tokenizer(checkpoint: Path, given: str | None) -> Tokenizer:
    """The tokenizer of a checkpoint, or the one given where it has none.

    Raises ValueError where both exist and differ: the model's ids would mean other pieces of text.
    """
    chosen = None
    if given is not None:
        chosen = ByteTokenizer() if given == "bytes" else load_tokenizer(Path(given).expanduser())
    try:
        own = find_tokenizer(checkpoint)
    except CheckpointError:
        if chosen is None:
            raise
        return chosen
    if chosen is not None and chosen.fingerprint != own.fingerprint:
        raise ValueError(
            f"--data.tokenizer {given} has another vocabulary ({chosen.vocab_size} ids) than the "
            f"checkpoint's tokenizer ({own.vocab_size} ids); leave it out"
        )
    return own


def load_text(
    config: EvalDataConfig,
    run_data: dict[str, Any],
    tokenizer: Tokenizer,
    max_tokens: int | None,
) -> EvalText:
    """The documents to evaluate, the first max_tokens tokens of them.

    run_data: the DataConfig of the run as a dict; empty for a checkpoint that knows of none.
    Raises ValueError for a text in which there is nothing to predict.
    """
    own_source = config.source is None or config.source == run_data.get("source")
    data = DataConfig(**run_data) if own_source else DataConfig(source=str(config.source))
    settings = ("val_fraction", "max_bytes", "cache_dir")
    given = {name: getattr(config, name) for name in settings}
    data = replace(data, **{k: v for k, v in given.items() if v is not None})
    split = config.split if config.split != "auto" else ("val" if own_source else "all")
    if split == "all":
        found = (tokenizer.encode(text) for text in documents(data))
    else:
        found = _split_documents(data, split, tokenizer)
    eot = np.array([tokenizer.eot]) if config.join_documents else None
    kept = list(_first(found, max_tokens, eot))
    if eot is not None:
        kept = [np.concatenate(kept)] if kept else []
    if not any(len(document) > 1 for document in kept):
        tokens = sum(len(document) for document in kept)
        raise ValueError(
            f"the {split} text of {data.source} has no document of two tokens or more ({tokens} "
            "tokens in all), so there is nothing to predict; give --data.source a longer text"
        )
    return EvalText(kept, tokenizer, data.source, split)


def _split_documents(data: DataConfig, split: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Documents of a split, without the end-of-text token that token files hold before each."""
    loaded = load_data(data, tokenizer)
    tokens, offsets = (
        (loaded.val, loaded.val_doc_offsets)
        if split == "val"
        else (loaded.train, loaded.train_doc_offsets)
    )
    for start, end in itertools.pairwise(offsets.tolist()):
        yield tokens[start + 1 : end]


def _first(
    found: Iterator[np.ndarray], max_tokens: int | None, eot: np.ndarray | None
) -> Iterator[np.ndarray]:
    """Documents up to max_tokens in all, each behind an end-of-text token if one is given."""
    left = max_tokens
    for tokens in found:
        document = tokens if eot is None else np.concatenate([eot, tokens])
        yield document if left is None else document[:left]
        if left is not None:
            left -= len(document)
            if left <= 0:
                return
