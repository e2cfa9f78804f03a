"""Calls the student's functions: what they return is looked at, and errors are explained.

Megatron has no counterpart.
"""

import traceback
from types import ModuleType
from typing import Any

import torch

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.catalog.ex24_two_tensor_backward.data import Kind
from minimegatron.exercises.check import Wrong

ERRORS = (RuntimeError, IndexError, TypeError, AttributeError, ValueError)


class Student:
    """The functions of one file, as a stage of some kind calls them."""

    def __init__(self, module: ModuleType, kind: Kind):
        self._module, self.kind = module, kind

    def hand_over(self, inputs: list, output: torch.Tensor) -> list[torch.Tensor]:
        """What is sent, once it is a list of tensors."""
        returned = self._call(
            "hand_over", list(inputs), output, self.kind.is_decoder, self.kind.is_last
        )
        if not isinstance(returned, list | tuple):
            raise self._wrong(
                "hand_over", f"returned {_kind_of(returned)}; a list of tensors is expected"
            )
        for tensor in returned:
            if not isinstance(tensor, torch.Tensor):
                raise self._wrong("hand_over", f"returned a list with {_kind_of(tensor)} in it")
        return list(returned)

    def free_outputs(self, outputs: list[torch.Tensor]) -> None:
        """In place; the list must stay."""
        before = list(outputs)
        self._call("free_outputs", outputs, self.kind.is_last)
        if len(outputs) != len(before) or any(
            one is not other for one, other in zip(outputs, before, strict=True)
        ):
            raise self._wrong(
                "free_outputs",
                "changed the list of outputs\nBackward begins at these very tensors: each keeps its "
                "place in the graph, and only its memory goes. Call deallocate_output_tensor for it.",
            )

    def backward_step(self, inputs: list, outputs: list, grads: list | None) -> list:
        """The gradients that are sent back: one for each input, of its shape; None for None."""
        shapes = [None if tensor is None else list(tensor.shape) for tensor in inputs]
        given = None if grads is None else list(grads)
        returned = self._call("backward_step", list(inputs), list(outputs), given)
        if not isinstance(returned, list | tuple):
            words = (
                f"returned {_kind_of(returned)}; a list, one gradient for each input, is expected"
            )
            raise self._wrong("backward_step", words)
        if len(returned) != len(inputs):
            words = (
                f"returned {num_of(len(returned), 'gradient')} for {num_of(len(inputs), 'input')}"
            )
            raise self._wrong("backward_step", f"{words}\n{self._input_words()}")
        found = [_shape_words(one) for one in returned]
        wanted = ["None" if shape is None else f"{shape}" for shape in shapes]
        for place, (has, wants) in enumerate(zip(found, wanted, strict=True)):
            if has != wants:
                why = self._why_shape(has, wanted, place)
                words = (
                    f"returned {has} as the gradient of input {place}; {wants} is expected\n{why}"
                )
                raise self._wrong("backward_step", words)
        return list(returned)

    def _input_words(self) -> str:
        words = self.kind.input_words or ["None, as it reads data"]
        return f"{self.kind.name} gets: {' and '.join(words)}.".capitalize()

    def _why_shape(self, has: str, wanted: list[str], place: int) -> str:
        if has == "None" and (self.kind.looks or place == 0):
            return (
                "Backward leaves gradients in the `.grad` of the tensors that came in: of inputs, and "
                "not of outputs."
            )
        if has == "None":
            return (
                "No layer of this stage looks at the encoder's output, so its own part is None. What "
                "came from the stage after must go on all the same: stages before this one wait for it."
            )
        if has in wanted:
            return (
                "That is the shape of another input: gradients come in the order of inputs. "
                f"{self._input_words()}"
            )
        return self._input_words()

    def _wrong(self, function: str, words: str) -> Wrong:
        return Wrong(f"{self.kind.name}: {function} {words}")

    def _call(self, function: str, *given: Any) -> Any:
        try:
            return getattr(self._module, function)(*given)
        except ERRORS as error:
            words = self._explained(function, error)
            if not words:
                raise
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == self._module.__file__]
            where = f", in line {lines[-1]} of your file" if lines else ""
            first = str(error).splitlines()[0]
            said = f"{type(error).__name__}: {first}"
            raise self._wrong(function, f"failed{where}: {said}\n{words}") from error

    def _explained(self, function: str, error: Exception) -> str:
        """What an error means here; "" for others."""
        text = str(error)
        if isinstance(error, IndexError) and self.kind.is_decoder and self.kind.begins:
            return (
                "The first decoder stage gets one tensor, the encoder's output, and reads data. The "
                "encoder's output is the last of inputs in every decoder stage."
            )
        if isinstance(error, IndexError):
            return f"{self._input_words()} An encoder stage sends one tensor."
        if function != "backward_step":
            return ""
        if "NoneType" in text and self.kind.is_last and "subscriptable" in text:
            return "Nobody stands after the last stage: output_grads is None there."
        if "NoneType" in text and "attribute" in text and not self.kind.input_words:
            return (
                "The first stage reads data: its only input is None, and so is what it sends back."
            )
        if "NoneType" in text and not self.kind.looks:
            return (
                "No layer of this stage looks at the encoder's output, so its `.grad` is None. What "
                "came from the stage after must go on all the same."
            )
        return _of_autograd(text)


def _of_autograd(text: str) -> str:
    if "Mismatch in shape" in text:
        return (
            "The output was freed: it has one element now. torch.autograd.backward compares its shape "
            "with the gradient's. custom_backward does not."
        )
    if "invalid gradient" in text and "got [1]" in text or "needs a scalar" in text:
        return (
            "custom_backward got no gradient. Only the last stage begins at a loss; elsewhere the "
            "output's gradient is the first of output_grads."
        )
    if "size of tensor" in text or "invalid gradient" in text:
        return (
            "Gradients of hidden states and of the encoder's output have different lengths. Which of "
            "the inputs went out again, as the second output?"
        )
    if "does not require grad" in text:
        return "What backward begins at has no place in the graph: it was detached."
    if "second time" in text:
        return "Backward ran twice for one microbatch. Its graph is gone after the first time."
    return ""


def _shape_words(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else _kind_of(value)


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
