"""`minimegatron preprocess`: what it writes, whatever the workers; what it refuses; no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.__main__ import main
from minimegatron.core.datasets import raw_text
from minimegatron.core.datasets.indexed_dataset import IndexedDataset
from minimegatron.core.datasets.megatron_tokenizer import BPETokenizer

TEXTS = ["def f(x):\n    return x\n", "naïve ☕", "", "third\n\ndocument\n" * 40]


def _jsonl(folder: Path) -> Path:
    path = folder / "in.jsonl"
    lines = [json.dumps({"text": t, "title": f"number {i}"}) for i, t in enumerate(TEXTS)]
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]) + "\n")
    return path


def _documents(prefix: Path | str) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix)[:]]


def _preprocess(*words: object) -> int:
    return main(["preprocess", *map(str, words)])


# -- What it writes --


def test_jsonl_to_bytes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, prefix = _jsonl(tmp_path), tmp_path / "out" / "d"
    assert _preprocess("--input", source, "--output-prefix", prefix, "--append-eod") == 0
    expected = [[*t.encode(), 256] for t in TEXTS if t]
    assert _documents(f"{prefix}_text_document") == expected
    assert IndexedDataset(f"{prefix}_text_document")[0].dtype == numpy.uint16
    out = capsys.readouterr().out
    tokens = sum(map(len, expected))
    assert "MB/s" in out
    assert f"d_text_document.bin and .idx: 3 documents, 2 empty, {tokens:,} tokens" in out
    assert f"--data-path {prefix}_text_document" in out


@pytest.mark.processes
def test_several_keys_and_several_workers_give_the_same_in_order(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(raw_text, "BATCH_BYTES", 64)  # the parent cuts: many batches
    keys = ["--json-keys", "text", "title"]
    for workers in (1, 3):
        prefix = tmp_path / f"w{workers}"
        options = ["--output-prefix", prefix, "--workers", workers]
        assert _preprocess("--input", _jsonl(tmp_path), *options, *keys) == 0
    assert _documents(tmp_path / "w1_title_document") == [
        list(f"number {i}".encode()) for i in range(len(TEXTS))
    ]
    for key in ("text", "title"):
        for suffix in ("bin", "idx"):
            one, three = (tmp_path / f"w{w}_{key}_document.{suffix}" for w in (1, 3))
            assert one.read_bytes() == three.read_bytes()


@pytest.mark.parametrize(
    ("per", "documents"),
    [
        ("file", ["one\ntwo\n\n\nthree\r\n", "four"]),
        ("paragraph", ["one\ntwo", "three", "four"]),
        ("line", ["one", "two", "three", "four"]),
    ],
)
def test_plain_text(tmp_path: Path, per: str, documents: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\n\nthree\r\n")
    (tmp_path / "b").write_bytes(b"four")
    inputs = ["--input", tmp_path / "a.txt", tmp_path / "b"]
    assert _preprocess(*inputs, "--output-prefix", tmp_path / "d", "--document-per", per) == 0
    assert _documents(tmp_path / "d_text_document") == [list(d.encode()) for d in documents]


@given(st.lists(st.sampled_from([b"a\n", b"bb\n", b"\n", b"  \n"]), max_size=9))
def test_paragraphs_keep_every_line(lines: list[bytes]) -> None:
    runs = list(raw_text._paragraphs(lines))
    assert b"".join(text for _, text in runs) == b"".join(lines)
    for number, text in runs[1:]:
        assert lines[number - 1].strip()
        assert not lines[number - 2].strip()
        assert text.strip()


@pytest.mark.processes
def test_bpe_learned_then_loaded(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    source, learned, loaded = _jsonl(tmp_path), tmp_path / "learned", tmp_path / "loaded"
    common = ["--input", source, "--tokenizer-type", "bpe", "--append-eod"]
    assert _preprocess(*common, "--output-prefix", learned, "--vocab-size", 300) == 0
    file = tmp_path / "learned_tokenizer.json"
    options = ["--output-prefix", loaded, "--tokenizer-file", file, "--workers", 2]
    assert _preprocess(*common, *options) == 0
    documents = _documents(f"{learned}_text_document")
    assert documents == _documents(f"{loaded}_text_document")
    tokenizer = BPETokenizer(file)
    assert [d[-1] for d in documents] == [tokenizer.eod] * 3
    assert [tokenizer.detokenize(d) for d in documents] == [t for t in TEXTS if t]


def test_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    common = ["--input", _jsonl(tmp_path), "--output-prefix", tmp_path / "d", "--dtype"]
    assert _preprocess(*common, "int32") == 0
    assert IndexedDataset(tmp_path / "d_text_document")[0].dtype == numpy.int32
    assert _preprocess(*common, "uint8") == 2
    assert "uint8 holds ids up to 255, but the vocabulary has 257" in capsys.readouterr().err


# -- What it refuses --


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a"}\n{"text": \n', "in.jsonl:2: not JSON"),
        (b'{"text": "a"}\n\n[1]\n', "in.jsonl:3: holds a list, not an object"),
        (b'{"body": "a"}\n', "in.jsonl:1: has no key 'text', only 'body'; name the right one"),
        (b"{}\n", "in.jsonl:1: has no key 'text', only none"),
        (b'{"text": 3}\n', "in.jsonl:1: 'text' holds a int, not text"),
        (b'{"text": null}\n', "in.jsonl:1: 'text' holds a NoneType, not text"),
        (b'{"text": "\xff"}\n', "in.jsonl:1: not JSON"),
        (b"[" * 100_000, "in.jsonl:1: lists or objects are nested deeper than 100"),
        (b"\n\n", "no text for"),
        (b"", "no text for"),
    ],
)
def test_bad_jsonl(tmp_path, capsys, content: bytes, reason: str, workers: int = 1) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    options = ["--output-prefix", tmp_path / "d", "--workers", workers]
    assert _preprocess("--input", source, *options) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.processes
def test_bad_jsonl_in_a_worker(tmp_path, capsys) -> None:
    test_bad_jsonl(tmp_path, capsys, b'{"text": "a"}\n[1]\n', "in.jsonl:2: holds a list", 2)


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("text")
    a, jsonl = tmp_path / "a.txt", _jsonl(tmp_path)
    for words, reason in [
        ([tmp_path / "x"], "x does not exist; name text or JSONL files"),
        ([tmp_path], "is a folder"),
        ([a, jsonl], "--input holds both JSONL and plain text"),
        ([a, "--json-keys", "body"], "--json-keys goes with JSONL"),
        ([jsonl, "--json-keys", "text", "text"], "--json-keys names 'text' twice"),
        ([jsonl, "--document-per", "line"], "--document-per goes with plain text"),
        ([a, "--workers", "0"], "--workers is 0; give 1 or more"),
        ([a, "--vocab-size", "300"], "go with --tokenizer-type bpe; bytes need neither"),
        ([a, "--tokenizer-type", "bpe"], "needs --tokenizer-file, to use a tokenizer.json, or"),
        ([a, "--tokenizer-type", "bpe", "--vocab-size", "9"], "BPE needs 257 or more"),
    ]:
        assert _preprocess("--output-prefix", tmp_path / "d", "--input", *words) == 2
        assert reason in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "in.jsonl"]


def test_bpe_wants_utf8(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_bytes(b"fine\nbad \xff\n")
    options = ["--output-prefix", tmp_path / "d", "--tokenizer-type", "bpe", "--vocab-size", 300]
    source = ["--input", tmp_path / "a.txt", "--document-per", "line"]
    assert _preprocess(*source, *options) == 2
    assert "a.txt:2: byte 4 is not UTF-8; convert the file, or" in capsys.readouterr().err


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """Runs with a limit on file sizes, which fails writes as a full disk does."""
    source, prefix = _jsonl(tmp_path), tmp_path / "d"
    assert _preprocess("--input", source, "--output-prefix", prefix) == 0
    before = _documents(f"{prefix}_text_document")
    source.write_text(json.dumps({"text": "x" * 3_000_000}))
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from minimegatron.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "preprocess", "--input", source, "--output-prefix", prefix]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "File too large; what was there before is unchanged" in done.stderr
    assert _documents(f"{prefix}_text_document") == before


def test_runs_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from minimegatron.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["preprocess", "--input", str(_jsonl(tmp_path)), "--output-prefix", str(tmp_path / "d")]
    done = subprocess.run([sys.executable, "-c", code, *words], env=os.environ, timeout=60)
    assert done.returncode == 0


# -- Documents of sentences, and WordPiece --

PROSE = "It is 3.5 m. (Or so.) Is it?\nYes, e.g. here.\n\nA heading\n\nMore text"
CODE = "def f():\n\n    return 1\n"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ([], [["It is 3.5 m.", "(Or so.)", "Is it?", "Yes, e.g. here.", "A heading", "More text"]]),
        (["punctuation"], [["def f():", "return 1"]]),
        (["lines"], [["def f():", "return 1"]]),
    ],
)
def test_documents_of_sentences(tmp_path: Path, how, expected) -> None:
    source = tmp_path / "in.jsonl"
    text = CODE if how else PROSE
    source.write_text("\n".join(json.dumps({"text": t}) for t in (text, "", "  \n\n ")) + "\n")
    flags = ["--output-prefix", tmp_path / "d", "--split-sentences", *how]
    assert _preprocess("--input", source, *flags) == 0
    dataset = IndexedDataset(tmp_path / "d_text_sentence")
    bounds = dataset.document_indices.tolist()
    documents = [
        [bytes(dataset[i].tolist()).decode() for i in range(begin, end)]
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    assert documents == expected


def test_word_pieces_by_the_built_in_vocabulary_and_by_a_file(tmp_path: Path, capsys) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "in.txt").write_text("return self\n")
    flags = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "d"]
    flags += ["--tokenizer-type", "BertWordPieceLowerCase"]
    assert _preprocess(*flags) == 0
    out = capsys.readouterr().out
    assert out.strip().endswith("_text_document --tokenizer-type BertWordPieceLowerCase")
    assert [len(ids) for ids in _documents(tmp_path / "d_text_document")] == [2]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nself\nreturn\n")
    assert _preprocess(*flags, "--vocab-file", vocab, "--split-sentences") == 0
    out = capsys.readouterr().out
    assert "1 documents, 1 sentences, 2 tokens" in out and f"--vocab-file {vocab}" in out
    assert _documents(tmp_path / "d_text_sentence") == [[6, 5]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--split-sentences --append-eod", ("--append-eod", "--split-sentences", "drop one")),
        ("--vocab-file v.txt", ("--vocab-file v.txt", "BertWordPieceLowerCase", "byte")),
        (
            "--tokenizer-type BertWordPieceCase --vocab-size 300",
            ("--vocab-size", "BertWordPieceCase takes --vocab-file"),
        ),
        (
            "--tokenizer-type BertWordPieceCase --vocab-file {folder}/none.txt",
            ("none.txt is not a file", "drop --vocab-file"),
        ),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, capsys, flags: str, words) -> None:
    (tmp_path / "in.txt").write_text("text")
    named = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "d"]
    assert _preprocess(*named, *flags.format(folder=tmp_path).split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words)
