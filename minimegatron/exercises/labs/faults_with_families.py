"""All known mistakes that need a model of another family than GPT, or its data, to show.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.faults_of_bert import FAULTS_OF_BERT
from minimegatron.exercises.labs.faults_of_mamba import FAULTS_OF_MAMBA
from minimegatron.exercises.labs.faults_of_masked_data import FAULTS_OF_MASKED_DATA
from minimegatron.exercises.labs.faults_of_t5 import FAULTS_OF_T5

FAULTS_WITH_FAMILIES = (
    *FAULTS_OF_BERT,
    *FAULTS_OF_T5,
    *FAULTS_OF_MAMBA,
    *FAULTS_OF_MASKED_DATA,
)
