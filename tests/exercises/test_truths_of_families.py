"""What the check of exercise 24 takes for right is what the package's own steps do."""

from types import SimpleNamespace

import pytest
import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel import steps
from minimegatron.exercises.catalog.ex24_two_tensor_backward import check

CONFIG = ModelParallelConfig(deallocate_pipeline_outputs=True)
ALONE = [case for case in check.cases(0) if case.part not in check.RUN_ON_RANKS]


class HandsOn(torch.nn.Module):
    """What a decoder stage says of itself."""

    def extra_outputs(self, inputs: list) -> list:
        return inputs[-1:]


def hand_over(inputs, output, is_decoder, is_last_stage):
    hands_on = is_decoder and not is_last_stage
    return steps.all_outputs(HandsOn() if hands_on else torch.nn.Module(), inputs, output)


def free_outputs(outputs, is_last_stage):
    chunk = SimpleNamespace(forward_only=False, is_last_stage=is_last_stage, config=CONFIG)
    steps.ModelChunk.free_output(chunk, outputs)


def backward_step(inputs, outputs, output_grads):
    return steps.backward_step(inputs, outputs, output_grads or [None], None, CONFIG)


OURS = SimpleNamespace(
    hand_over=hand_over, free_outputs=free_outputs, backward_step=backward_step, __file__=__file__
)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_the_steps_of_the_package_are_right(case):
    check.judge(case, [check.run(OURS, case)])
