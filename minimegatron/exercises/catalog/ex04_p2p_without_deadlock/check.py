"""Checks `_start`: its orders alone, then rings whose messages wait for each other, then real steps."""

import random
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import Done
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.work import ACTIVATION, GRADIENT
from minimegatron.core.pipeline_parallel.p2p_communication import (
    Handle,
    P2PCommunicator,
    TensorMessage,
)
from minimegatron.exercises.bench.gpt_step import Seat, StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.untagged_messages import transport_of, without_tags
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

COMMUNICATOR = "minimegatron.core.pipeline_parallel.p2p_communication.P2PCommunicator."
OURS, IN_ORDER = COMMUNICATOR + "exchange", COMMUNICATOR + "_in_order"
REPLACES = (OURS, IN_ORDER)
WITHHELD = {"_in_order": P2PCommunicator._in_order}
"""Where `_start` looks for our order it finds this, which is empty in the room."""
WORLD = 4
RINGS = (4, 3, 2)
LONG_RINGS = (6, 16)
"""More stages than ranks: a rank says the orders of several."""
OTHER_END = {
    "send_next": (1, "recv_prev"),
    "recv_prev": (-1, "send_next"),
    "send_prev": (-1, "recv_next"),
    "recv_next": (1, "send_prev"),
}
"""Of each message: how far its other end is, and what it is called there. In the stub's order."""
NAMES = {
    (True, ACTIVATION): "send_next",
    (False, ACTIVATION): "recv_prev",
    (True, GRADIENT): "send_prev",
    (False, GRADIENT): "recv_next",
}


def cases(seed: int) -> list[Case]:
    """Orders, three rings, and three training steps: M < p, an odd M, and a ring of two."""
    draw, data = random.Random(seed), data_seed(seed)
    found = [Case("every stage's order, nothing sent yet", part="the order")]
    found += [Case(f"a ring of {p} stages, all four messages", part="rings", ring=p) for p in RINGS]
    steps = [(4, None, draw.choice([2, 3])), (4, 2, 4), (2, 2, draw.choice([2, 4]))]
    for p, v, M in steps:
        step = StepCase(pp=p, vp=v, num_microbatches=M, seed=data)
        words = "1F1B" if v is None else f"{v} chunks each"
        found.append(Case(f"{p} stages, {words}, M={M}", part="training steps", step=step.values))
    return found


def run(student: ModuleType, case: Case) -> dict[str, Any] | None:
    """One ring, or one training step, over messages without names."""

    def exchange(
        self: P2PCommunicator, messages: Sequence[TensorMessage], overlap: bool = False
    ) -> list[Any]:
        transport_of(self)  # as students' files of earlier years call it
        parts = {NAMES[m.is_send, m.payload]: _ready(self, m) for m in messages}
        # In the stub's order on every stage: the order of `parts` must not be an answer.
        given = {name: parts[name] for name in OTHER_END if name in parts}
        self._in_order = WITHHELD["_in_order"]
        handles: dict[str, Handle] = student._start(self, given)
        del self._in_order
        if isinstance(self.transport, _Listing):
            self.transport.check_not_waited()
        _check_handles(handles, parts)
        may_run_on = overlap or self.config.overlap_p2p_comm
        return [self._handle(part, handles[name], may_run_on) for name, part in parts.items()]

    with installed(exchange, OURS), installed(_as_listed, IN_ORDER):
        if case.part == "the order":
            return _orders(dist.get_rank())
        return _run_ring(case.ring) if case.part == "rings" else _run_step(case)


def _ready(self: P2PCommunicator, message: TensorMessage) -> TensorMessage:
    if message.is_send:
        return message._replace(tensor=message.tensor.detach().contiguous())
    return self._with_memory(message)


def _as_listed(self: P2PCommunicator, **given: Any) -> list[TensorMessage]:
    """The messages of one call, in the stub's order on every stage."""
    found = []
    for is_send, payload, offset in (
        (True, ACTIVATION, 1),
        (False, ACTIVATION, -1),
        (True, GRADIENT, -1),
        (False, GRADIENT, 1),
    ):
        peer = self.next_rank if offset > 0 else self.prev_rank
        what = given.get(NAMES[is_send, payload])
        for one in what if isinstance(what, list) else [what] * (what is not None):
            tensor, shape = (one, None) if is_send else (None, one)
            found.append(TensorMessage(is_send, tensor, peer, payload, shape))
    return found


