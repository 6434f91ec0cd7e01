"""Where documents come from, and which of them are for validation."""

import os
import sys
import sysconfig
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minitx.corpus
from minitx.corpus import MissingTextError, choose_validation, cut_document, read_documents
from minitx.token_cache import index_documents


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


# -- where text comes from ------------------------------------------------------------------------


def test_a_file_is_one_document_byte_for_byte(tmp_path):
    text = b"\xef\xbb\xbfa\r\nit\x92s \x00 \xf0\x9f\x98\x80\n"
    file = write(tmp_path, x=text) / "x"
    assert list(read_documents(str(file))) == [text]


def test_a_folder_is_its_text_files_in_order(tmp_path):
    root = write(tmp_path / "texts", b=b"B", empty=b"", picture=b"\x89PNG\x00\x1a")
    write(root, **{".hidden": b"no", "a-file": b"A"})
    write(root / ".git", config=b"no")
    write(root / "a", z=b"Z")
    (root / "dangling").symlink_to(root / "nowhere")
    # Sorted by the parts of the path, whatever its separator: "a" before "a-file".
    assert list(read_documents(str(root))) == [b"Z", b"A", b"B"]


def test_a_glob_is_what_it_matches(tmp_path):
    root = write(tmp_path / "texts", **{"b.md": b"B", "a.md": b"A", "c.txt": b"C"})
    write(root / "deep", **{"d.md": b"D", "e.md": b"\x00"})
    assert list(read_documents(f"{root}/*.md")) == [b"A", b"B"]
    assert list(read_documents(f"{root}/**/*.md")) == [b"A", b"B", b"D"]


def test_a_name_that_looks_like_a_glob_but_exists_is_a_file(tmp_path):
    write(tmp_path, **{"x[1].txt": b"one", "x1.txt": b"other"})
    assert list(read_documents(str(tmp_path / "x[1].txt"))) == [b"one"]


def test_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, **{"x.txt": b"text"})
    assert list(read_documents("~/x.txt")) == [b"text"]


def test_stdlib_is_the_interpreters_own_library():
    root = Path(sysconfig.get_path("stdlib"))
    folders = [p for p in root.iterdir() if p.name not in ("site-packages", "dist-packages")]
    paths = [*root.glob("*.py"), *(path for f in folders for path in f.rglob("*.py"))]
    expected = {path.read_bytes() for path in paths}
    found = list(read_documents("stdlib"))
    assert set(found) == expected - {b""}
    assert found[0] == (root / "__future__.py").read_bytes()
    assert (root / "json" / "decoder.py").read_bytes() in found
    assert found == list(read_documents("stdlib"))


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (1, [b"a"]),
        (3, [b"abc"]),  # exactly one document: the next is not begun
        (4, [b"abc", b"d"]),
        (6, [b"abc", b"de"]),  # a cut inside é goes before it
        (7, [b"abc", "deé".encode()]),
        (99, [b"abc", "deé".encode()]),
    ],
)
def test_max_bytes_stops_reading(max_bytes, expected, tmp_path):
    root = write(tmp_path / "texts", a=b"abc", b="deé".encode())
    assert list(read_documents(str(root), max_bytes)) == expected


def test_max_bytes_reads_no_more_of_a_huge_file(tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)  # a terabyte of holes: reading it whole would not end well
    assert list(read_documents(str(tmp_path / "huge"), 10)) == [b"\0" * 10]


def one_line(caught: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "no such file or folder: .*nowhere.txt .*stdlib, a file, a folder"),
        ("nowhere/*.txt", r"no text in the glob .*nowhere/\*.txt: 0 files"),
        ("empty.txt", "empty.txt is empty"),
        ("empty-folder", "no text in the folder .*empty-folder: 0 files"),
        ("binaries", "no text in the folder .*binaries: 3 files, 2 of them binary"),
        ("pipe", "pipe is neither a file nor a folder"),
    ],
)
def test_no_text_is_one_clear_line(source, message, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty-folder").mkdir()
    write(tmp_path / "binaries", x=b"\0", y=b"\x7fELF\0", z=b"")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MissingTextError, match=message) as caught:
        list(read_documents(str(tmp_path / source)))
    one_line(caught)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    write(tmp_path, **{"x.txt": b"text"})

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(minitx.corpus, "open", refuse, raising=False)
    with pytest.raises(MissingTextError, match=r"^cannot read .*x.txt: Permission denied$"):
        list(read_documents(str(tmp_path)))


