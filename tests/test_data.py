"""Token files and their cache: what they hold, when they are made again, how they fail."""

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

import minitx.data
import minitx.token_cache
from minitx.data import DataConfig, MissingTextError, cache_folder, documents, load_data
from minitx.tokenizer import ALPHABET, ByteTokenizer, train_bpe


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINITX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def folders(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "tokens").iterdir() if path.is_dir())


# -- token files ----------------------------------------------------------------------------------


def test_the_files_hold_what_they_should(tmp_path):
    root = write(tmp_path / "texts", a=b"aa", b=b"bb", c=b"\xff")
    data = load_data(DataConfig(source=str(root), tokenizer="bytes", val_fraction=0.2))
    # Room for one byte of five: only c fits. End-of-text, 256, stands before each document.
    assert data.train.tolist() == [256, 97, 97, 256, 98, 98]
    assert data.train_doc_offsets.tolist() == [0, 3, 6]
    assert data.val.tolist() == [256, 255]
    assert data.val_doc_offsets.tolist() == [0, 2]
    assert (data.train_docs, data.val_docs, data.n_docs) == (2, 1, 3)
    assert (data.train_bytes, data.val_bytes) == (4, 1)
    for tokens in (data.train, data.val):
        assert isinstance(tokens, np.memmap)
        assert tokens.dtype == np.uint16
        assert not tokens.flags.writeable


def test_every_document_comes_back_from_its_tokens(tmp_path):
    texts = [os.urandom(300), "naïve 😀\r\n".encode() * 9, b"<|endoftext|>", b"x = 1\n" * 400]
    texts += [f"def f_{i}(): pass\n".encode() for i in range(40)]
    root = write(tmp_path / "texts", **{f"{i:02d}": t for i, t in enumerate(texts)})
    config = DataConfig(source=f"{root}/*", vocab_size=270, val_fraction=0.1)
    data = load_data(config)
    found = []
    for tokens, offsets in (
        (data.train, data.train_doc_offsets),
        (data.val, data.val_doc_offsets),
    ):
        for start, end in itertools.pairwise(offsets):
            assert tokens[start] == data.tokenizer.eot
            found.append(data.tokenizer.decode(tokens[start:end]))
    # Random bytes may hold a NUL, which a glob takes for a binary file.
    expected = list(documents(config))
    assert sorted(found) == sorted(expected)
    assert len(expected) >= len(texts) - 1
    assert data.val_docs > 0


def test_one_file_has_its_end_for_validation(tmp_path):
    file = write(tmp_path, x=b"line\n" * 20) / "x"
    data = load_data(DataConfig(source=str(file), tokenizer="bytes", val_fraction=0.1))
    assert data.tokenizer.decode(data.train) == b"line\n" * 18
    assert data.tokenizer.decode(data.val) == b"line\n" * 2


def test_no_validation_part_when_none_is_asked_for(tmp_path):
    file = write(tmp_path, x=b"abc") / "x"
    data = load_data(DataConfig(source=str(file), tokenizer="bytes", val_fraction=0))
    assert data.train.tolist() == [256, 97, 98, 99]
    assert (len(data.val), data.val_docs, data.val_doc_offsets.tolist()) == (0, 0, [0])


def tokenizer_beyond_16_bits(path: Path) -> None:
    """ "ab" is 65536, "cd" is 70000; 65536 and 70000 in 16 bits would be 0 and 4464."""
    vocab = {character: i for i, character in enumerate(ALPHABET)}
    vocab |= {f"filler{i}": i for i in range(256, 70_000) if i != 65_536}
    vocab |= {"ab": 65_536, "cd": 70_000}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("c", "d")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens([AddedToken("</s>")])
    library.save(str(path))


def test_ids_beyond_16_bits_do_not_wrap(tmp_path):
    tokenizer_beyond_16_bits(tmp_path / "tokenizer.json")
    file = write(tmp_path, x=b"abcd") / "x"
    config = DataConfig(str(file), str(tmp_path / "tokenizer.json"), val_fraction=0)
    data = load_data(config)
    assert data.train.dtype == np.uint32
    assert data.train.tolist() == [70_001, 65_536, 70_000]
    assert data.tokenizer.decode(data.train) == b"abcd"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_largest_id_decides_the_dtype(vocab_size, dtype):
    assert minitx.token_cache.token_dtype(vocab_size) == np.dtype(dtype)


def test_an_id_too_large_for_the_file_is_refused():
    writer = minitx.token_cache._SplitWriter(io.BytesIO(), np.dtype("<u2"), eot=0)
    with pytest.raises(OverflowError, match="token id 65536 does not fit uint16"):
        writer.add(np.array([65_536]), 1)


