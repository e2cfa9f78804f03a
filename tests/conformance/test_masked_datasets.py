"""Against NVIDIA's megatron-core: which sentences make up a sample, its keys, and what is always true.

Skipped where megatron-core (the `conformance` extra) is not installed. The random numbers behind what
is hidden are others; sentences, lengths, shares and forms are compared.
"""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from minimegatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from tests.core.datasets.test_masked_datasets import settings_of, tokenizer, write_sentences

pytest.importorskip("megatron.core.datasets.bert_dataset", reason="megatron-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = [900, 40, 20]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    """megatron-core asks torch.distributed who is rank 0, even in one process."""
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def both_families(name: str, folder: Path) -> tuple[list, list]:
    """Train, validation and test datasets of one corpus: ours, and Megatron's."""
    from megatron.core.datasets import bert_dataset, t5_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder as TheirBuilder,
    )

    prefix = write_sentences(folder / "d", 0)
    settings = settings_of(blend=([prefix], None), split="8,1,1")
    masking = {
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_max_ngram": 3 if name == "bert" else 10,
        "masking_do_full_word": True,
        "masking_use_geometric_distribution": name == "t5",
    }
    if name == "bert":
        masking["classification_head"] = True
        ours, our_config = BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
        theirs = bert_dataset.BERTMaskedWordPieceDataset
        their_config = bert_dataset.BERTMaskedWordPieceDatasetConfig
    else:
        masking["sequence_length_decoder"] = 40
        ours, our_config = T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
        theirs = t5_dataset.T5MaskedWordPieceDataset
        their_config = t5_dataset.T5MaskedWordPieceDatasetConfig
    left_out = {
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "path_to_cache": str(folder / "theirs"),
    }
    their_settings = settings | {"blend": ([prefix], None)} | masking | left_out
    return (
        BlendedMegatronDatasetBuilder(
            ours, SIZES, lambda: True, our_config(**settings | masking)
        ).build(),
        TheirBuilder(theirs, SIZES, lambda: True, their_config(**their_settings)).build(),
    )


@pytest.fixture(scope="module", params=["bert", "t5"])
def pair(request, tmp_path_factory) -> tuple[str, list, list]:
    return request.param, *both_families(request.param, tmp_path_factory.mktemp("corpus"))


def test_the_same_rows_in_another_order(pair):
    _, ours, theirs = pair
    for our, their in zip(ours, theirs, strict=True):
        assert sorted(our.sample_index.tolist()) == sorted(their.sample_index.tolist())


def test_the_same_keys_shapes_and_types(pair):
    name, (our, *_), (their, *_) = pair
    a, b = our[0], {key: numpy.asarray(value) for key, value in their[0].items()}
    renamed = {"enc_mask", "dec_mask"} if name == "t5" else set()
    for key, value in a.items():
        assert key in b
        assert numpy.asarray(value).dtype == b[key].dtype or key == "truncated"
        # T5's masks are [s, s] there, 1 where a token may look; ours is their row of any token.
        assert numpy.asarray(value).shape == b[key].shape or key in renamed
    assert set(b) - set(a) == ({"enc_dec_mask"} if name == "t5" else set()) & set(b)


def by_sentences(dataset: Any) -> dict[tuple[int, ...], int]:
    """Where each row of the index is, its first place."""
    rows = dataset.sample_index.tolist()
    return {tuple(row): number for number, row in reversed(list(enumerate(rows)))}


def test_the_same_text_from_the_same_row(pair):
    """What both share of a row: the tokens that nobody cut off or hid, and how many are hidden."""
    name, (our, *_), (their, *_) = pair
    theirs_at = by_sentences(their)
    hidden: dict[str, list[int]] = {"ours": [], "theirs": []}
    for row, number in list(by_sentences(our).items())[:200]:
        a, b = our[number], their[theirs_at[row]]
        if name == "bert":
            length = int(a["padding_mask"].sum())
            # Their padding mask holds the id of [PAD] at padding, which is 1 here, and hides nothing;
            # their text has 0 there.
            assert b["text"][length - 1] == tokenizer().sep and not b["text"][length:].any()
            assert a["truncated"] == b["truncated"]
            whole = [numpy.where(x["labels"] >= 0, x["labels"], x["text"])[:length] for x in (a, b)]
            if not a["truncated"]:
                assert sorted(whole[0].tolist()) == sorted(whole[1].tolist())
            counts = [int(x["loss_mask"].sum()) for x in (a, b)]
        else:
            counts = [int(x["loss_mask"].sum()) for x in (a, b)]
            eos = tokenizer().eos
            assert all(
                x["labels"][count - 1] == eos for x, count in zip((a, b), counts, strict=True)
            )
            assert a["text_dec"][0] == b["text_dec"][0] == tokenizer().bos
        hidden["ours"].append(counts[0])
        hidden["theirs"].append(counts[1])
    means = [numpy.mean(counts) for counts in hidden.values()]
    assert abs(means[0] / means[1] - 1) < 0.06, means
