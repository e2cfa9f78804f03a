"""Predict 1F1B: the forwards and backwards of every stage, in order.

F3 is the forward of microbatch 3 on some stage, B3 its backward there. The rules:

- F3 needs F3 of the previous stage; B3 needs B3 of the next stage (on the last stage, its own F3).
- Messages between two stages arrive in the order in which they were sent.
- 1F1B: each stage begins with one forward for each stage that follows it, and no more (fewer, if there
  are fewer microbatches); then one forward and one backward in turn, always the backward of the oldest
  microbatch; at the end the backwards that are left.

Part 1 is done by hand, with paper. Part 2 is the rule that you found.
"""

# Three stages, four microbatches. Fill in, for example "F0 B0 F1 B1 F2 B2 F3 B3".
PREDICTION = {
    0: "",
    1: "",
    2: "",
}


def predict_order(pp_size: int, pp_rank: int, num_microbatches: int) -> list[str]:
    """What stage `pp_rank` of `pp_size` does: ["F0", "F1", "B0", ...]."""
    raise NotImplementedError("Write predict_order: how many forwards come before the first B?")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
