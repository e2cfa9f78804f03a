"""Index arrays kept on disk, so that the next run, and the other ranks, need not build them again.

Counterpart: the `path_to_cache` halves of `GPTDataset._build_document_sample_shuffle_indices` and
`BlendedDataset._build_indices`.

An entry is one `.npy` per array and a `description.txt`, written last: without it there is no entry.
Two ranks that build the same entry write the same bytes, so it does not matter whose stay.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from minimegatron.core.datasets import atomic_file

logger = logging.getLogger(__name__)

Arrays = dict[str, numpy.ndarray]


def describe(identifiers: dict[str, Any]) -> str:
    """`identifiers` as text; its hash names the entry."""
    return json.dumps(identifiers, indent=1, default=lambda obj: obj.unique_identifiers)


def cached_arrays(
    path_to_cache: str | Path | None,
    identifiers: dict[str, Any],
    shapes: dict[str, tuple[int | None, ...]],
    build: Callable[[], Arrays],
) -> Arrays:
    """What `build()` returns, from the cache if it is there, into the cache if it is not.

    Args:
        path_to_cache: the folder; None for no cache.
        identifiers: everything the arrays depend on.
        shapes: name and shape of each array, None where only building tells. A cached one that is
            unreadable or of another shape is built again. Arrays are mapped, and nothing in them is
            unpickled.
    """
    if path_to_cache is None:
        return build()
    description = describe(identifiers)
    key = hashlib.sha256(description.encode()).hexdigest()[:32]
    base = Path(path_to_cache) / f"{key}-{identifiers['class']}-{identifiers['split']}"
    paths = {name: Path(f"{base}-{name}.npy") for name in shapes}
    marker = Path(f"{base}-description.txt")
    if marker.is_file():
        arrays = _load(paths, shapes)
        if arrays is not None:
            return arrays
        logger.warning("the cached indices %s-*.npy are damaged; building them again", base)
    arrays = build()
    for name, path in paths.items():
        _save(path, arrays[name])
    atomic_file.write_atomically(marker, description.encode())
    return arrays


def _load(paths: dict[str, Path], shapes: dict[str, tuple[int | None, ...]]) -> Arrays | None:
    arrays = {}
    for name, path in paths.items():
        try:
            arrays[name] = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if not _fits(arrays[name].shape, shapes[name]) or arrays[name].dtype.kind not in "iu":
            return None
    return arrays


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        size == want or want is None for size, want in zip(shape, wanted, strict=True)
    )


def _save(path: Path, array: numpy.ndarray) -> None:
    file = atomic_file.AtomicFile(path)
    try:
        numpy.save(file, array, allow_pickle=False)
        file.publish()
    finally:
        file.discard()
