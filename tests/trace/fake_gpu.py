"""Recordings of GPUs without any: the real recorder and communicator, and below both a pretended torch.

Each rank's program runs by itself. What it asks of CUDA and NCCL is noted in its streams: kernels,
messages, waits, events. Then the machine of `fake_streams` runs the streams of all ranks on its clock,
and the events have the times that recordings are made of.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from minimegatron.core import utils
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, TensorMessage
from minimegatron.core.tracing import observed_by
from minimegatron.tracing import recorder
from minimegatron.tracing.clock import Alignment
from minimegatron.tracing.to_events import to_rank_trace
from minimegatron.tracing.trace_view import Trace
from tests.core.pipeline_parallel import fake_step
from tests.core.pipeline_parallel.fake_step import SHAPE, Case
from tests.fake_streams import PAIRS, Kernel, Lengths, Machine, Mark, Wait
from tests.fake_transport import FakeGroup, FakeTransport, Network, no_numbers
from tests.trace.fake_run import Clock

FORWARD_MS, BACKWARD_MS, MESSAGE_MS = 10.0, 20.0, 2.0


def kernel_ms(kernel: Kernel) -> float:
    lengths = {"forward": FORWARD_MS, "backward": BACKWARD_MS}
    return lengths.get(kernel.name.split()[0], 0.0)


LENGTHS = Lengths(kernel_ms, lambda part: MESSAGE_MS)


class Gpu:
    """The pretended device of the rank whose program runs now."""

    def __init__(self, network: Network):
        self.network, self.rank, self.stream = network, 0, ""
        self.num_marks = self.num_streams = 0
        self.last_waited = -1
        self.transport: NcclTransport | None = None
        self.machine: Machine | None = None

    def mark(self) -> tuple[int, int]:
        self.num_marks += 1
        self.network.programs[self.rank].append(Mark(self.num_marks, self.stream))
        return self.rank, self.num_marks

    def start(self, is_batch: bool) -> "Work":
        number = self.transport.post(is_batch)
        return Work(self, number, self.transport.starting)

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    def new_stream(self, priority: int) -> SimpleNamespace:
        assert priority < 0, "NCCL may have the same stream"
        self.num_streams += 1
        return SimpleNamespace(name=f"further stream {self.num_streams}")


class Work(dist.Work):
    """NCCL's handle: `wait` makes the current stream wait."""

    def __init__(self, gpu: Gpu, number: int, messages: list):
        super().__init__()
        self.gpu, self.number = gpu, number
        self.sizes = [m.tensor for m in messages if m.payload.endswith("shape") and not m.is_send]

    def wait(self, timeout=None) -> bool:
        if self.gpu.stream == "":
            self.gpu.last_waited = max(self.gpu.last_waited, self.number)
        assert self.number <= self.gpu.last_waited, "the recorder waits before the program does"
        self.gpu.transport.note(Wait(self.number, self.gpu.stream))
        for tensor in self.sizes if self.gpu.stream == "" else ():
            self.gpu.transport.read_sizes(tensor)
        return True

    def is_completed(self) -> bool:
        return False  # the program runs far ahead


@dataclass(frozen=True)
class NcclGroup(FakeGroup):
    group_name: str = "7"
    group_desc: str = "pp+mp"


class NcclTransport(FakeTransport):
    """What the pretended `torch.distributed` does with the messages in `starting`."""

    gpu: Gpu

    def __init__(self, network: Network, rank: int, matches_by_tag: bool = False):
        super().__init__(network, rank, matches_by_tag)
        self.starting: list[TensorMessage] = []
        self.gpu.transport = self

    def post(self, is_batch: bool) -> int:
        number = self._num_posts
        self._post(self.starting, is_batch)
        return number


class NcclCommunicator(P2PCommunicator):
    """The real one, whose `torch.distributed` is the pretended one."""

    def __init__(self, group: FakeGroup, config: ModelParallelConfig, transport: NcclTransport):
        self.transport = transport
        super().__init__(NcclGroup(group.rank(), group.size()), config)

    def start(self, message):
        self.transport.starting = [message]
        return super().start(message)

    def start_batch(self, messages):
        self.transport.starting = messages
        return super().start_batch(messages)


@contextmanager
def pretended(network: Network) -> Iterator[Gpu]:
    """Within it, torch has a GPU, NCCL, and the streams of `network`."""
    gpu = Gpu(network)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.place = gpu.mark()

        def synchronize(self):
            pass

        def query(self):
            return self.place in gpu.machine.marks

        def elapsed_time(self, later):
            return gpu.machine.marks[later.place] - gpu.machine.marks[self.place]

    cuda = {
        "Event": Event,
        "Stream": gpu.new_stream,
        "stream": gpu.on,
        "synchronize": lambda: None,
    }
    distributed = {
        "get_backend": lambda group: "nccl",
        "get_process_group_ranks": lambda group: list(range(group.size())),
        "isend": lambda tensor, group, group_dst, tag: gpu.start(is_batch=False),
        "irecv": lambda tensor, group, group_src, tag: gpu.start(is_batch=False),
        "P2POp": lambda op, tensor, group, group_peer: SimpleNamespace(tensor=tensor),
        "batch_isend_irecv": lambda operations: [gpu.start(is_batch=True)],
    }
    ranges = {"range_push": lambda name: None, "range_pop": lambda: None}
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch.cuda.nvtx, **ranges),
        mock.patch.multiple(dist, **distributed),
        mock.patch.object(NcclTransport, "gpu", gpu, create=True),
        mock.patch.object(fake_step, "FakeTransport", NcclTransport),
        mock.patch.object(fake_step, "FakeCommunicator", NcclCommunicator),
        mock.patch.object(recorder, "get_device", lambda: torch.device("cuda")),
    ):
        yield gpu


def record(case: Case, lengths: Lengths = LENGTHS) -> tuple[Trace, Machine]:
    """One step of all ranks, as each GPU would have recorded it; and the machine that ran it."""
    network, recorders = Network(case.p, sizes=SHAPE), []
    device = mock.patch.object(utils, "_device", torch.device(network.device))
    with pretended(network) as gpu, device, no_numbers():
        for rank in range(case.p):
            gpu.rank, gpu.last_waited = rank, -1
            mine = recorder.Recorder(Clock().read)
            with observed_by(mine):
                fake_step.run_program(case, network, rank)
            mine.close()
            mine.surroundings.rank, mine.surroundings.world_size = rank, case.p
            recorders.append(mine)
        gpu.machine = network.run(PAIRS, lengths)
        return Trace(
            [to_rank_trace(mine, Alignment(), Alignment()) for mine in recorders]
        ), gpu.machine