def judge(case: Case, answers: list[Any]) -> Result:
    """What arrived, and how long it took; or a step's gradients."""
    if case.part == "the order":
        return Result({"message times": _judge_orders(answers)})
    if case.part == "rings":
        return Result({"ring": _judge_ring(case.ring, answers)})
    reference = Reference(case.step, WORLD).run()
    reference.check_gradients([answer["gradients"] for answer in answers])
    first = answers[0]
    words = f"{first['clock']} message times; rank 0 sent {first['num_messages']} messages"
    return Result({"step": words})


def _check_handles(handles: Any, parts: dict[str, TensorMessage]) -> None:
    where = f"rank {dist.get_rank()}: _start"
    if not isinstance(handles, dict):
        what = (
            "None (was `return` forgotten?)" if handles is None else f"a {type(handles).__name__}"
        )
        raise Wrong(f"{where} returned {what}; a dict of handles by name is expected")
    if missing := [name for name in parts if name not in handles]:
        raise Wrong(
            f"{where} was given {', '.join(parts)}, but returned no handle for "
            f"{', '.join(missing)}\nEvery message of `parts` must be started, or its other end "
            "waits for ever."
        )
    if extra := [name for name in handles if name not in parts]:
        raise Wrong(f"{where} returned a handle for {extra[0]}, which is not in `parts`")
    for name, handle in handles.items():
        if not hasattr(handle, "wait"):
            raise Wrong(
                f"{where} returned a {type(handle).__name__} as the handle of {name}\n"
                "A handle is what self.start(parts[name]) returns."
            )


# -- The order alone --


class _Noting(Done):
    """The handle of a message that is through; it notes that somebody waits for it."""

    def __init__(self, name: str, waited: list[str]):
        self._name, self._waited = name, waited

    def wait(self) -> None:
        """Nothing is left to wait for."""
        self._waited.append(self._name)


