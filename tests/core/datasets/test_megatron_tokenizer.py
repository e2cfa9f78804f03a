"""Text survives the way to ids and back; faults name the file and the remedy."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.datasets.megatron_tokenizer import (
    BPETokenizer,
    ByteLevelTokenizer,
    NullTokenizer,
    UnreadableText,
    build_tokenizer,
    train_bpe,
)

TEXT = "def add(a, b):\n    return a + b\n" * 30 + "naïve café ☕"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> BPETokenizer:
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe([TEXT], 280))
    return BPETokenizer(path)


@given(st.text())
def test_bytes_and_back(text: str) -> None:
    tokenizer = ByteLevelTokenizer()
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode())
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text


def test_bytes_of_any_encoding() -> None:
    tokenizer = ByteLevelTokenizer()
    assert tokenizer.tokenize_batch([b"\xff\x00", b""])[0].tolist() == [255, 0]
    assert tokenizer.detokenize([255]) == "\N{REPLACEMENT CHARACTER}"
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_and_back(bpe: BPETokenizer, text: str) -> None:
    ids = bpe.tokenize(text)
    assert bpe.detokenize([*ids, bpe.eod]) == text
    assert all(0 <= i < bpe.vocab_size for i in ids)


def test_bpe_learns_and_text_cannot_end_a_document(bpe: BPETokenizer) -> None:
    assert bpe.vocab_size == 280
    assert len(bpe.tokenize(TEXT)) < len(TEXT) / 2
    assert bpe.eod not in bpe.tokenize("a<|endoftext|>b")
    assert bpe.detokenize(bpe.tokenize("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_bpe_faults(bpe: BPETokenizer, tmp_path: Path) -> None:
    with pytest.raises(UnreadableText) as caught:
        bpe.tokenize_batch([b"fine", b"ab\xff"])
    assert (caught.value.document, caught.value.byte) == (1, 2)
    with pytest.raises(ValueError, match="absent.json is not a file; give the path"):
        BPETokenizer(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="broken.json is not a tokenizer.json"):
        BPETokenizer(broken)
    with pytest.raises(ValueError, match="has no token '<end>'; choose another"):
        BPETokenizer(bpe.tokenizer_file, eod_token="<end>")
    without_end = json.loads(bpe.tokenizer_file.read_text())
    without_end["added_tokens"] = []
    without_end["model"]["vocab"] = {
        t: i for t, i in without_end["model"]["vocab"].items() if t != "<|endoftext|>"
    }
    other = tmp_path / "other.json"
    other.write_text(json.dumps(without_end))
    with pytest.raises(ValueError, match="no end-of-document token.*name its own with --eod-token"):
        _ = BPETokenizer(other).eod
    with pytest.raises(ValueError, match="--vocab-size is 200; BPE needs 257 or more"):
        train_bpe([TEXT], 200)


def test_tokenizers_by_name(bpe: BPETokenizer) -> None:
    assert build_tokenizer("byte").unique_identifiers == {"class": "ByteLevelTokenizer"}
    same = build_tokenizer("bpe", bpe.tokenizer_file)
    assert same.unique_identifiers == bpe.unique_identifiers
    with pytest.raises(ValueError, match="give --tokenizer-file"):
        build_tokenizer("bpe")
    with pytest.raises(ValueError, match="'word' is unknown; use 'byte' or 'bpe'"):
        build_tokenizer("word")


def test_a_text_of_numbers():
    null = NullTokenizer(vocab_size=64)
    assert (null.vocab_size, null.eod) == (65, 64)
    assert null.tokenize("3 1 63") == [3, 1, 63] and null.detokenize([3, 1]) == "3 1"
    assert null.tokenize_batch([b"", b"7"])[0].tolist() == []
    assert null.unique_identifiers != NullTokenizer(65).unique_identifiers
    with pytest.raises(ValueError, match="reads numbers with spaces between only.*b'def'"):
        null.tokenize("def f")
    with pytest.raises(ValueError, match="vocab_size 0; give 1 or more"):
        NullTokenizer(0)
