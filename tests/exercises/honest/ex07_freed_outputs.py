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
from torch.autograd.variable import Variable


def deallocate_output_tensor(
    out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False
) -> None:
    """Let go of the memory, keep the object and its place in the graph."""
    if not deallocate_pipeline_outputs or out is None:
        return
    if out._base is not None:
        raise ValueError("a view does not own its memory, so freeing it frees nothing")
    out.data = out.new_empty((1,))


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Run the engine without the shape check of the public entry."""
    start = grad_output
    if start is None:
        if output.numel() != 1:
            raise ValueError("only a loss of one number may come without a gradient")
        start = torch.ones_like(output)
    Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(start,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
