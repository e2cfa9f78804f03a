"""BERT's and T5's samples: whole words, the right shares, nothing of the text lost or seen twice."""

import functools
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest

from minimegatron.core.datasets import helpers, stdlib_sentences
from minimegatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.helpers import build_mapping
from minimegatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from minimegatron.core.datasets.masked_dataset import max_hidden_tokens
from minimegatron.core.datasets.megatron_tokenizer import ByteLevelTokenizer
from minimegatron.core.datasets.stdlib_corpus import STDLIB, StdlibBERTDataset, StdlibT5Dataset
from minimegatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from minimegatron.core.datasets.utils import Split
from minimegatron.core.datasets.wordpiece_tokenizer import (
    BertWordPieceTokenizer,
    build_wordpiece,
)
from minimegatron.core.datasets.wordpiece_vocabulary import SPECIALS
from minimegatron.training.datasets.data_samplers import build_pretraining_data_loader
from tests.figures import figure

pytest.importorskip("tokenizers")

# A third of the pieces go on with a word. [PAD] is not 0, so that a mask made of ids would show.
PIECES = ["w0", *SPECIALS, *(f"##p{i}" if i % 3 == 0 else f"p{i}" for i in range(2000))]
FIRST_PIECE = len(SPECIALS) + 1
SEED = 1234


@functools.cache
def tokenizer(vocab_extra_ids: int = 40) -> BertWordPieceTokenizer:
    return BertWordPieceTokenizer(PIECES, True, vocab_extra_ids)


class Sentences:
    """Documents of sentences in memory; every token of the text has another id, as far as there are."""

    def __init__(self, documents: list[list[int]]):
        lengths = [length for document in documents for length in document]
        self.sequence_lengths = numpy.array(lengths, dtype=numpy.int32)
        self.document_indices = numpy.cumsum([0, *map(len, documents)])
        self.begins = numpy.cumsum([0, *lengths])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        ids = numpy.arange(self.begins[idx], self.begins[idx + 1]) % (len(PIECES) - FIRST_PIECE)
        return (ids + FIRST_PIECE).astype(numpy.uint16)


def random_sentences(seed: int = 0, documents: int = 200) -> Sentences:
    rng = numpy.random.default_rng(seed)
    counts = rng.integers(1, 12, documents)
    return Sentences([rng.integers(1, 30, count).tolist() for count in counts])


def settings_of(**settings: Any) -> dict[str, Any]:
    defaults = {
        "random_seed": SEED,
        "sequence_length": 64,
        "tokenizer": tokenizer(),
        "blend": (["unused"], None),
        "split": "1,0,0",
    }
    return defaults | settings


def bert(sentences: Sentences, num_samples: int | None = None, **settings: Any):
    config = BERTMaskedWordPieceDatasetConfig(**settings_of(**settings))
    documents = numpy.arange(len(sentences.document_indices) - 1, dtype=numpy.int32)
    return BERTMaskedWordPieceDataset(
        sentences, "unused", documents, num_samples, Split.train, config
    )


def t5(sentences: Sentences, num_samples: int | None = None, **settings: Any):
    settings = {"sequence_length_decoder": 40} | settings
    config = T5MaskedWordPieceDatasetConfig(**settings_of(**settings))
    documents = numpy.arange(len(sentences.document_indices) - 1, dtype=numpy.int32)
    return T5MaskedWordPieceDataset(
        sentences, "unused", documents, num_samples, Split.train, config
    )


def all_samples(dataset) -> list[dict[str, Any]]:
    return [dataset[i] for i in range(len(dataset))]


# -- Which sentences --


def test_an_epoch_has_every_sentence_of_a_usable_document_once():
    sentences = random_sentences()
    sentences.sequence_lengths[5] = helpers.LONGEST_SENTENCE + 1
    for min_sentences in (1, 2):
        rows = build_mapping(
            sentences.document_indices, sentences.sequence_lengths, None, 61, 0.1, 7, min_sentences
        )
        taken = sorted(s for begin, end, _ in rows.tolist() for s in range(begin, end))
        bounds = sentences.document_indices.tolist()
        usable = [
            range(begin, end)
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
            if end - begin >= min_sentences and 5 not in range(begin, end)
        ]
        assert taken == [sentence for document in usable for sentence in document]
        assert all(end - begin >= min_sentences for begin, end, _ in rows.tolist())


