"""All known mistakes that stand in files of their own.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.faults_around_a_step import FAULTS_AROUND_A_STEP
from minimegatron.exercises.labs.faults_of_backend import FAULTS_OF_BACKEND
from minimegatron.exercises.labs.faults_of_graphs import FAULTS_OF_GRAPHS
from minimegatron.exercises.labs.faults_of_lines import FAULTS_OF_LINES
from minimegatron.exercises.labs.faults_of_orders import FAULTS_OF_ORDERS
from minimegatron.exercises.labs.faults_of_policy import FAULTS_OF_POLICY
from minimegatron.exercises.labs.faults_of_reruns import FAULTS_OF_RERUNS
from minimegatron.exercises.labs.faults_of_stragglers import FAULTS_OF_STRAGGLERS
from minimegatron.exercises.labs.faults_with_context import FAULTS_WITH_CONTEXT
from minimegatron.exercises.labs.faults_with_experts import FAULTS_WITH_EXPERTS
from minimegatron.exercises.labs.faults_with_families import FAULTS_WITH_FAMILIES

OTHER_FAULTS = (
    *FAULTS_AROUND_A_STEP,
    *FAULTS_OF_ORDERS,
    *FAULTS_WITH_EXPERTS,
    *FAULTS_WITH_CONTEXT,
    *FAULTS_WITH_FAMILIES,
    *FAULTS_OF_POLICY,
    *FAULTS_OF_GRAPHS,
    *FAULTS_OF_RERUNS,
    *FAULTS_OF_STRAGGLERS,
    *FAULTS_OF_LINES,
    *FAULTS_OF_BACKEND,
)
