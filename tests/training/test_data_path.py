"""From text to training: `preprocess`, then `pretrain_gpt --data-path`.

One process, two tensor-parallel ranks (of which one reads the data) and two data-parallel ranks meet
the same samples in the same order, so their losses agree. (The vocabulary is padded to one size, for
padding rows are part of the softmax, as in Megatron.)
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from minimegatron import pretrain_gpt
from minimegatron.__main__ import main
from minimegatron.core import parallel_state
from minimegatron.training.families.family_checks import check_data
from minimegatron.training.families.masked_text import check_documents
from minimegatron.training.global_vars import destroy_global_vars
from tests.core.datasets.corpora import write_dataset
from tests.ranks import run_ranks

MODEL = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 16
    --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 0.01 --log-interval 1
    --eval-iters 0 --split 1,0,0 --hidden-dropout 0 --attention-dropout 0
    --lr-decay-style constant --train-iters 4 --padded-vocab-size 258
"""


def train(all_words: list[list[str]]) -> list[str]:
    """On this rank: runs of `pretrain_gpt`, one after the other; what each printed."""
    printed = []
    for words in all_words:
        sys.argv = ["pretrain_gpt.py", *MODEL.split(), *words]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            pretrain_gpt.main()
        destroy_global_vars()
        parallel_state.destroy_model_parallel()
        printed.append(out.getvalue())
    return printed


def _losses(nprocs: int, all_words: list[list[str]]) -> list[dict[int, float]]:
    outs = run_ranks(train, nprocs, all_words, timeout=200)[0]
    lines = [re.findall(r"iteration +(\d+)/.*?lm loss (\d+\.\d+)", out) for out in outs]
    return [{int(number): float(loss) for number, loss in of_one} for of_one in lines]


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A weighted blend of this test's own text and another file of the tests."""
    folder = tmp_path_factory.mktemp("data")
    words = ["--data-path"]
    for weight, source in (
        ("1", Path(__file__)),
        ("2.5", Path(__file__).parent.parent / "ranks.py"),
    ):
        prefix = folder / source.stem
        options = ["--document-per", "paragraph", "--append-eod", "--output-prefix", str(prefix)]
        assert main(["preprocess", "--input", str(source), *options]) == 0
        words += [weight, f"{prefix}_text_document"]
    return [*words, "--data-cache-path", str(folder / "cache")]


def test_every_layout_meets_the_same_samples(blend) -> None:
    (one,) = _losses(1, [blend])
    assert sorted(one) == [1, 2, 3, 4]
    assert one[4] < one[1]
    for found in _losses(2, [[*blend, "--tensor-model-parallel-size", "2"], blend]):
        assert found == pytest.approx(one, abs=3e-4)


# -- Before anything starts --


def given(*data_path: str, **changes) -> SimpleNamespace:
    defaults = {"split": "1,1,0", "train_iters": 1, "eval_iters": 1, "model_family": "t5"}
    return SimpleNamespace(data_path=list(data_path), **defaults | changes)


@pytest.mark.parametrize("check", [check_data, check_documents])
def test_b12_data_that_are_no_tokens_are_refused_before_training(tmp_path, check):
    """Once the first batch ended in numpy's words on casts, on ranks that had waited for each other."""
    good = write_dataset(tmp_path / "good", [[1, 2]] * 4)
    bad = write_dataset(tmp_path / "bad", [[1.5, 2.5]] * 4, numpy.float32)
    check(given("7", good))
    with pytest.raises(
        ValueError, match=f"^{bad}.idx says that {bad}.bin holds float32, but tokens"
    ):
        check(given("7", good, "3", bad))


def test_b12_documents_without_a_token_are_refused_before_training(tmp_path):
    prefix = write_dataset(tmp_path / "d", [[], [], [1], []])
    with pytest.raises(
        ValueError, match="gives training 2 of the 4 documents of .*, none of which"
    ):
        check_data(given(prefix))
    check_data(given(prefix, train_iters=0))