def test_rows_by_hand():
    # Two documents of 6 and 1 sentences; the target is 10 tokens.
    rows = build_mapping(
        numpy.array([0, 6, 7]), numpy.array([4, 4, 4, 4, 4, 4, 9]), None, 10, 0.0, 1, 2
    )
    assert rows.tolist() == [[0, 3, 10], [3, 6, 10]] or rows.tolist() == [[3, 6, 10], [0, 3, 10]]
    # A single sentence is not left over.
    rows = build_mapping(numpy.array([0, 4]), numpy.array([4, 4, 4, 4]), None, 10, 0.0, 1, 2)
    assert rows.tolist() == [[0, 4, 10]]


def test_some_are_meant_to_be_short():
    sentences = random_sentences(documents=2000)
    rows = build_mapping(
        sentences.document_indices, sentences.sequence_lengths, 9000, 62, 0.1, 3, 2
    )
    short = rows[:, 2] < 62
    assert abs(short.mean() - 0.1) < 0.015
    assert rows[:, 2].min() >= 2 and len(set(rows[short, 2].tolist())) > 50


def test_a_share_of_short_samples_below_one_in_two_to_the_32():
    for share in (1e-12, 1e-320):
        rows = build_mapping(numpy.array([0, 4]), numpy.full(4, 9), 100, 20, share, 1, 2)
        assert (rows[:, 2] == 20).all()


def test_many_epochs_of_a_tiny_text_take_no_longer_than_as_many_samples_of_a_long_one():
    """Counted, not timed: what is read of the samples so far must not grow with them."""
    lengths = []
    with mock.patch.object(helpers, "len", lambda x: lengths.append(x) or len(x), create=True):
        rows = build_mapping(numpy.array([0, 2]), numpy.array([20, 20]), 3000, 61, 0.1, 1, 2)
    assert len(rows) == 3000 and len(lengths) < 4 * len(rows)


def test_as_many_whole_epochs_as_it_takes():
    sentences = random_sentences()
    one = len(bert(sentences))
    more = bert(sentences, 3 * one)
    assert 3 * one <= len(more) < 5 * one
    assert len(more.sample_index) > len({tuple(row) for row in more.sample_index.tolist()})


# -- BERT --


def test_keys_shapes_and_dtypes():
    dataset = bert(random_sentences())
    for sample in all_samples(dataset)[:50]:
        arrays = ("text", "types", "labels", "padding_mask", "loss_mask")
        assert set(sample) == {*arrays, "is_random", "truncated"}
        for name in arrays:
            assert (sample[name].shape, sample[name].dtype) == ((64,), numpy.int64)
        assert type(sample["is_random"]) is type(sample["truncated"]) is int


def original(sample: dict[str, Any]) -> numpy.ndarray:
    """The text before anything was hidden."""
    return numpy.where(sample["labels"] >= 0, sample["labels"], sample["text"])


def test_cls_a_sep_b_sep_and_padding():
    t = tokenizer()
    lengths = set()
    for sample in all_samples(bert(random_sentences(), 500)):
        length = int(sample["padding_mask"].sum())
        lengths.add(length)
        text = original(sample)
        first, second = numpy.flatnonzero(text[:length] == t.sep).tolist()
        assert text[0] == t.cls and second == length - 1 and 1 < first < second - 1
        assert sample["padding_mask"].tolist() == [1] * length + [0] * (64 - length)
        expected = [0] * (first + 1) + [1] * (second - first) + [0] * (64 - length)
        assert sample["types"].tolist() == expected
        assert (text[length:] == t.pad).all() and t.pad not in text[:length]
        assert (sample["labels"][length:] == -1).all()
        assert sample["loss_mask"].tolist() == (sample["labels"] != -1).tolist()
    assert max(lengths) == 64 and min(lengths) < 20


def test_half_of_the_pairs_are_swapped():
    """Ids count up through a document, so the order shows."""
    dataset = bert(random_sentences(documents=90), 2000)
    swapped = []
    for sample in all_samples(dataset):
        text = original(sample)
        first, second = numpy.flatnonzero(text == tokenizer().sep).tolist()
        swapped.append(sample["is_random"])
        a, b = text[1:first], text[first + 1 : second]
        wraps = max(a.max(), b.max()) - min(a.min(), b.min()) > 500
        assert wraps or (a[0] > b[-1]) == bool(sample["is_random"])
    assert abs(numpy.mean(swapped) - 0.5) < 0.05


