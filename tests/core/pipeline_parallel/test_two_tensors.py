"""A link that carries two tensors: the order, the shapes and the gradients of 1F1B over two stacks.

Without processes, on streams that forgive as little as NCCL; as in `test_order` the model checks every
tensor that it reads. The two tensors have different shapes, so that no one is taken for the other.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron.core import utils
from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.core.pipeline_parallel import schedules, steps, user_results
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.planner.actions import ACTIVATION, COMMUNICATE, GRADIENT, SEND
from minimegatron.planner.plan import plan
from minimegatron.planner.stack_costs import messages_behind
from tests.core.pipeline_parallel.fake_step import Case, Made
from tests.fake_streams import PAIRS, TAGS, TOGETHER, Post
from tests.fake_transport import FakeCommunicator, FakeGroup, FakeTransport, Network, no_numbers

S_ENC, S_DEC, HIDDEN = 3, 1, 2
STATE, STATE_GRADIENT = "encoder's output", "its gradient"


class Stage(torch.autograd.Function):
    """One kernel for a forward and one for a backward; the state is read by both in the decoder."""

    @staticmethod
    def forward(ctx, hidden, state, chunk, microbatch):
        ctx.save_for_backward(hidden, state)
        ctx.chunk, ctx.microbatch = chunk, microbatch
        length = S_ENC if chunk.is_encoder else S_DEC
        output = hidden.new_empty(length, 1, HIDDEN)
        is_state = chunk.rank == chunk.split.split_rank - 1
        chunk.log.append(("F", microbatch))
        chunk.transport.compute(
            f"forward of microbatch {microbatch} on stage {chunk.rank}",
            reads=chunk.reads(hidden, state, microbatch),
            writes={output: Made(STATE if is_state else ACTIVATION, microbatch, chunk.rank)},
        )
        return output

    @staticmethod
    def backward(ctx, grad):
        chunk, microbatch, (hidden, state) = ctx.chunk, ctx.microbatch, ctx.saved_tensors
        rank, q = chunk.rank, chunk.split.split_rank
        reads = chunk.reads(hidden, state, microbatch)
        if rank < chunk.split.pp_size - 1:
            # What comes back for the encoder's output is all its gradient, of every decoder stage.
            kind = STATE_GRADIENT if rank == q - 1 else GRADIENT
            reads[grad] = Made(kind, microbatch, rank + 1)
        chunk.log.append(("B", microbatch))
        hidden_grad = torch.empty_like(hidden)
        writes = {hidden_grad: Made(GRADIENT, microbatch, rank)}
        state_grad = None
        if not chunk.is_encoder:
            state_grad = torch.empty_like(state)
            is_whole = rank == chunk.split.pp_size - 1
            writes[state_grad] = Made(STATE_GRADIENT if is_whole else "own part", microbatch, rank)
        chunk.transport.compute(
            f"backward of microbatch {microbatch} on stage {rank}", reads, writes
        )
        return hidden_grad, state_grad, None, None


class StackChunk(torch.nn.Module):
    """A stage of either stack; its methods are T5's."""

    def __init__(self, config, rank: int, split: StackSplit, transport: FakeTransport):
        super().__init__()
        self.config, self.rank, self.split, self.transport = config, rank, split, transport
        self.log = transport.network.log[rank]
        self.is_encoder = split.has_encoder(rank)
        size = (S_ENC if self.is_encoder else S_DEC, 1, HIDDEN)
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=torch.float64))
        self.inputs = None

    def set_input_tensor(self, tensors):
        number = 2 if self.rank > self.split.split_rank else 1
        assert len(tensors) == number
        self.inputs = tensors

    def extra_outputs(self, inputs):
        is_last = self.rank == self.split.pp_size - 1
        return [] if self.is_encoder or is_last else inputs[-1:]

    def message_shapes(self, encoder_shapes, decoder_shapes):
        behind = self.split.shapes_behind(encoder_shapes, decoder_shapes)
        return behind[max(self.rank - 1, 0)], behind[self.rank]

    def reads(self, hidden, state, microbatch):
        """What the stage's kernels read of what came from others."""
        q, found = self.split.split_rank, {}
        if not self.split.begins(self.rank):
            found[hidden] = Made(ACTIVATION, microbatch, self.rank - 1)
        if not self.is_encoder:
            found[state] = Made(STATE, microbatch, q - 1)
        return found

    def forward(self, microbatch):
        hidden = self.weight if self.split.begins(self.rank) else self.inputs[0]
        state = None if self.is_encoder else self.inputs[-1]
        if state is not None:
            state.of = (self, microbatch)
        return Stage.apply(hidden, state, self, microbatch)


