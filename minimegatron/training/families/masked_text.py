"""What BERT and T5 check in the arguments that say what text they read.

Megatron has no counterpart; see the package.
"""

import argparse

from minimegatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from minimegatron.core.datasets.helpers import LONGEST_SENTENCE, usable_documents
from minimegatron.core.datasets.indexed_dataset import open_tokens
from minimegatron.core.datasets.stdlib_sentences import documents_of_stdlib
from minimegatron.core.datasets.t5_dataset import check_room_for_runs
from minimegatron.core.datasets.wordpiece_tokenizer import LOWER_CASE
from minimegatron.training.families.family_checks import check_spans, prefixes_of_data, wanted_spans

SHORTEST_OF_BERT = 5
"""[CLS], two [SEP], and two tokens."""


def check_tokenizer(args: argparse.Namespace) -> None:
    """The tokenizer has tokens that stand for hidden text."""
    if args.tokenizer_type not in LOWER_CASE:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} has no token that stands for hidden text; use "
            f"{' or '.join(LOWER_CASE)}"
        )


def check_length_of_bert(args: argparse.Namespace) -> None:
    """A sequence holds the special tokens and some text."""
    if args.seq_length < SHORTEST_OF_BERT:
        raise ValueError(
            f"--seq-length is {args.seq_length}; give {SHORTEST_OF_BERT} or more: [CLS], two [SEP], "
            "and two tokens"
        )


def check_sentinels(args: argparse.Namespace) -> None:
    """Whatever is taken out of the text has a token that stands for it, and room in the decoder."""
    try:
        check_room_for_runs(
            args.mask_prob,
            args.seq_length,
            args.decoder_seq_length or args.seq_length,
            args.vocab_extra_ids,
        )
    except ValueError as error:
        message = str(error).replace("masking_probability", "--mask-prob")
        message = message.replace("sequence_length_encoder", "--seq-length")
        given = "--seq-length" if args.decoder_seq_length is None else "--decoder-seq-length"
        message = message.replace("sequence_length_decoder", given)
        raise ValueError(message) from None


def check_documents(args: argparse.Namespace) -> None:
    """The data is there, as documents of sentences, and every wanted split has some that are of use."""
    spans = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
    if args.data_path is None:
        check_spans(args, spans, len(documents_of_stdlib()), "documents of the built-in text")
        return
    min_sentences = 2 if args.model_family == "bert" and args.bert_binary_head else 1
    for prefix in prefixes_of_data(args):
        dataset = open_tokens(prefix)
        count = len(dataset.document_indices) - 1
        check_spans(args, spans, count, f"documents of --data-path {prefix}")
        usable = usable_documents(dataset.document_indices, dataset.sequence_lengths, min_sentences)
        for name, (begin, end) in wanted_spans(args, spans, count).items():
            if not usable[begin:end].any():
                raise ValueError(
                    f"--data-path {prefix}: of its {end - begin} documents for {name} by --split "
                    f"{args.split}, none has {min_sentences} or more sentences, each of at most "
                    f"{LONGEST_SENTENCE} tokens; write it with `minimegatron preprocess "
                    f"--split-sentences`, or raise the share of {name}"
                )
