"""The same GPT step uncut, in this process: what ranks' losses and gradients are held against.

Megatron has no counterpart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from minimegatron.core.orders.placement import usual_placement
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.rank_generator import GROUP_KINDS, make_grids
from minimegatron.exercises.bench.cases import Wrong
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.feedback_numbers import check_numbers, wrong_numbers
from minimegatron.exercises.bench.gpt_step import GptStep, Seat, StepCase

TOLERANCE = 1e-9
"""Relative and absolute; in float64 only the order of additions may differ."""
GROUPS = tuple(kind.name for kind in GROUP_KINDS)


class Reference:
    """A case's step in one process, and how the case cuts it over `num_ranks` ranks."""

    def __init__(self, values: dict[str, Any], num_ranks: int):
        self.case = StepCase(**values)
        self.dp = num_ranks // (self.case.tp * self.case.cp * self.case.pp)
        case = self.case
        dense, experts = make_grids(
            num_ranks, case.tp, case.pp, cp=case.cp, ep=case.ep, etp=case.etp, order=case.order
        )
        self.places = [dense.coordinates(rank) for rank in range(num_ranks)]
        self.experts = [experts.coordinates(rank) for rank in range(num_ranks)]
        self.edp = experts.dp
        self.step = _one_process(self.case, self.dp)
        self.reports: list[dict[str, torch.Tensor]] = []

    def run(self) -> "Reference":
        """Forward, backward and finalize; returns itself."""
        self.reports = self.step.forward_backward()
        return self

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Every gradient of the full model."""
        return self.step.gradients()

    @property
    def sizes(self) -> dict[str, int]:
        """What a wrong ratio is compared with."""
        case = self.case
        sizes = {"tp": case.tp, "cp": case.cp, "dp": self.dp, "pp": case.pp, "ep": case.ep}
        return sizes | {"num_microbatches": case.num_microbatches}

    def who(self, rank: int) -> str:
        """A rank and where it stands: "2 (stage 1, dp 0)"."""
        place = self.places[rank]
        words = [f"stage {place['pp']}"]
        words += [f"tp {place['tp']}"] if self.case.tp > 1 else []
        words += [f"cp {place['cp']}"] if self.case.cp > 1 else []
        words += [f"dp {place['dp']}"] if self.dp > 1 else []
        return f"{rank} ({', '.join(words)})"

    def is_last_stage(self, rank: int) -> bool:
        """Whether it has the losses."""
        return usual_placement(self.case.pp, self.case.vp).is_last_rank(self.places[rank]["pp"])

    @cache  # noqa: B019  as long as the reference itself
    def as_rank(self, rank: int) -> GptStep:
        """The step as this rank builds it, without a connection: names, pieces, buffers."""
        place, of_experts, case = self.places[rank], self.experts[rank], self.case
        seats = dict.fromkeys(GROUPS, Seat())
        seats |= {
            "tp": Seat(place["tp"], case.tp),
            "cp": Seat(place["cp"], case.cp),
            "tp_cp": Seat(place["tp"] + case.tp * place["cp"], case.tp * case.cp),
            "pp": Seat(place["pp"], case.pp),
            "dp": Seat(place["dp"], self.dp),
            "dp_cp": Seat(place["cp"] + case.cp * place["dp"], case.cp * self.dp),
            "ep": Seat(of_experts["ep"], case.ep),
            "expt_tp": Seat(of_experts["tp"], case.tp if case.etp is None else case.etp),
            "expt_dp": Seat(of_experts["dp"], self.edp),
        }
        return GptStep(case, ProcessGroupCollection(**seats))

    def pieces(self, rank: int, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a rank holds of the full model's tensors."""
        step = self.as_rank(rank)
        return {name: step.mine(full[name], param) for name, param in step.parameters()}

    # -- Comparing --

    def check_losses(self, answers: Sequence[Any], what: str = "loss") -> None:
        """Raises Wrong unless the last stage's reports are those of its microbatches."""
        for rank, reports in enumerate(answers):
            if not isinstance(reports, list):
                raise Wrong(f"rank {rank}: the schedule returned {type(reports).__name__}")
            if not self.is_last_stage(rank):
                continue
            expected = self.reports[self.places[rank]["dp"] :: self.dp]
            if len(reports) != len(expected):
                raise Wrong(
                    f"rank {rank}: the schedule returned {len(reports)} reports; the last stage "
                    f"has one for each of {num_of(len(expected), 'microbatch', 'microbatches')}"
                )
            for number, (report, wanted) in enumerate(zip(reports, expected, strict=True)):
                name = f"the {what} of microbatch {number}"
                check_numbers(name, report["loss"], wanted["loss"], rank, self.sizes)

    def check_gradients(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Raises Wrong, naming rank, place and parameter, unless all raw gradients are right."""
        full = self.gradients
        for rank, found in enumerate(answers):
            for name, wanted in self.pieces(rank, full).items():
                if name not in found or not is_close(found[name], wanted):
                    raise self.wrong_gradient(rank, name, found.get(name), wanted)

    def wrong_gradient(
        self,
        rank: int,
        name: str,
        got: Any,
        expected: torch.Tensor,
        sizes: dict[str, int] | None = None,
    ) -> Wrong:
        """What to say about one gradient: rank, place, parameter, ratio, what of `sizes` it is."""
        sizes = self.sizes if sizes is None else sizes
        what, who = f"gradient of {name}", self.who(rank)
        return wrong_numbers(what, got, expected, who, sizes, rtol=TOLERANCE, atol=TOLERANCE)


def is_close(found: Any, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors have one shape and, but for the order of additions, the same values."""
    return (
        isinstance(found, torch.Tensor)
        and found.shape == wanted.shape
        and torch.allclose(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    )


def _one_process(case: StepCase, dp: int) -> GptStep:
    """The step uncut, with all `dp` replicas' data."""
    serial = replace(
        case,
        tp=1,
        cp=1,
        pp=1,
        vp=None,
        split=None,
        ep=1,
        etp=1,
        overlap_moe=False,
        num_microbatches=case.num_microbatches * dp,
        num_layers=case.layers,
        sequence_parallel=False,
        overlap_grad_reduce=False,
        distributed_optimizer=False,
        rerun=False,
    )
    return GptStep(serial, ProcessGroupCollection(**dict.fromkeys(GROUPS, Seat())))
