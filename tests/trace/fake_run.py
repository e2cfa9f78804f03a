"""Recordings of lowered schedules without ranks: each rank's actions are played before a `Recorder`.

The links have the names and arguments of the real ones. Tensors are real and small; a clock that
jumps to the simulated times stands in for waiting, so a recording has the same times every time.
"""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.lowering import lower, simulate_orders
from minimegatron.core.orders.orders import (
    PlanConfig,
    get_schedule,
    order_of_ranks,
    register_order,
    unregister,
)
from minimegatron.core.orders.placement import V
from minimegatron.core.orders.work import pair
from minimegatron.core.pipeline_parallel.p2p_communication import TensorMessage
from minimegatron.core.tracing import observed_by, traced
from minimegatron.planner.actions import COMMUNICATE, FORWARD, KINDS, SEND, parts_of
from minimegatron.tracing.clock import Alignment
from minimegatron.tracing.recorder import Recorder
from minimegatron.tracing.to_events import to_rank_trace
from minimegatron.tracing.trace_view import Trace

SHAPE = (3, 1, 2)
NUM_BYTES = 3 * 1 * 2 * 4
MS = 1_000_000


def folded(rank):
    """Through a V: the forwards of the first chunk, those of the second, then all backwards."""
    for phase, chunks, work in (
        ("warmup", (0, 1), rank.forward),
        ("cooldown", (1, 0), rank.backward),
    ):
        rank.phase = phase
        for chunk in chunks:
            for i in range(rank.num_microbatches):
                yield work(i, chunk)


def paired(rank):
    """Split backwards; the weight gradients of one microbatch beside the next one's forward."""
    M = rank.num_microbatches
    for i in range(M):
        yield rank.forward(i)
    yield rank.backward_input(0)
    for i in range(1, M):
        yield pair(rank.backward_input(i), rank.backward_weight(i - 1))
    yield rank.backward_weight(M - 1)


@contextmanager
def registered():
    """Both orders are known by name inside the block, and not to other tests."""
    register_order("test-folded", placement=V)(folded)
    register_order("test-paired")(paired)
    try:
        yield
    finally:
        unregister("test-folded")
        unregister("test-paired")


class Group:
    """As much of a process group as a recording asks for."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Communicator:
    """What the link "exchange" belongs to."""

    def __init__(self, group: Group):
        self.pp_group, self.curr_rank_in_pg = group, group.rank()
        self._numbers: Counter = Counter()

    @traced("exchange")
    def exchange(self, messages):
        handles = []
        for message in messages:
            channel = (message.is_send, message.payload, message.peer)
            self.start(message)
            handle = {} if message.is_send else {"tensor": message.tensor}
            handles.append(
                SimpleNamespace(number=self._numbers[channel], message=message, **handle)
            )
            self._numbers[channel] += 1
        return handles

    @traced("p2p-start", lambda a: {**_told(a["message"]), "bytes": NUM_BYTES})
    def start(self, message):
        pass


def _told(message):
    doing = "sending" if message.is_send else "receiving"
    return {"peer": message.peer, "payload": message.payload, "doing": doing}


def _describe_wait(arguments):
    handle = arguments["handle"]
    return {"stage": arguments["stage"], **_told(handle.message), "number": handle.number}


@traced("p2p-wait", _describe_wait)
def wait(handle, stage, clock, until):
    clock.now = max(clock.now, until)


@traced("forward-compute", lambda a: {"microbatch": a["microbatch"], "chunk": a["chunk"]})
def forward_step(input_tensor, microbatch, chunk):
    return torch.empty(SHAPE), torch.tensor(1)


@traced("backward-compute")
def backward_step(input_tensor, output_tensor, output_tensor_grad):
    return torch.empty(SHAPE)


@traced("backward-input-compute")
def backward_input_step(input_tensor, output_tensor, output_tensor_grad):
    return torch.empty(SHAPE)


@traced("backward-weight-compute", lambda a: {"microbatch": a["microbatch"], "chunk": a["chunk"]})
def backward_weight_step(microbatch, chunk):
    pass


BACKWARDS = {"backward": backward_step, "backward-input": backward_input_step}


class Player:
    """Does one rank's actions. `mix_up` names two messages that are taken for each other."""

    def __init__(self, communicator, starts, clock, mix_up=()):
        self.communicator, self.clock = communicator, clock
        self.starts = iter(starts)
        self.mix_up = dict([mix_up, mix_up[::-1]]) if mix_up else {}
        self.outputs, self.gradients, self.received, self.sends = {}, {}, {}, []

    def play(self, actions):
        for action in actions:
            if action.kind == COMMUNICATE:
                self.exchange(action)
                continue
            until = next(self.starts) * MS
            for part in parts_of(action):
                self.work(part, until)
        for handle in reversed(self.sends):  # another order than they were sent in
            wait(handle, self.communicator.curr_rank_in_pg, self.clock, 0)

    def exchange(self, action):
        made = {"activation": self.outputs, "gradient": self.gradients}
        messages = []
        for m in action.messages:
            is_send = m.direction == SEND
            tensor = made[m.payload][m.microbatch, m.chunk] if is_send else torch.empty(SHAPE)
            messages.append(TensorMessage(is_send, tensor, m.peer, m.payload))
        for m, handle in zip(action.messages, self.communicator.exchange(messages), strict=True):
            if m.direction == SEND:
                self.sends.append(handle)
            else:
                self.received[m.payload, m.microbatch, m.chunk] = handle

    def take(self, payload, unit, until):
        """What was received, or a leaf in place of what this rank itself has made."""
        message = (payload, *unit)
        handle = self.received.get(self.mix_up.get(message, message))
        if handle is None:
            self.clock.now = max(self.clock.now, until)
            return torch.empty(SHAPE)
        wait(handle, self.communicator.curr_rank_in_pg, self.clock, until)
        return handle.tensor

    def work(self, part, until):
        unit, kind = (part.microbatch, part.chunk), KINDS[part.kind]
        taken = None if kind.takes is None else self.take(kind.takes, unit, until)
        if part.kind == FORWARD:
            self.outputs[unit], _ = forward_step(taken, *unit)
        elif part.kind in BACKWARDS:
            step = BACKWARDS[part.kind]
            self.gradients[unit] = step(torch.empty(SHAPE), self.outputs[unit], taken)
        else:
            backward_weight_step(*unit)