def add_gradient(tensor, grad):
    """`user_results.add_gradient` as a kernel of its own, which checks what it adds."""
    if grad is None:
        return
    chunk, microbatch = tensor.of
    summed = torch.empty_like(grad)
    chunk.transport.compute(
        f"sum of gradients of microbatch {microbatch} on stage {chunk.rank}",
        reads={
            tensor.grad: Made("own part", microbatch, chunk.rank),
            grad: Made(STATE_GRADIENT, microbatch, chunk.rank + 1),
        },
        writes={summed: Made(STATE_GRADIENT, microbatch, chunk.rank)},
    )
    tensor.grad = summed


def forward_step_func(data_iterator, model):
    microbatch = next(data_iterator)
    return model(microbatch), lambda output: (output.sum(), {"microbatch": microbatch})


def run_case(case: Case, split: StackSplit) -> tuple[list[list], Network]:
    """Both passes; what each rank reported, and what it did."""
    network, reports = Network(case.p), []
    with (
        mock.patch.object(utils, "_device", torch.device("cpu")),
        mock.patch.object(user_results, "add_gradient", add_gradient),
        no_numbers(),
        torch.set_grad_enabled(not case.forward_only),
    ):
        for rank in range(case.p):
            config, transport = case.config(), FakeTransport(network, rank, case.tagged)
            group = FakeGroup(rank, case.p)
            found = forward_backward_pipelining_without_interleaving(
                forward_step_func=forward_step_func,
                data_iterator=iter(range(case.M)),
                model=StackChunk(config, rank, split, transport),
                num_microbatches=case.M,
                seq_length=S_ENC,
                decoder_seq_length=S_DEC,
                micro_batch_size=1,
                forward_only=case.forward_only,
                p2p_communicator=FakeCommunicator(group, config, transport),
                pg_collection=ProcessGroupCollection(pp=group, tp=FakeGroup(), cp=FakeGroup()),
            )
            transport.compute("whatever follows the step")
            reports.append(found)
    if case.tagged:
        network.run(TAGS)
    else:
        network.run(PAIRS)
        if not case.batched:
            network.run(TOGETHER)
    return reports, network


def started(log: list) -> list[tuple]:
    """What a rank did: its work, and its messages in raw order."""
    found: list[tuple] = []
    for entry in log:
        if not isinstance(entry, Post):
            found.append(entry)
            continue
        found += [(part.is_send, part.payload, part.peer, part.num_bytes) for part in entry.parts]
    return found


def planned(actions) -> list[tuple]:
    """The same of a plan."""
    found: list[tuple] = []
    for action in actions:
        if action.kind != COMMUNICATE:
            found.append(("F" if action.kind == "forward" else "B", action.microbatch))
        found += [(m.direction == SEND, m.payload, m.peer, m.num_bytes) for m in action.messages]
    return found


def check(case: Case, split: StackSplit) -> None:
    reports, network = run_case(case, split)
    encoder, decoder = S_ENC * HIDDEN * 8, S_DEC * HIDDEN * 8
    step = plan(
        "1f1b",
        case.p,
        case.M,
        forward_only=case.forward_only,
        batch_p2p_comm=case.batched,
        message_sizes=messages_behind(split, encoder, decoder),
    )
    for rank in range(case.p):
        assert started(network.log[rank]) == planned(step.ranks[rank]), f"rank {rank} of {case}"
    assert [report["microbatch"] for report in reports[-1]] == list(range(case.M))


