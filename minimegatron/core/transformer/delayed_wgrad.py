"""Weight gradients that the backward has left, of a module with parts.

Megatron has this in `backward_dw` of each class.
"""

import torch


class DelayedWgrad:
    """A base of modules; those of their parts that have a `backward_dw` compute the gradients."""

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: weight gradients of the oldest microbatch that is owed.

        The last part first, as in backward: its bucket is the first to be sent.
        """
        _of_parts(self)


def _of_parts(module: torch.nn.Module) -> None:
    for part in reversed([*module.children()]):
        if isinstance(part, torch.nn.ModuleList):
            _of_parts(part)
        elif hasattr(part, "backward_dw"):
            part.backward_dw()
