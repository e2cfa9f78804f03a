"""Samples of `sequence_length` tokens, cut from shuffled documents laid end to end.

Counterpart: `megatron.core.datasets.gpt_dataset`, the same samples in the same order for the same
seed.

Three arrays lead from a sample's number to its tokens, read in this order:

    shuffle index    number in training order -> number in the stream
    sample index     number in the stream -> where it begins: a place in the document index, an offset
    document index   the stream: every document of every epoch, shuffled

"Document" here means a sequence of the low-level dataset; `preprocess` writes one per document.
"""

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from minimegatron.core.datasets import indexed_dataset as binary
from minimegatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from minimegatron.core.datasets.helpers import build_sample_idx
from minimegatron.core.datasets.megatron_dataset import (
    LowLevelDataset,
    MegatronDataset,
    cached_arrays,
)
from minimegatron.core.datasets.utils import DataError, Split
from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "MockGPTDataset": "minimegatron.core.datasets.mock_gpt_dataset:MockGPTDataset",
        "MockGPTLowLevelDataset": "minimegatron.core.datasets.mock_gpt_dataset:MockGPTLowLevelDataset",
    },
)

PAD = -1
"""Fills the last sample of a stream that does not come out even. No tokenizer has it; the model
never sees it (token 0 stands there) and the loss mask is 0."""

LAST_EPOCH_THRESHOLD = 0.80
"""A last epoch that gives a smaller share of its samples than this is shuffled apart."""


