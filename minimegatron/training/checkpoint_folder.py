"""How a folder of checkpoints is laid out, and which checkpoint in it counts.

Torch-free. Counterpart: the functions of `megatron.training.checkpointing` that name files.

    SAVE/iter_0000100/...                        complete, or it would not have this name
    SAVE/iter_0000120.tmp-1a2b3c4d/...           being written, or left by a run that was killed
    SAVE/latest_checkpointed_iteration.txt       "100"; replaced last: it names a complete one
"""

import os
import re
import shutil
from pathlib import Path

from minimegatron.core.dist_checkpointing.core import ASIDE, METADATA, REPLACED

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the newest complete checkpoint of a folder."""


def get_checkpoint_name(checkpoints_path: str | os.PathLike, iteration: int) -> str:
    """The folder of one checkpoint. In Megatron, by default a file in it, which is one rank's.

    >>> get_checkpoint_name("save", 100)
    'save/iter_0000100'
    """
    return os.path.join(checkpoints_path, f"iter_{iteration:07d}")


def get_checkpoint_tracker_filename(checkpoints_path: str | os.PathLike) -> str:
    """The file that names the newest complete checkpoint of a folder."""
    return os.path.join(checkpoints_path, TRACKER)


def complete_iterations(folder: str | Path) -> list[int]:
    """The iterations of all complete checkpoints in `folder`, in order."""
    names = {path.parent.name for path in Path(folder).glob(f"iter_*/{METADATA}")}
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"iter_\d{7,}", name))


def find_checkpoint(load: str | Path) -> Path | None:
    """The folder of the newest complete checkpoint in `load`; None if there has never been one.

    Raises ValueError if there has, but it cannot be told which, or it is gone.
    """
    tracker = Path(get_checkpoint_tracker_filename(load))
    complete = complete_iterations(load)
    remedy = "drop --load"
    if complete:
        newest = complete[-1]
        remedy = f"to use iteration {newest}, which is complete, write {newest} into it"
    if not tracker.is_file():
        if complete:
            raise ValueError(f"--load {load}: {tracker} is missing; {remedy}")
        return None
    text = tracker.read_bytes()[:100].decode(errors="replace").strip()
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{tracker} says {text!r} instead of a number; {remedy}")
    folder = Path(get_checkpoint_name(load, int(text)))
    if not folder.is_dir():
        raise ValueError(f"{tracker} names iteration {text}, but {folder} is missing; {remedy}")
    return folder


def remove_leftovers(save: str | Path) -> None:
    """Removes what killed runs were writing."""
    for path in Path(save).glob(f"iter_*{ASIDE}*"):
        target = path.with_name(path.name.partition(ASIDE)[0])
        # Killed in between two renames: this is the checkpoint itself.
        if path.name.endswith(REPLACED) and not target.exists():
            continue
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoints(save: str | Path, keep_last: int) -> None:
    """Removes complete checkpoints but the newest `keep_last`, which include the marked one."""
    marked = int(Path(get_checkpoint_tracker_filename(save)).read_text())
    # Newer than the marked one: from a run before this one, which went further.
    older = [iteration for iteration in complete_iterations(save) if iteration <= marked]
    for iteration in older[:-keep_last]:
        folder = Path(get_checkpoint_name(save, iteration))
        # Renamed first: a kill in between leaves no incomplete checkpoint under a complete name.
        doomed = folder.with_name(f"{folder.name}{ASIDE}old")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
