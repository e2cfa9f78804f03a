"""Records which files of the package one training step of each model enters, into entered_files.json.

Run by: a person, after an edit that moves work to another file; all models take half a minute:

    python docs/tools/record.py entered-files [MODEL ...]

Read by: `cases.states`, `spine`. Calls: torchrun with each model's own program, in which this file
wraps `train_step`.

A file counts if a function of it is called in every step but the first, on one of two stages (T5's: one
has the encoder, the other the decoder): batch, forward, messages, backward, gradients, optimizer.
Decorators that hand a call on do not count, nor does what `torch.distributed` calls: `backend/`.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from records.recorded_words import keep, launched
from source.places import ROOT, recorded

PACKAGE = f"{ROOT / 'minimegatron'}/"
DECORATORS = ("core/tracing.py", "core/left_out.py")
BACKEND = "backend/"

FLAGS = """
    --pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4
    --train-iters 6 --lr 0.001 --eval-iters 0 --log-interval 1 --distributed-backend gloo
"""
T5 = """
    --pipeline-model-parallel-split-rank 1 --encoder-num-layers 1 --decoder-num-layers 1
    --encoder-seq-length 64 --decoder-seq-length 32 --vocab-extra-ids 16
"""
MAMBA = "--mamba-head-dim 32 --mamba-num-groups 2"
PROGRAMS = {
    "GPT": ("pretrain_gpt", ""),
    "BERT": ("pretrain_bert", ""),
    "T5": ("pretrain_t5", T5),
    "Mamba": ("pretrain_mamba", MAMBA),
}
"""By the model's name, its program and its own flags."""


# -- In a rank --


def watch(program: str, folder: str, flags: list[str]) -> None:
    """Runs the program; the files that all its steps but the first enter go into `folder`."""
    from minimegatron.training import training

    steps: list[set[str]] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            steps[-1].add(name.removeprefix(PACKAGE))

    train_step = training.train_step

    def watched_step(*args: Any, **options: Any) -> Any:
        steps.append(set())
        sys.setprofile(profile)
        try:
            return train_step(*args, **options)
        finally:
            sys.setprofile(None)

    training.train_step = watched_step
    sys.argv = [program, *flags]
    runpy.run_module(f"minimegatron.{program}", run_name="__main__")
    files = sorted(set.intersection(*steps[1:]) - set(DECORATORS))
    files = [file for file in files if not file.startswith(BACKEND)]
    Path(folder, os.environ["RANK"]).write_text(json.dumps(files))


# -- The command --


def entered_by(program: str, own_flags: str) -> list[str]:
    """The files that any rank enters."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["--standalone", "--nproc-per-node", 2, "-m", __name__]
        flags = [*FLAGS.split(), *own_flags.split()]
        launched([*launch, program, folder, *flags])
        ranks = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return sorted(set().union(*ranks))


def main() -> None:
    """Writes the file, and prints how many files each step enters."""
    names = sys.argv[1:] or list(PROGRAMS)
    files = recorded("entered_files")["files"] if sys.argv[1:] else {}
    files |= {name: entered_by(*PROGRAMS[name]) for name in names}
    about = "Made by docs/tools/record.py entered-files; do not edit."
    keep("entered_files", {"about": about, "files": files})
    for name, found in files.items():
        print(f"{name}: {len(found)} files")


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2], sys.argv[3:])
