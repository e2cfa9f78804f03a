"""What notices each known mistake of context parallelism, and of predicting further tokens.

Used by tests/test_mutations.py; a row is as in that file. Few of these start ranks: the others are
noticed without.
"""

RING = ("pytest", "tests/core/transformer/test_context_parallel.py", "-k")
SPLIT = ("pytest", "tests/core/transformer/test_zigzag.py", "-k")
CP_TOKENS = ("tests.probes", '{"cp": 2, "M": 2, "num_layers": 1, "per_token": true}')
OFF = r"AssertionError: \{'output'"

CAUGHT_WITH_CONTEXT = {
    "tokens-summed-over-dp-only": (CP_TOKENS, r"gradient of .* is off"),
    "context-ranks-read-other-samples": ((*SPLIT, "read_the_same_samples"), r"assert"),
    "labels-split-contiguously": ((*SPLIT, "keeps_all_columns"), r"assert \[\[0, 1, 2, 3\]"),
    "rope-restarts-on-each-rank": ((*SPLIT, "model_turns"), r"assert"),
    "ring-takes-the-wrong-half": ((*SPLIT, "blocks_are"), r"AssertionError"),
    "ring-merges-without-weights": ((*RING, "merged_halves"), r"not close"),
    "ring-backward-with-partial-lse": ((*RING, "one_process and 2-4-4-p2p"), OFF),
    "ring-gradients-stop-early": ((*RING, "one_process and 4-4-4-p2p"), OFF),
    "masked-nan-multiplied-by-zero": ((*RING, "see_nothing and p2p and causal"), r"nan"),
    "mask-of-own-columns": ((*RING, "see_nothing and p2p and causal"), OFF),
    "ring-drops-others-in-backward": ((*RING, "drops_the_same and p2p"), r"assert False"),
    "hop-not-overlapped": ((*RING, "travel_while"), r"'wait'"),
    "gathered-keys-in-rank-order": ((*RING, "one_process and 2-4-4-all_gather"), OFF),
    "tokens-for-heads-in-rank-order": ((*RING, "one_process and 2-4-4-a2a"), OFF),
}
