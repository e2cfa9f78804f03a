"""Freed outputs: once a stage has sent its output, only the output's place in the graph is needed.

Two functions are missing. The first swaps the output's memory for a single element. Then the public
entry of autograd refuses: it compares the shapes of output and gradient. The engine underneath does
not look at the shape, so the second function calls it directly:

    Variable._execution_engine.run_backward(
        tensors=(output,), grad_tensors=(gradient,), keep_graph=False, create_graph=False,
        inputs=(), allow_unreachable=True, accumulate_grad=True,
    )

`tensor._base` is not None for a view: a tensor that looks into another one's memory.
"""

import torch
from torch.autograd.variable import Variable  # noqa: F401


def deallocate_output_tensor(
    out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False
) -> None:
    """Frees the memory of `out`, in place: whoever holds the tensor object sees one element.

    Does nothing for None, or if `deallocate_pipeline_outputs` is False. `out` keeps its dtype, its
    device and its `grad_fn`; what autograd itself has saved stays as it is. Raises ValueError for a
    view, whose memory belongs to another tensor: nothing would be freed.
    """
    raise NotImplementedError("Write deallocate_output_tensor: what does `out.data = ...` do?")


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Backward from `output`, which may have been freed. Gradients add up in `.grad` as usual.

    Without a gradient (None), `output` is a loss: a single number, of shape [] or [1], whose
    gradient is 1. Raises ValueError if it is not a single number.
    """
    raise NotImplementedError("Write custom_backward: call the engine; without a gradient, from 1")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