# -- the cache ------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch) -> list[int]:
    """The vocabulary sizes of every BPE trained, in order."""
    sizes = []

    def train(texts, vocab_size, text_bytes):
        sizes.append(vocab_size)
        return train_bpe(texts, vocab_size, text_bytes)

    monkeypatch.setattr(minitx.data, "train_bpe", train)
    return sizes


@pytest.fixture
def texts(tmp_path) -> Path:
    words = {f"{i}.txt": b"some words of text %d\n" % i * (i + 1) for i in range(12)}
    return write(tmp_path / "texts", **words)


def test_a_second_load_trains_and_writes_nothing(texts, cache, trained):
    config = DataConfig(source=str(texts), vocab_size=260)
    first = load_data(config)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    second = load_data(config)
    assert trained == [260]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert second.train.tolist() == first.train.tolist()
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert not list(cache.rglob("*.tmp"))


def test_only_training_documents_train_the_tokenizer(texts, monkeypatch):
    seen = []

    def train(documents, vocab_size, text_bytes):
        seen.extend(documents)
        return train_bpe(seen, vocab_size, text_bytes)

    monkeypatch.setattr(minitx.data, "train_bpe", train)
    data = load_data(DataConfig(source=str(texts), vocab_size=260, val_fraction=0.3))
    assert b"".join(seen) == data.tokenizer.decode(data.train)
    assert data.val_bytes > 0


def test_a_given_tokenizer_takes_the_place_of_the_settings(texts, trained):
    data = load_data(DataConfig(source=str(texts)), ByteTokenizer())
    assert isinstance(data.tokenizer, ByteTokenizer)
    assert len(data.train) == data.train_bytes + data.train_docs
    assert trained == []


def test_whatever_changes_the_tokens_changes_the_place(texts, cache, tmp_path):
    source = str(texts)
    base = DataConfig(source=source, vocab_size=260)
    load_data(base)
    load_data(DataConfig(source=f"{source}/*.txt", vocab_size=260))  # the same text: the same place
    load_data(DataConfig(source=source, vocab_size=260, max_bytes=10**9))
    assert len(folders(cache)) == 1
    load_data(DataConfig(source=source, tokenizer="bytes"))
    load_data(DataConfig(source=source, tokenizer="bytes", vocab_size=999))  # not its setting
    assert len(folders(cache)) == 2
    others = [
        DataConfig(source=source, vocab_size=261),
        DataConfig(source=source, vocab_size=260, val_fraction=0.3),
        DataConfig(source=source, vocab_size=260, max_bytes=1000),
    ]
    for i, config in enumerate(others):
        load_data(config)
        assert len(folders(cache)) == 3 + i
    (texts / "3.txt").write_bytes(b"edited")
    edited = load_data(base)
    assert b"edited" in edited.tokenizer.decode([*edited.train, *edited.val])
    assert len(folders(cache)) == 6


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flip": flip,
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 2),
    "delete": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize(
    "name",
    ["train.bin", "val.bin", "train.offsets", "val.offsets", "tokenizer.json", "meta.json"],
)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_noticed_and_made_again(name, damage, texts, cache, caplog):
    config = DataConfig(source=str(texts), vocab_size=258, val_fraction=0.2)
    good = load_data(config)
    expected = (good.train.tolist(), good.val.tolist(), good.val_doc_offsets.tolist())
    (folder,) = folders(cache)
    DAMAGE[damage](folder / name)
    with caplog.at_level("INFO", "minitx"):
        again = load_data(config)
    assert (again.train.tolist(), again.val.tolist(), again.val_doc_offsets.tolist()) == expected
    if damage != "delete":
        assert f"{name} " in caplog.text
    assert load_data(config).train.tolist() == expected[0]


def test_wrong_counts_in_the_side_file_are_noticed(texts, cache):
    config = DataConfig(source=str(texts), vocab_size=258)
    expected = load_data(config).train_bytes
    (folder,) = folders(cache)
    stamped = json.loads((folder / "meta.json").read_text())
    stamped["meta"]["splits"]["train"]["bytes"] += 1
    (folder / "meta.json").write_text(json.dumps(stamped))
    assert load_data(config).train_bytes == expected


def test_a_build_that_fails_or_was_killed_leaves_nothing(texts, cache, monkeypatch):
    config = DataConfig(source=str(texts), vocab_size=258)
    load_data(config)
    (folder,) = folders(cache)
    killed = write(cache / "tokens" / "0123.abc.tmp", **{"train.bin": b"half"})
    os.utime(killed, (0, 0))
    at_work = write(cache / "tokens" / "0123.def.tmp", **{"train.bin": b"half"})
    (folder / "meta.json").unlink()

    def fail(*_):
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(minitx.token_cache, "_write", fail)
        with pytest.raises(ValueError, match="no"):
            load_data(config)
    with monkeypatch.context() as patch:  # with files open, whose close is a warning if forgotten
        patch.setattr(minitx.token_cache._SplitWriter, "add", fail)
        with pytest.raises(ValueError, match="no"):
            load_data(config)
    assert list(cache.rglob("*.tmp")) == [at_work]
    assert load_data(config).train_docs > 0


