"""What a checkpoint's folder holds, as far as it can be told without torch.

It is also read before any process group exists. Torch-free. Counterpart:
`megatron.core.dist_checkpointing.core`.

    metadata.json               every tensor: dtype, global shape, which file holds which box of it
    common.json                 everything but the tensors: iteration, schedule, arguments
    rank_00000.safetensors ...  one file per rank that had something to write, in the format of
                                https://github.com/huggingface/safetensors: a length, JSON, raw bytes

Only JSON is parsed and only raw bytes are copied: nothing in a checkpoint can be executed.
"""

import json
import os
from pathlib import Path
from typing import Any

from minimegatron.core.json_text import parse_json

METADATA, COMMON = "metadata.json", "common.json"
ASIDE, REPLACED = ".tmp-", "-replaced"
"""`NAME.tmp-1a2b3c4d` becomes `NAME` once it is complete; what bore that name until then is
`NAME.tmp-1a2b3c4d-replaced` for a moment."""
FORMAT = 1
"""Raised when what is written here changes so that older readers would misread it."""


class CheckpointingException(RuntimeError):
    """A checkpoint cannot be written or read; the message says why and what to do, in one line."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises CheckpointingException if it is missing or damaged."""
    try:
        value = parse_json(path.read_bytes(), "its text")
    except FileNotFoundError:
        raise CheckpointingException(
            f"{path} is missing, so {path.parent} is not a complete checkpoint; use another"
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointingException(
            f"{path} is damaged ({error}); use another checkpoint"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointingException(f"{path} is damaged (no JSON object); use another checkpoint")
    return value


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Everything in the checkpoint but its tensors. Raises CheckpointingException."""
    return read_json(Path(checkpoint_dir) / COMMON)


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Whether the folder holds a checkpoint of this format. Its files are not looked at.

    False for one that Megatron wrote. Raises CheckpointingException if it cannot be told.
    """
    path = Path(checkpoint_dir) / METADATA
    return path.exists() and "format" in read_json(path)


def check_files(checkpoint_dir: str | Path) -> None:
    """Raises CheckpointingException unless every file is there and as long as it was written."""
    folder = Path(checkpoint_dir)
    metadata = read_json(folder / METADATA)
    if metadata.get("format") != FORMAT:
        raise CheckpointingException(
            f"{folder / METADATA} has format {metadata.get('format')!r}, but this version reads "
            f"{FORMAT}; use another checkpoint or version"
        )
    sizes = metadata.get("files")
    if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
        raise CheckpointingException(
            f"{folder / METADATA} is damaged (no sizes of files); use another checkpoint"
        )
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointingException(
                f"{path} is missing; copy it back or use another checkpoint"
            )
        if path.stat().st_size != size:
            raise CheckpointingException(
                f"{path} has {path.stat().st_size:,} bytes instead of {size:,}; copy it again or "
                "use another checkpoint"
            )


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on disk: a file's own fsync does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` and puts it on disk. Raises OSError, TypeError for what is no JSON."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
