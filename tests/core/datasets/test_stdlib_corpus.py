"""The built-in text: the same on every rank, in blocks, with its entropy."""

import math
import sys

import numpy
import pytest

from minimegatron.core.datasets import stdlib_corpus
from minimegatron.core.datasets.megatron_tokenizer import ByteLevelTokenizer
from minimegatron.core.datasets.stdlib_corpus import (
    BLOCK_LENGTH,
    StdlibCorpus,
    num_blocks,
    stdlib_files,
    unigram_entropy,
    validation_unigram_entropy,
)


def test_files_are_the_librarys_and_scattered():
    files = stdlib_files()
    names = [path.name for path in files]
    assert len(files) > 200 and {"argparse.py", "heapq.py"} <= set(names)
    assert files == stdlib_files() and names != sorted(names)
    assert not any("site-packages" in path.parts for path in files)
    assert all(path.suffix == ".py" for path in files)


def test_folder_without_source(tmp_path):
    with pytest.raises(ValueError, match="--data-path"):
        stdlib_files(tmp_path)


@pytest.fixture
def small(tmp_path):
    """Three files of known bytes."""
    texts = [b"a" * 5000, b"", bytes(range(256)) * 20]
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_bytes(text)
    return files, texts


def test_blocks_hold_the_text_in_order(small):
    files, texts = small
    corpus = StdlibCorpus(ByteLevelTokenizer(), files)
    expected = [token for text in texts for token in [*text, 256]]
    assert corpus.tokens.dtype == numpy.uint16
    assert corpus.tokens.tolist() == expected
    assert corpus.sequence_lengths.sum() == len(expected)
    assert set(corpus.sequence_lengths[:-1]) == {BLOCK_LENGTH}
    assert len(corpus.sequence_lengths) == num_blocks(files)
    joined = [token for i in range(len(corpus.sequence_lengths)) for token in corpus.get(i)]
    assert joined == expected
    assert corpus.get(1, 10, 3).tolist() == expected[BLOCK_LENGTH + 10 :][:3]
    last = len(corpus.sequence_lengths) - 1
    assert corpus.get(last, 5, 10**6).tolist() == expected[last * BLOCK_LENGTH + 5 :]


def test_entropy():
    assert unigram_entropy(numpy.array([3, 3, 3])) == 0.0
    assert unigram_entropy(numpy.arange(256)) == pytest.approx(math.log(256))
    assert unigram_entropy(numpy.array([0, 0, 1, 1])) == pytest.approx(math.log(2))


def test_entropy_of_the_validation_text(monkeypatch, small):
    files, _ = small
    tokenizer = ByteLevelTokenizer()
    corpus = StdlibCorpus(tokenizer, files)
    monkeypatch.setattr(stdlib_corpus, "load_stdlib_corpus", lambda _: corpus)
    # Three blocks: the middle one is "a" first, then every byte.
    expected = unigram_entropy(corpus.get(1))
    assert validation_unigram_entropy(tokenizer, "1,1,1") == pytest.approx(expected)
    assert math.isnan(validation_unigram_entropy(tokenizer, "1,0,1"))


def test_entropy_of_the_real_text_is_that_of_source_code():
    entropy = validation_unigram_entropy(ByteLevelTokenizer(), "949,50,1")
    assert 2.8 < entropy < 3.8, f"{entropy} nats/byte with Python {sys.version}"