def test_another_machine_may_be_first(texts, cache, monkeypatch):
    write_tokens = minitx.token_cache._write

    def write_twice(work, *arguments):
        write_tokens(work, *arguments)
        shutil.copytree(work, work.parent / work.name.split(".")[0])

    monkeypatch.setattr(minitx.token_cache, "_write", write_twice)
    assert load_data(DataConfig(source=str(texts), vocab_size=258)).train_docs > 0
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("second_pass", [[b"ax", b"c"], [b"ab"], [b"ab", b"c", b"d"]])
def test_a_text_that_changes_while_it_is_read_is_refused(second_pass, cache, monkeypatch):
    passes = iter([[b"ab", b"c"], second_pass])
    monkeypatch.setattr(minitx.data, "documents", lambda _: iter(next(passes)))
    with pytest.raises(ValueError, match="the text changed while it was being read"):
        load_data(DataConfig(vocab_size=257))
    assert not folders(cache)


LOAD = """
import sys, minitx.data as data
train = data.train_bpe
def counted(*arguments):
    with open(sys.argv[2], "a") as log:
        log.write("trained\\n")
    return train(*arguments)
data.train_bpe = counted
print("ready", flush=True)
sys.stdin.readline()
loaded = data.load_data(data.DataConfig(sys.argv[1], vocab_size=400, val_fraction=0.2))
text = loaded.tokenizer.decode(loaded.train) + loaded.tokenizer.decode(loaded.val)
print(len(loaded.train), len(text), text.hex()[:40], ascii(text.decode()[-1]))
"""


def test_two_processes_at_once_do_the_work_once_whatever_the_locale(tmp_path):
    file = write(tmp_path, x="naïve words 😀".encode() * 5000) / "x"
    log = tmp_path / "log"
    # A locale without UTF-8: text is bytes, so it makes no difference.
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", LOAD, str(file), str(log)]
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        for _ in range(2)
    ]
    for process in both:  # imported, and waiting for the start
        assert process.stdout.readline() == "ready\n"
    results = []
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        results.append(process.communicate()[0])
        assert process.returncode == 0
    assert results[0] == results[1]
    assert results[0].split()[1] == str(len(file.read_bytes()))
    assert "'\\U0001f600'" in results[0]
    assert log.read_text() == "trained\n"


def test_an_unwritable_cache_is_one_line_that_names_the_setting(texts, tmp_path):
    (tmp_path / "file").touch()
    config = DataConfig(source=str(texts), vocab_size=257, cache_dir=str(tmp_path / "file" / "x"))
    with pytest.raises(ValueError, match=r"^cannot use the token cache .*/file/x/tokens") as e:
        load_data(config)
    assert "set --data.cache_dir or MINITX_CACHE_DIR" in str(e.value)
    assert "\n" not in str(e.value)


def test_the_cache_folder_by_precedence(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("MINITX_CACHE_DIR", "/mine")
    assert cache_folder("~/there") == Path("/home/someone/there")
    assert cache_folder() == Path("/mine")
    monkeypatch.delenv("MINITX_CACHE_DIR")
    assert cache_folder() == Path("/xdg/minitx")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/someone/.cache/minitx")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nobody's home is known
    with pytest.raises(ValueError, match=r"no home folder .* set --data.cache_dir"):
        cache_folder()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val_fraction": 1.0}, r"^val_fraction must be at least 0 and below 1, got 1.0$"),
        ({"val_fraction": -0.1}, r"^val_fraction must be .* got -0.1$"),
        ({"vocab_size": 256}, r"^vocab_size must be at least 257 .* got 256$"),
        ({"max_bytes": 0}, r"^max_bytes must be at least 1, got 0$"),
        ({"tokenizer": "bpf"}, r"^unknown tokenizer 'bpf'; expected bytes, bpe or the path"),
    ],
)
def test_settings_out_of_range(settings, message, texts):
    with pytest.raises(ValueError, match=message):
        load_data(DataConfig(source=str(texts), **settings))


def test_no_text_leaves_no_cache(tmp_path, cache):
    with pytest.raises(MissingTextError, match="no such file or folder"):
        load_data(DataConfig(source=str(tmp_path / "nowhere")))
    assert not cache.exists()


def test_max_bytes_limits_the_tokens(texts):
    data = load_data(DataConfig(source=str(texts), tokenizer="bytes", max_bytes=100))
    assert data.train_bytes + data.val_bytes == 100
