"""Pretrain a BERT: `pretrain_gpt` with other functions; the loop, the step and the schedules stay.

Counterpart: `pretrain_bert.py` at the top of Megatron-LM.

The functions come in the order of `pretrain_gpt`, and `main` hands them over.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core import parallel_state
from minimegatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.stdlib_corpus import STDLIB
from minimegatron.core.datasets.stdlib_sentences import (
    StdlibBERTDataset,
    entropies_of_hidden_pieces,
)
from minimegatron.core.datasets.utils import get_blend_from_list
from minimegatron.core.enums import ModelType
from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.models.bert.bert_model import BertModel, Outputs
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.core.tensor_parallel.data import broadcast_data
from minimegatron.core.transformer.layer_placement import ranks_with_word_embedding
from minimegatron.core.utils import or_one
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.global_vars import get_args, get_timers, get_tokenizer
from minimegatron.training.result_checks import check_labels, check_loss
from minimegatron.training.training import pretrain
from minimegatron.training.utils import (
    average_losses_across_data_parallel_group,
    check_loss_mask,
    print_rank_0,
)

stimer = StragglerDetector()


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> BertModel:
    """Builds one chunk of the model. `pre_process`: it has the embedding; `post_process`: the heads."""
    args = get_args()
    return BertModel(
        config=core_transformer_config_from_args(args),
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        add_binary_head=args.bert_binary_head,
        vp_stage=vp_stage,
    )


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Of one pipeline's ranks, those that hold the word embedding, or a copy of it."""
    args = get_args()
    return ranks_with_word_embedding(args, not args.untie_embeddings_and_output_weights, pp_ranks)


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int], vp_stage: int | None = None
) -> list[Any]:
    """Train, validation and test datasets. Every chunk needs them, for the padding mask."""
    config = core_bert_dataset_config_from_args()
    is_built_in = get_args().data_path is None
    dataset_class = StdlibBERTDataset if is_built_in else BERTMaskedWordPieceDataset
    return BlendedMegatronDatasetBuilder(
        dataset_class, train_val_test_num_samples, is_dataset_built_on_rank, config
    ).build()


def core_bert_dataset_config_from_args() -> BERTMaskedWordPieceDatasetConfig:
    """What is read, and how it is hidden."""
    args = get_args()
    return BERTMaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=get_tokenizer(),
        blend=get_blend_from_list(args.data_path) or ([STDLIB], None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )


def is_dataset_built_on_rank() -> bool:
    """True on the rank of each tensor-parallel group that reads the batches, on every stage."""
    return parallel_state.get_tensor_model_parallel_rank() == 0


def get_batch(data_iterator: Iterator | None) -> tuple[torch.Tensor, ...]:
    """text, types, is_random, loss_mask, labels, padding_mask, on every stage alike.

    All [b, s], but is_random [b]; int64, but loss_mask float32.
    """
    keys = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]
    data = None if data_iterator is None else next(data_iterator)
    check_labels(data, get_args().unpadded_vocab_size)
    batch = broadcast_data(keys, data, torch.int64, sizes_vary=False)
    tokens, types, sentence_order = batch["text"], batch["types"], batch["is_random"]
    loss_mask, lm_labels = batch["loss_mask"].float(), batch["labels"]
    return tokens, types, sentence_order, loss_mask, lm_labels, batch["padding_mask"]


def loss_func(
    loss_mask: torch.Tensor,
    sentence_order: torch.Tensor,
    output_tensor: Outputs,
    model: torch.nn.Module | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one microbatch, on the last stage.

    Args:
        loss_mask: float32 [b, s], 1 at the tokens that are to be predicted.
        sentence_order: int64 [b], 1 where the two texts are swapped; -1 does not count.
        output_tensor: what the model returned: the loss of each token [b, s], and the binary head's
            logits [b, 2] or None.
        model: the chunk that computed them; a bad loss is reported with its microbatch.

    Returns a mean, of this rank's microbatch, and what is logged: the means of all copies of the model.
    So each microbatch weighs the same, however many tokens are masked in it; with the three values of
    `pretrain_gpt` each token could.
    """
    losses, sop_logits = output_tensor
    check_loss_mask(loss_mask, losses)
    losses, loss_mask = losses.view(-1).float(), loss_mask.view(-1)
    lm_loss = torch.sum(losses * loss_mask) / or_one(loss_mask.sum())
    found = {"lm loss": lm_loss}
    if sop_logits is not None:
        found["sop loss"] = F.cross_entropy(
            sop_logits.float(), sentence_order.view(-1), ignore_index=-1
        )
    loss = sum(found.values())
    check_loss(loss.detach(), model)
    averaged = average_losses_across_data_parallel_group(list(found.values()))
    return loss, dict(zip(found, averaged, strict=True))


def forward_step(data_iterator: Iterator | None, model: torch.nn.Module) -> tuple[Any, Callable]:
    """One microbatch through one chunk. The schedule calls it, and later the function it returns.

    On the last stage the output is a pair, which only the loss function takes apart.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        batch = get_batch(data_iterator)
    tokens, types, sentence_order, loss_mask, lm_labels, padding_mask = batch
    timers("batch-generator").stop()

    if not get_args().bert_binary_head:
        types = None
    with stimer:
        output_tensor = model(tokens, padding_mask, tokentype_ids=types, lm_labels=lm_labels)
    return output_tensor, partial(loss_func, loss_mask, sentence_order, model=model)


def no_sample(model: list[torch.nn.Module]) -> None:
    """An evaluation collects nothing beside its losses."""


def after_evaluation(collected: None, iteration: int, writer: Any) -> None:
    """Below the validation loss: what to hold it against."""
    if get_args().data_path is None and torch.distributed.get_rank() == 0:
        entropy, at_one_place = entropies_of_hidden_pieces(core_bert_dataset_config_from_args())
        print_rank_0(
            f" for comparison: unigram entropy of hidden tokens {entropy:.4f} nats/token; the best lm "
            f"loss without looking at other tokens {at_one_place:.4f}"
        )


def main() -> None:
    """The whole run."""
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
        process_non_loss_data_func=after_evaluation,
        args_defaults={"model_family": "bert", "tokenizer_type": "BertWordPieceLowerCase"},
        non_loss_data_func=no_sample,
    )


if __name__ == "__main__":
    main()
