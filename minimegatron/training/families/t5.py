"""What T5 checks in the arguments.

Megatron has no counterpart; see the package.
"""

from minimegatron.training.families.family_checks import FamilyChecks

T5 = FamilyChecks("pretrain_t5", sections=("bert", "t5"))
