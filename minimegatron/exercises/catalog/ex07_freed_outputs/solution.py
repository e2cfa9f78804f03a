"""Freed outputs, solved.

`out.data = small` makes the tensor object point at other memory. Autograd's graph is attached to the
object, not to its memory, so it stays; what an operation saved for its own backward is held by the
graph and stays too. The old memory is freed as soon as nobody else uses it.
"""

import torch
from torch.autograd.variable import Variable


def deallocate_output_tensor(
    out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False
) -> None:
    """Frees the memory of `out`, in place: whoever holds the tensor object sees one element."""
    if out is None or not deallocate_pipeline_outputs:
        return
    if out._base is not None:
        raise ValueError(
            f"the output of shape {tuple(out.shape)} is a view; freeing it would free nothing"
        )
    # dtype and device stay: whoever holds the output may ask for them.
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Backward from `output`, which may have been freed. Gradients add up in `.grad` as usual."""
    if grad_output is None:
        if output.numel() != 1:
            raise ValueError(f"a loss is one number, not of shape {tuple(output.shape)}")
        grad_output = torch.ones_like(output)
    Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(grad_output,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
