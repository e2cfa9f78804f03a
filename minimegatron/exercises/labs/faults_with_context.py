"""All known mistakes that need ranks that share sequences, or further tokens to predict, to show.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.faults_of_mtp import FAULTS_OF_MTP
from minimegatron.exercises.labs.faults_of_rings import FAULTS_OF_RINGS

FAULTS_WITH_CONTEXT = (*FAULTS_OF_RINGS, *FAULTS_OF_MTP)
