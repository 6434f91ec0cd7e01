"""Bytes in, the same bytes out; and the ids that the tokenizers library gives for the same text."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import minitx.tokenizer
from minitx.tokenizer import (
    ALPHABET,
    ByteTokenizer,
    Tokenizer,
    _chunks,
    load_tokenizer,
    train_bpe,
)

TEXT = b"def encode(text):\n    return [text[i] for i in range(len(text))]\n\n" * 20

AWKWARD = {
    "empty": b"",
    "bom": b"\xef\xbb\xbfx = 1\n",
    "crlf": b"a\r\nb\r\n\r\n  c\r",
    "nul": b"\x00a\x00\x00b",
    "emoji": "naïve 😀👩‍👩‍👧 e\u0301 \u00e9".encode(),
    "windows quote": b"it\x92s",
    "half an emoji": b"x\xf0\x9f\x98 y",
    "encoded surrogate": b"\xed\xb2\x80",
    "overlong": b"\xc0\xaf",
    "every byte": bytes(range(256)) * 2,
    "special token": b"a<|endoftext|>b",
    "white space": b" \t\n  \n\n x   ",
}


def llama3_like() -> tokenizers.Tokenizer:
    """A byte-level BPE with another pre-tokenizer than ours, as published models have."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    library = json.loads(train_bpe([TEXT], 300)._library.to_str())
    library["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }
    return tokenizers.Tokenizer.from_str(json.dumps(library))


def saved(library: tokenizers.Tokenizer, tmp_path) -> str:
    path = str(tmp_path / "tokenizer.json")
    library.save(path)
    return path


@pytest.fixture(scope="module", params=["bytes", "bpe", "llama3"])
def tokenizer(request) -> Tokenizer:
    match request.param:
        case "bytes":
            return ByteTokenizer()
        case "bpe":
            return train_bpe([TEXT], 300)
    return minitx.tokenizer.BPETokenizer(llama3_like())


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_bytes_come_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_counts[ids].sum() == len(text)
    assert tokenizer.eot not in ids


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(lambda t: t.encode())))
def test_any_bytes_come_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.binary(max_size=40), max_size=5))
def test_a_batch_is_its_texts_one_by_one(tokenizer, texts):
    batch = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(t).tolist() for t in texts]


def test_byte_ids_are_the_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(b"A\xff\x00").tolist() == [65, 255, 0]
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([256, 65, 256]) == b"A"


def test_the_alphabet_is_the_librarys():
    # Order matters and the library gives a set, so each byte is checked by itself too: Latin-1
    # bytes that print stand for themselves, and the space is the famous Ġ.
    assert set(ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (ALPHABET[0x20], ALPHABET[0x0A], ALPHABET[0x41], ALPHABET[0xAD]) == ("Ġ", "Ċ", "A", "Ń")


@pytest.mark.parametrize(
    "text", ["def f(x):\n        return x", "naïve 😀 42's\n", "a\r\n\r\nb  c"]
)
def test_valid_text_has_the_librarys_own_ids(tokenizer, text, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    library = tokenizers.Tokenizer.from_file(str(path))
    assert tokenizer.encode(text.encode()).tolist() == library.encode(text).ids


def test_invalid_bytes_are_single_tokens_between_the_librarys():
    tokenizer = train_bpe([TEXT], 300)
    ids = tokenizer.encode(b"return\xff\xfereturn")
    word = tokenizer.encode(b"return").tolist()
    ff, fe = (tokenizer._library.token_to_id(ALPHABET[b]) for b in (0xFF, 0xFE))
    assert ids.tolist() == [*word, ff, fe, *word]
    assert len(word) < 6  # it was merged, so the test sees more than bytes


def test_bpe_has_the_size_asked_for_and_end_of_text_last():
    tokenizer = train_bpe([TEXT], 290)
    assert (tokenizer.vocab_size, tokenizer.eot) == (290, 289)
    assert tokenizer.decode([tokenizer.eot]) == b""
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2  # and it does merge


def test_bpe_of_little_text_is_smaller_and_says_so(caplog):
    with caplog.at_level("INFO", "minitx"):
        tokenizer = train_bpe([b"ab ab ab"], 1000)
    assert tokenizer.vocab_size < 300
    assert f"a BPE of {tokenizer.vocab_size} tokens, not 1000" in caplog.text


def test_no_more_ids_are_asked_for_than_a_text_can_fill(monkeypatch):
    """For each the library sets memory aside; 10**9 of them ended the process."""
    asked = []
    make = trainers.BpeTrainer

    def recording(vocab_size, **settings):
        asked.append(vocab_size)
        return make(vocab_size=min(vocab_size, 1000), **settings)

    monkeypatch.setattr(trainers, "BpeTrainer", recording)
    texts = [b"ab ab ab", b"a"]
    tokenizer = train_bpe(texts, 10**9, sum(map(len, texts)))
    assert asked == [256 + 9]
    assert tokenizer.vocab_size == train_bpe(texts, 1000).vocab_size
    # As it comes from a text that is full of different pieces: each merge has room.
    assert train_bpe([TEXT], 300, len(TEXT)).fingerprint == train_bpe([TEXT], 300).fingerprint


def test_bpe_refuses_less_than_the_bytes():
    assert train_bpe([TEXT], 257).vocab_size == 257
    with pytest.raises(ValueError, match=r"^vocab_size must be at least 257 .* got 256$"):
        train_bpe([TEXT], 256)


def test_the_same_text_trains_the_same_bpe():
    a, b, other = train_bpe([TEXT], 300), train_bpe([TEXT], 300), train_bpe([TEXT[:99]], 290)
    assert a.fingerprint == b.fingerprint != other.fingerprint
    assert a._library.to_str() == b._library.to_str()


def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = Tokenizer.load(path)
    assert type(again) is type(tokenizer)
    assert (again.fingerprint, again.eot, again.vocab_size) == (
        tokenizer.fingerprint,
        tokenizer.eot,
        tokenizer.vocab_size,
    )
    for text in AWKWARD.values():
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("limit", [48, 100, 999])
@pytest.mark.parametrize("kind", ["bpe", "llama3"])
def test_long_texts_have_the_same_ids_in_pieces(kind, limit, monkeypatch):
    # A cut in the wrong place (before a line break after white space, inside a word) changes the
    # ids next to it.
    text = TEXT + TEXT.replace(b"\n", b"\r\n") + b"one two  three\n\n\n   four 's " * 20
    library = llama3_like() if kind == "llama3" else train_bpe([TEXT], 300)._library
    tokenizer = minitx.tokenizer.BPETokenizer(library)
    whole = tokenizer.encode(text).tolist()
    monkeypatch.setattr(minitx.tokenizer, "CHUNK_BYTES", limit)
    pieces = list(_chunks(text, limit))
    assert len(pieces) >= len(text) // limit
    assert b"".join(pieces) == text
    assert max(map(len, pieces)) <= limit
    assert tokenizer.encode(text).tolist() == whole


def test_a_piece_without_word_ends_is_cut_between_characters():
    pieces = list(_chunks("😀".encode() * 50, 10))
    assert {len(piece) for piece in pieces} == {8}
    assert list(_chunks(b"\x80" * 25, 10)) == [b"\x80" * 10, b"\x80" * 10, b"\x80" * 5]


@pytest.mark.parametrize("as_what", [list, np.array, torch.tensor])
def test_decode_takes_any_ids_and_refuses_strange_ones(tokenizer, as_what):
    ids = tokenizer.encode(b"return x").tolist()
    assert tokenizer.decode(as_what(ids)) == b"return x"
    n = tokenizer.vocab_size
    with pytest.raises(ValueError, match=rf"^ids must be from 0 to {n - 1}, got from 1 to {n}$"):
        tokenizer.decode(as_what([1, n]))
    with pytest.raises(ValueError, match=r"got from -1 to 2$"):
        tokenizer.decode(as_what([-1, 2]))


def test_what_would_lose_text_is_switched_off(tmp_path):
    library = train_bpe([TEXT], 300)._library
    library.normalizer = normalizers.Sequence([normalizers.NFC()])
    library.enable_truncation(3)
    library.enable_padding(length=64)
    library.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", library.get_vocab_size() - 1)]
    )
    tokenizer = load_tokenizer(saved(library, tmp_path))
    text = "e\u0301 and more than three tokens".encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(b"a")) == 1


