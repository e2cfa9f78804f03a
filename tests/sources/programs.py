"""Runs `pretrain` with a text's functions in ranks of `run_ranks`; remembers what the steps return."""

import sys
from typing import Any
from unittest import mock

from minimegatron.core import parallel_state
from minimegatron.training import training
from minimegatron.training.global_vars import destroy_global_vars
from tests.training.short_runs import little_text

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-2 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
)
PIPELINE = "--pipeline-model-parallel-size 2"
CHUNKS = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "p=2": PIPELINE,
    "t=2": "--tensor-model-parallel-size 2",
    "d=2": "",
    "two chunks": CHUNKS,
}


def run(flags: str, *functions: Any, **defaults: Any) -> list[dict[str, float]]:
    """What each step of `pretrain(*functions)` reports on this rank, `lm loss` and others by name.

    `functions` are the provider of data sets, the model provider, the kind of model and the forward
    step, as `pretrain` takes them.
    """
    found = []

    def step(*args: Any, **kwargs: Any) -> Any:
        results = _train_step(*args, **kwargs)
        found.append({key: float(value) for key, value in results[0].items()})
        return results

    sys.argv = ["program", *MODEL.split(), *flags.split()]
    _train_step = training.train_step
    try:
        with little_text(), mock.patch.object(training, "train_step", step):
            training.pretrain(*functions, args_defaults=defaults)
        return found
    finally:
        destroy_global_vars()
        parallel_state.destroy_model_parallel()
