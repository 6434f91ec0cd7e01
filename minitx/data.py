"""Training data: text in, batches of token windows out.

    data = load_data(DataConfig(source="stdlib", vocab_size=1024, max_bytes=3_000_000))
    stream = BatchStream(data.train, batch_size=8, seq_len=256, seed=0)
    inputs, targets = stream.next()        # [8, 256] int64 each, targets one token later

The token files hold documents one after the other, an end-of-text token before each: the first
token of a text is predicted from it, and generating from it alone begins a new document.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minitx.batches import BatchStream
from minitx.corpus import MissingTextError, read_documents
from minitx.token_cache import cache_key, index_documents, open_or_build
from minitx.tokenizer import MIN_BPE_VOCAB, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

__all__ = [
    "BatchStream",
    "DataConfig",
    "MissingTextError",
    "TokenData",
    "documents",
    "load_data",
]


@dataclass
class DataConfig:
    """What text to learn from, and how it becomes tokens."""

    source: str = "stdlib"
    """"stdlib" (the running Python's standard library: real text, on every machine), a file, a
    folder, a glob, or a named corpus "hf:NAME[:CONFIG[:SPLIT[:TEXT_COLUMN]]]" (needs the extra
    `data`). Files are read as bytes."""

    tokenizer: str = "bpe"
    """"bytes" (one token a byte), "bpe" (byte-level, trained on the training documents), or the
    path of a byte-level tokenizer.json."""

    vocab_size: int = 50_257
    """Tokens of a BPE trained here, its end-of-text token included; at least 257."""

    val_fraction: float = 0.05
    """Share of the text's bytes kept for validation, in [0, 1): whole documents, chosen by a hash
    of what they hold. Of a corpus of one document it is the end."""

    max_bytes: int | None = None
    """Read no more of the corpus than so many bytes; all of it when null."""

    cache_dir: str | None = None
    """Where tokens are kept; null means $MINITX_CACHE_DIR, else $XDG_CACHE_HOME/minitx, else
    ~/.cache/minitx. Safe to delete."""


@dataclass(frozen=True)
class TokenData:
    """A tokenised corpus.

    Attributes:
        train, val: token ids, 1-D, uint16 or uint32, memory-mapped and read-only.
        tokenizer: what made them.
        train_docs, val_docs: number of documents.
        train_bytes, val_bytes: bytes of text; end-of-text tokens are none of them.
        train_doc_offsets, val_doc_offsets: int64 [n_docs + 1]; document i, from its end-of-text
            token on, is tokens[offsets[i] : offsets[i + 1]].
    """

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    train_docs: int
    val_docs: int
    train_bytes: int
    val_bytes: int
    train_doc_offsets: np.ndarray
    val_doc_offsets: np.ndarray

    @property
    def n_docs(self) -> int:
        return self.train_docs + self.val_docs


def documents(config: DataConfig) -> Iterator[bytes]:
    """All documents of the corpus, training and validation alike, in order."""
    return read_documents(config.source, config.max_bytes)


def load_data(config: DataConfig, tokenizer: Tokenizer | None = None) -> TokenData:
    """Tokens of a corpus: made once, then read from the cache.

    tokenizer: takes the place of config.tokenizer, as a checkpoint's own does.

    The cache is found by a hash of the text and of the settings that decide its tokens, so a text
    that was edited is tokenised again. Several processes may call this at once: one does the work.

    Raises:
        MissingTextError (a ValueError): no text where the source points.
        ValueError: a setting out of range, a tokenizer that cannot be used, a cache that cannot be
            written.
    """
    if not 0 <= config.val_fraction < 1:
        raise ValueError(f"val_fraction must be at least 0 and below 1, got {config.val_fraction}")
    if tokenizer is None:
        tokenizer, settings = _tokenizer_of(config)
    else:
        settings: dict = {"tokenizer": tokenizer.fingerprint}

    def make_tokenizer(training_documents: Iterator[bytes]) -> Tokenizer:
        text_bytes = int(index.sizes.sum())
        return tokenizer or train_bpe(training_documents, config.vocab_size, text_bytes)

    def read() -> Iterator[bytes]:
        return documents(config)

    index = index_documents(read)
    settings["val_fraction"] = config.val_fraction
    folder = cache_folder(config.cache_dir) / "tokens" / cache_key(index, settings)
    splits, tokenizer = open_or_build(folder, read, index, config.val_fraction, make_tokenizer)
    train, val = splits["train"], splits["val"]
    return TokenData(
        train=train.tokens,
        val=val.tokens,
        tokenizer=tokenizer,
        train_docs=train.n_docs,
        val_docs=val.n_docs,
        train_bytes=train.n_bytes,
        val_bytes=val.n_bytes,
        train_doc_offsets=train.offsets,
        val_doc_offsets=val.offsets,
    )


def cache_folder(cache_dir: str | None = None) -> Path:
    """The cache's folder, by `DataConfig.cache_dir`'s rule."""
    if cache_dir is None:
        xdg = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache_dir = os.environ.get("MINITX_CACHE_DIR") or os.path.join(xdg, "minitx")
    expanded = os.path.expanduser(cache_dir)
    if expanded.startswith("~"):
        raise ValueError(
            f"no home folder for the cache {cache_dir}: set --data.cache_dir or MINITX_CACHE_DIR"
        )
    return Path(expanded)


def _tokenizer_of(config: DataConfig) -> tuple[Tokenizer | None, dict]:
    """The tokenizer, None for a BPE that is still to be trained, and what names it in the
    cache."""
    if config.tokenizer == "bpe":
        if config.vocab_size < MIN_BPE_VOCAB:
            raise ValueError(
                f"vocab_size must be at least {MIN_BPE_VOCAB} (256 bytes and end-of-text), "
                f"got {config.vocab_size}"
            )
        return None, {"tokenizer": "bpe", "vocab_size": config.vocab_size}
    if config.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif os.path.exists(path := os.path.expanduser(config.tokenizer)):
        tokenizer = load_tokenizer(path)
    else:
        raise ValueError(
            f"unknown tokenizer '{config.tokenizer}'; expected bytes, bpe or the path of a "
            "tokenizer.json"
        )
    return tokenizer, {"tokenizer": tokenizer.fingerprint}
