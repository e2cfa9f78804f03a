"""What notices each known mistake of a family of models other than GPT.

Used by tests/test_mutations.py.
"""

from tests.mutations_of_bert import CAUGHT_OF_BERT
from tests.mutations_of_mamba import CAUGHT_OF_MAMBA
from tests.mutations_of_masked_data import CAUGHT_OF_MASKED_DATA
from tests.mutations_of_t5 import CAUGHT_OF_T5

CAUGHT_WITH_FAMILIES = {
    **CAUGHT_OF_BERT,
    **CAUGHT_OF_T5,
    **CAUGHT_OF_MAMBA,
    **CAUGHT_OF_MASKED_DATA,
}
