"""Backwards take the newest microbatch.

Expected: the oldest microbatch in flight comes first
"""

PREDICTION = {
    0: "F0 F1 F2 B0 F3 B1 B2 B3",
    1: "F0 F1 B0 F2 B1 F3 B2 B3",
    2: "F0 B0 F1 B1 F2 B2 F3 B3",
}


def predict_order(pp_size: int, pp_rank: int, num_microbatches: int) -> list[str]:
    num_warmup = min(pp_size - pp_rank - 1, num_microbatches)
    order, held = [], []
    for i in range(num_microbatches):
        order.append(f"F{i}")
        held.append(i)
        if i >= num_warmup:
            order.append(f"B{held.pop()}")
    return order + [f"B{i}" for i in reversed(held)]
