"""What a pipeline of two stacks costs, T5's: its messages, its time, what its stages hold.

Torch-free. Megatron has no counterpart.

    stage     0 ..        q-1          q ..                  p-1
    sends on  [s_enc, b, h]            [s_dec, b, h], [s_enc, b, h]
    holds     its layers' activations  the same, and [s_enc, b, h] once per microbatch in flight
"""

from collections.abc import Sequence
from typing import Any

from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.planner.memory import Bytes
from minimegatron.planner.simulator import Costs, Time


def messages_behind(
    split: StackSplit, encoder_bytes: int, decoder_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """For a plan: of each stage the sizes of all messages that it sends on.

    >>> messages_behind(StackSplit(4, 2), 12, 8)
    ((12,), (12,), (8, 12), (8, 12))
    """
    return tuple(map(tuple, split.shapes_behind([encoder_bytes], [decoder_bytes])))


def messages_of_model(
    model: Any, encoder_bytes: int = 0, decoder_bytes: int = 0
) -> tuple[tuple[int, ...], ...] | None:
    """The same for a run's model, without wrappers; None for one that sends one tensor."""
    shapes_behind = getattr(model, "shapes_behind", None)
    if shapes_behind is None:
        return None
    return tuple(map(tuple, shapes_behind([encoder_bytes], [decoder_bytes])))


def costs_of_split(
    split: StackSplit,
    encoder_times: tuple[Time, Time],
    decoder_times: tuple[Time, Time],
    latency: Time = 0,
    bandwidth: Time | None = None,
) -> Costs:
    """Costs from (forward, backward) of a stage of each kind.

    >>> costs_of_split(StackSplit(3, 2), (1, 2), (2, 4)).forward
    [1, 1, 2]
    """
    of_stages = [
        encoder_times if split.has_encoder(rank) else decoder_times for rank in range(split.pp_size)
    ]
    forward, backward = ([times[index] for times in of_stages] for index in (0, 1))
    return Costs(forward, backward, latency, bandwidth)


def activation_bytes_of_split(
    split: StackSplit,
    encoder_stage: Bytes,
    decoder_stage: Bytes,
    encoder_message: Bytes,
) -> Sequence[Bytes]:
    """For `memory`: what each stage keeps of one microbatch in flight.

    A stage's own layers keep `encoder_stage` or `decoder_stage`. A decoder stage also holds what it got
    of the encoder, once for all its layers: they project it to keys and values of their own, and each
    needs it again for the gradient of that projection.

    >>> activation_bytes_of_split(StackSplit(3, 1), 100, 80, 12)
    [100, 92, 92]
    """
    return [
        encoder_stage if split.has_encoder(rank) else decoder_stage + encoder_message
        for rank in range(split.pp_size)
    ]
