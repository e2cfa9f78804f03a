"""What T5 checks in the arguments.

Megatron has no counterpart; see the package.
"""

from minimegatron.training.families.family_checks import FamilyChecks
from minimegatron.training.families.masked_text import (
    check_documents,
    check_sentinels,
    check_tokenizer,
)

T5 = FamilyChecks(
    "pretrain_t5",
    sections=("bert", "t5"),
    checks=(check_tokenizer, check_sentinels),
    check_data=check_documents,
)
