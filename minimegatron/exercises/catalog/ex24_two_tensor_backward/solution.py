"""Two tensors between stages, solved.

The encoder's output is one tensor, which comes in and goes out. It has two readers: this stage's cross
attention, whose term of the gradient autograd leaves in `.grad`, and the stages after, whose sum has
arrived.
"""

import torch

from minimegatron.core.pipeline_parallel.steps import custom_backward, deallocate_output_tensor


def hand_over(
    inputs: list[torch.Tensor | None], output: torch.Tensor, is_decoder: bool, is_last_stage: bool
) -> list[torch.Tensor]:
    """What this stage sends to the next one, in that order; on the last stage the loss alone."""
    if is_decoder and not is_last_stage:
        return [output, inputs[-1]]
    return [output]


def free_outputs(outputs: list[torch.Tensor], is_last_stage: bool) -> None:
    """After sending: frees what only the next stage reads from now on."""
    if not is_last_stage:
        deallocate_output_tensor(outputs[0], True)


def backward_step(
    inputs: list[torch.Tensor | None],
    outputs: list[torch.Tensor],
    output_grads: list[torch.Tensor] | None,
) -> list[torch.Tensor | None]:
    """Backward of one microbatch. Returns one gradient for each input, None for None."""
    grads_from_behind = [None] if output_grads is None else output_grads
    custom_backward(outputs[0], grads_from_behind[0])
    input_grads = [None if tensor is None else tensor.grad for tensor in inputs]
    for grad_from_behind in grads_from_behind[1:]:
        own_grad = input_grads[-1]
        input_grads[-1] = grad_from_behind if own_grad is None else own_grad + grad_from_behind
    return input_grads


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
