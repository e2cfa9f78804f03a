"""One known mistake: a patch of a line or two.

Megatron has no counterpart.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """`old`, found exactly once in `file` (under the package's folder), becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    story: str
    """What is wrong with it, and what a run then does."""


def apply_fault(fault: Fault, package: Path) -> None:
    """Patches the copy of minimegatron in folder `package`.

    Raises ValueError if the code has changed so that the patch no longer fits.
    """
    path = package / fault.file
    path.write_text(patched(path.read_text(encoding="utf-8"), fault), encoding="utf-8")
    # A compiled copy would count as current if the file is as long as it was, and a second old.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink(missing_ok=True)


def patched(source: str, fault: Fault) -> str:
    """The text of the fault's file with the fault in it. Raises ValueError as `apply_fault` does."""
    if source.count(fault.old) != 1:
        raise ValueError(
            f"fault {fault.name}: {fault.old!r} occurs {source.count(fault.old)} times in "
            f"{fault.file}, not once; write the patch anew"
        )
    return source.replace(fault.old, fault.new)
