"""Tokenizers that take bytes and give every one of them back.

    tokenizer.decode(tokenizer.encode(text)) == text     whatever the bytes: UTF-8 or not, CRLF, NUL

Two kinds: `ByteTokenizer`, one token a byte, and `BPETokenizer`, the byte-level BPE of GPT-2 in the
tokenizers library, trained here (`train_bpe`) or read from a tokenizer.json (`load_tokenizer`).

The library takes str, not bytes. Valid UTF-8 goes through it as it is, so the ids are those that
everyone else's GPT-2, Llama 3 or SmolLM2 gives; each byte that is not valid UTF-8 becomes the one
token that stands for it in the byte-level alphabet. Decoding looks every id up in a table of bytes.

The text of a special token inside a document ("<|endoftext|>") is text, and encoded as such: only
minitx puts an end-of-text token. It decodes to nothing.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from minitx.run_files import write_whole

logger = logging.getLogger("minitx")

EOT = "<|endoftext|>"
# What published tokenizers call the token between documents; the first that exists is taken.
EOT_NAMES = (EOT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")
MIN_BPE_VOCAB = 257  # 256 bytes and the end-of-text token

# Text goes to the library in pieces of this many bytes: it keeps tens of bytes of bookkeeping for
# each, and encodes pieces in parallel.
CHUNK_BYTES = 1 << 16
# A word's end: no pre-tokenizer of the GPT family joins a letter to the white space after it, so a
# text cut there has the same tokens as the whole.
_WORD_END = re.compile(rb".*[A-Za-z](?=[ \t\r\n])", re.DOTALL)
# What str.decode("surrogateescape") makes of bytes that are not UTF-8, and of nothing else.
_INVALID = re.compile("([\udc80-\udcff]+)")


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable Latin-1 stands for itself,
    the rest for 256, 257, ... in order (GPT-2's table; every tokenizer.json of the family holds
    it)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    moved = {b: chr(256 + i) for i, b in enumerate(others)}
    return [moved.get(b, chr(b)) for b in range(256)]


ALPHABET = _byte_alphabet()
# For str.translate: the alphabet to Latin-1, and what is not in the alphabet to what Latin-1 lacks.
_TO_LATIN_1 = dict.fromkeys(range(256), 256) | {ord(c): byte for byte, c in enumerate(ALPHABET)}


class Tokenizer(ABC):
    """Bytes to ids and back.

    Attributes:
        vocab_size: ids are in [0, vocab_size), the end-of-text token's included.
        eot: id of the end-of-text token.
        fingerprint: hex digest; equal fingerprints give equal ids.
        byte_counts: int64 [vocab_size], bytes that each id decodes to (0 for `eot`).
    """

    fingerprint: str

    def __init__(self, pieces: list[bytes], eot: int) -> None:
        """pieces: the bytes of each id."""
        self._pieces = pieces
        self.eot = eot
        self.vocab_size = len(pieces)
        self.byte_counts = np.array([len(piece) for piece in pieces], dtype=np.int64)

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of a text, int64 [N], without an end-of-text token."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of several texts, on all cores where the tokenizer can."""

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids; raises ValueError for an id outside the vocabulary."""
        # `tolist` for tensors and arrays: far faster than one element at a time.
        numbers: list[int] = ids.tolist() if hasattr(ids, "tolist") else list(ids)  # type: ignore
        if numbers and (min(numbers) < 0 or max(numbers) >= self.vocab_size):
            raise ValueError(
                f"ids must be from 0 to {self.vocab_size - 1}, got from {min(numbers)} "
                f"to {max(numbers)}"
            )
        return b"".join(map(self._pieces.__getitem__, numbers))

    @abstractmethod
    def save(self, path: str | PathLike[str]) -> None:
        """Writes a tokenizer.json that `load_tokenizer` and the tokenizers library read."""

    @staticmethod
    def load(path: str | PathLike[str]) -> "Tokenizer":
        """`load_tokenizer`."""
        return load_tokenizer(path)


class ByteTokenizer(Tokenizer):
    """One token a byte, id = byte; end-of-text is 256."""

    fingerprint = "bytes"

    def __init__(self) -> None:
        super().__init__([bytes([b]) for b in range(256)] + [b""], eot=256)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, dtype=np.uint8).astype(np.int64) for text in texts]

    def save(self, path: str | PathLike[str]) -> None:
        # A byte-level BPE without merges is a byte tokenizer: one file format for both.
        vocab = {character: byte for byte, character in enumerate(ALPHABET)}
        library = _byte_level(models.BPE(vocab=vocab, merges=[]))
        library.add_special_tokens([AddedToken(EOT, normalized=False)])
        write_whole(Path(path), library.to_str(pretty=True))


class BPETokenizer(Tokenizer):
    """Byte-level BPE by the tokenizers library.

    Raises ValueError, with `name` in it, when a byte has no token, when there is no end-of-text
    token, or when text does not come back as it went in (SentencePiece, WordPiece, lower-casing).
    """

    def __init__(self, library: tokenizers.Tokenizer, name: str = "the tokenizer") -> None:
        vocab = library.get_vocab(with_added_tokens=True)
        eot_name = next((token for token in EOT_NAMES if token in vocab), None)
        if eot_name is None:
            raise ValueError(
                f"{name} has no end-of-text token; expected one of {', '.join(EOT_NAMES)}"
            )
        missing = [byte for byte, character in enumerate(ALPHABET) if character not in vocab]
        if missing:
            raise ValueError(
                f"{name} cannot represent every byte (no token for byte 0x{missing[0]:02x}, "
                f"{len(missing)} in all); expected a byte-level BPE, as GPT-2's or Llama 3's"
            )
        eot = vocab[eot_name]
        super().__init__(_piece_table(library, vocab, eot), eot)
        self._byte_ids = np.array([vocab[character] for character in ALPHABET], dtype=np.int64)
        self._library = library
        # The text "<|endoftext|>" in a document must not end it.
        library.encode_special_tokens = True
        self._check_round_trip(name, eot_name)
        self.fingerprint = _fingerprint(library, eot)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        # Each text is a list of parts: str for the library, bytes for those that are not UTF-8.
        parts = [list(_parts(text)) for text in texts]
        valid = [part for of_text in parts for part in of_text if isinstance(part, str)]
        encodings = iter(self._library.encode_batch_fast(valid, add_special_tokens=False))
        return [
            np.concatenate(
                [np.empty(0, dtype=np.int64)]
                + [
                    np.array(next(encodings).ids, dtype=np.int64)
                    if isinstance(part, str)
                    else self._byte_ids[np.frombuffer(part, dtype=np.uint8)]
                    for part in of_text
                ]
            )
            for of_text in parts
        ]

    def save(self, path: str | PathLike[str]) -> None:
        write_whole(Path(path), self._library.to_str(pretty=True))

    def _check_round_trip(self, name: str, eot_name: str) -> None:
        for probe in (*_PROBES, eot_name.encode()):
            if self.decode(self.encode(probe)) != probe:
                raise ValueError(
                    f"{name} does not give text back as it went in ({probe!r} became "
                    f"{self.decode(self.encode(probe))!r}); expected a byte-level BPE that neither "
                    "adds spaces nor normalises"
                )


# Each catches one way to lose bytes: a prefix space, stripping, lower case, Unicode normalisation
# (NFC, NFKC), white space runs, and bytes that are not UTF-8.
_PROBES = (
    b"a",
    b" a ",
    b"Ab",
    "é e\u0301 \ufb01 \ufeff😀".encode(),
    b"a  b\r\n\t\n\n  c\x00",
    bytes(range(256)),
)


def train_bpe(
    texts: Iterable[bytes], vocab_size: int, text_bytes: int | None = None
) -> BPETokenizer:
    """A byte-level BPE of `vocab_size` ids trained on texts; the last id is end-of-text.

    text_bytes: of all texts or more, if known. The library sets memory aside for every id it is
    asked for, and ends the process where there is not as much.

    Bytes that are not UTF-8 take no part in the training, but have their tokens like any other.
    A text too small to hold that many different pieces gives fewer ids: read `vocab_size`.
    """
    if vocab_size < MIN_BPE_VOCAB:
        raise ValueError(
            f"vocab_size must be at least {MIN_BPE_VOCAB} (256 bytes and end-of-text), "
            f"got {vocab_size}"
        )
    library = _byte_level(models.BPE())
    most = vocab_size - 1
    if text_bytes is not None:  # each merge makes the text at least a token shorter
        most = min(most, MIN_BPE_VOCAB - 1 + text_bytes)
    trainer = trainers.BpeTrainer(
        vocab_size=most,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    valid = (part for text in texts for part in _parts(text) if isinstance(part, str))
    library.train_from_iterator(valid, trainer)
    library.add_special_tokens([AddedToken(EOT, normalized=False)])
    tokenizer = BPETokenizer(library)
    if tokenizer.vocab_size < vocab_size:
        logger.info("the text gave a BPE of %d tokens, not %d", tokenizer.vocab_size, vocab_size)
    return tokenizer


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Reads a tokenizer.json: one that minitx saved, or any byte-level BPE.

    Truncation, padding and BPE dropout written in the file are switched off, and so is Unicode
    composition (NFC), which would lose bytes; text that is in NFC keeps its ids.

    Raises ValueError, in one line, for a file that is missing, is no tokenizer.json, or cannot
    represent every byte.
    """
    try:
        spec = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise ValueError(f"{path} is not a tokenizer.json: it has no model")
    spec["truncation"] = spec["padding"] = None
    if spec["model"].get("dropout") is not None:
        spec["model"]["dropout"] = None
    if _is_nfc(spec.get("normalizer")):
        logger.info("%s: Unicode composition (NFC) is switched off, it loses bytes", path)
        spec["normalizer"] = None
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    tokenizer = BPETokenizer(library, str(path))
    is_bytes = tokenizer.vocab_size == 257 and np.array_equal(tokenizer._byte_ids, np.arange(256))
    return ByteTokenizer() if is_bytes else tokenizer