def test_a_special_tokens_text_is_text_and_other_specials_decode_to_themselves(tmp_path):
    library = train_bpe([TEXT], 300)._library
    library.add_special_tokens([AddedToken("<|im start é|>")])
    tokenizer = load_tokenizer(saved(library, tmp_path))
    text = "<|im start é|><|endoftext|>".encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).max() < tokenizer.eot
    assert tokenizer.decode([tokenizer.eot + 1]) == "<|im start é|>".encode()


def test_a_word_that_was_added_as_text_is_found_in_text(tmp_path):
    library = train_bpe([TEXT], 300)._library
    library.add_tokens(["é-é"])
    tokenizer = load_tokenizer(saved(library, tmp_path))
    ids = tokenizer.encode("né-én".encode())
    assert tokenizer.eot + 1 in ids
    assert tokenizer.decode(ids) == "né-én".encode()


def without_eot() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))


def with_change(**changes) -> tokenizers.Tokenizer:
    library = train_bpe([TEXT], 300)._library
    for name, value in changes.items():
        setattr(library, name, value)
    return library


def without_a_byte() -> tokenizers.Tokenizer:
    vocab = {c: i for i, c in enumerate(ALPHABET) if i not in (7, 9)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.add_special_tokens(["</s>"])
    return library


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_eot, r"has no end-of-text token; expected one of <\|endoftext\|>"),
        (without_a_byte, r"no token for byte 0x07, 2 in all"),
        (lambda: with_change(normalizer=normalizers.Lowercase()), r"b'Ab' became b'ab'"),
        (lambda: with_change(normalizer=normalizers.NFKC()), r"does not give text back"),
        (
            lambda: with_change(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
            r"b'a' became b' a'",
        ),
        (
            lambda: with_change(pre_tokenizer=pre_tokenizers.Split(Regex(r"\s"), "removed")),
            r"does not give text back",
        ),
    ],
    ids=["no end", "lacks bytes", "lower case", "nfkc", "prefix space", "no spaces"],
)
def test_a_tokenizer_that_loses_text_is_refused(make, message, tmp_path):
    path = saved(make(), tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the tokenizer .*: No such file or directory"),
        (b"\xff\xfe", "is not a tokenizer.json"),
        (b"[1]", "is not a tokenizer.json: it has no model"),
        (b'{"model": {"type": "BPE"}}', "is not a tokenizer.json: Missing vocab/merges"),
    ],
    ids=["missing", "not text", "no model", "no vocabulary"],
)
def test_what_is_no_tokenizer_is_named(content, message, tmp_path):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