class FakeRows:
    column_names = ("text", "body", "none")

    def select_columns(self, names):
        (self.name,) = names
        return self

    def iter(self, batch_size):
        columns = {"text": ["a", None, "", "é"], "body": ["b"], "none": [""]}
        yield {self.name: columns[self.name]}


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the datasets library that records what it was asked."""
    asked = []

    class DatasetsError(Exception):
        pass

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        if name == "lost":
            raise FileNotFoundError("Dataset 'lost' doesn't exist\nand so on")
        if name == "broken":
            raise DatasetsError
        return FakeRows()

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    fake.exceptions = types.SimpleNamespace(DatasetsError=DatasetsError)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


@pytest.mark.parametrize(
    ("source", "asked", "expected"),
    [
        ("hf:org/name", ("org/name", None, "train"), [b"a", "é".encode()]),
        ("hf:name:config:test", ("name", "config", "test"), [b"a", "é".encode()]),
        ("hf:name:::body", ("name", None, "train"), [b"b"]),
    ],
)
def test_a_named_corpus(source, asked, expected, hub):
    assert list(read_documents(source)) == expected
    assert hub == [asked]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:lost", r"\(minitx\[data\]\) cannot load hf:lost: Dataset 'lost' doesn't exist$"),
        ("hf:broken", r"cannot load hf:broken: DatasetsError$"),
        ("hf:name:::nope", r"has no column 'nope'; it has text, body, none$"),
        ("hf:name:::none", r"no text in column 'none' of hf:name"),
        ("hf:", r"^expected hf:NAME"),
        ("hf:a:b:c:d:e", r"^expected hf:NAME"),
    ],
)
def test_a_named_corpus_that_cannot_be_had(source, message, hub):
    with pytest.raises(ValueError, match=message) as caught:
        list(read_documents(source))
    one_line(caught)


def test_a_named_corpus_without_the_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingTextError, match=r"pip install 'minitx\[data\]'$"):
        list(read_documents("hf:org/name"))


# -- which documents are for validation -----------------------------------------------------------


def digests_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_the_split_goes_by_hash_as_long_as_it_fits():
    # Room for 50 of 1000 bytes. In order of hash: 30 fits, 25 does not, 20 does, 10 does not.
    digests = digests_of(9, 2, 1, 3, 4)
    sizes = np.array([915, 25, 30, 20, 10])
    assert choose_validation(digests, sizes, 0.05).tolist() == [False, False, True, True, False]


# A busy machine is no fault of the split.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=60),
    fraction=st.floats(0.001, 0.9),
    data=st.data(),
)
def test_the_split_keeps_its_promises(sizes, fraction, data):
    n = len(sizes)
    digests = digests_of(*data.draw(st.lists(st.integers(0, n), min_size=n, max_size=n)))
    sizes = np.array(sizes)
    chosen = choose_validation(digests, sizes, fraction)
    # Equal documents are on one side, so no validation text was trained on.
    assert not set(digests[chosen].tolist()) & set(digests[~chosen].tolist())
    if len(set(digests.tolist())) < 2:
        assert not chosen.any()
        return
    assert 0 < chosen.sum() < n
    groups = {d: sizes[digests == d].sum() for d in digests.tolist()}
    assert sizes[chosen].sum() <= max(fraction * sizes.sum(), min(groups.values()))
    order = np.array(data.draw(st.permutations(range(n))))
    assert choose_validation(digests[order], sizes[order], fraction).tolist() == (
        chosen[order].tolist()
    )


def test_one_document_is_cut_at_a_line_break():
    assert cut_document(b"line\n" * 20, 0.1) == (b"line\n" * 18, b"line\n" * 2)
    assert cut_document(b"line\n" * 20, 0.11) == (b"line\n" * 17, b"line\n" * 3)
    assert cut_document("é".encode() * 10, 0.25) == ("é".encode() * 7, "é".encode() * 3)


def test_growing_a_corpus_leaves_documents_where_they_were():
    def validation(count: int) -> set[int]:
        names = [f"document {i} " * (i % 7 + 1) for i in range(count)]
        index = index_documents(lambda: iter([n.encode() for n in names]))
        return set(np.flatnonzero(choose_validation(index.digests, index.sizes, 0.1)).tolist())

    before, after = validation(1000), validation(1010)
    assert 60 < len(before) < 140
    assert len(before ^ {i for i in after if i < 1000}) <= 4
