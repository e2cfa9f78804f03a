"""Short runs whose steps are watched, for tests of captured steps: in ranks of `run_ranks`.

Read by: test_captured_step, and `gpu.captured`.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from minimegatron import pretrain_gpt
from minimegatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from minimegatron.core.recorded_graph import RecordedGraph
from minimegatron.training import training
from minimegatron.training.evaluation import evaluate
from tests.training import short_runs
from tests.training.bad_graph_configs import GRAPH, QUIET

EAGER = f"{QUIET} --attention-dropout 0 --hidden-dropout 0"
CAPTURED = f"{GRAPH} --hidden-dropout 0 --cuda-graph-warmup-steps 2"
STEPS = 5


class Watched:
    """A short run in this rank: what each step left, and how often Python was in the model."""

    def __init__(self, flags: str, forward_step: Any = None):
        self.steps: list[dict[str, torch.Tensor]] = []
        self.evaluated: list[float] = []
        self.list_that_grows: list[int] = []
        self.replayed: list[RecordedGraph] = []
        self._evaluates = "--eval-iters" in flags
        self._forward_step = forward_step or pretrain_gpt.forward_step
        self._train_step = training.train_step
        program = SimpleNamespace(**vars(pretrain_gpt) | {"forward_step": self.forward_step})
        flags = f"{flags} --num-layers 2"
        with (
            mock.patch.object(training, "train_step", self.train_step),
            mock.patch.object(RecordedGraph, "replay", noted(self.replayed, RecordedGraph.replay)),
        ):
            self.losses = short_runs.run(flags, STEPS, program=program)["losses"]
        self.after = (
            dict(FullCudaGraphWrapper.cuda_graph),
            dict(FullCudaGraphWrapper.curr_iteration),
            sum(map(len, StaticBufferLoader.static_buffers.values())),
        )

    def forward_step(self, *args: Any) -> Any:
        self.list_that_grows.append(len(self.list_that_grows))
        return self._forward_step(*args)

    def train_step(
        self, forward_step: Any, iterator: Any, model: list, optimizer: Any, *others: Any
    ) -> Any:
        grads = {}

        def step() -> Any:
            named = list(model[0].named_parameters())
            grads.update({f"{name}: gradient": p.main_grad.clone() for name, p in named})
            return update()

        update = optimizer.step
        with mock.patch.object(optimizer, "step", step):
            found = self._train_step(forward_step, iterator, model, optimizer, *others)
        weights = {name: p.detach().clone() for name, p in model[0].named_parameters()}
        self.steps.append(found[0] | grads | weights)
        if self._evaluates:
            losses, _ = evaluate(forward_step, iterator, model, None, model[0].config)
            self.evaluated.append(losses["lm loss"])
        return found

    def same_as(self, other: "Watched") -> list[str]:
        """What is not, by step; gradients before clipping, and weights after the update."""
        assert len(self.steps) == len(other.steps) == STEPS
        return [
            f"step {number}: {name}"
            for number, (mine, its) in enumerate(zip(self.steps, other.steps, strict=True))
            for name in mine.keys() | its.keys()
            if not torch.equal(mine[name], its[name])
        ]


def noted(replayed: list, replay: Any) -> Any:
    """A method of a graph that also notes the graph."""

    def call(graph: RecordedGraph) -> None:
        replayed.append(graph)
        replay(graph)

    return call