def char_boundary(text: bytes, position: int) -> int:
    """The largest index up to `position` that does not cut a UTF-8 character of `text` in two."""
    for back in range(min(4, position + 1)):
        if position - back >= len(text) or text[position - back] & 0xC0 != 0x80:
            return position - back
    return position  # four continuation bytes in a row: not UTF-8, cut anywhere


def _chunks(text: bytes, limit: int) -> Iterator[bytes]:
    """`text` in pieces of `limit` bytes or less, cut at word ends where there are any."""
    start = 0
    while len(text) - start > limit:
        word_end = _WORD_END.match(text, start + limit // 2, start + limit)
        end = word_end.end() if word_end else char_boundary(text, start + limit)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _parts(text: bytes) -> Iterator[str | bytes]:
    """`text` in order, as str where it is valid UTF-8 and as bytes where it is not."""
    for chunk in _chunks(text, CHUNK_BYTES):
        for part in _INVALID.split(chunk.decode("utf-8", "surrogateescape")):
            if part and "\udc80" <= part[0] <= "\udcff":
                yield part.encode("utf-8", "surrogateescape")
            elif part:
                yield part


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    library.decoder = decoders.ByteLevel()  # type: ignore
    return library


def _piece_table(library: tokenizers.Tokenizer, vocab: dict[str, int], eot: int) -> list[bytes]:
    """The bytes of each id. Ids that no token has decode to nothing, and neither does `eot`."""
    pieces = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        try:
            pieces[i] = token.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # not in the byte-level alphabet: it stands for itself
            pieces[i] = token.encode()
    for i, added in library.get_added_tokens_decoder().items():  # so do these
        pieces[i] = added.content.encode()
    pieces[eot] = b""
    return pieces


def _is_nfc(normalizer: Any) -> bool:
    if not isinstance(normalizer, dict):
        return False
    inner = normalizer.get("normalizers")
    if normalizer.get("type") == "Sequence" and isinstance(inner, list):
        return bool(inner) and all(map(_is_nfc, inner))
    return normalizer.get("type") == "NFC"


def _fingerprint(library: tokenizers.Tokenizer, eot: int) -> str:
    """Digest of what decides the ids, in a form that no version of the library's file format
    changes."""
    spec = json.loads(library.to_str())
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"].get("merges", [])]
    vocab = sorted(library.get_vocab(with_added_tokens=True).items())
    decisive = json.dumps([vocab, merges, spec["pre_tokenizer"], eot], sort_keys=True)
    return blake2b(decisive.encode(), digest_size=16).hexdigest()
