"""Known mistakes where samples with masked tokens are made, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_MASKED_DATA: tuple[Fault, ...] = ()