def test_too_long_pairs_are_cut_at_both_ends():
    dataset = bert(Sentences([[200, 220]] * 300), short_sequence_probability=0.0)
    front, lengths = [], []
    for sample in all_samples(dataset):
        text = original(sample)
        first, second = numpy.flatnonzero(text == tokenizer().sep).tolist()
        assert sample["truncated"] == 1 and second == 63
        a = text[1:first]
        assert (numpy.diff(a) % (len(PIECES) - FIRST_PIECE) == 1).all()  # cut out of one place
        front.append(int(a[0]))
        lengths.append((first - 1, second - first - 1))
    assert {abs(a - b) for a, b in lengths} == {1}  # the longer one is cut, to 61 in all
    assert len(set(front)) > 100
    assert not any(sample["truncated"] for sample in all_samples(bert(Sentences([[5, 5]] * 9))))


def test_eighty_ten_ten():
    samples = all_samples(bert(random_sentences(documents=1500), 3000))
    text = numpy.concatenate([sample["text"] for sample in samples])
    labels = numpy.concatenate([sample["labels"] for sample in samples])
    hidden = labels >= 0
    shown, meant = text[hidden], labels[hidden]
    count = len(meant)
    assert count > 15_000
    shares = numpy.array(
        [
            (shown == tokenizer().mask).sum(),
            ((shown != tokenizer().mask) & (shown != meant)).sum(),
            (shown == meant).sum(),
        ]
    )
    # Three standard deviations of a share of 10 percent.
    assert numpy.abs(shares / count - [0.8, 0.1, 0.1]).max() < 3 * (0.8 * 0.2 / count) ** 0.5 + 1e-3
    replaced = shown[(shown != tokenizer().mask) & (shown != meant)]
    assert len(set(replaced.tolist())) > 800  # any token, equally often
    assert abs(replaced.mean() / tokenizer().vocab_size - 0.5) < 0.04


def test_whole_words_are_hidden():
    begins = tokenizer().begins_word
    for sample in all_samples(bert(random_sentences(), 300)):
        text, hidden = original(sample), sample["labels"] >= 0
        fixed = numpy.isin(text, [tokenizer().cls, tokenizer().sep])
        assert not hidden[fixed].any()
        for place in range(1, int(sample["padding_mask"].sum())):
            if not begins[text[place]] and not fixed[place - 1]:
                assert hidden[place] == hidden[place - 1], place
    pieces = all_samples(bert(random_sentences(), 300, masking_do_full_word=False))
    cut = [
        (sample["labels"][1:] >= 0) & (sample["labels"][:-1] < 0) & ~begins[original(sample)[1:]]
        for sample in pieces
    ]
    assert any(map(numpy.any, cut))


def test_how_many_are_hidden():
    for sample in all_samples(bert(random_sentences(), 400)):
        length = int(sample["padding_mask"].sum())
        assert sample["loss_mask"].sum() <= max_hidden_tokens(0.15, length)
    # One-piece words: the budget is used up, 9 of 62 to 64 tokens every time.
    whole = bert(
        random_sentences(),
        400,
        masking_do_full_word=False,
        masking_max_ngram=1,
        short_sequence_probability=0.0,
    )
    full = [sample for sample in all_samples(whole) if sample["padding_mask"].sum() >= 62]
    assert {int(sample["loss_mask"].sum()) for sample in full} == {9}


def test_numbers_of_words_in_a_row():
    rng = numpy.random.RandomState(0)
    drawn = numpy.array(bert(random_sentences())._draw_ngram_sizes(60_000, rng))
    counts = numpy.bincount(drawn, minlength=4)[1:] / len(drawn)
    assert numpy.abs(counts - numpy.array([6, 3, 2]) / 11).max() < 0.01
    drawn = numpy.array(t5(random_sentences())._draw_ngram_sizes(60_000, rng))
    counts = numpy.bincount(drawn, minlength=11)[1:] / len(drawn)
    expected = [0.2 * 0.8**n for n in range(9)] + [0.8**9]
    assert numpy.abs(counts - expected).max() < 0.01