@dataclass(frozen=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """What one sample holds besides its tokens."""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = False
    """Hide earlier documents from later ones; needs `create_attention_mask`."""
    eod_mask_loss: bool = False
    """No loss where the input is an end of document: what follows it cannot be known."""
    create_attention_mask: bool = True
    """Give each sample a mask [1, s, s], True where attention must not look. Causal attention
    without resets needs none."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out a last validation sample that the stream does not fill, instead of padding it."""
    add_extra_token_to_sequence: bool = True
    """Read one token more, so that the last one has a label."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            raise ValueError("tokenizer is None; give one, such as ByteLevelTokenizer()")
        if self.reset_attention_mask and not self.create_attention_mask:
            raise ValueError(
                "reset_attention_mask needs a mask to reset; set create_attention_mask too"
            )


class GPTDataset(MegatronDataset):
    """Samples for a left-to-right language model.

    Args:
        indexed_dataset: the sequences.
        dataset_path: where they come from, for messages.
        indexed_indices: which of them belong to this split, int32.
        num_samples: how many samples are wanted; None for one epoch.
        index_split: the split.
        config: the settings.

    `dataset[i]` holds, for s = sequence_length: `tokens` and `labels`, int64 [s], the labels one
    token on; `loss_mask`, float32 [s]; `position_ids`, int64 [s]; and `attention_mask`, bool
    [1, s, s], if the configuration asks for one.

    Sample i depends on the seed, on the documents, and on `num_samples` only through the number of
    epochs, and whether the last is shuffled apart: where these stay, a longer run keeps its order.

    Raises ValueError if samples are wanted from a split without tokens; `dataset[i]` does, if it meets
    a token that the tokenizer does not have.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        self._extra = int(self.config.add_extra_token_to_sequence)
        self._vocab_size = self.config.tokenizer.vocab_size
        self.tokens_per_epoch = int(
            self.dataset.sequence_lengths[self.indices].sum(dtype=numpy.int64)
        )
        self._check_tokens()
        self._plan_epochs()
        arrays = cached_arrays(
            self.config.path_to_cache,
            self.unique_identifiers,
            {
                "document_index": (self.num_epochs * len(self.indices),),
                "sample_index": (self._num_samples_built() + 1, 2),
                "shuffle_index": (self._num_samples_built(),),
            },
            self._build_document_sample_shuffle_indices,
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """What `--split` divides: sequences."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> "binary.IndexedDataset":
        """The dataset of one path prefix. Raises ValueError where no data is named."""
        if dataset_path is None:
            raise DataError(
                "neither blend nor blend_per_split names data; give one, or use MockGPTDataset, "
                "which makes data up"
            )
        return binary.open_tokens(dataset_path)

    # -- How many epochs --

    def _check_tokens(self) -> None:
        if self.num_samples and self.tokens_per_epoch == 0:
            raise DataError(
                f"{self.num_samples} {self.index_split.name} samples are wanted, but the split "
                f"has no tokens: {len(self.indices)} of the "
                f"{len(self.dataset.sequence_lengths)} documents of {self.dataset_path}; "
                "give it a larger share in --split, or cut the text into more documents"
            )

    def _plan_epochs(self) -> None:
        """Sets `num_epochs`, and whether the last is shuffled apart from the others.

        Documents are shuffled over all epochs together. If only a fraction of the last epoch is
        used, that would draw some documents once more than others all through training; so below
        the threshold the last epoch gets a shuffle of its own, at the end.
        """
        s, per_epoch = self.config.sequence_length, self.tokens_per_epoch
        self.num_epochs = 1
        self.samples_before_final_epoch: int | None = None
        if not self.num_samples or not per_epoch:
            return
        self.num_epochs = max(1, -(-(self.num_samples * s + self._extra) // per_epoch))
        if self.num_epochs == 1:
            return
        before = ((self.num_epochs - 1) * per_epoch - self._extra) // s
        if self.num_samples - before < int(LAST_EPOCH_THRESHOLD * ((per_epoch - self._extra) // s)):
            self.samples_before_final_epoch = before

    def _drops_partial(self) -> bool:
        return self.index_split != Split.valid or self.config.drop_last_partial_validation_sequence

    def _num_samples_built(self) -> int:
        """Samples in all epochs: as many as fit, not only those wanted."""
        tokens = max(0, self.num_epochs * self.tokens_per_epoch - self._extra)
        rounding = 0 if self._drops_partial() else self.config.sequence_length - 1
        return (tokens + rounding) // self.config.sequence_length

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return super().unique_identifiers | {
            "extra_token": self._extra,
            "drop_last_partial": self._drops_partial(),
        }

    # -- The three indices --

    def _build_document_sample_shuffle_indices(self) -> dict[str, numpy.ndarray]:
        rng = numpy.random.RandomState(self.config.random_seed)
        apart = self.samples_before_final_epoch is not None
        document_index = _build_document_index(self.indices, self.num_epochs, rng, apart)
        sample_index = build_sample_idx(
            self.dataset.sequence_lengths,
            document_index,
            self.config.sequence_length,
            self.num_epochs,
            self.tokens_per_epoch,
            self._drops_partial(),
            bool(self._extra),
        )
        total = len(sample_index) - 1
        first = self.samples_before_final_epoch if apart else total
        return {
            "document_index": document_index,
            "sample_index": sample_index,
            "shuffle_index": _build_shuffle_index(first, total, rng),
        }

    # -- One sample --

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Sample `idx`; None gives one of the right shape without any loss, to fill up a batch."""
        text, _ = self._query_document_sample_shuffle_indices(0 if idx is None else idx)
        text = torch.from_numpy(text)
        if self._extra:
            tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        else:
            tokens, labels = text, torch.roll(text, shifts=-1)
            labels[-1] = PAD
        attention_mask, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            tokens,
            self.config.tokenizer.eod,
            self.config.reset_position_ids,
            self.config.reset_attention_mask,
            self.config.eod_mask_loss,
            self.config.create_attention_mask,
        )
        loss_mask[labels == PAD] = 0.0
        if idx is None:
            loss_mask.zero_()
        sample = {
            "tokens": tokens.masked_fill(tokens == PAD, 0),
            "labels": labels.masked_fill(labels == PAD, 0),
            "loss_mask": loss_mask,
            "position_ids": position_ids,
        }
        if attention_mask is not None:
            sample["attention_mask"] = attention_mask
        return sample

    def _query_document_sample_shuffle_indices(
        self, idx: int
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The tokens of sample `idx`, int64 [s + extra], padded if need be, and the ids of the
        documents they come from."""
        number = int(self.shuffle_index[idx])
        (first, begin), (last, end) = self.sample_index[number : number + 2].tolist()
        documents = self.document_index[first : last + 1]
        # The sample ends one (extra) token into what the next one begins with.
        parts = []
        for place, document in enumerate(documents.tolist(), start=first):
            start = begin if place == first else 0
            stop = end + self._extra if place == last else None
            parts.append(self.dataset.get(document, start, None if stop is None else stop - start))
        missing = self.config.sequence_length + self._extra - sum(map(len, parts))
        if missing:
            parts.append(numpy.full(missing, PAD))
        text = numpy.concatenate(parts, dtype=numpy.int64)
        check_token_ids(self.dataset_path, text, self._vocab_size, lowest=PAD)
        return text, documents


def check_token_ids(
    dataset_path: str | None, text: numpy.ndarray, vocab_size: int, lowest: int = 0
) -> None:
    """Raises DataError for an id below `lowest`, or without a row in the embedding.

    It would end in a crash far from here, or in nonsense.
    """
    strange = text[(text >= vocab_size) | (text < lowest)]
    if strange.size:
        raise DataError(
            f"{dataset_path} holds token {strange[0]}, but the tokenizer has {vocab_size} from 0 on; "
            "train with the tokenizer it was made with"
        )


def _build_document_index(
    documents: numpy.ndarray,
    num_epochs: int,
    numpy_random_state: numpy.random.RandomState,
    separate_final_epoch: bool,
) -> numpy.ndarray:
    """All epochs' documents, int32, shuffled together, or the last epoch's by themselves."""
    if separate_final_epoch and num_epochs > 1:
        return numpy.concatenate(
            [
                _build_document_index(documents, epochs, numpy_random_state, False)
                for epochs in (num_epochs - 1, 1)
            ]
        )
    document_index = numpy.tile(documents, num_epochs).astype(numpy.int32)
    numpy_random_state.shuffle(document_index)
    return document_index


def _build_shuffle_index(
    num_samples: int, total_size: int, numpy_random_state: numpy.random.RandomState
) -> numpy.ndarray:
    """0 to `total_size`: the first `num_samples` shuffled, then the rest, if any, shuffled."""
    small = total_size < numpy.iinfo(numpy.uint32).max - 1
    shuffle_index = numpy.arange(total_size, dtype=numpy.uint32 if small else numpy.int64)
    numpy_random_state.shuffle(shuffle_index[:num_samples])
    if num_samples < total_size:
        numpy_random_state.shuffle(shuffle_index[num_samples:])
    return shuffle_index


def _get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Attention mask [1, s, s] (True: hidden) or None, loss mask [s] and positions [s] of the
    tokens `data`, int64 [s]."""
    s = len(data)
    positions = torch.arange(s)
    is_eod = data == eod_token
    loss_mask = torch.ones(s)
    if eod_mask_loss:
        loss_mask[is_eod] = 0.0
    # Where the document of each token begins: right after the last end of document before it.
    begins = torch.zeros(s, dtype=torch.int64)
    if (reset_position_ids or reset_attention_mask) and s > 1:
        begins[1:] = torch.where(is_eod[:-1], positions[1:], 0).cummax(0).values
    attention_mask = None
    if create_attention_mask:
        first_visible = begins if reset_attention_mask else torch.zeros_like(begins)
        query, key = positions[:, None], positions[None, :]
        attention_mask = ((key > query) | (key < first_visible[:, None])).unsqueeze(0)
    return attention_mask, loss_mask, positions - begins if reset_position_ids else positions
