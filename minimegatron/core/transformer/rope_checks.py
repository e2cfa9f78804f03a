"""What turning by positions refuses: angles of other tokens, features that are no pairs.

Megatron has no counterpart.
"""

import torch


def refuse_angles(freqs: torch.Tensor, t: torch.Tensor) -> None:
    """Raises ValueError: the angles are not those of the positions of `t`, queries or keys."""
    raise ValueError(
        f"rotary angles are {list(freqs.shape)} for queries or keys {list(t.shape)}; give "
        f"[{t.size(0)}, 1, 1, d'], one row for each of this rank's tokens"
    )


def turned_width(kv_channels: int, rotary_percent: float) -> int:
    """This share of a head's features. Raises ValueError unless it is an even number of 2 or more."""
    width = int(kv_channels * rotary_percent)
    if width < 2 or width % 2:
        raise ValueError(
            f"kv_channels {kv_channels} x rotary_percent {rotary_percent} turns {width} "
            "features; they are turned in pairs, so give an even number of 2 or more"
        )
    return width
