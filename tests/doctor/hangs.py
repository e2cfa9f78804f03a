"""Jobs that hang, each by one mistake; and one that is merely slow."""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from minimegatron.backend import mesh
from minimegatron.core import parallel_state
from minimegatron.core.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    pass_to_next,
)
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    forward_step,
)
from minimegatron.core.pipeline_parallel.utils import schedule
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from tests.doctor.nccl_json import answer, entry, pretend_nccl

SHAPE = (4, 1, 2)


class OneRank:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Stage(torch.nn.Module):
    """A stage that multiplies; `before` is called in each forward, with microbatch and chunk."""

    def __init__(self, config, chunk: int, before: Callable, in_backward: Callable | None):
        super().__init__()
        self.config, self.chunk, self.before = config, chunk, before
        self.in_backward = in_backward
        self.weight = torch.nn.Parameter(torch.ones(SHAPE))
        self.input_tensor = None

    def set_input_tensor(self, tensors):
        self.input_tensor = tensors[0]

    def forward(self, microbatch: int) -> torch.Tensor:
        self.before(microbatch, self.chunk)
        output = self.weight * (2 if self.input_tensor is None else self.input_tensor)
        if self.in_backward is not None:
            output.register_hook(partial(self.in_backward, microbatch))
        return output


def gloo_group() -> dist.ProcessGroup:
    """All ranks over plain gloo: a send waits for its receive, and nobody is told of a mistake."""
    return dist.new_group(backend="gloo")


def forward_step_func(data_iterator, model):
    microbatch = next(data_iterator)
    return model(microbatch), lambda output: (output.sum(), {"loss": output.sum().detach()})


def nothing(microbatch: int, chunk: int) -> None:
    pass


def run_step(
    num_microbatches: int,
    before: Callable[[int, int], None] = nothing,
    num_chunks: int | None = None,
    next_rank: int | None = None,
    function: Callable | None = None,
    group: dist.ProcessGroup | None = None,
    in_backward: Callable | None = None,
) -> list:
    """One step of a pipeline over all ranks: those of `group`, or of the default group."""
    world = group or dist.group.WORLD
    config = ModelParallelConfig(
        pipeline_model_parallel_size=world.size(),
        virtual_pipeline_model_parallel_size=num_chunks,
        batch_p2p_comm=num_chunks is None,
        pipeline_dtype=torch.float32,
    )
    config.hidden_size = SHAPE[2]
    p2p = P2PCommunicator(world, config)
    if next_rank is not None:
        p2p.next_rank = next_rank
    chunks = [Stage(config, chunk, before, in_backward) for chunk in range(num_chunks or 1)]
    if function is None:
        function = forward_backward_pipelining_without_interleaving
        if num_chunks is not None:
            function = forward_backward_pipelining_with_interleaving
    return function(
        forward_step_func=forward_step_func,
        data_iterator=[iter(range(num_microbatches)) for _ in chunks],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=SHAPE[0],
        micro_batch_size=SHAPE[1],
        p2p_communicator=p2p,
        pg_collection=ProcessGroupCollection(pp=world, tp=OneRank(), cp=OneRank()),
    )


# -- Messages --


@schedule
def all_send_first(*, model, p2p_communicator, data_iterator, num_microbatches, **_):
    """Sends an output and a gradient before it receives either, and waits for both to be out."""
    p2p, rank = p2p_communicator, dist.get_rank()
    store: list = []
    output, _ = forward_step(
        forward_step_func,
        data_iterator[0],
        model[0],
        num_microbatches,
        None,
        store,
        model[0].config,
        1,
        current_microbatch=0,
        is_last_stage=False,
    )
    if rank == 0:
        p2p.send_forward(output.detach(), False)
    else:
        p2p.send_backward(output.detach(), False)
    p2p.finish()
    if rank == 0:
        p2p.recv_backward(SHAPE, False)
    else:
        p2p.recv_forward(SHAPE, False)


def send_send_cycle() -> None:
    run_step(2, function=all_send_first, group=gloo_group())


@schedule
def receives_one_less(*, p2p_communicator, num_microbatches, **_):
    if dist.get_rank() == 0:
        for _ in range(num_microbatches):
            p2p_communicator.send_forward(torch.ones(SHAPE), False)
    else:
        for _ in range(num_microbatches - 1):
            p2p_communicator.recv_forward(SHAPE, False)
    p2p_communicator.finish()


def missing_receive() -> None:
    run_step(4, function=receives_one_less, group=gloo_group())
    all_reduce(torch.ones(3), dist.group.WORLD)


def wrong_peer() -> None:
    run_step(4, next_rank=2 if dist.get_rank() == 0 else None, group=gloo_group())


def unequal_microbatches() -> None:
    run_step(6 if dist.get_rank() == 1 else 4)


# -- Collectives --


def skipped_collective() -> None:
    group = dist.new_group([0, 1, 2])
    for layer in range(5):
        if not (dist.get_rank() == 2 and layer == 3):
            all_reduce(torch.ones(4, 8), dist.group.WORLD)
    if dist.get_rank() < 3:
        all_gather(torch.empty(6), torch.ones(2), group)


def mismatched_shapes() -> None:
    for size in ((4, 8), (2, 8)):
        rows = 1 if dist.get_rank() == 1 and size == (2, 8) else size[0]
        all_reduce(torch.ones(rows, size[1]), dist.group.WORLD)
    time.sleep(60)


def mismatched_operations(group: dist.ProcessGroup | None = None) -> None:
    tensor = torch.ones(16)
    if dist.get_rank() == 1:
        broadcast(tensor, 0, group or dist.group.WORLD)
    else:
        all_reduce(tensor, group or dist.group.WORLD)
    time.sleep(60)


