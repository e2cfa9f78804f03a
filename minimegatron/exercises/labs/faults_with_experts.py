"""All known mistakes that need experts to show.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.faults_of_combined import FAULTS_OF_COMBINED
from minimegatron.exercises.labs.faults_of_dispatch import FAULTS_OF_DISPATCH
from minimegatron.exercises.labs.faults_of_expert_layers import FAULTS_OF_EXPERT_LAYERS
from minimegatron.exercises.labs.faults_of_routers import FAULTS_OF_ROUTERS

FAULTS_WITH_EXPERTS = (
    *FAULTS_OF_EXPERT_LAYERS,
    *FAULTS_OF_ROUTERS,
    *FAULTS_OF_DISPATCH,
    *FAULTS_OF_COMBINED,
)
