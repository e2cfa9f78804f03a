"""WordPiece: pieces add up to words, special tokens have ids, a vocabulary is the same everywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from minimegatron.core.datasets import megatron_tokenizer
from minimegatron.core.datasets.stdlib_text import part_of_stdlib
from minimegatron.core.datasets.wordpiece_tokenizer import (
    BertWordPieceTokenizer,
    build_wordpiece,
)
from minimegatron.core.datasets.wordpiece_vocabulary import (
    SPECIALS,
    VOCABULARY_SIZE,
    make_vocabulary,
    read_vocabulary,
)

pytest.importorskip("tokenizers")
PIECES = [*SPECIALS, "un", "##happy", "happy", "##ly", "Happy", "!", "a", "##a"]


def test_the_longest_known_first_part():
    tokenizer = BertWordPieceTokenizer(PIECES, lower_case=True)
    ids = tokenizer.tokenize("Unhappyly happy! xyz")
    assert [tokenizer.pieces[i] for i in ids] == ["un", "##happy", "##ly", "happy", "!", "[UNK]"]
    assert tokenizer.detokenize([tokenizer.cls, *ids[:-1], tokenizer.sep]) == "unhappyly happy !"
    assert tokenizer.begins_word[ids].tolist() == [True, False, False, True, True, True]


def test_case_and_accents():
    kept = BertWordPieceTokenizer(PIECES, lower_case=False)
    small = BertWordPieceTokenizer(PIECES, lower_case=True)
    assert kept.tokenize("Happy") == [PIECES.index("Happy")]
    assert small.tokenize("Happy") == small.tokenize("háppy") == [PIECES.index("happy")]


def test_special_tokens_stand_behind_the_vocabulary_if_it_lacks_them():
    tokenizer = BertWordPieceTokenizer(PIECES, True, vocab_extra_ids=3)
    n = len(PIECES)
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (n, n + 1, n + 1)
    assert tokenizer.additional_special_tokens_ids == [n + 2, n + 3, n + 4]
    assert tokenizer.vocab_size == n + 5 == len(tokenizer.vocab) == len(tokenizer.inv_vocab)
    assert BertWordPieceTokenizer([*PIECES, "[EOS]"], True).eos == n


def test_text_never_becomes_a_special_token():
    tokenizer = BertWordPieceTokenizer(PIECES, True, vocab_extra_ids=1)
    special = {
        tokenizer.mask,
        tokenizer.sep,
        tokenizer.eos,
        *tokenizer.additional_special_tokens_ids,
    }
    assert not special & set(tokenizer.tokenize("[MASK] [SEP] [EOS] <extra_id_0>"))


def test_vocabulary_of_the_built_in_text():
    tokenizer = build_wordpiece("BertWordPieceLowerCase", None, 20)
    assert tokenizer.vocab_size == VOCABULARY_SIZE + 20
    assert tokenizer.pieces[:5] == list(SPECIALS)
    assert tokenizer is build_wordpiece("BertWordPieceLowerCase", None, 20)
    ids = tokenizer.tokenize("\n".join(part_of_stdlib()[:20]))
    assert ids.count(tokenizer.vocab["[UNK]"]) < len(ids) / 100
    assert tokenizer.begins_word[ids].mean() > 0.7
    with_case = build_wordpiece("BertWordPieceCase")
    assert with_case.vocab_size == VOCABULARY_SIZE and "None" in with_case.vocab


def test_the_same_in_every_process():
    """The order of sets and of hashes differs between processes."""
    program = (
        "from minimegatron.core.datasets.wordpiece_tokenizer import build_wordpiece;"
        "print(build_wordpiece('BertWordPieceCase').unique_identifiers['sha256'])"
    )
    environment = {"PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
    )
    expected = build_wordpiece("BertWordPieceCase").unique_identifiers["sha256"]
    assert done.stdout.strip() == expected, done.stderr


def test_ties_go_by_text_and_small_text_gives_fewer():
    # Every letter is rare but a and b; then words, the more frequent first.
    text = "ab " * 40 + "abab " * 3 + "abba " * 3
    pieces = make_vocabulary([text], lower_case=True, size=50)
    assert pieces[7:14] == ["a", "b", "##a", "##b", "ab", "abab", "abba"]
    assert len(pieces) == len(set(pieces)) < 50


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("is not a file", "give the file")),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n", ("has no piece [MASK]", "drop --vocab-file")),
        (b"\xff\xfe", ("not UTF-8", "byte 0")),
        (b"", ("has no piece [PAD], [UNK]",)),
        ("\n".join([*SPECIALS, "a", "b", "a"]).encode(), ("'a' on 2 lines",)),
    ],
)
def test_files_that_are_no_vocabulary(tmp_path: Path, content, words) -> None:
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_vocabulary(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_file_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes("\r\n".join([*SPECIALS, "a"]).encode() + b"\r\n")
    assert read_vocabulary(path) == [*SPECIALS, "a"]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"WordPiece needs.*minimegatron\[data\]"):
        BertWordPieceTokenizer(PIECES, True)
    assert megatron_tokenizer.ByteLevelTokenizer().tokenize("a") == [97]
