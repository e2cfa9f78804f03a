"""Small models of other families than GPT, for `gpt_step`: how a stage is built, batches, forward step.

Megatron has no counterpart.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.models.bert.bert_model import BertModel
from minimegatron.core.models.mamba.mamba_layer_specs import get_mamba_stack_spec
from minimegatron.core.models.mamba.mamba_model import MambaModel
from minimegatron.core.models.T5.stack_split import (
    StackSplit,
    ranks_with_position_embedding_of_t5,
    ranks_with_word_embedding_of_t5,
)
from minimegatron.core.models.T5.t5_model import T5Model
from minimegatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.exercises.bench.step_case import MICRO_BATCH, SEQ, VOCAB, StepCase

Batch = dict[str, torch.Tensor]
MASK_ID, PAD_ID = 3, 5
S_ENC = 6
"""Of T5's encoder; its decoder has SEQ tokens. With one length a message could be taken for another."""
CHUNK = 3
"""Tokens of a chunk of the scan: a sequence has two."""


def _no_ranks(case: StepCase) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class ModelOfStep:
    """What a step needs to know of a family of models."""

    build: Callable[..., torch.nn.Module]
    """(case, config, groups, has embedding, has loss, vp_stage) -> one chunk."""
    batches: Callable[[int, int], list[Batch]]
    """(seed, number) -> the microbatches of the global batch."""
    forward_step: Callable
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `TransformerConfig`."""
    seq_length: int = SEQ
    embedding_ranks: Callable[[StepCase], dict[str, Any]] = _no_ranks
    """Arguments of `initialize_model_parallel`."""


def tokens_with_mask(seed: int, num: int) -> list[Batch]:
    """Tokens, labels and mask; a different number of unmasked tokens in each."""
    generator = torch.Generator().manual_seed(seed + 7)
    found = []
    for i in range(num):
        text = torch.randint(VOCAB, (MICRO_BATCH, SEQ + 1), generator=generator)
        mask = torch.ones(MICRO_BATCH, SEQ, dtype=torch.float64)
        mask[:, SEQ - i % 3 :] = 0.0
        found.append({"tokens": text[:, :-1], "labels": text[:, 1:], "mask": mask})
    return found


def sum_of_losses(mask: torch.Tensor, output: torch.Tensor) -> tuple:
    """(summed loss, number of tokens, report)."""
    total, num_tokens = (output * mask).sum(), mask.sum().int()
    return total, num_tokens, {"loss": total.detach().clone()}


# -- BERT --


def _build_bert(
    case: StepCase, config: TransformerConfig, groups: Any, first: bool, last: bool, vp: int | None
) -> BertModel:
    return BertModel(
        config,
        2,
        bert_layer_local_spec,
        VOCAB,
        SEQ,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=case.tied,
        pg_collection=groups,
        vp_stage=vp,
    )


def _bert_batches(seed: int, num: int) -> list[Batch]:
    """Two texts in each row; some rows are short, and one or two tokens are hidden."""
    generator = torch.Generator().manual_seed(seed + 11)
    shape, found = (MICRO_BATCH, SEQ), []
    places = torch.arange(SEQ).expand(shape)
    for i in range(num):
        text = torch.randint(PAD_ID + 1, VOCAB, shape, generator=generator)
        is_token = places < torch.tensor([[SEQ - i % 2], [SEQ - 1]])
        is_hidden = (places == 1) | (places == i % 3) & is_token
        found.append(
            {
                "text": text.where(~is_hidden, MASK_ID).where(is_token, PAD_ID),
                "types": (places > 1).long(),
                "labels": text.where(is_hidden, -1),
                "is_random": torch.tensor([i % 2, 1]),
                "loss_mask": is_hidden.double(),
                "padding_mask": is_token.long(),
            }
        )
    return found


def _bert_loss(mask: torch.Tensor, is_random: torch.Tensor, output: tuple) -> tuple:
    losses, binary_logits = output
    loss = (losses * mask).sum() / mask.sum() + F.cross_entropy(binary_logits, is_random)
    return loss, {"loss": loss.detach().clone()}


def _bert_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple:
    batch = next(data_iterator)
    targets = {"tokentype_ids": batch["types"], "lm_labels": batch["labels"]}
    output = model(batch["text"], batch["padding_mask"], **targets)
    return output, partial(_bert_loss, batch["loss_mask"], batch["is_random"])


# -- T5 --


def _split_of(case: StepCase) -> StackSplit:
    return StackSplit(case.pp, case.split)


def _build_t5(
    case: StepCase, config: TransformerConfig, groups: Any, first: bool, last: bool, vp: int | None
) -> T5Model:
    split, rank = _split_of(case), groups.pp.rank()
    return T5Model(
        config,
        split.encoder_config(config, config.num_layers),
        encoder_model_with_local_spec(),
        decoder_model_with_local_spec(),
        VOCAB,
        S_ENC,
        pre_process=split.begins(rank),
        post_process=split.ends(rank),
        share_embeddings_and_output_weights=case.tied,
        add_encoder=split.has_encoder(rank),
        add_decoder=split.has_decoder(rank),
        pg_collection=groups,
    )


def _t5_batches(seed: int, num: int) -> list[Batch]:
    """What the decoder reads is a GPT's batch; the encoder reads another text, some of it short."""
    generator = torch.Generator().manual_seed(seed + 13)
    found = tokens_with_mask(seed, num)
    for i, batch in enumerate(found):
        batch["text_enc"] = torch.randint(VOCAB, (MICRO_BATCH, S_ENC), generator=generator)
        is_padding = torch.arange(S_ENC) >= torch.tensor([[S_ENC - i % 2], [S_ENC - 2]])
        batch["enc_mask"] = is_padding[:, None, None, :]
        batch["dec_mask"] = (batch["mask"] == 0.0)[:, None, None, :]
    return found


