"""A linear layer that may leave the gradient of its weight for later.

Megatron has no counterpart; there Transformer Engine's linear layers do so, with `backward_dw`.
"""

from typing import Any

import torch

from minimegatron.core.tensor_parallel.weight_grad_store import WeightGradStore, store_of


class OwingLinear(torch.nn.Module):
    """What both linear layers know of `config.delay_wgrad_compute`, and of the output layer's deferral.

    Where `owes` is False, a forward asks no further.
    """

    owes = False
    """Whether some of the layer's products leave their weight gradient."""

    def set_up_owing(
        self,
        delay_wgrad_compute: bool | None = None,
        sequence_group: Any = None,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
    ) -> None:
        """For a constructor, once the layer has its `config` and its `weight`.

        Args:
            delay_wgrad_compute: None for the config's.
            sequence_group: gather the input over it before the product; None if it is whole.
            embedding_activation_buffer, grad_output_buffer: see `ColumnParallelLinear`.
        """
        config = self.config
        self.delay_wgrad_compute = (
            config.delay_wgrad_compute if delay_wgrad_compute is None else delay_wgrad_compute
        )
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        if self.delay_wgrad_compute and self.weight is not None:
            # As in Megatron: the hooks of this weight run in `backward_dw`, not in backward.
            self.weight.skip_backward_post_hook = True
        self._sequence_group = sequence_group
        self._deferred: WeightGradStore | None = None
        if config.defer_embedding_wgrad_compute and grad_output_buffer is not None:
            self._deferred = WeightGradStore(
                embedding_activation_buffer,
                grad_output_buffer,
                sequence_group,
                config.wgrad_deferral_limit,
                until_drained=True,
            )
        self.owes = self.delay_wgrad_compute or self._deferred is not None

    def store_for(self, weight: torch.Tensor) -> WeightGradStore | None:
        """Where the gradient of a product with `weight` is left; None to compute it in backward.

        A delay is of the layer's own weight alone. One that `forward` is given is another layer's.
        """
        if self._deferred is None and self.delay_wgrad_compute and weight is self.weight:
            return store_of(weight, self._sequence_group)
        return self._deferred

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the weight gradient of the oldest microbatch that is owed."""
        if self.delay_wgrad_compute and self.weight is not None:
            store_of(self.weight, self._sequence_group).backward_dw(self.weight)