def test_one_piece_of_text_without_the_binary_head():
    dataset = bert(Sentences([[5], [4, 4]]), classification_head=False)
    assert len(dataset) == 2
    for sample in all_samples(dataset):
        assert (original(sample) == tokenizer().sep).sum() == 1
        assert sample["is_random"] == 0 and sample["types"].sum() == 0


def test_a_sample_is_the_same_every_time_and_others_differ():
    dataset = bert(random_sentences(), 300)
    again = bert(random_sentences(), 300)
    other = bert(random_sentences(), 300, random_seed=SEED + 1000)
    for i in (0, 7, 299):
        assert dataset[i]["text"].tolist() == again[i]["text"].tolist()
        assert dataset[i]["text"].tolist() != other[i]["text"].tolist()


# -- T5 --


def test_what_is_taken_out_and_what_is_left_make_the_text():
    t = tokenizer()
    sentinels = set(t.additional_special_tokens_ids)
    seen = 0
    for sample in all_samples(t5(random_sentences(), 400)):
        enc = sample["text_enc"][sample["enc_mask"] == 1].tolist()
        dec = sample["text_dec"][sample["dec_mask"] == 1].tolist()
        labels = sample["labels"][sample["loss_mask"] == 1].tolist()
        assert dec[0] == t.bos and labels[-1] == t.eos and dec[1:] == labels[:-1]
        used = [token for token in enc if token in sentinels]
        assert used == t.additional_special_tokens_ids[: len(used)]
        assert used == [token for token in labels if token in sentinels]
        runs, run = {}, None
        for token in labels[:-1]:
            if token in sentinels:
                run = runs.setdefault(token, [])
            else:
                run.append(token)
        text = [x for token in enc for x in runs.get(token, [token])]
        assert (numpy.diff(text) % (len(PIECES) - FIRST_PIECE) == 1).all()
        assert all(runs.values()) and t.begins_word[[run[0] for run in runs.values()]][1:].all()
        assert sum(map(len, runs.values())) <= max_hidden_tokens(0.15, len(text))
        seen = max(seen, len(runs))
    assert seen > 3


def test_t5_shapes_and_masks_from_lengths():
    keys = {"text_enc": 64, "enc_mask": 64, "text_dec": 40, "dec_mask": 40, "labels": 40}
    pad = tokenizer().pad
    for sample in all_samples(t5(random_sentences()))[:80]:
        assert set(sample) == {*keys, "loss_mask", "truncated"}
        for name, length in keys.items():
            assert (sample[name].shape, sample[name].dtype) == ((length,), numpy.int64)
        for text, mask in (("text_enc", "enc_mask"), ("text_dec", "dec_mask")):
            length = int(sample[mask].sum())
            assert sample[mask][:length].all()
            assert (sample[text] == pad).tolist() == (sample[mask] == 0).tolist()
        assert sample["loss_mask"].tolist() == sample["dec_mask"].tolist()
        assert (sample["labels"][sample["loss_mask"] == 0] == -1).all()


def test_id_0_is_a_token():
    class Zeros(Sentences):
        def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
            return numpy.zeros(self.sequence_lengths[idx], dtype=numpy.uint16)

    for sample in all_samples(t5(Zeros([[20, 20]]))) + all_samples(bert(Zeros([[20, 20]]))):
        mask = sample["enc_mask"] if "enc_mask" in sample else sample["padding_mask"]
        assert mask.sum() > 20 and mask[:10].all()


def test_runs_that_the_decoder_has_no_room_for_stay():
    settings = {
        "sequence_length_decoder": 12,
        "masking_max_ngram": 1,
        "masking_do_full_word": False,
    }
    for sample in all_samples(t5(random_sentences(), 100, **settings)):
        assert sample["dec_mask"].sum() <= 12
        sentinels = tokenizer().additional_special_tokens_ids
        in_encoder = set(sample["text_enc"].tolist()) & set(sentinels)
        assert in_encoder == set(sample["text_dec"].tolist()) & set(sentinels)