class _Listing:
    """It sends nothing: it lists what is started."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.waited: list[str] = []

    def start(self, message: TensorMessage) -> Done:
        """Each message is through at once. Who waits for it is noted."""
        onwards = (message.payload == ACTIVATION) == message.is_send
        direction = "next" if onwards else "prev"
        self.started.append(f"{'send' if message.is_send else 'recv'}_{direction}")
        return _Noting(self.started[-1], self.waited)

    def check_not_waited(self) -> None:
        """Wrong if somebody has waited for a message already."""
        if self.waited:
            raise Wrong(
                f"rank {dist.get_rank()}: _start waits for {self.waited[0]} before it returns\nUntil "
                "the message is needed, its caller may compute (overlap_p2p_comm). Who gets the "
                "handles, and what for?"
            )

    def start_batch(self, messages: list[TensorMessage]) -> list[Done]:
        """A batch gives its messages no order: there is nothing to judge."""
        raise Wrong(
            f"rank {dist.get_rank()}: _start starts its messages as one batch\nA batch has no order, "
            "and in a ring of two stages it cannot tell activations from gradients: both have the same "
            "sender and the same receiver. What is asked here is the other way out: an order in which "
            "messages are started one by one."
        )

    def names(self, *given: str) -> list[str]:
        """What was started; Wrong unless it is each of `given`, once."""
        for name in given:
            if (times := self.started.count(name)) != 1:
                how = f"starts {name} {times} times" if times else f"never starts {name}"
                raise Wrong(
                    f"rank {dist.get_rank()}: _start {how}\n"
                    "self.start is called once for each message of `parts`."
                )
        return self.started


def _orders(rank: int) -> dict[str, list[str]]:
    """What this rank starts as a stage of each ring, and in exchanges with one neighbour.

    In a ring of two it is asked twice: as of the ranks 0, 1, and as of the ranks 0, 2. Of a long ring
    it is every fourth stage.
    """
    number = torch.zeros((1, 1, 1), dtype=torch.float64)
    shape, found = (1, 1, 1), {}
    rings = {f"ring {p}": (rank % p, p) for p in RINGS if rank < WORLD // p * p}
    for p in LONG_RINGS:
        rings |= {f"stage {stage} of {p}": (stage, p) for stage in range(rank, p, WORLD)}
    for ring, (stage, p) in {**rings, "ring apart": (rank // 2, 2)}.items():
        listing, communicator = _listing(stage, p)
        communicator.send_forward_backward_recv_forward_backward(number, number, True, True, shape)
        found[ring] = listing.names(*OTHER_END)
    listing, communicator = _listing(rank, WORLD)
    communicator.send_forward_recv_backward(number, shape, False)
    found["next"] = listing.names("send_next", "recv_next")
    listing, communicator = _listing(rank, WORLD)
    communicator.send_backward_recv_forward(number, shape, False)
    found["prev"] = listing.names("send_prev", "recv_prev")
    return found


class _Listed(P2PCommunicator):
    """A communicator whose messages are listed."""

    def __init__(self, group: Seat, config: ModelParallelConfig, transport: _Listing):
        self.transport = transport
        super().__init__(group, config)

    def start(self, message: TensorMessage) -> Done:
        """Lists it."""
        return self.transport.start(message)

    def start_batch(self, messages: list[TensorMessage]) -> list[Done]:
        """Refused."""
        return self.transport.start_batch(messages)


def _listing(stage: int, p: int) -> tuple[_Listing, P2PCommunicator]:
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p, batch_p2p_comm=False, pipeline_dtype=torch.float64
    )
    listing = _Listing()
    return listing, _Listed(Seat(stage, p), config, listing)


def _judge_orders(answers: Sequence[dict[str, list[str]]]) -> str:
    """Raises Wrong for orders that hang, that mix two messages up, or that are slow."""
    times = []
    for p in (*RINGS, *LONG_RINGS):
        where = f"a ring of {p} stages"
        key = "ring {1}" if p in RINGS else "stage {0} of {1}"
        orders = {stage: answers[stage % WORLD][key.format(stage, p)] for stage in range(p)}
        time = _time_of(orders, p, where)
        _check_time(p, time)
        times.append(f"{time} in {where}")
    for rank, answer in enumerate(answers):
        mine, other = answer["ring apart"], answers[rank // 2]["ring 2"]
        if mine != other:
            raise Wrong(
                f"stage {rank // 2} of 2 stages starts {', '.join(other)} if it is rank {rank // 2}, "
                f"but {', '.join(mine)} if it is rank {rank}\n"
                "The order may depend on the stage, self.curr_rank_in_pg. The number of the rank "
                "(dist.get_rank()) is another one as soon as there are several pipelines."
            )
    for stage in range(WORLD):
        after = (stage + 1) % WORLD
        pair = {stage: answers[stage]["next"], after: answers[after]["prev"]}
        where = f"stages {stage} and {after} exchange an activation and a gradient"
        _time_of(pair, WORLD, where)
    return ", ".join(times)


def _time_of(orders: Mapping[int, list[str]], p: int, where: str) -> int:
    """Runs the stages' orders against each other; how many message times they take."""
    places, clocks = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)

    def at(stage: int) -> str | None:
        return orders[stage][places[stage]] if places[stage] < len(orders[stage]) else None

    has_moved = True
    while has_moved:
        has_moved = False
        for stage in orders:
            name = at(stage)
            if name is None or not name.startswith("send"):
                continue
            offset, wanted = OTHER_END[name]
            peer = (stage + offset) % p
            found = at(peer)
            if found is None or found.startswith("send"):
                continue
            if (peer + OTHER_END[found][0]) % p != stage:
                continue
            if found != wanted:
                raise Wrong(_crossed_words(where, stage, name, peer, found))
            clocks[stage] = clocks[peer] = max(clocks[stage], clocks[peer]) + 1
            places[stage] += 1
            places[peer] += 1
            has_moved = True
    stuck = {stage: name for stage in orders if (name := at(stage)) is not None}
    if stuck:
        raise Wrong(_stuck_words(where, stuck, orders, places, p))
    return max(clocks.values())


