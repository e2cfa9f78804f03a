"""What notices each known mistake of samples with masked tokens.

Used by tests/test_mutations.py; a row is as in that file.
"""

CAUGHT_OF_MASKED_DATA: dict[str, tuple[tuple[str, ...], str]] = {}
