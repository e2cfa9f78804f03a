"""Known mistakes in T5, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_T5: tuple[Fault, ...] = ()