class Clock:
    """Every reading is a microsecond after the last, in nanoseconds."""

    def __init__(self):
        self.now = 0

    def read(self) -> int:
        self.now += 1000
        return self.now


def config_of(name: str, p: int, M: int, **more) -> PlanConfig:
    """The config of a lowered plan."""
    placement = get_schedule(name).placed(p)
    v = placement.num_model_chunks
    sizes = {"num_model_chunks": v, "placement": placement, "message_bytes": NUM_BYTES}
    return PlanConfig(name, p, M, **{**sizes, "wire": "tagged", **more})


def record(config: PlanConfig, play_as=None, **player) -> Trace:
    """All ranks of one step, recorded one after the other.

    `play_as` is the config whose plan they follow instead of the one they claim.
    """
    played = play_as or config
    orders = order_of_ranks(played)
    ranks, times = lower(orders, played), simulate_orders(orders, played)
    return Trace(
        [
            record_rank(config, rank, actions, times.starts[rank], **player)
            for rank, actions in enumerate(ranks)
        ]
    )


def record_rank(config: PlanConfig, rank: int, actions, starts, mix_up=None):
    """One rank's recording. `mix_up` holds, by rank, two of (payload, microbatch, chunk)."""
    group, clock = Group(rank, config.pp_size), Clock()
    communicator = Communicator(group)
    player = Player(communicator, starts, clock, (mix_up or {}).get(rank, ()))
    model_config = ModelParallelConfig(
        pipeline_model_parallel_size=config.pp_size, pipeline_dtype=torch.float32
    )
    model_config.hidden_size = SHAPE[2]
    model = SimpleNamespace(config=model_config)

    def describe(arguments):
        return {"schedule": config.schedule, "wire": config.wire}

    @traced("forward-backward", describe)
    def run(model, num_microbatches, forward_only, p2p_communicator, seq_length, micro_batch_size):
        player.play(actions)

    recorder = Recorder(clock.read)
    with observed_by(recorder):
        run(
            model=[model] * config.num_model_chunks,
            num_microbatches=config.num_microbatches,
            forward_only=config.forward_only,
            p2p_communicator=communicator,
            seq_length=SHAPE[0],
            micro_batch_size=SHAPE[1],
        )
    recorder.close()
    recorder.surroundings.rank, recorder.surroundings.world_size = rank, config.pp_size
    return to_rank_trace(recorder, Alignment(), None)
