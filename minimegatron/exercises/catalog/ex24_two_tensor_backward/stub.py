"""Two tensors between stages: what a decoder stage hands on, and the gradients it sends back.

Started by: you, and `minimegatron exercises check`. A model has an encoder and a decoder, as T5. Each
is cut into stages, and microbatches go through both:

    encoder stage -> encoder stage -> decoder stage -> decoder stage -> loss
                 [hidden]           [e]             [hidden, e]

    hidden    [s, b, h]: what the layers of a stage make, for the layers of the next one
    e         [s_enc, b, h]: the encoder's output. Every decoder stage looks at it, by cross attention,
              and no decoder stage changes it.

So most decoder stages get two tensors and send two. The stage itself, its layers and its loss, is
given. The check calls your functions around it, for each microbatch:

    output = stage(inputs)
    outputs = hand_over(inputs, output, is_decoder, is_last_stage)      these are sent
    free_outputs(outputs, is_last_stage)
    ...                                                                 forwards of other microbatches
    input_grads = backward_step(inputs, outputs, output_grads)          these are sent back

You have from exercise 7, in the imports below:

    deallocate_output_tensor(out, True)      frees the memory of `out`; it keeps its place in the graph
    custom_backward(output, grad)            backward from an output that was freed. Gradients add up in
                                             `.grad` of weights and of inputs. grad None: from a loss
"""

import torch

from minimegatron.core.pipeline_parallel.steps import (  # noqa: F401
    custom_backward,
    deallocate_output_tensor,
)


def hand_over(
    inputs: list[torch.Tensor | None], output: torch.Tensor, is_decoder: bool, is_last_stage: bool
) -> list[torch.Tensor]:
    """What this stage sends to the next one, in that order; on the last stage the loss alone.

    Args:
        inputs: what came from the stage before. [None] on the first stage of all, which reads data;
            [hidden] on other encoder stages; [e] on the first decoder stage, which reads data too;
            [hidden, e] on other decoder stages.
        output: what this stage's layers made: hidden states (the last encoder stage's are e);
            on the last stage the loss.
    """
    raise NotImplementedError("Write hand_over: which stages send one tensor, and which send two?")


def free_outputs(outputs: list[torch.Tensor], is_last_stage: bool) -> None:
    """After sending: frees what only the next stage reads from now on.

    The list keeps its tensors: backward begins at them. The loss is not freed.
    """
    raise NotImplementedError("Write free_outputs: what does this stage still need, and for what?")


def backward_step(
    inputs: list[torch.Tensor | None],
    outputs: list[torch.Tensor],
    output_grads: list[torch.Tensor] | None,
) -> list[torch.Tensor | None]:
    """Backward of one microbatch. Returns one gradient for each input, None for None.

    Gradients of the stage's weights add up in their `.grad`, over all microbatches. `inputs` require a
    gradient. Some stage may have no layer that looks at the encoder's output. Nothing of a microbatch
    is kept after its backward.

    Args:
        inputs, outputs: those of this microbatch's forward; outputs were freed.
        output_grads: from the stage after, one for each tensor that was sent; None on the last stage.
    """
    raise NotImplementedError(
        "Write backward_step: the gradient of the encoder's output has two parts"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
