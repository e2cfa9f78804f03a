"""The communicator's nine methods as a table: what each is given, and what it moves.

Torch-free. Counterpart: the signatures of
`megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator`. Whoever records, plans or calls
the methods by name reads this table.
"""

from typing import NamedTuple

from minimegatron.core.orders.work import ACTIVATION, GRADIENT


class CommunicatorCall(NamedTuple):
    """What one method of `P2PCommunicator` is given, and moves."""

    link: str
    """The name under which it is traced."""
    parameters: tuple[str, ...]
    sends: tuple[tuple[str, str], ...]
    """(parameter, payload)"""
    receives: tuple[str, ...]
    """The payloads of what it returns."""
    silent_if: str | None = None
    """The parameter that, when true, makes it send and receive nothing."""


_OUTPUTS, _INPUT_GRADS = ("output_tensors", ACTIVATION), ("input_tensor_grads", GRADIENT)
_OUTPUT, _INPUT_GRAD = ("output_tensor", ACTIVATION), ("input_tensor_grad", GRADIENT)
_SHAPES, _SHAPE, _FIRST, _LAST = "tensor_shapes", "tensor_shape", "is_first_stage", "is_last_stage"

OVERLAP = "overlap_p2p_comm"
"""The parameter that makes a call return at once."""

ASKED_BY = {ACTIVATION: "recv_prev", GRADIENT: "recv_next"}
"""Payload -> the flag that asks for it, in the calls that have flags; also the name of its handle."""


def _calls(*rows: tuple) -> dict[str, CommunicatorCall]:
    found = {}
    for name, link, parameters, sends, receives in rows:
        ends = [parameter for parameter in parameters if parameter in (_FIRST, _LAST)]
        found[name] = CommunicatorCall(link, parameters, sends, receives, *ends)
    return found


METHODS = _calls(
    ("recv_forward", "forward-recv", (_SHAPES, _FIRST), (), (ACTIVATION,)),
    ("recv_backward", "backward-recv", (_SHAPES, _LAST), (), (GRADIENT,)),
    ("send_forward", "forward-send", ("output_tensors", _LAST), (_OUTPUTS,), ()),
    ("send_backward", "backward-send", ("input_tensor_grads", _FIRST), (_INPUT_GRADS,), ()),
    (
        "send_forward_recv_backward",
        "forward-send-backward-recv",
        ("output_tensors", _SHAPES, _LAST),
        (_OUTPUTS,),
        (GRADIENT,),
    ),
    (
        "send_backward_recv_forward",
        "backward-send-forward-recv",
        ("input_tensor_grads", _SHAPES, _FIRST),
        (_INPUT_GRADS,),
        (ACTIVATION,),
    ),
    (
        "send_forward_recv_forward",
        "forward-send-forward-recv",
        ("output_tensor", "recv_prev", _SHAPE, OVERLAP),
        (_OUTPUT,),
        (ACTIVATION,),
    ),
    (
        "send_backward_recv_backward",
        "backward-send-backward-recv",
        ("input_tensor_grad", "recv_next", _SHAPE, OVERLAP),
        (_INPUT_GRAD,),
        (GRADIENT,),
    ),
    (
        "send_forward_backward_recv_forward_backward",
        "forward-backward-send-forward-backward-recv",
        ("output_tensor", "input_tensor_grad", "recv_prev", "recv_next", _SHAPE),
        (_OUTPUT, _INPUT_GRAD),
        (ACTIVATION, GRADIENT),
    ),
)
"""Megatron's nine methods of the communicator, by name."""
