"""What notices each known mistake of T5.

Used by tests/test_mutations.py; a row is as in that file.
"""

CAUGHT_OF_T5: dict[str, tuple[tuple[str, ...], str]] = {}
