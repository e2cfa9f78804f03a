"""The written schedules as lists of actions: what the real ones call, in the same order.

Counterpart: `forward_backward_no_pipelining`, `forward_backward_pipelining_without_interleaving`
and `forward_backward_pipelining_with_interleaving` of `megatron.core.pipeline_parallel.schedules`.
GPipe has none there; here it is with the messages of its simplest form, where each call waits for
its message.

What each computes, without the messages, is in `core.pipeline_parallel.orders`.
"""

from collections.abc import Iterator

from minimegatron.core.pipeline_parallel.orders import (
    COMBINED,
    GPIPE,
    INTERLEAVED,
    NO_PIPELINING,
    ONE_F_ONE_B,
    written_as,
)
from minimegatron.core.pipeline_parallel.schedule_table import (
    InterleavedOrder,
    get_num_warmup_microbatches,
)
from minimegatron.planner.actions import COOLDOWN, STEADY, WARMUP, Action
from minimegatron.planner.stage import Stage


@written_as(NO_PIPELINING)
def no_pipelining(stage: Stage) -> Iterator[Action]:
    """Gradient accumulation on one stage: forward, backward, next microbatch."""
    stage.phase = STEADY
    for i in range(stage.num_microbatches):
        yield stage.forward(i)
        if not stage.forward_only:
            yield stage.backward(i)


@written_as(GPIPE)
def gpipe(stage: Stage) -> Iterator[Action]:
    """All forwards, then all backwards. Source: Huang et al. 2019 (arXiv:1811.06965).

    Backwards run in the order of the forwards: the gradient of microbatch 0 is the first to exist.
    Any other order of backwards gives the same makespan, if all stages use the same one.
    """
    stage.phase = WARMUP
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    if stage.forward_only:
        return
    stage.phase = COOLDOWN
    for i in range(stage.num_microbatches):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


# -- Plain 1F1B --


@written_as(ONE_F_ONE_B)
def one_forward_one_backward(stage: Stage) -> Iterator[Action]:
    """Warm-up forwards, then forward and backward in turn, then the backwards that are left.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1.
    """
    M = stage.num_microbatches
    num_warmup = get_num_warmup_microbatches(stage.pp_size, stage.pp_rank, M)

    stage.phase = WARMUP
    for i in range(num_warmup):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)

    stage.phase = STEADY
    if num_warmup < M:
        yield stage.recv_forward(num_warmup)
    for i in range(M - num_warmup):
        yield from _steady_iteration(stage, forward=num_warmup + i, backward=i)
    if stage.forward_only:
        return

    stage.phase = COOLDOWN
    for i in range(M - num_warmup, M):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


def _steady_iteration(stage: Stage, forward: int, backward: int) -> Iterator[Action]:
    is_last = forward == stage.num_microbatches - 1
    yield stage.forward(forward)
    if stage.forward_only:
        yield stage.send_forward(forward)
        if not is_last:
            yield stage.recv_forward(forward + 1)
        return
    # To the next stage: our output, for the gradient it has ready. To the previous stage, likewise.
    yield stage.send_forward_recv_backward(forward, receives=backward)
    yield stage.backward(backward)
    if is_last:
        yield stage.send_backward(backward)
    else:
        yield stage.send_backward_recv_forward(backward, receives=forward + 1)


# -- Interleaved 1F1B --


@written_as(INTERLEAVED)
def interleaved(stage: Stage) -> Iterator[Action]:
    """1F1B over v chunks per stage. Source: Narayanan et al. 2021, section 2.2.2."""
    yield from _in_turns(_Interleaved(stage))


@written_as(COMBINED)
def combined(stage: Stage) -> Iterator[Action]:
    """Megatron's combined 1F1B: a forward and a backward in one step, its messages after it.

    A step without backwards takes the ordinary path.
    """
    if stage.pp_size > 1:
        yield from _in_turns(_Interleaved(stage, is_combined=not stage.forward_only))
        return
    M = stage.num_microbatches
    stage.phase = WARMUP
    for i in range(M if stage.forward_only else 1):
        yield stage.forward(i)
    if stage.forward_only:
        return
    stage.phase = STEADY
    for i in range(M - 1):
        yield stage.pair(stage.forward(i + 1), stage.backward(i))
    stage.phase = COOLDOWN
    yield stage.backward(M - 1)


