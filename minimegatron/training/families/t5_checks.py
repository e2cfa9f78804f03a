"""What T5 checks in the arguments.

Megatron has no counterpart; see the package.
"""

import argparse
from dataclasses import replace
from functools import partial

from minimegatron.core.models.T5.stack_split import StackSplit, check_t5
from minimegatron.core.transformer.layer_placement import layers_of_virtual_stages
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.families.family_checks import FamilyChecks, check_unused
from minimegatron.training.families.masked_text import (
    check_documents,
    check_sentinels,
    check_tokenizer,
)

UNUSED = {
    "bert_binary_head": (True, "T5 has no binary head to leave out; drop it"),
    "eod_mask_loss": (False, "T5's samples have no end of document; drop it"),
    "sample_tokens": (0, "T5 writes no sample; give 0"),
}
"""Arguments with the value that means nothing, and why no other can be used."""
UNUSED_FIRST = {
    "num_layers_per_virtual_pipeline_stage": (None, "two stacks run by plain 1F1B only; drop it")
}
"""The same; looked at before what follows from it."""


def check_stacks(args: argparse.Namespace, config: TransformerConfig) -> None:
    """Each stack has stages, and each of these a whole number of layers.

    Raises ValueError, with the flags, the numbers and the remedy.
    """
    check_unused(UNUSED_FIRST, args)
    check_t5(config)
    p = args.pipeline_model_parallel_size
    split = StackSplit(p, args.pipeline_model_parallel_split_rank)
    encoder_layers = args.encoder_num_layers or args.num_layers
    decoder_layers = args.decoder_num_layers or args.num_layers
    encoder_config = split.encoder_config(config, encoder_layers)
    stages = split.decoder_line(p - 1).size()
    decoder_config = replace(config, num_layers=decoder_layers, pipeline_model_parallel_size=stages)
    for name, of_stack in (("encoder", encoder_config), ("decoder", decoder_config)):
        number = of_stack.pipeline_model_parallel_size
        try:
            layers_of_virtual_stages(of_stack)
        except ValueError:
            raise ValueError(
                f"--{name}-num-layers {of_stack.num_layers} (by default --num-layers) are not "
                f"divisible over the {name}'s {number} stages of --pipeline-model-parallel-size {p} "
                f"with --pipeline-model-parallel-split-rank {split.split_rank}; give a multiple of "
                f"{number}, or another split rank"
            ) from None


def check_lengths(args: argparse.Namespace) -> None:
    """Both sequences have positions, and are divisible where ranks share them."""
    if args.encoder_seq_length not in (None, args.seq_length):
        raise ValueError(
            f"--encoder-seq-length {args.encoder_seq_length} and --seq-length {args.seq_length} mean "
            "the same; drop --encoder-seq-length"
        )
    length, t = args.decoder_seq_length, args.tensor_model_parallel_size
    if length is None:
        return  # it is --seq-length, which all models check
    if length > args.max_position_embeddings:
        raise ValueError(
            f"--decoder-seq-length {length} is more than --max-position-embeddings "
            f"{args.max_position_embeddings}; raise the second to {length}"
        )
    if args.sequence_parallel and length % t:
        raise ValueError(
            f"--decoder-seq-length {length} is not divisible by --tensor-model-parallel-size {t}, as "
            f"--sequence-parallel needs; try {length // t * t or t}"
        )


def check_positions_of_t5(args: argparse.Namespace) -> None:
    """Tokens have places: the encoder looks both ways. A table of distances is on one stage."""
    buckets, distance = args.relative_attention_num_buckets, args.relative_attention_max_distance
    if buckets >= distance:
        raise ValueError(
            f"--relative-attention-num-buckets {buckets} are not fewer than the distances, "
            f"--relative-attention-max-distance {distance}; raise the second, or give fewer buckets"
        )
    p = args.pipeline_model_parallel_size
    if args.position_embedding_type == "relative" and p > 1:
        raise ValueError(
            "--position-embedding-type relative needs one table in all layers of a stack, but "
            f"--pipeline-model-parallel-size is {p}; use 1, or other positions"
        )
    if args.position_embedding_type == "none":
        raise ValueError(
            "--position-embedding-type none leaves T5's encoder, which looks both ways, without any "
            "order; use learned_absolute, rope or relative"
        )


T5 = FamilyChecks(
    "pretrain_t5",
    sections=("bert", "t5"),
    unused=tuple(UNUSED),
    checks=(
        check_tokenizer,
        check_lengths,
        check_sentinels,
        partial(check_unused, UNUSED),
        check_positions_of_t5,
    ),
    check_layers=check_stacks,
    check_data=check_documents,
)
