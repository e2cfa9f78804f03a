"""The last part: three ranks, a schedule of the package, and the student's functions in its steps.

Megatron has no counterpart.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from minimegatron.core import parallel_state
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.exercises.bench.gpt_step import on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex24_two_tensor_backward.calls import Student
from minimegatron.exercises.catalog.ex24_two_tensor_backward.data import (
    BATCH,
    ENCODER,
    FIRST,
    FIRST_DECODER,
    HIDDEN,
    LAST,
    ONLY_DECODER,
    S_DEC,
    S_ENC,
    Layers,
    given_own,
    given_weights,
    shape_of,
)
from minimegatron.exercises.check import Case, Result, installed

STEPS = "minimegatron.core.pipeline_parallel.steps."
LINES = {1: (FIRST, FIRST_DECODER, LAST), 2: (FIRST, ENCODER, ONLY_DECODER)}
"""Encoder stages -> what each of the three stages is."""


def layers_of(case: Case, stage: int) -> Layers:
    """One stage of the case's pipeline."""
    return Layers(LINES[case.split][stage], given_weights(case.seed, stage))


class StageModel(torch.nn.Module):
    """A stage as the schedule wants it."""

    def __init__(self, case: Case, stage: int):
        super().__init__()
        self.config = TransformerConfig(
            num_layers=3,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            pipeline_model_parallel_size=3,
            pipeline_dtype=torch.float64,
            params_dtype=torch.float64,
            deallocate_pipeline_outputs=True,
        )
        self.layers = layers_of(case, stage)
        self.inputs: list[torch.Tensor | None] = []

    def set_input_tensor(self, inputs: list[torch.Tensor | None]) -> None:
        """What came from the stage before."""
        self.inputs = inputs

    def message_shapes(self, shapes: list, _: list) -> tuple[list, list]:
        """What comes in and what goes out; at the ends of the pipeline nothing does."""
        kind = self.layers.kind
        came = [shape_of(word, kind) for word in kind.input_words]
        sent = [shape_of(word, kind) for word in kind.output_words]
        return came or shapes, shapes if kind.is_last else sent


# -- On every rank --


def run_whole(student: ModuleType, case: Case) -> dict[str, Any]:
    """A step of plain 1F1B in which hand-over, freeing and backward are the student's."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = StageModel(case, groups.pp.rank())
    with in_the_steps(Student(student, model.layers.kind)) as in_steps:
        reports = forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step_func,
            data_iterator=(given_own(case.seed, model.layers.kind, i) for i in range(case.M)),
            model=model,
            num_microbatches=case.M,
            seq_length=S_ENC,
            decoder_seq_length=S_DEC,
            micro_batch_size=BATCH,
            pg_collection=groups,
        )
    weights = {name: x.grad for name, x in model.layers.weights.items()}
    return {"losses": reports, "weights": weights, "sent": in_steps.sent}


def run_t5(student: ModuleType, case: Case) -> dict[str, Any]:
    """The same with a T5 of the package."""
    step = on_these_ranks(case.step)
    step.config.deallocate_pipeline_outputs = True
    with in_the_steps(Student(student, LINES[1][step.groups.pp.rank()])) as in_steps:
        reports = step.forward_backward()
    return {"reports": reports, "gradients": step.gradients(), "sent": in_steps.sent}


class InSteps:
    """The student's functions, with the arguments that the package's steps give."""

    def __init__(self, caller: Student):
        self._caller = caller
        self.sent: list[list[int]] = []

    def all_outputs(self, model: Any, input_tensor: list, output_tensor: torch.Tensor) -> list:
        """The hand-over."""
        outputs = self._caller.hand_over(input_tensor, output_tensor)
        self.sent = [list(tensor.shape) for tensor in outputs]
        return outputs

    def free_output(self, output_tensor: list) -> None:
        """In the place of a method: there is one chunk, so its `self` is not needed."""
        self._caller.free_outputs(output_tensor)

    def backward_step(
        self, input_tensor: list, output_tensor: list, output_tensor_grad: list, *_: Any
    ) -> list:
        """The backward."""
        grads = None if self._caller.kind.is_last else output_tensor_grad
        return self._caller.backward_step(input_tensor, output_tensor, grads)


@contextlib.contextmanager
def in_the_steps(caller: Student) -> Iterator[InSteps]:
    """Inside the block, the package's steps call the student's functions."""
    in_steps = InSteps(caller)
    with contextlib.ExitStack() as stack:
        for name in ("all_outputs", "backward_step", "ModelChunk.free_output"):
            function = getattr(in_steps, name.rpartition(".")[2])
            stack.enter_context(installed(function, STEPS + name))
        yield in_steps


def forward_step_func(
    data_iterator: Iterator[tuple[torch.Tensor, torch.Tensor]], model: StageModel
) -> tuple[torch.Tensor, Any]:
    """One microbatch through the stage."""
    output = model.layers(model.inputs, *next(data_iterator))
    return output, _loss_func


def _loss_func(output: torch.Tensor) -> tuple[torch.Tensor, float]:
    return output, float(output.detach())


# -- In the judge --


def judge_whole(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """Against all stages in one process."""
    stages = [layers_of(case, stage) for stage in range(3)]
    losses = [_loss_of(case, stages, i) for i in range(case.M)]
    (sum(losses) / case.M).backward()
    what = "the loss of microbatch"
    for i, (found, wanted) in enumerate(zip(answers[-1]["losses"], losses, strict=True)):
        check_known(f"{what} {i}", found, wanted.detach())
    for rank, (layers, answer) in enumerate(zip(stages, answers, strict=True)):
        for name, weight in layers.weights.items():
            if weight.grad is not None:
                what = f"the gradient of weight {name} of {layers.kind.name}"
                found = answer["weights"][name]
                check_known(
                    what, found, weight.grad, rank=rank, layout={"num_microbatches": case.M}
                )
    return Result({"sent forwards by": _sent_words(answers)})


def judge_t5(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """Against one process."""
    reference = Reference(case.step, 3).run()
    reference.check_losses([answer["reports"] for answer in answers])
    reference.check_gradients([answer["gradients"] for answer in answers])
    return Result({"sent forwards by": _sent_words(answers)})


def _sent_words(answers: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        f"rank {rank} {' and '.join(str(shape) for shape in answer['sent'])}"
        for rank, answer in enumerate(answers[:-1])
    )


def _loss_of(case: Case, stages: Sequence[Layers], microbatch: int) -> torch.Tensor:
    """One microbatch through all stages, with nothing cut."""
    inputs: list[torch.Tensor] = []
    for layers in stages:
        output = layers(inputs, *given_own(case.seed, layers.kind, microbatch))
        inputs = [output, inputs[-1]] if layers.kind.is_decoder else [output]
    return output
