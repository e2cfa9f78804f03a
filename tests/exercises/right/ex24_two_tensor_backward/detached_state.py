"""The state goes out detached, and what comes from behind is put into its .grad before backward."""

from minimegatron.core.pipeline_parallel.steps import custom_backward, deallocate_output_tensor


def hand_over(inputs, output, is_decoder, is_last_stage):
    if not is_decoder or is_last_stage:
        return (output,)
    return output, inputs[-1].detach()


def free_outputs(outputs, is_last_stage):
    if is_last_stage:
        return
    # of a detached state only the second name loses its memory: the input has it still
    for tensor in outputs:
        deallocate_output_tensor(tensor, True)


def backward_step(inputs, outputs, output_grads):
    first, *others = output_grads or [None]
    if others:
        inputs[-1].grad = others[0]
    custom_backward(outputs[0], first)
    return [getattr(tensor, "grad", None) for tensor in inputs]


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
