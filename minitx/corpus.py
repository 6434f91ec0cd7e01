"""Text as documents: where they come from, and which of them are for validation.

Documents are bytes, as they lie on disk: nothing is decoded, so the locale plays no part and bytes
that are not UTF-8 are kept.
"""

import logging
import os
import sysconfig
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

import numpy as np

from minitx.tokenizer import char_boundary

logger = logging.getLogger("minitx")

# Looked at for a NUL byte, which text has no use for and nearly every binary format starts with;
# git tells binary files from text in the same way.
BINARY_PROBE_BYTES = 8000
# How far before the wanted place a line break is looked for when a document is cut in two.
LINE_BREAK_SEARCH_BYTES = 4096


class MissingTextError(ValueError):
    """There is no text where it was looked for; the message says what to change."""


def read_documents(source: str, max_bytes: int | None = None) -> Iterator[bytes]:
    """The documents of a corpus, in an order that does not depend on the machine.

    Args:
        source: one of
            "stdlib": every *.py of the running Python's standard library, its tests included
                (more than half of it, and real text), packages installed beside it excluded;
            a file: one document, whatever its bytes;
            a folder: every file below it that is not hidden and not binary, a document each, in
                order of path;
            a glob ("texts/**/*.md"): the same for what it matches;
            "hf:NAME[:CONFIG[:SPLIT[:TEXT_COLUMN]]]": a corpus that the datasets library fetches;
                split "train" and column "text" unless given.
        max_bytes: stop after so many bytes; the document that goes beyond is cut.

    Empty documents are left out. Raises MissingTextError, at the first document asked for, when
    there is nothing to read.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    left = max_bytes
    for document in _all_documents(source, max_bytes):
        if left is not None and len(document) >= left:
            if beginning := document[: char_boundary(document, left)]:
                yield beginning
            return
        yield document
        if left is not None:
            left -= len(document)


def _all_documents(source: str, max_bytes: int | None) -> Iterator[bytes]:
    """As `read_documents`; no more than max_bytes + 1 of any one file is read."""
    limit = -1 if max_bytes is None else max_bytes + 1
    path = Path(os.path.expanduser(source))
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _files_below(root) if f.suffix == ".py"]
        yield from _texts(files, f"the standard library in {root}", limit)
    elif source.startswith("hf:"):
        yield from _hub_texts(source)
    elif path.is_file():
        document = _read(path, limit)
        if not document:
            raise MissingTextError(f"{path} is empty: give --data.source a file with text")
        yield document
    elif path.is_dir():
        yield from _texts(_files_below(path), f"the folder {path}", limit)
    elif path.exists():
        raise MissingTextError(f"{path} is neither a file nor a folder: give --data.source one")
    elif has_magic(source):
        matches = sorted(glob(str(path), recursive=True))
        files = [file for match in matches if (file := Path(match)).is_file()]
        yield from _texts(files, f"the glob {source}", limit)
    else:
        raise MissingTextError(
            f"no such file or folder: {source} (--data.source takes stdlib, a file, a folder, "
            "a glob or hf:NAME)"
        )


def _files_below(root: Path) -> list[Path]:
    """Regular files under a folder, sorted; hidden ones and installed packages left out."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and name not in ("site-packages", "dist-packages")
        ]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(
        (path for path in found if path.is_file()), key=lambda path: path.relative_to(root).parts
    )


def _texts(files: list[Path], where: str, limit: int) -> Iterator[bytes]:
    binary: list[Path] = []
    some = False
    for path in files:
        document = _read(path, limit)
        if b"\0" in document[:BINARY_PROBE_BYTES]:
            binary.append(path)
        elif document:
            some = True
            yield document
    if binary:
        logger.info("%s: left out %d binary files (%s, ...)", where, len(binary), binary[0])
    if not some:
        raise MissingTextError(
            f"no text in {where}: {len(files)} files, {len(binary)} of them binary, the others "
            "empty; hidden files do not count"
        )


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise MissingTextError(f"cannot read {path}: {error.strerror or error}") from error


def _hub_texts(source: str) -> Iterator[bytes]:
    fields = source.removeprefix("hf:").split(":")
    if len(fields) > 4 or not fields[0]:
        raise ValueError(f"expected hf:NAME[:CONFIG[:SPLIT[:TEXT_COLUMN]]], got {source}")
    name, config, split, column = fields + [""] * (4 - len(fields))
    split, column = split or "train", column or "text"
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingTextError(
            f"{source} needs the package datasets: pip install 'minitx[data]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MissingTextError(
            f"datasets (minitx[data]) cannot load {source}: {reason or type(error).__name__}"
        ) from error
    if column not in rows.column_names:
        raise MissingTextError(
            f"{source} has no column '{column}'; it has {', '.join(rows.column_names)}"
        )
    some = False
    for batch in rows.select_columns([column]).iter(batch_size=1000):
        for text in batch[column]:
            if text:
                some = True
                yield text.encode("utf-8")
    if not some:
        raise MissingTextError(f"no text in column '{column}' of {source}")


def choose_validation(digests: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are for validation, bool [N].

    Whole documents, in order of their hash, each taken if the total stays within
    `fraction` of the bytes. It depends on what the documents hold, not on their order or names;
    adding documents moves few others. Equal documents go together, so that none of the
    validation text is a training document too. Where no document is small enough, the smallest is
    taken. Where all documents are equal (or there is one) none is: `cut_document` makes two of it.

    Args:
        digests: uint64 [N], a hash of each document.
        sizes: int64 [N], its bytes.
        fraction: of all bytes, in [0, 1).
    """
    chosen = np.zeros(len(digests), dtype=bool)
    distinct, group = np.unique(digests, return_inverse=True)
    if fraction == 0 or len(distinct) < 2:
        return chosen
    group_sizes = np.bincount(group, weights=sizes).astype(np.int64)
    room = int(fraction * int(sizes.sum()))
    taken = np.zeros(len(distinct), dtype=bool)
    for i, size in enumerate(group_sizes.tolist()):
        if size <= room:
            taken[i] = True
            room -= size
    if not taken.any():
        taken[np.argmin(group_sizes)] = True
    return taken[group]


def cut_document(document: bytes, fraction: float) -> tuple[bytes, bytes]:
    """The one document of a corpus as a training and a validation part: the last `fraction` of its
    bytes, from the line break before."""
    wanted = char_boundary(document, round(len(document) * (1 - fraction)))
    line_break = document.rfind(b"\n", max(0, wanted - LINE_BREAK_SEARCH_BYTES), wanted)
    cut = line_break + 1 if line_break > 0 else wanted
    return document[:cut], document[cut:]
