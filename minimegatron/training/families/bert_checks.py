"""What BERT checks in the arguments.

Megatron has no counterpart; see the package.
"""

import argparse
from functools import partial

from minimegatron.training.families.family_checks import FamilyChecks, check_unused
from minimegatron.training.families.masked_text import (
    check_documents,
    check_length_of_bert,
    check_tokenizer,
)

UNUSED = {
    "context_parallel_size": (1, "BERT's ranks do not share sequences; give 1"),
    "num_experts": (None, "a BERT layer has one MLP; drop it"),
    "mtp_num_layers": (None, "BERT predicts masked tokens, not further ones; drop it"),
    "qk_layernorm": (False, "a BERT layer has no norms of queries and keys; drop it"),
    "defer_embedding_wgrad_compute": (False, "BERT's output layer does not put it off; drop it"),
    "calculate_per_token_loss": (False, "BERT's loss is a mean of each microbatch; drop it"),
    "eod_mask_loss": (False, "BERT's samples have no end of document; drop it"),
    "rotary_base": (10000, "BERT's rotary positions have the base 10000; drop it"),
    "sample_tokens": (0, "BERT does not write text; give 0"),
}
"""Arguments with the value that means nothing, and why no other can be used."""


def check_positions(args: argparse.Namespace) -> None:
    """Tokens have places. What looks only back knows some order without; BERT looks both ways."""
    if args.position_embedding_type == "none":
        raise ValueError(
            "--position-embedding-type none leaves BERT, which looks both ways, without any order; "
            "use learned_absolute or rope"
        )


BERT = FamilyChecks(
    "pretrain_bert",
    sections=("bert",),
    checks=(check_tokenizer, check_length_of_bert, partial(check_unused, UNUSED), check_positions),
    check_data=check_documents,
)
