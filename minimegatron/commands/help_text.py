"""The end of a command's `--help`: two or three lines to type.

Torch-free. Megatron has no counterpart.
"""

import argparse
from collections.abc import Sequence
from typing import Any


def with_examples(program: str, examples: Sequence[str]) -> dict[str, Any]:
    """Arguments of a parser whose help ends with these; each is what stands behind `program`."""
    return {
        "epilog": "\n  ".join(
            ["examples:", *(f"{program} {words}".rstrip() for words in examples)]
        ),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
