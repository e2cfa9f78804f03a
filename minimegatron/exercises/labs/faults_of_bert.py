"""Known mistakes in BERT, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_BERT: tuple[Fault, ...] = ()
