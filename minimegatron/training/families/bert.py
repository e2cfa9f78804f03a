"""What BERT checks in the arguments.

Megatron has no counterpart; see the package.
"""

from minimegatron.training.families.family_checks import FamilyChecks
from minimegatron.training.families.masked_text import (
    check_documents,
    check_length_of_bert,
    check_tokenizer,
)

BERT = FamilyChecks(
    "pretrain_bert",
    sections=("bert",),
    checks=(check_tokenizer, check_length_of_bert),
    check_data=check_documents,
)