@pytest.mark.parametrize("p, q", [(p, q) for p in (2, 3, 4, 5) for q in range(1, p)])
def test_messages_and_gradients_are_where_they_belong(p, q):
    for M in (1, 2, 3, 7):
        for options in (
            {},
            {"batched": False},
            {"deallocate": True},
            {"forward_only": True},
            {"batched": False, "tagged": True, "deallocate": True},
        ):
            check(Case(p, M, **options), StackSplit(p, q))


# -- One backward, with numbers --


def backward(inputs: list, outputs: list, grads: list, deallocate: bool = False) -> list:
    config = SimpleNamespace(grad_scale_func=None, deallocate_pipeline_outputs=deallocate)
    return steps.backward_step(inputs, outputs, grads, None, config)


def leaf(size: int) -> torch.Tensor:
    return torch.arange(1.0, size + 1).requires_grad_()


@pytest.mark.parametrize("deallocate", [False, True])
def test_a_middle_decoder_stage_adds_its_own_gradient_to_that_from_behind(deallocate):
    hidden, state = leaf(2), leaf(3)
    output = hidden * state.sum()
    steps.deallocate_output_tensor(output, deallocate)
    from_behind = [torch.tensor([1.0, 10.0]), torch.tensor([0.5, 0.25, 0.125])]
    found = backward([hidden, state], [output, state], from_behind, deallocate)
    assert found[0].tolist() == [6.0, 60.0]
    assert found[1].tolist() == [21.5, 21.25, 21.125]
    assert state.tolist() == [1.0, 2.0, 3.0], "the state is still needed by other stages' backwards"


def test_the_first_decoder_stage_sends_the_states_gradient_alone():
    state = leaf(3)
    output = torch.ones(2) * state.sum()
    found = backward([state], [output, state], [torch.tensor([1.0, 10.0]), torch.ones(3)])
    assert [grad.tolist() for grad in found] == [[12.0, 12.0, 12.0]]


def test_the_last_stage_has_nothing_from_behind():
    hidden, state = leaf(2), leaf(3)
    loss = hidden.sum() * state.sum()
    found = backward([hidden, state], [loss], [None, None])
    assert [grad.tolist() for grad in found] == [[6.0, 6.0], [3.0, 3.0, 3.0]]


def test_a_stage_need_not_use_what_it_got():
    hidden, state = leaf(2), leaf(3)
    found = backward([hidden, state], [hidden.sum()], [None, None])
    assert [grad.tolist() for grad in found] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    hidden, state, from_behind = leaf(2), leaf(3), torch.ones(3)
    found = backward([hidden, state], [hidden * 2, state], [torch.ones(2), from_behind])
    assert [grad.tolist() for grad in found] == [[2.0, 2.0], [1.0, 1.0, 1.0]]


def test_a_first_stage_may_be_given_a_list_of_shapes_too():
    """`adjust_tensor_shapes_fn` may say the same on every stage; the first receives nothing."""
    weight = leaf(2)
    assert backward([None, None], [weight * 2], [torch.ones(2)]) == [None, None]
    assert weight.grad.tolist() == [2.0, 2.0]


def test_shapes_may_be_adjusted_in_place():
    """As by ModelOpt's function for distillation, which widens first one list and then the other."""

    def widen(receive, send):
        for shapes in (receive, send):
            shapes[0] = (*shapes[0][:-1], shapes[0][-1] + 3)
        return receive, send

    config = Case(p=2, M=1).config()
    groups = SimpleNamespace(tp=FakeGroup(0, 1), cp=FakeGroup(0, 1))
    found = schedules._message_shapes(config, groups, (4, 1, None), widen)
    assert found == ([(4, 1, 5)], [(4, 1, 5)])


def test_outputs_come_with_what_the_model_hands_on():
    chunk = SimpleNamespace(extra_outputs=lambda inputs: inputs[-1:])
    hidden, state, output = leaf(1), leaf(2), leaf(1)
    found = steps.all_outputs(chunk, [hidden, state], output)
    assert found[0] is output and found[1] is state and len(found) == 2
    assert steps.all_outputs(SimpleNamespace(), [hidden], output) == [output]
    assert steps.all_outputs(chunk, None, output) is output  # without a pipeline
