"""One training step of the real schedules over the fake transport, with a model that only notes.

The model's kernels write on each tensor what it is (payload, microbatch, virtual stage), and check
this on each tensor they read. So a run that ends well has brought every message to the right place.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch

from minimegatron.core import utils
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.orders import get_schedule
from minimegatron.core.orders.placement import Placement, usual_placement
from minimegatron.core.pipeline_parallel.schedule_node import AbstractSchedulePlan, ScheduleNode
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.planner.actions import (
    ACTIVATION,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    SEND,
    parts_of,
)
from minimegatron.planner.plan import Plan, plan
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from tests.fake_streams import PAIRS, TAGS, TOGETHER, Machine, Post
from tests.fake_transport import FakeCommunicator, FakeGroup, FakeTransport, Network, no_numbers

SHAPE = (1, 1, 2)


@dataclass(frozen=True)
class Case:
    """p stages, v chunks (None for plain 1F1B), M microbatches, G per group."""

    p: int
    M: int
    v: int | None = None
    G: int | None = None
    forward_only: bool = False
    batched: bool = True
    overlap: bool = False
    deallocate: bool = False
    variable: bool = False
    planned: str | None = None
    """Run this plan with the planned runner, instead of the schedule that is written out."""
    order: str | None = None
    """Run this registered order, with its messages lowered; the same for a model placed so."""
    tagged: bool = False
    """A transport that matches messages by their payload."""
    combined: bool = False
    """Combined 1F1B."""

    def config(self) -> ModelParallelConfig:
        config = ModelParallelConfig(
            pipeline_model_parallel_size=self.p,
            virtual_pipeline_model_parallel_size=self.v,
            microbatch_group_size_per_vp_stage=self.G,
            batch_p2p_comm=self.batched and not self.overlap,
            overlap_p2p_comm=self.overlap,
            deallocate_pipeline_outputs=self.deallocate,
            variable_seq_lengths=self.variable,
            pipeline_dtype=torch.float64,
            pipeline_schedule=self.order,
            overlap_moe_expert_parallel_comm=self.combined,
        )
        config.hidden_size = SHAPE[-1]
        return config

    def plan(self) -> Plan:
        """What the planner says of the same step; raises ValueError if it refuses."""
        written = "interleaved" if self.v else "no-pipelining" if self.p == 1 else "1f1b"
        if self.combined and not self.forward_only:
            written = "combined"
        wire = None
        if self.order is not None:
            wire = "tagged" if self.tagged and not self.variable else "untagged"
        return plan(
            self.planned or self.order or written,
            self.p,
            self.M,
            self.v,
            self.G,
            forward_only=self.forward_only,
            overlap_p2p_comm=self.overlap,
            batch_p2p_comm=self.batched and not self.overlap,
            wire=wire,
        )

    def placement(self) -> Placement:
        """Where its stages are."""
        if self.order is not None:
            return get_schedule(self.order).placed(self.p, self.v)
        return usual_placement(self.p, self.v)


class Made(NamedTuple):
    """What a tensor of the model is."""

    payload: str
    microbatch: int
    stage: int
    """The virtual stage that made it."""

    def __str__(self) -> str:
        return f"{self.payload} of microbatch {self.microbatch} from virtual stage {self.stage}"


class Identified(torch.autograd.Function):
    """A stage's computation: one kernel for the forward, one for the backward."""

    @staticmethod
    def forward(ctx, tensor, chunk, microbatch):
        ctx.save_for_backward(tensor)
        ctx.chunk, ctx.microbatch = chunk, microbatch
        stage, output = chunk.stage, torch.empty_like(tensor)
        chunk.log.append(("F", microbatch, stage))
        chunk.transport.compute(
            f"forward of microbatch {microbatch} on virtual stage {stage}",
            reads={} if stage == 0 else {tensor: Made(ACTIVATION, microbatch, stage - 1)},
            writes={output: Made(ACTIVATION, microbatch, stage)},
        )
        return output

    @staticmethod
    def backward(ctx, grad):
        chunk, microbatch, (tensor,) = ctx.chunk, ctx.microbatch, ctx.saved_tensors
        stage, input_grad = chunk.stage, torch.empty_like(grad)
        chunk.log.append(("B", microbatch, stage))
        # A real backward reads what the forward read.
        reads = {} if stage == 0 else {tensor: Made(ACTIVATION, microbatch, stage - 1)}
        if stage < chunk.num_stages - 1:
            reads[grad] = Made(GRADIENT, microbatch, stage + 1)
        chunk.transport.compute(
            f"backward of microbatch {microbatch} on virtual stage {stage}",
            reads,
            writes={input_grad: Made(GRADIENT, microbatch, stage)},
        )
        return input_grad, None, None


class FakeChunk(torch.nn.Module):
    """A model chunk whose only work is `Identified`."""

    def __init__(self, config, stage, num_stages, transport):
        super().__init__()
        self.config, self.stage, self.num_stages = config, stage, num_stages
        self.transport, self.log = transport, transport.network.log[transport.rank]
        self.weight = torch.nn.Parameter(
            torch.empty(SHAPE, dtype=torch.float64, device=transport.network.device)
        )
        self.input_tensor = None

    def set_input_tensor(self, tensors):
        self.input_tensor = tensors[0]

    def forward(self, microbatch):
        tensor = self.weight if self.stage == 0 else self.input_tensor
        return Identified.apply(tensor, self, microbatch)

    def build_schedule_plan(self, microbatch):
        return FakePlan(self, microbatch)


