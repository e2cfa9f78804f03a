"""The norm of the features, replicated over the tensor-parallel ranks.

Counterpart: `megatron.core.transformer.torch_norm`.

A norm goes over the last dimension, which every rank holds whole; only the gradients of
its weights need care. Under sequence parallelism a rank normalises its own tokens, so its gradients
are one term of a sum over tensor-parallel ranks. `param.sequence_parallel = True` says so, and
`finalize_model_grads` sums them.
"""

import torch
import torch.nn.functional as F

from minimegatron.core.parameter_marks import note_marks
from minimegatron.core.transformer import rms_norm
from minimegatron.core.transformer.transformer_config import TransformerConfig


class LayerNorm(torch.nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016, https://arxiv.org/abs/1607.06450).

    Input of any float dtype; output in the weight's, which differs under
    `fp32_residual_connection`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        output = F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return output.to(self.weight.dtype)


def WrappedTorchNorm(
    config: TransformerConfig,
    hidden_size: int,
    eps: float = 1e-5,
    *,
    gradient_is_partial: bool | None = None,
) -> torch.nn.Module:
    """The norm that `config.normalization` names, over `hidden_size` features.

    Args:
        gradient_is_partial: each tensor-parallel rank normalises other values, so that gradients
            must be summed. None: as between layers, only under `config.sequence_parallel`.
            Norms inside a tensor-parallel region (queries and keys, per head) say True.
    """
    norm_class = LayerNorm if config.normalization == "LayerNorm" else rms_norm.RMSNorm
    norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
    is_partial = config.sequence_parallel if gradient_is_partial is None else gradient_is_partial
    for name, param in norm.named_parameters():
        param.sequence_parallel = is_partial
        param.init_method = torch.nn.init.ones_ if name == "weight" else torch.nn.init.zeros_
    note_marks(norm)
    return norm
