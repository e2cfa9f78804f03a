"""What Mamba checks in the arguments.

Megatron has no counterpart; see the package.
"""

from minimegatron.training.families.family_checks import FamilyChecks

MAMBA = FamilyChecks("pretrain_mamba", sections=("mamba",))
