"""What is said of documents of sentences before any process group exists."""

from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from minimegatron.core.datasets.helpers import LONGEST_SENTENCE
from minimegatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from minimegatron.training.families.masked_text import check_documents

ONE_SENTENCE, TOO_LONG, OF_USE = [5], [LONGEST_SENTENCE + 1, 5], [LONGEST_SENTENCE, 5]


def written(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", numpy.uint16) as builder:
        for lengths in documents:
            builder.add_document(numpy.zeros(sum(lengths), dtype=numpy.uint16), lengths)
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def check(prefix: str, **changes) -> None:
    args = {
        "data_path": [prefix],
        "split": "3,1,0",
        "train_iters": 1,
        "eval_iters": 1,
        "model_family": "bert",
        "bert_binary_head": True,
    }
    check_documents(SimpleNamespace(**(args | changes)))


@pytest.mark.parametrize("useless", [ONE_SENTENCE, TOO_LONG])
def test_a_split_without_a_usable_document(tmp_path: Path, useless: list[int]) -> None:
    check(written(tmp_path / "good", [useless, OF_USE, useless, OF_USE]))
    prefix = written(tmp_path / "bad", [OF_USE] * 3 + [useless])
    with pytest.raises(ValueError) as caught:
        check(prefix)
    for words in ("1 documents for validation", "none has 2 or more", "512", "--split-sentences"):
        assert words in str(caught.value)
    check(prefix, eval_iters=0)


def test_one_sentence_is_enough_without_a_binary_head_and_for_t5(tmp_path: Path) -> None:
    prefix = written(tmp_path / "short", [ONE_SENTENCE] * 4)
    check(prefix, bert_binary_head=False)
    check(prefix, model_family="t5")
    with pytest.raises(ValueError, match="3 documents for training"):
        check(prefix)
    with pytest.raises(ValueError, match="none has 1 or more"):
        check(written(tmp_path / "long", [TOO_LONG] * 4), model_family="t5")
