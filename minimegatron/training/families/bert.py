"""What BERT checks in the arguments.

Megatron has no counterpart; see the package.
"""

from minimegatron.training.families.family_checks import FamilyChecks

BERT = FamilyChecks("pretrain_bert", sections=("bert",))
