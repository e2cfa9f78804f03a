"""Against megatron-core: the same tables, on every rank the same calls in the same order, and in every
call of the communicator the same messages in the same raw order."""

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron.core.enums import ModelType
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel import schedules
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.conformance.recording import (
    StepCase,
    record_step,
    recording_distributed,
)
from tests.fake_transport import FakeGroup
from tests.figures import figure

their_schedules = megatron_module("pipeline_parallel.schedules")
pytestmark = pytest.mark.filterwarnings("ignore")


def _core(module, config, groups, model_type) -> SimpleNamespace:
    def schedule_for(case: StepCase):
        if case.p == 1:
            return module.forward_backward_no_pipelining
        if case.v is None:
            return module.forward_backward_pipelining_without_interleaving
        return module.forward_backward_pipelining_with_interleaving

    return SimpleNamespace(
        TransformerConfig=config,
        ProcessGroupCollection=groups,
        model_type=model_type,
        schedule_for=schedule_for,
    )


OURS = _core(schedules, TransformerConfig, ProcessGroupCollection, ModelType.encoder_or_decoder)
THEIRS = _core(
    their_schedules,
    megatron_module("transformer.transformer_config").TransformerConfig,
    megatron_module("process_groups_config").ProcessGroupCollection,
    megatron_module("enums").ModelType.encoder_or_decoder,
)


# -- Tables --


