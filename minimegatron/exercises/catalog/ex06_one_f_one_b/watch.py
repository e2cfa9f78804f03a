"""Looks over the student's loop, in the student's room: what it calls, and what it hands to each call.

Megatron has no counterpart.

Nothing here knows the plan. An argument can be wrong in itself: None for a tensor, the input of another
microbatch, an output that is freed before it is sent. That is a complaint. The step goes on with it,
unless it must crash.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.steps import ModelChunk
from minimegatron.core.tracing import Call, observed_by
from minimegatron.exercises.bench.noting import note
from minimegatron.exercises.check import Wrong, installed

CHUNK = "minimegatron.core.pipeline_parallel.steps.ModelChunk."
FINISH = "minimegatron.core.pipeline_parallel.p2p_communication.P2PCommunicator.finish"
CALLS = {
    "forward-compute": "F",
    "backward-compute": "B",
    "forward-recv": "recv_forward",
    "backward-recv": "recv_backward",
    "forward-send": "send_forward",
    "backward-send": "send_backward",
    "forward-send-backward-recv": "send_forward_recv_backward",
    "backward-send-forward-recv": "send_backward_recv_forward",
}
"""What is noted while a step runs: a link's name, and what the student calls it."""
COMPLAINT, END = "!", "end"
"""Noted beside the calls: a complaint, and that the loop is over on this rank."""
WARMUP, STEADY, COOLDOWN, OUTCOME = PARTS = (
    "warm-up",
    "steady",
    "cool-down",
    "memory, losses and gradients",
)
SENT = {"output_tensors": "forward_step", "input_tensor_grads": "backward_step"}
"""A parameter of the calls that send, and whose result belongs there."""


class Shapes(list):
    """The shapes of a stage's messages, with the name of the variable that holds them."""

    def __init__(self, shapes: list, name: str):
        super().__init__(shapes)
        self.name = name


def named_shapes(recv_shapes: list, send_shapes: list) -> tuple[Shapes, Shapes]:
    """The same shapes; those of inputs can be told from those of outputs (adjust_tensor_shapes_fn)."""
    return Shapes(recv_shapes, "recv_shapes"), Shapes(send_shapes, "send_shapes")


