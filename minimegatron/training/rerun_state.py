"""What a resumed run must know of a step whose result was rejected: a file in the checkpoint's folder.

Counterpart: the rerun state in the checkpoints of `megatron.training.checkpointing`.

    SAVE/iter_0000100/rerun.json    the layout, and for each rank what its judge found
"""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.dist_checkpointing.core import read_json
from minimegatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from minimegatron.core.utils import barrier
from minimegatron.training.global_vars import get_train_state
from minimegatron.training.random_state import rng_layout
from minimegatron.training.utils import print_rank_0

FILE = "rerun.json"


def save_rerun_state(folder: Path) -> None:
    """Every rank must call it, when the checkpoint in `folder` is complete."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, get_rerun_state_machine().state_dict())
    if dist.get_rank() == 0:
        text = json.dumps({"layout": rng_layout(per_copy=True), "ranks": everyones}, indent=1)
        write_atomically(folder / FILE, text.encode())
    barrier()


def take_rerun_state(folder: Path) -> None:
    """If the checkpoint was saved in the middle of an examination, the next step is its third run.

    Not in mode `disabled`, and not at another layout, where no rank is what it was: a line says so.
    Raises CheckpointingException for a damaged file.
    """
    if not (folder / FILE).is_file():
        return
    machine, about = get_rerun_state_machine(), read_json(folder / FILE)
    if machine.get_mode() is RerunMode.DISABLED:
        print_rank_0(f" {FILE} is not used: a rejected result is not examined (--rerun-mode)")
    elif about["layout"] != rng_layout(per_copy=True):
        print_rank_0(f" {FILE} is not used: it is of another layout, {about['layout']}")
    else:
        get_train_state().rerun_folder = str(folder)
        machine.load_state_dict(about["ranks"][dist.get_rank()])
        print_rank_0(" the next step was rejected in an earlier run: it is examined now")
