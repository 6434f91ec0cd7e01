"""Token files: documents, tokenised once and memory-mapped ever after.

A folder of the cache holds one tokenised corpus:

    train.bin, val.bin              token ids, uint16 where the vocabulary fits, else uint32
    train.offsets, val.offsets      int64: document i is tokens[offsets[i] : offsets[i + 1]]
    tokenizer.json
    meta.json                       counts, dtype, and the size and hash of every other file

It is written beside its place and renamed, under a lock, so a folder that exists is whole and two
processes that start at once tokenise once. A file that has changed since is found by its size or
hash, named in the log, and the folder is made anew.
"""

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock

from minitx.corpus import choose_validation, cut_document
from minitx.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("minitx")

FORMAT = 1  # of the folder and of all that decides its tokens: raise it when either changes
SPLITS = ("train", "val")
# A folder that was begun so long ago is nobody's work any more.
ABANDONED_SECONDS = 24 * 3600
# Documents are encoded in groups of this many bytes: enough to keep every core busy, and some
# 200 MiB of the tokenizers library's bookkeeping at most.
GROUP_BYTES = 4 << 20

Documents = Callable[[], Iterator[bytes]]  # a fresh pass over the corpus at every call


class StaleCacheError(Exception):
    """The cache folder is missing, or a file of it is not what was written."""


@dataclass(frozen=True)
class CorpusIndex:
    """What one pass over the documents learns: uint64 digests [N], int64 sizes [N] in bytes, and
    a hash of the whole text."""

    digests: np.ndarray
    sizes: np.ndarray
    text_hash: str


@dataclass(frozen=True)
class Split:
    """Tokens of one part of a corpus, read-only and memory-mapped."""

    tokens: np.ndarray
    offsets: np.ndarray
    n_docs: int
    n_bytes: int


def index_documents(documents: Documents) -> CorpusIndex:
    """Reads the corpus once, a document in memory at a time."""
    whole = blake2b(digest_size=16)
    digests, sizes = bytearray(), bytearray()
    for document in documents():
        digest = blake2b(document, digest_size=16).digest()
        whole.update(digest)
        digests += digest[:8]
        sizes += len(document).to_bytes(8, "little")
    return CorpusIndex(
        np.frombuffer(digests, dtype="<u8"), np.frombuffer(sizes, dtype="<i8"), whole.hexdigest()
    )


def cache_key(index: CorpusIndex, settings: dict[str, Any]) -> str:
    """Name of the folder for a text and the settings that decide its tokens."""
    decisive = json.dumps([FORMAT, index.text_hash, settings], sort_keys=True)
    return blake2b(decisive.encode(), digest_size=16).hexdigest()


def open_or_build(
    folder: Path,
    documents: Documents,
    index: CorpusIndex,
    val_fraction: float,
    make_tokenizer: Callable[[Iterator[bytes]], Tokenizer],
) -> tuple[dict[str, Split], Tokenizer]:
    """The two splits by name and their tokenizer, from `folder` or made and put there.

    make_tokenizer: called with the training documents when the folder has to be made.
    Raises ValueError, in one line, where the folder cannot be read or written.
    """
    try:
        with contextlib.suppress(StaleCacheError):
            return _open(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            try:
                return _open(folder)  # another process made it while this one waited
            except StaleCacheError as error:
                logger.info("%s", error)
            _build(folder, documents, index, val_fraction, make_tokenizer)
            return _open(folder)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise ValueError(
            f"cannot use the token cache {folder.parent}: {error}; set --data.cache_dir or "
            "MINITX_CACHE_DIR to a folder that can be written"
        ) from error


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer of at least 16 bits that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _build(
    folder: Path,
    documents: Documents,
    index: CorpusIndex,
    val_fraction: float,
    make_tokenizer: Callable[[Iterator[bytes]], Tokenizer],
) -> None:
    for work in folder.parent.glob("*.tmp"):
        if time.time() - work.stat().st_mtime > ABANDONED_SECONDS:  # its process was killed
            shutil.rmtree(work)
    if folder.exists():
        shutil.rmtree(folder)  # damaged, or this would not be called
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        tokenizer = make_tokenizer(
            part for name, part in _split(documents(), index, val_fraction) if name == "train"
        )
        logger.info("tokenising %.1f MB", int(index.sizes.sum()) / 1e6)
        _write(work, _split(documents(), index, val_fraction), tokenizer)
        try:
            os.rename(work, folder)
        except OSError:
            # On a file system whose locks do not reach other machines, one of them may be first.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already unless something went wrong


def _split(
    documents: Iterator[bytes], index: CorpusIndex, val_fraction: float
) -> Iterator[tuple[str, bytes]]:
    """Each document with the split it belongs to. Raises if the text is no longer what was
    indexed: its tokens would be kept under the hash of another text."""
    chosen = choose_validation(index.digests, index.sizes, val_fraction)
    cut = val_fraction > 0 and not chosen.any()  # all documents are equal, or there is one
    changed = ValueError("the text changed while it was being read: start again")
    left = iter(index.digests)
    for i, document in enumerate(documents):
        digest = blake2b(document, digest_size=16).digest()[:8]
        expected = next(left, None)
        if expected is None or digest != expected.tobytes():
            raise changed
        if cut:
            yield from zip(SPLITS, cut_document(document, val_fraction), strict=True)
        else:
            yield SPLITS[int(chosen[i])], document
    if next(left, None) is not None:
        raise changed


def _write(work: Path, documents: Iterator[tuple[str, bytes]], tokenizer: Tokenizer) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(work / f"{name}.bin", "wb")) for name in SPLITS}
        writers = {name: _SplitWriter(files[name], dtype, tokenizer.eot) for name in SPLITS}
        for group in _groups(documents):
            encoded = tokenizer.encode_batch([text for _, text in group])
            for (name, text), ids in zip(group, encoded, strict=True):
                writers[name].add(ids, len(text))
    tokenizer.save(work / "tokenizer.json")
    splits = {name: writer.finish(work / f"{name}.offsets") for name, writer in writers.items()}
    names = sorted(path.name for path in work.iterdir())
    meta = {
        "format": FORMAT,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "splits": splits,
        "files": {name: _stamp(work / name) for name in names},
    }
    stamped = {"meta": meta, "hash": _hash_of_meta(meta)}
    (work / "meta.json").write_text(json.dumps(stamped, indent=1), encoding="utf-8")


