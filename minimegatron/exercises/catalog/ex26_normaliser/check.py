"""Checks one step's gradient, with two values and with three, on two copies and two context ranks."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.distributed.finalize_model_grads import _divide_by_num_tokens
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.steps import forward_step_calc_loss
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex26_normaliser.batch import (
    WIDTH,
    WORLD,
    global_batch,
    of_all,
    part_of,
    wrong_ways,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

REPLACES = ("minimegatron.train_rl.loss_func", "minimegatron.rl.loss_contract.Row.hand_over")
COUNT, TWO, THREE = "the number N", "two values", "three values"
LAYOUTS = ((2, 1, 4), (2, 1, 2), (2, 1, 1), (1, 2, 4), (1, 2, 1))
"""d, c, M. The first has three sizes that differ: a missing factor is told from the others."""


def cases(seed: int) -> list[Case]:
    """N, then both ways of returning; each in every layout, and once without any token."""
    data = data_seed(seed)
    found = []
    for part in (COUNT, TWO, THREE):
        for d, c, M in LAYOUTS if part != COUNT else ((2, 1, 2), (1, 2, 4)):
            values = {"c": c, "M": M, "per_token": part == THREE, "empty": False, "seed": data}
            found.append(Case(f"{part}, d={d}, c={c}, M={M}", part=part, **values))
        if part != COUNT:
            nothing = values | {"c": 1, "M": 2, "empty": True}
            found.append(Case(f"{part}, no token counts anywhere", part=part, **nothing))
    return found


class _Chunk(torch.nn.Module):
    """A model of one vector, whose gradient lies in `main_grad`."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.main_grad = torch.zeros(WIDTH, dtype=torch.float64)

    def scale_gradients(self, scaling_factor: float) -> None:
        self.main_grad *= scaling_factor


def run(student: ModuleType, case: Case) -> Any:
    """A step: the package's own schedule of one loss, sum over ranks, and division at the end."""
    parallel_state.initialize_model_parallel(context_parallel_size=case.c)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    batches = part_of(case, groups.dp.rank(), groups.cp.rank())
    if case.part == COUNT:
        masks = [mask.clone() for _, mask in batches]
        found = student.tokens_of_all(masks, groups.dp_cp)
        if not all(torch.equal(mask, batch[1]) for mask, batch in zip(masks, batches, strict=True)):
            raise Wrong(
                f"rank {dist.get_rank()}: tokens_of_all changed the masks that it was given"
            )
        return found
    return _run_step(student, case, batches, groups)


def _run_step(student: ModuleType, case: Case, batches: list, groups: Any) -> dict[str, Any]:
    # N is ours: what `tokens_of_all` gives is asked alone.
    N = global_batch(case)[1].sum()
    function = student.three_values if case.per_token else student.two_values
    number, d = (3, "loss, n, report") if case.per_token else (2, "loss, report"), WORLD // case.c
    config = ModelParallelConfig(calculate_per_token_loss=case.per_token)
    chunk, store, tokens = _Chunk(config), [], torch.tensor(0.0, dtype=torch.float64)
    for x, mask in batches:

        def loss_func(token_loss: torch.Tensor, mask: torch.Tensor = mask) -> tuple:
            found = function(token_loss, mask.clone(), N.clone(), case.M, d, case.c)
            if not isinstance(found, tuple) or len(found) != number[0]:
                what = (
                    f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
                )
                raise Wrong(f"{function.__name__} returned {what}; ({number[1]}) is expected")
            return found

        loss, n = forward_step_calc_loss(
            model=None,
            output_tensor=x @ chunk.weight,
            loss_func=loss_func,
            config=config,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=case.M,
            forward_data_store=store,
            cp_group_size=case.c,
            is_last_stage=True,
        )
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise Wrong(f"the loss of {function.__name__} has no graph\nWhere was it left?")
        loss.backward()
        tokens = tokens + n
    chunk.main_grad += chunk.weight.grad
    dist.all_reduce(chunk.main_grad, group=groups.dp_cp)
    if case.per_token:
        _divide_by_num_tokens([chunk], tokens, groups.pp, groups.dp_cp)
    else:
        chunk.main_grad /= WORLD
    return {"gradient": chunk.main_grad, "reports": [_said(report) for report in store]}


def _said(report: Any) -> torch.Tensor:
    value = report.get("lm loss") if isinstance(report, dict) else None
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        raise Wrong('the report has no tensor "lm loss" without a graph; [sum, number] is expected')
    return value.double()


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """N of every rank, or the gradient and the reports."""
    places = [part_of(case, rank // case.c, rank % case.c) for rank in range(WORLD)]
    if case.part == COUNT:
        N = global_batch(case)[1].sum()
        for rank, answer in enumerate(answers):
            counts = torch.stack([mask.sum() for _, mask in places[rank]])
            known = [
                (counts.sum(), "Those are this rank's own tokens. Who else has some?"),
                (counts[0], "Those are one microbatch's tokens."),
                (N * case.c, "It is c times too large. Has a context rank the whole sequence?"),
                (N / WORLD, "That is a mean over ranks. What is N a sum of?"),
            ]
            check_known("N", answer, N, known, rank)
        return None
    for rank, answer in enumerate(answers):
        name = f"the gradient with {case.part}"
        if not torch.isfinite(answer["gradient"]).all():
            raise Wrong(
                f"{name} has values that are nan or inf\nBy what may a sum of 0 be divided?"
            )
        check_known(name, answer["gradient"], of_all(case), wrong_ways(case), rank)
        for (x, mask), said in zip(places[rank], answer["reports"], strict=True):
            right = torch.stack([(x.sum(-1) * mask).sum(), mask.sum()])
            check_known('"lm loss" of the report', said, right, rank=rank)
    return Result({"gradient": "of the mean over all tokens"})
