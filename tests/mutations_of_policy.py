"""What notices each known mistake in reinforcement learning; a row is as in tests/test_mutations.py."""

FORMULAS = ("pytest", "tests/rl/test_rl_utils.py", "-k")
RUNS = ("pytest", "tests/rl/test_train_rl.py", "-k")
STEP = ("pytest", "tests/rl/test_grpo_step.py", "-k")
REFUSALS = ("pytest", "tests/training/test_bad_configs.py", "-k")

CAUGHT_OF_POLICY = {
    "logprob-of-the-same-token": ((*FORMULAS, "that_follows"), r"not close"),
    "logprobs-without-temperature": ((*FORMULAS, "that_follows"), r"not close"),
    "padding-of-the-vocabulary-scored": ((*FORMULAS, "that_follows"), r"not close"),
    "clipped-from-above-only": ((*FORMULAS, "of_the_formula"), r"not close"),
    "best-of-both-ratios": ((*FORMULAS, "of_the_formula"), r"not close"),
    "distance-the-other-way": ((*FORMULAS, "of_the_formula"), r"not close"),
    "weights-without-a-cap": ((*FORMULAS, "cap"), r"not close"),
    "deviation-of-a-sample": ((*FORMULAS, "in_order"), r"approx"),
    "empty-microbatch-counts-a-token": ((*FORMULAS, "counts_none"), r"0\.0, 1\.0"),
    "held-out-rows-not-padded": ((*RUNS, "whole_microbatches"), r"assert|invalid for input"),
    "a-repeated-step-reads-on": ((*RUNS, "begins_again"), r"StopIteration"),
    "one-iterator-for-all-chunks": ((*RUNS, "begins_again"), r"reads more than the 3"),
    "dropout-in-the-update": ((*REFUSALS, "train_rl and hidden-dropout"), r"not refused"),
    "advantage-over-the-batch": ((*RUNS, "groups_that"), r"not close|not equal"),
    "old-policy-follows": ((*RUNS, "ratio_one"), r"!= 1\.0"),
    "reference-follows": ((*RUNS, "ratio_one"), r"> 0\.0"),
    "numbers-of-each-copy": ((*RUNS, "copies_draw"), r"assert"),
    "mask-starts-one-late": ((*STEP, "formula and 1"), r"is off by"),
    "mean-of-microbatches": ((*STEP, "formula and 1"), r"is off by"),
    "gather-takes-its-part": ((*STEP, "formula and 2"), r"c=2.* is off by"),
}
