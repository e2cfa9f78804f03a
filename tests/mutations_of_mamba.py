"""What notices each known mistake of Mamba.

Used by tests/test_mutations.py; a row is as in that file.
"""

CAUGHT_OF_MAMBA: dict[str, tuple[tuple[str, ...], str]] = {}