@pytest.mark.parametrize("num_model_chunks", [1, 2, 3, 5])
def test_same_schedule_table_and_order(num_model_chunks: int):
    convert = megatron_module("transformer.cuda_graphs").convert_schedule_table_to_order
    for num_microbatches, group_size in itertools.product(range(1, 25), range(1, 26)):
        sizes = (num_microbatches, num_model_chunks, group_size)
        table = their_schedules.get_schedule_table(*sizes)
        assert schedules.get_schedule_table(*sizes) == table
        total = num_microbatches * num_model_chunks
        for num_warmup in {0, 1, total // 2, total - 1, total}:
            ours = schedules.convert_schedule_table_to_order(num_warmup, num_model_chunks, table)
            assert ours == convert(num_warmup, num_model_chunks, table), (sizes, num_warmup)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_same_counts_of_microbatches(p: int):
    sizes = itertools.product(
        range(p), (1, 2, 3, 4, 7, 8, 16), (None, 1, 2, 3), (p, p + 1, 2 * p), (False, True)
    )
    for r, num_microbatches, v, group_size, forward_only in sizes:
        if p == 1 and v is not None:
            continue
        communicator = SimpleNamespace(
            pp_group=FakeGroup(r, p), virtual_pipeline_model_parallel_size=v
        )
        for extra in (False, True):
            arguments = (num_microbatches, v or 1, group_size, forward_only, extra, communicator)
            ours = schedules.get_pp_rank_microbatches(*arguments)
            assert tuple(ours) == their_schedules.get_pp_rank_microbatches(*arguments), arguments


# -- Calls --


def _their_step(case: StepCase) -> tuple[list[tuple], list]:
    # Without torch.distributed, megatron-core takes every group for a group of one.
    with cuda_calls_on_cpu(), mock.patch("torch.distributed.is_initialized", lambda: True):
        return record_step(THEIRS, case)


def _without_handles(log: list[tuple]) -> list[tuple]:
    """Megatron's warm-up waits even with overlap on (unless `overlap_p2p_comm_warmup_flush`), ours
    takes handles there too: the same messages in the same order, waited for later."""
    exchanges = ("send_forward_recv_forward", "send_backward_recv_backward")
    return [call[:-1] if call[0] in exchanges else call for call in log]


def _assert_same_step(case: StepCase) -> int:
    theirs, their_reports = _their_step(case)
    ours, our_reports = record_step(OURS, case)
    if case.overlap:
        ours, theirs = _without_handles(ours), _without_handles(theirs)
    assert ours == theirs, case
    assert our_reports == their_reports, case
    return len(theirs)


def _refuses(step: Callable, case: StepCase) -> bool:
    try:
        step(case)
    except (ValueError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("forward_only", [False, True])
def test_same_calls_without_a_pipeline(forward_only: bool):
    for num_microbatches in (1, 2, 3, 8):
        _assert_same_step(StepCase(1, 0, num_microbatches, forward_only=forward_only))


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_same_calls_in_plain_1f1b(p: int, forward_only: bool):
    cases = itertools.product(range(p), (1, 2, 3, 4, 5, 8, 16))
    num_calls = [_assert_same_step(StepCase(p, r, m, forward_only=forward_only)) for r, m in cases]
    figure(f"p={p}: {len(num_calls)} ranks the same, {sum(num_calls)} calls")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_same_calls_in_interleaved_1f1b(p: int, forward_only: bool, overlap: bool):
    """All M and G up to 2p + 1: where the numbers are illegal, both must refuse."""
    num_calls, num_refused = [], 0
    sizes = itertools.product((2, 3), range(1, 2 * p + 2), range(1, 2 * p + 2))
    for v, num_microbatches, group_size in sizes:
        cases = [
            StepCase(p, r, num_microbatches, v, group_size, forward_only, overlap) for r in range(p)
        ]
        if _refuses(_their_step, cases[0]):
            assert _refuses(partial(record_step, OURS), cases[0]), cases[0]
            num_refused += 1
        else:
            num_calls += [_assert_same_step(case) for case in cases]
    figure(
        f"p={p}: {len(num_calls)} ranks the same, {sum(num_calls)} calls; "
        f"{num_refused} sizes refused by both"
    )


# -- Messages of one call --

SHAPE = (1, 1, 2)


def _calls() -> list[tuple]:
    """Every method with every choice of its messages: (method, arguments)."""
    tensor, both = torch.zeros(SHAPE), (False, True)
    calls: list[tuple] = [("recv_forward", SHAPE, end) for end in both]
    calls += [("recv_backward", SHAPE, end) for end in both]
    calls += [("send_forward", tensor, end) for end in both]
    calls += [("send_backward", tensor, end) for end in both]
    calls += [("send_forward_recv_backward", tensor, SHAPE, end) for end in both]
    calls += [("send_backward_recv_forward", tensor, SHAPE, end) for end in both]
    for output, wanted in itertools.product((None, tensor), both):
        calls.append(("send_forward_recv_forward", output, wanted, SHAPE))
        calls.append(("send_backward_recv_backward", output, wanted, SHAPE))
    for choice in itertools.product((None, tensor), (None, tensor), both, both):
        calls.append(("send_forward_backward_recv_forward_backward", *choice, SHAPE))
    return calls


def _started(communicator, call: tuple, log: list[tuple]) -> list[tuple]:
    log.clear()
    getattr(communicator, call[0])(*call[1:])
    return list(log)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_same_messages_in_raw_order_in_every_call(p: int, batched: bool):
    """Also where nothing is to be moved: Megatron then starts no batch."""
    their_communicator = megatron_module("pipeline_parallel.p2p_communication").P2PCommunicator
    their_config = megatron_module("model_parallel_config").ModelParallelConfig
    options = {
        "pipeline_model_parallel_size": p,
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": batched,
    }
    num_messages = 0
    for r, call in itertools.product(range(p), _calls()):
        group, ours, theirs = FakeGroup(r, p), [], []
        with cuda_calls_on_cpu(), recording_distributed(theirs):
            wanted = _started(their_communicator(group, their_config(**options)), call, theirs)
        with recording_distributed(ours):
            communicator = P2PCommunicator(group, ModelParallelConfig(**options))
            found = _started(communicator, call, ours)
        assert found == wanted, (r, call[0])
        num_messages += sum(len(entry) - 1 for entry in wanted)
    figure(f"p={p}, {'batched' if batched else 'lone'}: {num_messages} messages in the same order")