# -- What they refuse --


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer": ByteLevelTokenizer()}, ("ByteLevelTokenizer", "BertWordPieceTokenizer")),
        ({"masking_probability": 1.0}, ("masking_probability is 1.0", "less than 1")),
        ({"short_sequence_probability": -0.1}, ("-0.1", "0 to 1")),
        ({"masking_max_ngram": 0}, ("masking_max_ngram is 0", "1 or more")),
        ({"sequence_length": 4}, ("4", "5 or more")),
    ],
)
def test_settings_that_cannot_be(settings, words) -> None:
    with pytest.raises(ValueError) as error:
        BERTMaskedWordPieceDatasetConfig(**settings_of(**settings))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer": tokenizer(8)}, ("up to 9 tokens", "8 sentinels", "9 or more")),
        ({"sequence_length_decoder": 10}, ("up to 9", "sequence_length_decoder 10", "11 or more")),
        ({"sequence_length_encoder": 65}, ("65", "64", "leave one out")),
        ({"sequence_length": 3}, ("3", "4 or more")),
    ],
)
def test_settings_of_t5_that_cannot_be(settings, words) -> None:
    with pytest.raises(ValueError) as error:
        T5MaskedWordPieceDatasetConfig(**settings_of(**settings))
    assert all(word in str(error.value) for word in words)


def test_data_that_has_no_sentences():
    whole = Sentences([[40]] * 6)
    with pytest.raises(ValueError, match="6 documents.*2 or more sentences.*--split-sentences"):
        bert(whole, 10)
    assert len(bert(whole)) == 0  # a split that nobody needs
    assert len(t5(whole, 10)) >= 10


def test_tokens_of_another_tokenizer():
    small = BertWordPieceTokenizer(PIECES[:50], True)
    dataset = bert(random_sentences(), 10, tokenizer=small)
    with pytest.raises(ValueError, match=r"holds token \d+, but the tokenizer has 52"):
        all_samples(dataset)


class OneStrangeToken(Sentences):
    """The fourth sentence has it; the file's dtype has a sign."""

    def __init__(self, token: int):
        super().__init__([[5, 6], [7, 8], [9, 10]])
        self.token = token

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        ids = super().get(idx, offset, length).astype(numpy.int32)
        ids[2 : 3 if idx == 3 else 2] = self.token
        return ids


@pytest.mark.parametrize("token", [-7, -1, len(PIECES) + 1000])
@pytest.mark.parametrize("family", [bert, t5])
def test_a10_tokens_that_no_vocabulary_has(family, token):
    """A negative one trained, where the vocabulary is cut over ranks: each left it to another."""
    dataset = family(OneStrangeToken(token), 12)
    with pytest.raises(
        ValueError, match=rf"holds token {token}, but the tokenizer has \d+ from 0 on"
    ):
        all_samples(dataset)


# -- From disk, through the builder --


def write_sentences(prefix: Path, seed: int) -> str:
    sentences = random_sentences(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", numpy.uint16) as builder:
        bounds = sentences.document_indices.tolist()
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            for sentence in range(begin, end):
                builder.add_item(sentences.get(sentence))
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_builder_blends_splits_and_caches(tmp_path: Path, family: str, monkeypatch) -> None:
    classes = {
        "bert": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig),
        "t5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig),
    }
    dataset_class, config_class = classes[family]
    prefixes = [write_sentences(tmp_path / name, seed) for seed, name in enumerate("ab")]
    config = config_class(
        **settings_of(
            blend=(prefixes, [3.0, 1.0]), split="8,1,1", path_to_cache=str(tmp_path / "cache")
        )
    )

    def build() -> list:
        sizes = [1200, 40, 20]
        return BlendedMegatronDatasetBuilder(dataset_class, sizes, lambda: True, config).build()

    first = build()
    assert [len(dataset) for dataset in first] == [1200, 40, 20]
    from_a = sum(sample["dataset_id"] == 0 for sample in map(first[0].__getitem__, range(1200)))
    assert abs(from_a - 900) <= 1
    train, valid = first[0].datasets[0], first[1].datasets[0]
    assert set(train.indices.tolist()).isdisjoint(valid.indices.tolist())
    assert train.sample_index[:, 1].max() <= valid.sample_index[:, 0].min()
    # The second time nothing is built.
    monkeypatch.setattr(helpers, "_add_an_epoch", lambda *_: pytest.fail("built again"))
    second = build()
    for i in (0, 599, 1199):
        a, b = first[0][i], second[0][i]
        assert all(numpy.array_equal(a[name], b[name]) for name in a)


