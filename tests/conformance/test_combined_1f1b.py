"""Against megatron-core: combined 1F1B makes the same calls, and its nodes stand in the same order.

Its own schedule runs here with its own plans' `run`; what they order are notes, not computations.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron.core.models.common import model_chunk_schedule_plan as our_plans
from minimegatron.core.pipeline_parallel.schedule_node import AbstractSchedulePlan, TensorsInFlight
from tests.conformance import test_call_order
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.conformance.recording import RecordingChunk, StepCase, record_step
from tests.figures import figure

their_schedules = megatron_module("pipeline_parallel.schedules")
their_step = megatron_module("pipeline_parallel.combined_1f1b")
their_plans = megatron_module("models.common.model_chunk_schedule_plan")
their_utils = megatron_module("pipeline_parallel.utils")
their_model = megatron_module("models.gpt.gpt_model")
pytestmark = pytest.mark.filterwarnings("ignore")


class Event:
    """Of a stream: nothing waits."""

    def wait(self, stream):
        pass

    def record(self, stream):
        pass


@contextlib.contextmanager
def global_state(case: StepCase):
    """Theirs asks it which stage this is, where a caller's own groups are not handed on."""

    def is_last(ignore_virtual=False, vp_stage=None):
        return case.r == case.p - 1 and vp_stage in (None, (case.v or 1) - 1)

    state = their_schedules.parallel_state
    with (
        mock.patch.object(state, "get_context_parallel_world_size", lambda: 1),
        mock.patch.object(state, "is_pipeline_last_stage", is_last),
    ):
        yield


@contextlib.contextmanager
def their_streams():
    """What theirs asks of a GPU's streams does nothing."""
    with (
        cuda_calls_on_cpu(),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: None),
        mock.patch.object(torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
        mock.patch.object(their_step, "set_streams", lambda *_: None),
        mock.patch.object(their_plans, "get_comm_stream", lambda: None),
        mock.patch.object(torch.cuda.nvtx, "range_push", lambda *_: None),
        mock.patch.object(torch.cuda.nvtx, "range_pop", lambda: None),
        mock.patch.object(their_model, "GPTModel", RecordingChunk),
        mock.patch("torch.distributed.is_initialized", lambda: True),
    ):
        yield


# -- A step: forwards, backwards, messages --


def plan_class(base: type) -> type:
    """A plan of one node, which notes its forward and its backward."""

    class Plan(base):
        def __init__(self, chunk):
            self.chunk, self.event, self.vp_stage = chunk, Event(), chunk.vp_stage
            self.input, self.output = chunk.input_tensor, None

        @staticmethod
        def run(f, b, b_grad=None, pre_forward=None, pre_backward=None, *post, **named):
            post_forward, post_backward = post or (
                named.get("post_forward"),
                named.get("post_backward"),
            )
            output = None
            if f is not None:
                if pre_forward is not None:
                    pre_forward(f.vp_stage)
                output = f.output = f.chunk()
            if b is not None:
                if pre_backward is not None:
                    pre_backward(b.vp_stage)
                torch.autograd.backward(b.output, b_grad)
                b_grad, b.output = None if b.input is None else b.input.grad, None
            if post_forward is not None:
                post_forward(output, f.vp_stage)
            if post_backward is not None:
                post_backward(b_grad, b.vp_stage)
            return output

    return Plan


OUR_PLAN = plan_class(AbstractSchedulePlan)
THEIR_PLAN = plan_class(their_utils.AbstractSchedulePlan)


def recorded(core: SimpleNamespace, plan: type, case: StepCase) -> tuple[list[tuple], list]:
    """`record_step` with the flag on."""
    config = core.TransformerConfig

    def with_flag(**options):
        found = config(**options)
        found.overlap_moe_expert_parallel_comm = True
        return found

    def forward_step(data_iterator, model, return_schedule_plan):
        drawn = next(data_iterator)
        assert return_schedule_plan and drawn == model.current_microbatch

        def loss_func(output):
            return output.sum(), drawn

        return plan(model), loss_func

    return record_step(
        SimpleNamespace(**{**vars(core), "TransformerConfig": with_flag}), case, forward_step
    )


