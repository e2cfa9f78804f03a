"""Cases that only the exam needs: the package's own functions on small numbers.

Called by: `problem_cases`, so that expressions of docs/exam.toml may name them. Calls: the planner, the
recorded step, the ends of a step. Where a collective is needed, it is given what the other ranks hold.
"""

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import torch

from cases.tensor_cases import plain_number
from minimegatron.core import parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
)
from minimegatron.core.orders.placement import LOOP
from minimegatron.core.orders.work import SEND
from minimegatron.core.rank_generator import DEFAULT_ORDER, make_grids
from minimegatron.core.recorded_graph import RecordedGraphs
from minimegatron.core.rerun import step_runs
from minimegatron.core.tensor_parallel import mappings
from minimegatron.core.tensor_parallel.layers import RowParallelLinear
from minimegatron.planner.plan import plan
from minimegatron.training.utils import batch_keys
from source.places import RECORDINGS, read_json

# The package has a function of this name too.
finalize = importlib.import_module("minimegatron.core.distributed.finalize_model_grads")

__all__ = [
    "answering_call",
    "calls_above",
    "clip_factor",
    "num_reading",
    "order_of_sums",
    "rank_at",
    "replay_after_replacing",
    "row_parallel_output",
    "runs_again",
]


# -- Ranks --


def rank_at(place: dict[str, int], world: int, order: str = DEFAULT_ORDER, **sizes: int) -> int:
    """The rank with these coordinates; axes of size 1 need not be named."""
    grid, _ = make_grids(world, order=order, **sizes)
    (found,) = (
        rank
        for rank in range(world)
        if all(grid.coordinates(rank)[axis] == number for axis, number in place.items())
    )
    return found


def num_reading(world: int, **sizes: int) -> int:
    """Ranks that read samples of a GPT: of each tensor group the first, where the stage needs data."""
    grid, _ = make_grids(world, **sizes)
    places = [grid.coordinates(rank) for rank in range(world)]
    return sum(place["tp"] == 0 and _needs_data(place["pp"], grid.pp) for place in places)


def _needs_data(stage: int, num_stages: int) -> bool:
    with mock.patch.multiple(
        parallel_state,
        rank_of=lambda axis: {"pp": stage}[axis],
        get_pipeline_placement=lambda: LOOP(num_stages, 1),
    ):
        return bool(batch_keys())


# -- One step --


def answering_call(rank: int, call: str, p: int = 4, m: int = 8) -> str:
    """In which call of 1F1B the next stage takes what this rank's last `call` sends to it."""
    ranks = plan("1f1b", p, m).ranks
    *_, sender = (action for action in ranks[rank] if action.call == call)
    (sent,) = (message for message in sender.messages if message.direction == SEND)
    (found,) = (
        action.call
        for action in ranks[rank + 1]
        for message in action.messages
        if message.direction != SEND
        and (message.payload, message.microbatch) == (sent.payload, sent.microbatch)
    )
    return found


def calls_above(kind: str, recording: str = "1f1b-paced", rank: int = 1) -> str:
    """The lines that were under way, from `main` on, when the recorded rank did its first `kind`."""
    found = read_json(RECORDINGS / f"{recording}.json")
    events = found["steps"][0]["ranks"][rank]["events"]
    stack = next(event["st"] for event in events if event["k"] == kind)
    return "\n".join(found["frames"][frame][2] for frame in found["stacks"][stack])


# -- Tensor parallelism --


def row_parallel_output(terms: Sequence[float], bias: float) -> str:
    """What the first of so many ranks has after a row-parallel layer; `terms` are their products."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: len(terms))

    def add(tensor: torch.Tensor, *_: object, **__: object) -> None:
        tensor += sum(terms[1:])

    layer = RowParallelLinear(
        len(terms),
        1,
        config=ModelParallelConfig(),
        init_method=torch.nn.init.ones_,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=group,
    )
    with torch.no_grad(), mock.patch.object(mappings.collectives, "all_reduce", add):
        layer.weight.fill_(1.0)
        layer.bias.fill_(bias)
        output, _ = layer(torch.full((1, 1, 1), float(terms[0])))
    return plain_number(output.item())


# -- The end of a step --

SUMS = {
    "finish_grad_sync": "the copies of the model",
    "_allreduce_non_tensor_model_parallel_grads": "the norms over tensor ranks",
    "_allreduce_word_embedding_grads": "the tied embedding",
    "_divide_by_num_tokens": "the division by all tokens",
}


def order_of_sums() -> str:
    """What `finalize_model_grads` does, one after the other, with the per-token flag on."""
    done: list[str] = []

    def note(name: str):
        return lambda *_, **__: done.append(SUMS[name])

    chunk = SimpleNamespace(
        note_final=lambda: None,
        finish_grad_sync=note("finish_grad_sync"),
        config=SimpleNamespace(after_grads_funcs=[]),
    )
    groups = SimpleNamespace(embd=None, pp=None, pos_embd=None, dp_cp=None)
    others = {name: note(name) for name in SUMS if hasattr(finalize, name)}
    with (
        mock.patch.multiple(finalize, **others),
        mock.patch.object(finalize.step_checks, "refuse_unscaled_loss", lambda *_: None),
    ):
        finalize.finalize_model_grads([chunk], torch.tensor(1), groups)
    return ", ".join(done)


def clip_factor(in_buffer: float, loss_scale: float, limit: float) -> float:
    """By what clipping multiplies a gradient that lies in the buffer with the loss scale in it."""
    param = torch.zeros(1)
    param.grad = torch.tensor([in_buffer / loss_scale])
    clip_grad_by_total_norm_fp32(param, limit, get_grad_norm_fp32([param.grad]))
    return param.grad.item() * loss_scale / in_buffer


# -- A step again, a step as a graph --


def runs_again(wishes: Sequence[bool]) -> list[bool]:
    """Which ranks run the step again, if these ranks wish for it."""

    def take_largest(tensor: torch.Tensor, *_: object, **__: object) -> None:
        tensor.fill_(max(wishes))

    with (
        mock.patch.object(step_runs.dist, "is_initialized", lambda: True),
        mock.patch.object(step_runs.collectives, "all_reduce", take_largest),
    ):
        return [step_runs.of_any_rank(wish)[0] for wish in wishes]


def replay_after_replacing(captured: float, later: float) -> str:
    """x² of a replay, where the program has a new tensor for x after the capture."""
    holder, out = {"x": torch.tensor([float(captured)])}, []
    graph = RecordedGraphs().capture(lambda: out.append(holder["x"].square()))
    holder["x"] = torch.tensor([float(later)])
    graph.replay()
    return plain_number(out[0].item())
