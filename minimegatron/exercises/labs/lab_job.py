"""What the ranks of a lab are asked to do: plain data, which travels to them.

Torch-free. Megatron has no counterpart.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LabJob:
    """What the ranks of a lab are asked to do."""

    package: str
    """The folder that holds the copy."""
    path: str
    """The broken file."""
    layout: dict[str, Any]
    strict: bool
    pipes: str = ""
    lines: str = ""
    """The folder where ranks write what they notice."""