def _in_turns(planner: "_Interleaved") -> Iterator[Action]:
    stage = planner.stage
    stage.phase = WARMUP
    yield from planner.warmup()
    if not stage.forward_only:
        stage.phase = STEADY
        yield from planner.steady()
        stage.phase = COOLDOWN
        yield from planner.cooldown()


class _Interleaved:
    """One stage's calls. `InterleavedOrder` knows which; here is only when.

    Virtual microbatch k is the k-th forward; its backward is the k-th backward. What arrives for a
    chunk arrives in the order of microbatches, so counting per chunk names each message.
    """

    def __init__(self, stage: Stage, is_combined: bool = False):
        config = stage.config
        self.stage, self.is_combined = stage, is_combined
        self.order = InterleavedOrder(
            config.pp_size,
            stage.pp_rank,
            config.num_microbatches,
            config.num_model_chunks,
            config.microbatch_group_size_per_vp_stage,
            forward_only=config.forward_only,
            overlap_moe_expert_parallel_comm=is_combined,
        )
        self.counts = self.order.counts
        self.forwards = self._units(forward=True)
        self.backwards = self._units(forward=False)
        self._num_arrived = {forward: [0] * config.num_model_chunks for forward in (True, False)}

    def _units(self, forward: bool) -> list[tuple[int, int]]:
        order = self.order
        return [
            (order.microbatch_id(k), order.model_chunk_id(k, forward))
            for k in range(self.counts.total)
        ]

    def _arrival(self, chunk: int, forward: bool) -> tuple[int, int]:
        num_arrived = self._num_arrived[forward]
        num_arrived[chunk] += 1
        return num_arrived[chunk] - 1, chunk

    def _arrival_after(self, k: int, forward: bool) -> tuple[int, int] | None:
        expected, chunk = self.order.arrival_after(k, forward)
        return self._arrival(chunk, forward) if expected else None

    def _first_gradient(self) -> tuple[int, int] | None:
        # Nothing arrives before the first backward of the stage that computes the loss.
        last_chunk = self.stage.num_model_chunks - 1
        return None if self.stage.is_last_stage else self._arrival(last_chunk, forward=False)

    def warmup(self) -> Iterator[Action]:
        stage, num_warmup = self.stage, self.counts.num_warmup
        overlap = stage.config.overlap_p2p_comm
        # Stage 0 makes this call too, but its input is data: nothing arrives.
        yield stage.recv_forward((0, 0) if stage.pp_rank == 0 else self._arrival(0, forward=True))
        has_backward_next = not (stage.forward_only or self.counts.are_all_in_warmup)
        for k in range(num_warmup):
            output = self.forwards[k]
            yield stage.forward(*output)
            arrival = self._arrival_after(k, forward=True)
            if k < num_warmup - 1 or not has_backward_next:
                yield stage.send_forward_recv_forward(output, arrival, overlap)
            elif overlap:
                yield stage.send_forward_recv_forward(output, arrival, overlap=True)
                yield stage.send_backward_recv_backward(None, self._first_gradient(), overlap=True)
            else:
                yield stage.send_forward_backward_recv_forward_backward(
                    output, None, arrival, self._first_gradient()
                )

    def steady(self) -> Iterator[Action]:
        stage, num_warmup = self.stage, self.counts.num_warmup
        for i in range(self.counts.num_remaining):
            k = num_warmup + i
            output, input = self.forwards[k], self.backwards[i]
            arrival = self._arrival_after(k, forward=True)
            gradient = self._arrival_after(i, forward=False)
            if self.is_combined:
                yield stage.pair(stage.forward(*output), stage.backward(*input))
            else:
                yield stage.forward(*output)
            if stage.config.overlap_p2p_comm:
                yield stage.send_forward_recv_forward(output, arrival, overlap=True)
                if not self.is_combined:
                    yield stage.backward(*input)
                yield stage.send_backward_recv_backward(input, gradient, overlap=True)
            else:
                if not self.is_combined:
                    yield stage.backward(*input)
                yield stage.send_forward_backward_recv_forward_backward(
                    output, input, arrival, gradient
                )

    def cooldown(self) -> Iterator[Action]:
        stage, total = self.stage, self.counts.total
        if self.counts.are_all_in_warmup:
            gradient = self._first_gradient()
            yield stage.recv_backward(gradient or (0, stage.num_model_chunks - 1))
        for i in range(self.counts.num_remaining, total):
            yield stage.backward(*self.backwards[i])
            gradient = self._arrival_after(i, forward=False)
            yield stage.send_backward_recv_backward(self.backwards[i], gradient)
