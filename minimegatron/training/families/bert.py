"""What BERT checks in the arguments.

Megatron has no counterpart; see the package.
"""

import argparse

from minimegatron.training.argument_utils import flags_by_name
from minimegatron.training.families.family_checks import FamilyChecks

WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
SHORTEST = 5
"""[CLS] A [SEP] B [SEP]."""

UNUSED = {
    "context_parallel_size": (1, "BERT's ranks do not share sequences; give 1"),
    "num_experts": (None, "a BERT layer has one MLP; drop it"),
    "mtp_num_layers": (None, "BERT predicts masked tokens, not further ones; drop it"),
    "qk_layernorm": (False, "a BERT layer has no norms of queries and keys; drop it"),
    "defer_embedding_wgrad_compute": (False, "BERT's output layer does not put it off; drop it"),
    "calculate_per_token_loss": (False, "BERT's loss is a mean of each microbatch; drop it"),
    "eod_mask_loss": (False, "BERT's samples have no end of document; drop it"),
    "sample_tokens": (0, "BERT does not write text; give 0"),
}
"""Arguments with the value that means nothing, and why no other can be used."""


def check_unused(args: argparse.Namespace) -> None:
    """Nothing is asked for that BERT would not do."""
    for name, (nothing, why) in UNUSED.items():
        value = args.__dict__[name]
        if value != nothing:
            given = "is given" if value is True else f"is {value}"
            raise ValueError(f"{flags_by_name()[name]} {given}, but {why}")


def check_tokens(args: argparse.Namespace) -> None:
    """There is a token that masks, a position for each token, and room for two texts."""
    if args.tokenizer_type not in WORD_PIECES:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} has no token that masks another; BERT needs "
            f"{' or '.join(WORD_PIECES)}"
        )
    if args.position_embedding_type == "none":
        raise ValueError(
            "--position-embedding-type none leaves BERT, which looks both ways, without any order; "
            "use learned_absolute or rope"
        )
    if args.seq_length < SHORTEST:
        raise ValueError(
            f"--seq-length {args.seq_length} has no room for two texts between [CLS], [SEP] and "
            f"[SEP]; give {SHORTEST} or more"
        )


BERT = FamilyChecks("pretrain_bert", sections=("bert",), checks=(check_unused, check_tokens))
