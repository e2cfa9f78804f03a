"""Fields of a batch, and masks of its losses, that cannot be used, in words.

Megatron has no counterpart.
"""

from typing import NoReturn

import torch

from minimegatron.core.datasets.utils import DataError


def refuse_fractions(key: str, field: torch.Tensor, dtype: torch.dtype) -> NoReturn:
    """Raises DataError: a field of fractions is to arrive as integers."""
    raise DataError(
        f"{key!r} of the batch has dtype {field.dtype}, but is to arrive as {dtype}, which has "
        "no fractions; convert it in the data set, or give get_batch_on_this_tp_rank its "
        f"dtype: dtypes=FIELD_DTYPES | {{{key!r}: {field.dtype}}}"
    )


def refuse_loss_mask(loss_mask: torch.Tensor, losses: torch.Tensor) -> NoReturn:
    """Raises ValueError: there is not one number of the mask for each loss."""
    raise ValueError(
        f"loss_mask is {list(loss_mask.shape)}, but there are losses {list(losses.shape)}; give "
        "one number for each token"
    )
