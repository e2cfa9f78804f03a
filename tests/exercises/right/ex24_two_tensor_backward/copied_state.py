"""The state goes out as a copy that is part of the graph, and backward begins at both in turn."""

import torch

from minimegatron.core.pipeline_parallel.steps import deallocate_output_tensor, run_backward


def hand_over(inputs, output, is_decoder, is_last_stage):
    return [output, *(x.clone() for x in inputs[-1:] if is_decoder and not is_last_stage)]


def free_outputs(outputs, is_last_stage):
    if not is_last_stage:
        deallocate_output_tensor(outputs[0], True)


def backward_step(inputs, outputs, output_grads):
    grads = output_grads or [torch.tensor(1.0, dtype=torch.float64)]
    for output, grad in zip(outputs, grads, strict=True):
        run_backward((output,), (grad,))
    return [None if x is None else x.grad.clone() for x in inputs]


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