class Watch:
    """What the loop does in one step on one stage, and the complaints about it: [part, words]."""

    def __init__(self, student: ModuleType, stage: int, p: int, M: int, forward_only: bool):
        self._file, self._stage, self._p, self._M = student.__file__, stage, p, M
        self._forward_only = forward_only
        self.complaints: list[list[str]] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._grads: list[Any] = []
        self._input_grads: list[Any] = []
        self._sent: list[Any] = []
        self._freed: list[Any] = []
        self._microbatches: list[int] = []
        self.num_freed = 0
        self.kept: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at every call inside the block."""
        with (
            self._around(ModelChunk.forward_step, CHUNK + "forward_step", self._forward),
            self._around(ModelChunk.backward_step, CHUNK + "backward_step", self._backward),
            self._around(ModelChunk.free_output, CHUNK + "free_output", self._free),
            self._around(P2PCommunicator.finish, FINISH, lambda run: (note([END, None]), run())),
            observed_by(self),
        ):
            yield

    @staticmethod
    def _around(
        original: Callable, symbol: str, look: Callable
    ) -> contextlib.AbstractContextManager:
        def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
            return look(lambda: original(self, *args, **kwargs), *args, **kwargs)

        return installed(instead, symbol)

    # -- Complaints --

    def where(self) -> str:
        """Rank, and the line of the student's file that runs."""
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        line = "" if frame is None else f", line {frame.f_lineno} of your file"
        return f"rank {dist.get_rank()}{line}"

    def phase(self, name: str) -> str:
        """The phase to which the call belongs, by the number of its microbatch's turn."""
        is_after = name.startswith("send")
        num_warmup = self._M if self._forward_only else min(self._p - self._stage - 1, self._M)
        if name == "F" or name.startswith(("recv_forward", "send_forward")):
            return WARMUP if len(self._microbatches) - is_after < num_warmup else STEADY
        return STEADY if len(self._grads) - is_after < self._M - num_warmup else COOLDOWN

    def complain(self, name: str, words: str, part: str = "") -> None:
        """Notes what is wrong with a call; the first of each part counts."""
        part = part or self.phase(name)
        if part not in [known for known, _ in self.complaints]:
            self.complaints.append([part, f"{self.where()}: {words}"])
            note([COMPLAINT, self.complaints[-1]])

    def cause(self) -> Wrong | None:
        """What makes a crash a consequence: an earlier complaint about an argument, if any."""
        found = ((part, text) for part, text in self.complaints if part != OUTCOME)
        return next((Wrong(text, part) for part, text in found), None)

    def refuse(self, name: str, words: str) -> NoReturn:
        """Ends the step, where the real call would crash. An earlier complaint is the cause."""
        self.complain(name, words)
        raise self.cause()

    def _note_kept(self, what: str) -> None:
        """Notes the outputs that were sent, and are not freed, when the next computation begins."""
        if self._forward_only or self._stage == self._p - 1:
            return
        for number, output in zip(self._microbatches, self._outputs, strict=False):
            is_sent = any(output is known for known in self._sent)
            if is_sent and not any(output is known for known in self._freed):
                self.kept.append(
                    f"the output of microbatch {number} is kept while {what} is computed"
                )

    # -- Calls of the chunk --

    def _forward(self, run: Callable, microbatch_id: Any = None, input_tensor: Any = None) -> Any:
        microbatch, tensor = microbatch_id, _tensor(input_tensor)
        if not isinstance(microbatch, int):
            self.refuse(
                "F",
                f"forward_step got {_kind(microbatch)} as the number of the microbatch\nThe number "
                "comes first, then the input: chunk.forward_step(i, input_tensor).",
            )
        if microbatch in self._microbatches:
            self.refuse(
                "F",
                f"microbatch {microbatch} is forwarded a second time\nEach microbatch has one "
                f"forward: numbers 0 to {self._M - 1}. The steady phase goes on with the number after "
                "the warm-up's last one.",
            )
        if tensor is None and self._stage > 0:
            self.refuse(
                "F",
                "forward_step got None as its input\nOnly the first stage has no input. Hand on "
                "what recv_forward (or send_backward_recv_forward) returned.",
            )
        if tensor is not None and any(tensor is known for known in self._inputs):
            self.complain(
                "F",
                f"the forward of microbatch {microbatch} got the input of an earlier microbatch\n"
                "Each receive returns a new input. Keep it: input_tensor = ..., also for "
                "send_backward_recv_forward.",
            )
        self._note_kept(f"the forward of microbatch {microbatch}")
        self._inputs.append(tensor)
        self._microbatches.append(microbatch)
        output = run()
        self._outputs.append(_tensor(output))
        return output

    def _backward(
        self, run: Callable, output_tensor_grad: Any = None, microbatch_id: Any = None
    ) -> Any:
        grad = _tensor(output_tensor_grad)
        if grad is None and self._stage < self._p - 1:
            self.refuse(
                "B",
                "backward_step got None\nOnly the last stage has no gradient to begin from: it has "
                "the loss. Hand on what recv_backward (or send_forward_recv_backward) returned.",
            )
        if grad is not None and any(grad is known for known in self._grads):
            self.complain(
                "B",
                "backward_step got the gradient of an earlier microbatch\nEach receive returns a "
                "new gradient. Keep it: grad = ..., also for send_forward_recv_backward.",
            )
        self._note_kept(f"the backward of microbatch {len(self._grads)}")
        self._grads.append(grad)
        found = run()
        self._input_grads.append(_tensor(found))
        return found

    def _free(self, run: Callable, output_tensor: Any = None) -> None:
        self.num_freed += 1
        if not self._forward_only and self._stage < self._p - 1:
            self._look_at_freed(_tensor(output_tensor))
        run()

    def _look_at_freed(self, tensor: Any) -> None:
        number = next((i for i, known in enumerate(self._outputs) if known is tensor), None)
        if tensor is None or number is None:
            is_input = tensor is not None and any(tensor is known for known in self._inputs)
            what = "the input of a forward" if is_input else _kind(tensor)
            self.complain(
                "free",
                f"free_output got {what}; it takes what forward_step returned\nThe output is sent "
                "and needed no more. The input is still needed: backward puts its gradient there.",
                OUTCOME,
            )
            return
        name = f"microbatch {self._microbatches[number]}"
        if any(tensor is known for known in self._freed):
            words = f"the output of {name} is freed a second time; free each output once"
            self.complain("free", words, OUTCOME)
        elif not any(tensor is known for known in self._sent):
            self.complain(
                "free",
                f"the output of {name} is freed before it is sent\nIts memory is gone then, and the "
                "next stage would get something else. Send first, then free.",
                OUTCOME,
            )
        self._freed.append(tensor)

    # -- Calls between stages --

    def start(self, call: Call) -> None:
        """A traced call begins."""
        name = CALLS.get(call.name)
        if name is None:
            return
        note([name, call.attributes.get("microbatch")])
        self._look_at_flag(name, call.arguments)
        for parameter, maker in SENT.items():
            if parameter in call.arguments and not self._is_edge(call.arguments):
                self._look_at_sent(name, _tensor(call.arguments[parameter]), maker)
        shapes = call.arguments.get("tensor_shapes")
        wanted = "recv_shapes" if name.endswith("recv_forward") else "send_shapes"
        if isinstance(shapes, Shapes) and shapes.name != wanted:
            self.complain(
                name,
                f"{name} got {shapes.name}; it needs {wanted}\nA gradient has the shape of the "
                "output that was sent. Here both shapes are equal; in a model whose stages hand on "
                "tensors of different sizes they are not.",
            )

    def stop(self, call: Call) -> None:
        """A traced call ends; it was noted when it began."""

    def _is_edge(self, arguments: dict[str, Any]) -> bool:
        """Whether this is the stage on which the call has nothing to send."""
        edge = 0 if "is_first_stage" in arguments else self._p - 1
        return self._stage == edge

    def _look_at_flag(self, name: str, arguments: dict[str, Any]) -> None:
        flag = next((key for key in ("is_first_stage", "is_last_stage") if key in arguments), None)
        if flag is not None and arguments[flag] is not self._is_edge(arguments):
            self.complain(
                name,
                f"{name} got {_kind(arguments[flag])} as its {flag}; here that is "
                f"{self._is_edge(arguments)}\n"
                "Where the flag is True, the call sends nothing and receives nothing.",
            )

    def _look_at_sent(self, name: str, tensor: Any, maker: str) -> None:
        made = (self._outputs if maker == "forward_step" else self._input_grads)[-1:]
        self._sent.append(tensor)
        if tensor is None:
            self.complain(
                name, f"{name} got None, so nothing is sent; it takes what {maker} returned"
            )
        elif not made or not _is_same(tensor, made[0]):
            self.complain(name, f"{name} got another tensor than {maker} has just returned")


def _tensor(value: Any) -> Any:
    """The tensor itself: between stages it travels as a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _is_same(one: Any, other: Any) -> bool:
    if one is other or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


def _kind(value: Any) -> str:
    value = _tensor(value)
    if value is None or isinstance(value, bool | int):
        return repr(value)
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