def same_step(case: StepCase) -> int:
    with (
        their_streams(),
        global_state(case),
        mock.patch.object(RecordingChunk, "build_schedule_plan", None, create=True),
    ):
        theirs, their_reports = recorded(test_call_order.THEIRS, THEIR_PLAN, case)
        ours, our_reports = recorded(test_call_order.OURS, OUR_PLAN, case)
    if case.overlap:
        ours, theirs = map(test_call_order._without_handles, (ours, theirs))
    assert ours == theirs, case
    assert our_reports == their_reports, case
    return len(theirs)


def test_same_calls_without_a_pipeline():
    for num_microbatches in (1, 2, 5):
        same_step(StepCase(1, 0, num_microbatches))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_same_calls_in_interleaved_1f1b(p: int, overlap: bool):
    num_calls = [
        same_step(StepCase(p, r, M, v, G, overlap=overlap))
        for v in (2, 3)
        for M in (p, 2 * p, 2 * p + 1)
        for G in {p, M}
        if M % G == 0 or p <= M % G
        for r in range(p)
    ]
    figure(f"p={p}: {len(num_calls)} ranks the same, {sum(num_calls)} calls")


# -- A chunk and a layer: nodes --


class Node:
    """Notes its calls. A start counts as the call: in theirs it only goes into a stream."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def _note(self, what, given=None):
        if self.log is not None:
            self.log.append((self.name, what))
        return given

    def forward(self, given=None):
        return self._note("forward", given)

    def backward(self, given):
        return self._note("backward", given)

    def start_forward(self, given):
        return TensorsInFlight(self._note("forward", given))

    def start_backward(self, given):
        return TensorsInFlight(self._note("backward", given))

    def backward_dw(self):
        self._note("weights")


class Layer:
    """A plan of a layer for either package."""

    config = SimpleNamespace(ep_overlap_early_attn_memory_release=False)

    def __init__(self, name, log):
        for node in ("attn", "moe_dispatch", "mlp", "moe_combine"):
            setattr(self, node, Node(f"{name} {node}", log))
        self.add = self.mtp_post_process = Node("", None)

    def get_fp8_context(self):
        return contextlib.nullcontext()

    def release_state(self):
        pass


class Chunk:
    """A plan of a chunk for either package."""

    def __init__(self, name, num_layers, log):
        self.vp_stage = 0
        self.layers = [Layer(f"{name}{i}", log) for i in range(num_layers)]
        self.pre_process = Node(f"{name} pre_process", log)
        self.post_process = Node(f"{name} post_process", log)

    def num_layers(self):
        return len(self.layers)

    def get_layer(self, i):
        return self.layers[i]

    def pop_layer(self):
        return self.layers.pop()

    def record_current_stream(self):
        pass

    wait_current_stream = release_state = record_current_stream


def lanes(log: list[tuple]) -> list[list[tuple]]:
    """What computes, with the hooks; and what communicates."""

    def communicates(entry):
        return entry[0].endswith(("moe_dispatch", "moe_combine"))

    return [[entry for entry in log if communicates(entry) == lane] for lane in (False, True)]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("has_f, has_b", [(True, True), (True, False), (False, True)])
def test_same_nodes_of_a_pair_on_each_lane(has_f, has_b, is_last):
    logs: list[list] = []
    for plans in (our_plans, their_plans):
        logs.append(log := [])
        f, b = Layer("f", log) if has_f else None, Layer("b", log) if has_b else None
        plans.TransformerLayerSchedulePlan.run(f, b, "input", "gradient", is_last)
    assert lanes(logs[0]) == lanes(logs[1])
    assert sum(map(len, lanes(logs[0]))) == 4 * has_f + (6 - is_last) * has_b


@pytest.mark.parametrize("num_f, num_b", [(2, 2), (3, 1), (1, 3), (2, None), (None, 2), (0, 2)])
def test_same_nodes_and_hooks_of_two_chunks(num_f, num_b):
    logs: list[list] = []
    for plans in (our_plans, their_plans):
        logs.append(log := [])
        f = None if num_f is None else Chunk("f", num_f, log)
        b = None if num_b is None else Chunk("b", num_b, log)
        hooks = {
            name: lambda *arguments, name=name, log=log: log.append((name, arguments))
            for name in ("pre_forward", "pre_backward", "post_forward", "post_backward")
        }
        with their_streams():
            plans.TransformerModelChunkSchedulePlan.run(f, b, b_grad="gradient", **hooks)
    assert lanes(logs[0]) == lanes(logs[1])