class FakePlan(AbstractSchedulePlan):
    """Of a chunk that is one node."""

    def __init__(self, chunk, microbatch):
        self.input, self.node = chunk.input_tensor, ScheduleNode(partial(chunk, microbatch))

    @staticmethod
    def run(f, b, b_grad=None, pre_forward=None, pre_backward=None, *post):
        output = None if f is None else f.node.forward()
        if b is not None:
            b.node.backward(b_grad)
            b_grad = None if b.input is None else b.input.grad
        for hook, tensor in zip(post, (output, b_grad), strict=True):
            if hook is not None:
                hook(tensor, None)
        return output


def forward_step_func(data_iterator, model, return_schedule_plan=False):
    microbatch = next(data_iterator)

    def loss_func(output, non_loss_data=False):
        return output.sum(), {"microbatch": microbatch, "output": output.detach()}

    run = model.build_schedule_plan if return_schedule_plan else model
    return run(microbatch), loss_func


def run_program(case: Case, network: Network, rank: int) -> list:
    """The program of one rank, into `network`; returns what its schedule reported."""
    config, transport = case.config(), FakeTransport(network, rank, case.tagged)
    group, placement = FakeGroup(rank, case.p), case.placement()
    chunks = [
        FakeChunk(config, placement.stage_of(rank, chunk), placement.num_stages, transport)
        for chunk in range(case.v or 1)
    ]
    arguments = {
        "forward_step_func": forward_step_func,
        "data_iterator": [iter(range(case.M)) for _ in chunks],
        "model": chunks,
        "num_microbatches": case.M,
        "seq_length": 1,
        "micro_batch_size": 1,
        "forward_only": case.forward_only,
        "pg_collection": ProcessGroupCollection(pp=group, tp=FakeGroup(), cp=FakeGroup()),
    }
    with torch.set_grad_enabled(not case.forward_only):
        if case.p == 1 and case.planned is None:
            return forward_backward_no_pipelining(**arguments)
        function = forward_backward_pipelining_without_interleaving
        if case.v is not None:
            function = forward_backward_pipelining_with_interleaving
            if case.planned is None and case.order is None:
                arguments["decoder_seq_length"] = 7  # not read: messages are of seq_length
        if case.planned is not None:
            function = get_planned_forward_backward_func(case.planned)
        if case.order is not None:
            function = get_forward_backward_func(case.p, case.v, case.order)
        reports = function(p2p_communicator=FakeCommunicator(group, config, transport), **arguments)
    transport.compute("whatever follows the step")  # the communicator is gone, and what it held
    return reports


def run_programs(case: Case) -> tuple[list[list], Network]:
    """The first pass of every rank: what each schedule reported, and the network to run."""
    network = Network(case.p, sizes=SHAPE)
    with mock.patch.object(utils, "_device", torch.device(network.device)), no_numbers():
        return [run_program(case, network, rank) for rank in range(case.p)], network


def run_case(case: Case) -> tuple[list[list], Network, Machine]:
    """Both passes, with each choice of communicators. The machine is the last one's."""
    reports, network = run_programs(case)
    if case.tagged:
        return reports, network, network.run(TAGS)
    if not case.batched:
        network.run(TOGETHER)
    return reports, network, network.run(PAIRS)


def computations(log: list) -> list[tuple]:
    """Only the forwards and backwards of a rank's log: (kind, microbatch, virtual stage)."""
    return [entry for entry in log if not isinstance(entry, Post)]


def done_by(rank: int, network: Network, machine: Machine) -> list[tuple]:
    """What the rank did, in raw order, in the words of `planned_for`."""
    done: list[tuple] = []
    for entry in network.log[rank]:
        if not isinstance(entry, Post):
            done.append(entry)
            continue
        values = machine.values[rank, entry.number]
        messages = [
            (part.is_send, part.payload, part.peer, *value[1:])
            for part, value in zip(entry.parts, values, strict=True)
        ]
        done.append(("batch" if entry.is_batch else "lone", *messages))
    return done


def planned_for(rank: int, step: Plan) -> list[tuple]:
    """Forwards ("F", microbatch, virtual stage), backwards, and what is started at once: ("batch" or
    "lone", messages). A message is (is it a send, payload, peer, microbatch, stage that made it)."""
    stage_of, planned = step.config.placement.stage_of, []
    for action in step.ranks[rank]:
        if action.kind != COMMUNICATE:
            for part in parts_of(action):
                kind = "F" if part.kind == FORWARD else "B"
                planned.append((kind, part.microbatch, stage_of(rank, part.chunk)))
            continue
        messages = []
        for message in action.messages:
            is_send, stage = message.direction == SEND, stage_of(rank, message.chunk)
            if not is_send:
                stage += -1 if message.payload == ACTIVATION else 1
            messages.append((is_send, message.payload, message.peer, message.microbatch, stage))
        if not step.config.batch_p2p_comm or step.config.wire == "tagged":
            planned += [("lone", message) for message in messages]
        elif messages:
            planned.append(("batch", *messages))
    return planned