def mismatched_operations_over_gloo() -> None:
    mismatched_operations(gloo_group())


def wrong_order() -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    order = (first, second) if dist.get_rank() == 0 else (second, first)
    for group in order:
        all_reduce(torch.ones(5), group)


def never_waits_for_launched() -> None:
    """An asynchronous collective: rank 1 never launches the second."""
    handles = []
    for _ in range(2 - dist.get_rank()):
        handles.append(all_reduce(torch.ones(7), dist.group.WORLD, async_op=True))
    for handle in handles:
        handle.wait()
    if dist.get_rank() == 1:
        while True:
            pass


def rank_that_skips_its_experts() -> None:
    """Two pairs share experts. The second of a pair sends a row to each, the first none."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    group, rank = parallel_state.get_expert_model_parallel_group(), dist.get_rank()
    for layer in range(3):
        if rank == 3 and layer == 2:
            time.sleep(600)
        rows = group.rank()
        all_to_all(torch.empty(1, 2), torch.ones(2 * rows, 2), group, [0, 1], [rows, rows])


def rank_that_skips_a_hop() -> None:
    """Two pairs share sequences. In the backward of the second layer a rank does nothing more."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    for layer in (1, 2):
        for hop in range(2):
            if dist.get_rank() == 2 and (layer, hop) == (2, 1):
                time.sleep(600)
            told = {"hop": hop, "layer": layer, "direction": "backward", "payload": "dkv"}
            pass_to_next(torch.empty(2, 3), torch.ones(2, 3), group, **told).wait()


# -- Ranks --


def early_return() -> str:
    all_reduce(torch.ones(2), dist.group.WORLD)
    if dist.get_rank() == 2:
        return "done"
    all_reduce(torch.ones(2), dist.group.WORLD)
    return "done"


def stops(microbatch: int, chunk: int) -> None:
    if dist.get_rank() == 1 and microbatch == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def sleeps(microbatch: int, chunk: int) -> None:
    if dist.get_rank() == 1 and microbatch == 1:
        time.sleep(600)


def loops(microbatch: int, chunk: int) -> None:
    while dist.get_rank() == 1 and microbatch == 3 and chunk == 1:
        pass


def raises(microbatch: int, chunk: int) -> None:
    if dist.get_rank() == 1 and microbatch == 2:
        raise ValueError("a bad sample\nand more lines")


def dawdles(microbatch: int, chunk: int) -> None:
    time.sleep(0.7 if dist.get_rank() == 1 else 0)


def stopped_rank() -> None:
    run_step(4, stops)


def asleep() -> None:
    run_step(4, sleeps)


def endless_loop() -> None:
    run_step(4, loops, num_chunks=2)


def swallowed_exception(group: dist.ProcessGroup | None = None) -> None:
    try:
        run_step(4, raises, group=group)
    except ValueError:
        print("never mind")
    all_reduce(torch.ones(1), group or dist.group.WORLD)


def swallowed_exception_over_gloo() -> None:
    """Over gloo's network nobody can be told that a rank has given up."""
    with mock.patch.object(mesh, "is_supported", lambda: False):
        swallowed_exception(dist.new_group())


def sleeps_in_backward(microbatch: int, grad: torch.Tensor) -> None:
    if dist.get_rank() == 1 and microbatch == 2:
        time.sleep(600)


def planned_schedule() -> None:
    """All forwards first, as the planner registers it; stuck in a backward, of the last stage."""
    run_step(4, function=get_planned_forward_backward_func("gpipe"), in_backward=sleeps_in_backward)


def slow() -> str:
    run_step(4, dawdles)
    return "done"


# -- Calls of torch.distributed itself --


def both_receive() -> None:
    other = 1 - dist.get_rank()
    dist.recv(torch.empty(3), src=other)
    dist.send(torch.ones(3), dst=other)


def barrier_of_one() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.recv(torch.empty(3), src=0)


def handle_of_torch() -> None:
    if dist.get_rank() == 0:
        dist.irecv(torch.empty(3), src=1).wait()
    else:
        dist.barrier()


# -- As on NCCL: a call returns at once, and the program waits later, where nobody sees for what --


def wait_for_the_gpu() -> None:
    """As `.item()` does, in a call that lets other threads run Python."""
    threading.Event().wait()


def gpu_waits_in_a_collective() -> None:
    """Rank 1 leaves the last one out. What torch knows of it is what it really recorded."""
    pretend_nccl()
    group = dist.new_group([0, 1, 2], backend="gloo", group_desc="tp")
    for size in range(1, 5):
        if size < 4 or dist.get_rank() != 1:
            handle = dist.all_reduce(torch.ones(size), group=group, async_op=True)
            if size < 4:
                handle.wait()
    if dist.get_rank() == 1:
        time.sleep(600)
    wait_for_the_gpu()


def gpu_waits_for_a_message() -> None:
    """Rank 0 sends, rank 1 does not receive; both stand where nobody sees what they wait for."""
    pretend_nccl(answer(entry("send 0->1", 3)) if dist.get_rank() == 0 else answer())
    wait_for_the_gpu()


def hook_of_a_layer(forever: threading.Event) -> None:
    forever.wait()


def backward_in_a_thread_of_its_own() -> None:
    """As on a GPU: autograd works in a thread that Python did not start, and the program waits."""
    if dist.get_rank() == 0:
        _thread.start_new_thread(hook_of_a_layer, (threading.Event(),))
        engine = SimpleNamespace(run_backward=time.sleep)
        graph = torch.autograd.graph
        with mock.patch.object(graph, "Variable", SimpleNamespace(_execution_engine=engine)):
            graph._engine_run_backward(600)
    dist.recv(torch.empty(3), src=0)
