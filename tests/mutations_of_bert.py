"""What notices each known mistake of BERT.

Used by tests/test_mutations.py; a row is as in that file.
"""

CAUGHT_OF_BERT: dict[str, tuple[tuple[str, ...], str]] = {}