def _t5_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple:
    batch = next(data_iterator)
    masks = (batch["enc_mask"], batch["dec_mask"], batch["enc_mask"])
    output = model(batch["text_enc"], batch["tokens"], *masks, lm_labels=batch["labels"])
    return output, partial(sum_of_losses, batch["mask"])


def _t5_embedding_ranks(case: StepCase) -> dict[str, Any]:
    split = _split_of(case)
    return {
        "get_embedding_ranks": partial(ranks_with_word_embedding_of_t5, split, case.tied),
        "get_position_embedding_ranks": partial(ranks_with_position_embedding_of_t5, split, True),
    }


# -- Mamba --


def _build_mamba(
    case: StepCase, config: TransformerConfig, groups: Any, first: bool, last: bool, vp: int | None
) -> MambaModel:
    spec = get_mamba_stack_spec()
    layer = spec.submodules.mamba_layer
    mixer = replace(layer.submodules.mixer, params={"chunk_size": CHUNK})
    layer = replace(layer, submodules=replace(layer.submodules, mixer=mixer))
    return MambaModel(
        config,
        replace(spec, submodules=replace(spec.submodules, mamba_layer=layer)),
        VOCAB,
        SEQ,
        pre_process=first,
        hybrid_override_pattern=case.pattern,
        post_process=last,
        share_embeddings_and_output_weights=case.tied,
        pg_collection=groups,
        vp_stage=vp,
    )


def _mamba_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple:
    batch = next(data_iterator)
    output = model(batch["tokens"], None, None, labels=batch["labels"])
    return output, partial(sum_of_losses, batch["mask"])


FAMILIES = {
    "bert": ModelOfStep(_build_bert, _bert_batches, _bert_step),
    "t5": ModelOfStep(
        _build_t5,
        _t5_batches,
        _t5_step,
        seq_length=S_ENC,
        embedding_ranks=_t5_embedding_ranks,
    ),
    "mamba": ModelOfStep(
        _build_mamba,
        tokens_with_mask,
        _mamba_step,
        {"mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 4},
    ),
}