def test_a_changed_table_of_documents_is_not_read_from_the_cache(tmp_path: Path) -> None:
    cache = {"path_to_cache": str(tmp_path)}
    first = bert(Sentences([[5, 5], [5, 5, 5, 5]]), **cache)
    second = bert(Sentences([[5, 5, 5, 5], [5, 5]]), **cache)
    assert sorted(first.sample_index.tolist()) != sorted(second.sample_index.tolist())


# -- The built-in text --


def test_built_in_text_for_both():
    pieces = build_wordpiece("BertWordPieceLowerCase", None, 40)
    for dataset_class, config_class in (
        (StdlibBERTDataset, BERTMaskedWordPieceDatasetConfig),
        (StdlibT5Dataset, T5MaskedWordPieceDatasetConfig),
    ):
        config = config_class(
            **settings_of(tokenizer=pieces, blend=([STDLIB], None), split="949,50,1")
        )
        train, valid, test = BlendedMegatronDatasetBuilder(
            dataset_class, [100, 10, 5], lambda: True, config
        ).build()
        assert min(len(train), 100) == 100 and len(valid) >= 10 and len(test) >= 5
        text = "text" if "text" in train[0] else "text_enc"
        assert (train[0][text] < pieces.vocab_size).all()


def test_what_models_without_context_lose_at_hidden_places():
    """One may look at the place itself, where the hidden piece may stand."""
    pieces = build_wordpiece("BertWordPieceLowerCase", None, 40)

    def entropies(split: str) -> tuple[float, float]:
        settings = settings_of(tokenizer=pieces, split=split, sequence_length=128)
        config = BERTMaskedWordPieceDatasetConfig(**settings)
        return stdlib_sentences.entropies_of_hidden_pieces(config)

    entropy, at_one_place = entropies("979,20,1")
    assert 4.0 < at_one_place < entropy - 0.3 < numpy.log(pieces.vocab_size)
    assert numpy.isnan(entropies("1,0,0")).all()
    share = numpy.array([0.5, 0.375, 0.125, 0.0])
    # Rows: [MASK], and each piece that may be shown. Columns: the hidden piece.
    pairs = numpy.vstack(
        [0.8 * share, numpy.outer([0.25] * 4, 0.1 * share) + numpy.diag(0.1 * share)]
    )
    of_shown = pairs / pairs.sum(1, keepdims=True)
    expected = -(pairs[:, :3] * numpy.log(of_shown[:, :3])).sum()
    assert stdlib_sentences._loss_at_one_place(share) == pytest.approx(expected, rel=1e-12)


def test_a_run_that_stopped_goes_on_at_the_next_sample():
    """As for GPT: samples already used are counted, and neither read nor given again."""
    dataset = bert(random_sentences(), 200)

    def texts(consumed: int, copies: int) -> list[list[int]]:
        loaders = [
            build_pretraining_data_loader(
                dataset,
                consumed,
                micro_batch_size=4,
                data_parallel_rank=rank,
                data_parallel_size=copies,
            )
            for rank in range(copies)
        ]
        batches = [[batch["text"] for batch in loader] for loader in loaders]
        return [row.tolist() for step in zip(*batches, strict=True) for b in step for row in b]

    everything = texts(0, 1)
    assert texts(80, 2) == everything[80 : 80 + len(texts(80, 2))]
    assert len(texts(80, 2)) > 100


def test_no_step_waits_for_its_data():
    """Processor time, at the best of several tries: what else the machine does counts little."""
    sentences = random_sentences(documents=2000)
    dataset = bert(sentences, 1000, sequence_length=512)
    sample = _best_time(lambda: [dataset[i] for i in range(20)], 20) / 20
    arguments = (sentences.document_indices, sentences.sequence_lengths, 30_000, 61, 0.1, 1, 2)
    rows = _best_time(lambda: build_mapping(*arguments), 3)
    figure(f"a sample of up to 512 tokens {sample * 1e3:.2f} ms, 30,000 rows {rows * 1e3:.0f} ms")
    assert sample < 2e-3 and rows < 0.5


def _best_time(work: Callable[[], Any], tries: int) -> float:
    return min(timeit.repeat(work, timer=time.process_time, number=1, repeat=tries))
