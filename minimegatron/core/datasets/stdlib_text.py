"""Where the built-in text is: the source of Python's standard library, and one part of it.

Torch-free. Megatron has no such module; its examples begin with a download.

Different Python versions hold different text; one version gives the same on every rank.
"""

import functools
import hashlib
import os
import sysconfig
from pathlib import Path

STDLIB = "the Python standard library"
"""Stands for this corpus where datasets are known by a path."""

LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
"""Folders that are not the library, are missing on some systems, or repeat what is elsewhere."""

PART_BYTES = 3_000_000
"""A quarter of the library. WordPiece takes a second for that much, and every rank does it."""


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The library's `*.py` files, in an order that is the same everywhere but not alphabetical.

    Ordered by a hash of the path below `root`: a split cut off the end is then a fair sample, not
    whatever begins with z. Raises ValueError where there are none.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise ValueError(
            f"no Python source below {root}, so there is no built-in text; use --data-path"
        )
    return sorted(
        found,
        key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest(),
    )


@functools.cache
def part_of_stdlib(num_bytes: int = PART_BYTES) -> tuple[str, ...]:
    """The text of as many of the first files as have `num_bytes`, one more file than fits."""
    texts, size = [], 0
    for path in stdlib_files():
        content = path.read_bytes()
        texts.append(content.decode(errors="replace"))
        size += len(content)
        if size >= num_bytes:
            break
    return tuple(texts)
