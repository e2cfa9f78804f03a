"""The smaller of two numbers is asked from numpy.

Expected: numpy.minimum is used: this part is checked without numpy and torch; use plain Python In your
file, innermost call last: smaller_by_numpy.py
"""

import numpy as np

# Three stages, four microbatches.
PREDICTION = {
    0: "F0 F1 F2 B0 F3 B1 B2 B3",
    1: "F0 F1 B0 F2 B1 F3 B2 B3",
    2: "F0 B0 F1 B1 F2 B2 F3 B3",
}


def predict_order(pp_size: int, pp_rank: int, num_microbatches: int) -> list[str]:
    """What stage `pp_rank` of `pp_size` does: ["F0", "F1", "B0", ...]."""
    num_warmup = int(np.minimum(pp_size - pp_rank - 1, num_microbatches))
    order = [f"F{i}" for i in range(num_warmup)]
    for i in range(num_microbatches):
        if num_warmup + i < num_microbatches:
            order.append(f"F{num_warmup + i}")
        order.append(f"B{i}")
    return order
