"""Pretrain a T5: `pretrain_gpt` with other functions; the loop, the step and the schedules stay.

Counterpart: `pretrain_t5.py` at the top of Megatron-LM. The one of today refuses several stages; which
stage has what is from before July 2024, see `core.models.T5.stack_split`.

The functions come in the order of `pretrain_gpt`, and `main` hands them over.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from minimegatron.core import parallel_state
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.stdlib_corpus import STDLIB
from minimegatron.core.datasets.stdlib_sentences import StdlibT5Dataset
from minimegatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from minimegatron.core.datasets.utils import get_blend_from_list
from minimegatron.core.enums import ModelType
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
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.core.tensor_parallel.data import broadcast_data
from minimegatron.core.utils import or_one
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.global_vars import get_args, get_timers, get_tokenizer
from minimegatron.training.result_checks import check_labels, check_loss
from minimegatron.training.training import pretrain
from minimegatron.training.utils import check_loss_mask

stimer = StragglerDetector()


def split_of_stages() -> StackSplit:
    """Which stages have which stack."""
    args = get_args()
    return StackSplit(args.pipeline_model_parallel_size, args.pipeline_model_parallel_split_rank)


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> T5Model:
    """Builds this stage's part of the model.

    A stack begins and ends on other stages than the model does, so the split rank decides, and the
    two flags say less.
    """
    args, split = get_args(), split_of_stages()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    config = core_transformer_config_from_args(args)
    has_bias = args.position_embedding_type == "relative"
    return T5Model(
        config=replace(config, num_layers=args.decoder_num_layers or args.num_layers),
        encoder_config=split.encoder_config(config, args.encoder_num_layers or args.num_layers),
        transformer_encoder_layer_spec=encoder_model_with_local_spec(has_bias),
        transformer_decoder_layer_spec=decoder_model_with_local_spec(has_bias),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=split.begins(rank),
        post_process=split.ends(rank),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
        add_encoder=split.has_encoder(rank),
        add_decoder=split.has_decoder(rank),
    )


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Of one pipeline's ranks, those that hold the word embedding, or a copy of it."""
    is_tied = not get_args().untie_embeddings_and_output_weights
    return ranks_with_word_embedding_of_t5(split_of_stages(), is_tied, pp_ranks)


def get_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Of one pipeline's ranks, those that hold the position embedding, or a copy of it."""
    is_learned = get_args().position_embedding_type == "learned_absolute"
    return ranks_with_position_embedding_of_t5(split_of_stages(), is_learned, pp_ranks)


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int], vp_stage: int | None = None
) -> list[Any]:
    """Train, validation and test datasets. Every stage needs them, for the masks."""
    args = get_args()
    config = T5MaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        sequence_length_decoder=args.decoder_seq_length,
        tokenizer=get_tokenizer(),
        blend=get_blend_from_list(args.data_path) or ([STDLIB], None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=10,
        masking_do_full_word=True,
        masking_use_geometric_distribution=True,
    )
    dataset_class = StdlibT5Dataset if args.data_path is None else T5MaskedWordPieceDataset
    return BlendedMegatronDatasetBuilder(
        dataset_class, train_val_test_num_samples, is_dataset_built_on_rank, config
    ).build()


def is_dataset_built_on_rank() -> bool:
    """True on the rank of each tensor-parallel group that reads the batches, on every stage."""
    return parallel_state.get_tensor_model_parallel_rank() == 0


def batch_keys(split: StackSplit, rank: int) -> list[str]:
    """What stage `rank` needs of a batch. Every decoder layer needs the encoder's mask too.

    >>> [batch_keys(StackSplit(3, 1), rank)[1:] for rank in range(3)]
    [['text_enc'], ['dec_mask', 'text_dec'], ['dec_mask', 'labels', 'loss_mask']]
    """
    begins, ends = split.begins(rank), split.ends(rank)
    keys = ["enc_mask"]
    if split.has_encoder(rank):
        keys += ["text_enc"] * begins
    if split.has_decoder(rank):
        keys += ["dec_mask", *["text_dec"] * begins, *["labels", "loss_mask"] * ends]
    return keys


def get_batch(data_iterator: Iterator | None) -> tuple[torch.Tensor | None, ...]:
    """text_enc, text_dec, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask; None where not needed.

    All int64 [b, s] of their stack's s, but loss_mask float32, and the masks of attention bool
    [b, 1, 1, s]: True at padding, which no query looks at. The last is for the decoder's queries, which
    look at the encoder's tokens.
    """
    rank = parallel_state.get_pipeline_model_parallel_rank()
    keys = batch_keys(split_of_stages(), rank)
    data = None if data_iterator is None else next(data_iterator)
    check_labels(data, get_args().unpadded_vocab_size)
    batch: dict[str, Any] = broadcast_data(keys, data, torch.int64, sizes_vary=False)
    for name in ("enc_mask", "dec_mask"):
        if name in batch:
            batch[name] = (batch[name] == 0)[:, None, None, :]
    if "loss_mask" in batch:
        batch["loss_mask"] = batch["loss_mask"].float()
    names = ("text_enc", "text_dec", "loss_mask", "labels", "enc_mask", "dec_mask", "enc_mask")
    return tuple(batch.get(name) for name in names)


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: torch.nn.Module | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one microbatch, on the last stage, as a GPT's: over the tokens of the decoder.

    Args:
        loss_mask: float32 [b, s_dec], 0 at padding.
        output_tensor: the loss of each token, float32 [b, s_dec].
        model: the chunk that computed them; a bad loss is reported with its microbatch.

    Returns the summed loss, the number of tokens, and what is logged: both, as a pair.
    """
    check_loss_mask(loss_mask, output_tensor)
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1)
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().detach()
    check_loss(loss.detach() / or_one(num_tokens), model)
    reporting_loss = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": reporting_loss}


def forward_step(data_iterator: Iterator | None, model: torch.nn.Module) -> tuple[Any, Callable]:
    """One microbatch through one stage. The schedule calls it, and later the function it returns.

    What came from the stage before, one tensor or two, `set_input_tensor` has told the model.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        text_enc, text_dec, loss_mask, labels, *masks = get_batch(data_iterator)
    timers("batch-generator").stop()

    with stimer:
        output_tensor = model(text_enc, text_dec, *masks, lm_labels=labels)
    return output_tensor, partial(loss_func, loss_mask, model=model)


def main() -> None:
    """The whole run."""
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        args_defaults={
            "model_family": "t5",
            "tokenizer_type": "BertWordPieceLowerCase",
            "vocab_extra_ids": 100,
        },
    )


if __name__ == "__main__":
    main()