def _groups(documents: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    group, size = [], 0
    for named in documents:
        group.append(named)
        size += len(named[1])
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class _SplitWriter:
    """Appends documents to the file of one split, end-of-text before each."""

    def __init__(self, tokens: BinaryIO, dtype: np.dtype, eot: int) -> None:
        self._tokens = tokens
        self._offsets = [0]
        self._dtype, self._eot = dtype, eot
        self._bytes = 0

    def add(self, ids: np.ndarray, n_bytes: int) -> None:
        document = np.concatenate([[self._eot], ids])
        limit = np.iinfo(self._dtype).max
        # numpy's astype wraps without a word: 65536 in 16 bits becomes 0.
        if document.min() < 0 or document.max() > limit:
            raise OverflowError(f"token id {document.max()} does not fit {self._dtype.name}")
        self._tokens.write(document.astype(self._dtype).tobytes())
        self._offsets.append(self._offsets[-1] + len(document))
        self._bytes += n_bytes

    def finish(self, offsets: Path) -> dict[str, int]:
        """Writes where documents begin, and returns the split's sizes."""
        offsets.write_bytes(np.array(self._offsets, dtype="<i8").tobytes())
        return {
            "tokens": self._offsets[-1],
            "documents": len(self._offsets) - 1,
            "bytes": self._bytes,
        }


def _open(folder: Path) -> tuple[dict[str, Split], Tokenizer]:
    try:
        stamped = json.loads((folder / "meta.json").read_bytes())
        meta = stamped["meta"]
        if stamped["hash"] != _hash_of_meta(meta):
            raise StaleCacheError(f"{folder / 'meta.json'} has changed: tokenising again")
        for name, stamp in meta["files"].items():
            if _stamp(folder / name) != stamp:
                raise StaleCacheError(f"{folder / name} is damaged: tokenising again")
        splits = {
            name: Split(
                _map(folder / f"{name}.bin", np.dtype(meta["dtype"])),
                _map(folder / f"{name}.offsets", np.dtype("<i8")),
                counts["documents"],
                counts["bytes"],
            )
            for name, counts in meta["splits"].items()
        }
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StaleCacheError(f"no tokens yet in {folder}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StaleCacheError(f"{folder / 'meta.json'} is damaged: tokenising again") from error
    return splits, load_tokenizer(folder / "tokenizer.json")


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")


def _stamp(path: Path) -> dict[str, Any]:
    """Size and hash. Reading every byte costs less than hashing the text did to find the folder."""
    with open(path, "rb") as file:
        digest = file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
    return {"size": path.stat().st_size, "hash": digest}


def _hash_of_meta(meta: dict[str, Any]) -> str:
    return blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16).hexdigest()
