"""With `calculate_per_token_loss`: gradients are divided by the tokens of the whole batch.

Megatron does this within `finalize_model_grads`.
"""

import torch
import torch.distributed as dist

from minimegatron.core.collectives import all_reduce, broadcast
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.stages_as_told import placement_of
from minimegatron.core.utils import get_model_config, or_one


@traced("scale-gradients")
def _divide_by_num_tokens(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor,
    pp_group: dist.ProcessGroup,
    dp_cp_group: dist.ProcessGroup,
) -> None:
    """Divides all gradients by the number of tokens in the global batch; by 1 if there are none."""
    num_tokens = num_tokens.to(torch.float64, copy=True)  # weights add up to fractions
    last_stage = placement_of(get_model_config(model[0]), pp_group.size()).last_rank
    broadcast(num_tokens, last_stage, pp_group)
    all_reduce(num_tokens, dp_cp_group)
    scaling = or_one(num_tokens).reciprocal()
    for chunk in model:
        chunk.scale_gradients(scaling)
