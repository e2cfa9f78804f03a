"""Known mistakes in Mamba, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_MAMBA: tuple[Fault, ...] = ()
