"""Names in a message: the first few, and how many there are.

Torch-free. Megatron has no counterpart; a model has thousands of parameters, and a message that names
all of them hides what it says.
"""

from collections.abc import Iterable
from typing import Any


def first_few(names: Iterable[Any], most: int = 3) -> str:
    """The first `most`, and the number of the rest.

    >>> first_few(range(9)), first_few(["weight", "bias"])
    ('0, 1, 2 and 6 more', 'weight, bias')
    """
    words = [str(name) for name in names]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