def _crossed_words(where: str, stage: int, name: str, peer: int, found: str) -> str:
    sent, taken = (
        "activation" if one in ("send_next", "recv_prev") else "gradient" for one in (name, found)
    )
    return (
        f"{where}: stage {peer} is at {found} and waits for a {taken}, but stage {stage} is at {name} "
        f"and sends a{'n' * (sent[0] == 'a')} {sent}: stage {peer} takes the one for the other\n"
        "On NCCL, messages between two ranks have no names: send number n meets receive number n. "
        "Both ranks must have the same order of what travels between them."
    )


def _stuck_words(
    where: str,
    stuck: Mapping[int, str],
    orders: Mapping[int, list[str]],
    places: Mapping[int, int],
    p: int,
) -> str:
    lines = [f"{where}: these orders hang"]
    for stage, name in stuck.items():
        offset, wanted = OTHER_END[name]
        before = ", ".join(orders[stage][: places[stage]])
        done = f"has done {before} and " if before else ""
        lines.append(
            f"  stage {stage} {done}starts {name}: it waits until stage {(stage + offset) % p} "
            f"starts {wanted}"
        )
    return "\n".join([*lines, "Each waits for another. Who could begin with another message?"])


def _check_time(p: int, time: int) -> None:
    if p % 2 == 0 and time > 4:
        raise Wrong(
            f"right, but slow: all four messages over {p} stages took {time} message times, one "
            "after the other; 4 are enough for any even number of stages\n"
            "Some stages wait for a chain of others: stage 1 can send only when it has received, "
            "and so on. How many of the messages could travel at the same time?"
        )


# -- A ring --


def _run_ring(p: int) -> dict[str, Any] | None:
    """Each stage sends both ways and receives both ways, at once. None on ranks left over."""
    groups = [dist.new_group(list(range(i, i + p))) for i in range(0, WORLD - p + 1, p)]
    place = dist.get_rank() // p
    if place >= len(groups):
        return None
    group = groups[place]
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p, batch_p2p_comm=False, pipeline_dtype=torch.float64
    )
    with without_tags():
        return _exchanged(group, P2PCommunicator(group, config))


def _exchanged(group: dist.ProcessGroup, communicator: P2PCommunicator) -> dict[str, Any]:
    activation = torch.full((1, 1, 1), 10.0 + group.rank(), dtype=torch.float64)
    gradient = torch.full((1, 1, 1), -10.0 - group.rank(), dtype=torch.float64)
    from_prev, from_next = communicator.send_forward_backward_recv_forward_backward(
        activation, gradient, True, True, (1, 1, 1)
    )
    return {
        "activation": from_prev.item(),
        "gradient": from_next.item(),
        "clock": transport_of(communicator).clock,
    }


def _judge_ring(p: int, answers: Sequence[Any]) -> str:
    found = [answer for answer in answers if answer is not None]
    if len(found) != WORLD // p * p:
        raise Wrong(f"{len(found)} of {WORLD // p * p} ranks answered")
    for rank, answer in enumerate(found):
        stage = rank % p
        ends = (("activation", 10.0 + (stage - 1) % p), ("gradient", -10.0 - (stage + 1) % p))
        for payload, expected in ends:
            if answer[payload] != expected:
                raise Wrong(
                    f"rank {rank}: the {payload} that arrived holds {answer[payload]:g}, but "
                    f"{expected:g} was sent"
                )
    time = max(answer["clock"] for answer in found)
    _check_time(p, time)
    return f"{4 * p} messages took {time} message times"


# -- A training step --


def _run_step(case: Case) -> dict[str, Any]:
    """A GPT's gradients, with the student's order."""
    step = on_these_ranks(case.step)
    step.config.batch_p2p_comm = False
    with without_tags() as made:
        step.forward_backward()
    return {
        "gradients": step.gradients(),
        "num_messages": made[0].num_messages,
        "clock": made[0].clock,
    }
