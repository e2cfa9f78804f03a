"""What notices each known mistake of context parallelism, and of predicting further tokens.

Used by tests/test_mutations.py; a row is as in that file. Few of these start ranks: the others are
noticed without.
"""

RING = ("pytest", "tests/core/transformer/test_context_parallel.py", "-k")
SPLIT = ("pytest", "tests/core/transformer/test_zigzag.py", "-k")
CP_TOKENS = ("tests.probes", '{"cp": 2, "M": 2, "num_layers": 1, "per_token": true}')
MTP = ("pytest", "tests/core/transformer/test_multi_token_prediction.py", "-k")
RUNS = ("pytest", "tests/training/test_further_tokens.py", "-k")
MTP_CP = ("tests.probes", '{"cp": 2, "M": 1, "mtp": 1, "num_layers": 1, "per_token": true}')
MTP_TP = ("tests.probes", '{"tp": 2, "M": 1, "mtp": 1, "num_layers": 1}')
NOT_EQUAL = r"AssertionError: (mtp|embedding|decoder|output)|not close"
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
    "mtp-return-dropped": ((*MTP, "sum_of_losses and llama-1-means"), NOT_EQUAL),
    "mtp-mask-not-passed": ((*RUNS, "gets_the_mask"), r"KeyError: 'loss_mask'"),
    "mtp-scale-without-m": ((*MTP, "sum_of_losses and llama-1-means"), NOT_EQUAL),
    "mtp-count-not-clamped": ((*MTP, "mask_of_nothing"), r"assert False"),
    "mtp-depths-weigh-by-their-tokens": ((*MTP, "sum_of_losses and llama-1-per"), NOT_EQUAL),
    "mtp-counts-of-one-rank": (MTP_CP, r"gradient of mtp.* is off"),
    "mtp-depth-two-predicts-depth-one": ((*MTP, "sum_of_losses and llama-2-means"), NOT_EQUAL),
    "mtp-hidden-before-embedding": ((*MTP, "sum_of_losses and llama-1-means"), NOT_EQUAL),
    "mtp-positions-stay": ((*MTP, "sum_of_losses and tied-1-means"), NOT_EQUAL),
    "eh-proj-gather-reduces": (MTP_TP, r"gradient of .* is off"),
    "mtp-borders-stay": ((*MTP, "ranks_that_share"), r"assert False"),
    "mtp-stage-outside-embedding-group": ((*MTP, "which_ranks"), r"assert \[5, 8\] == \[5, 7, 8\]"),
    "mtp-stage-without-tokens": ((*RUNS, "which_chunk"), r"assert \[\['tokens"),
    "mtp-final-norm-at-the-loss": ((*MTP, "any_cut"), r"AssertionError"),
    "mtp-second-output-weight": ((*MTP, "any_cut and tied"), r"assert|NoneType"),
    "mtp-copy-counted-again": ((*MTP, "any_cut and tied"), r"AssertionError|assert"),
    "mtp-messages-of-one-length": (
        (*MTP, "tell_their_shape"),
        r"assert \[\(8, 3, 32\)\] == \[\(\)\]",
    ),
    "mtp-log-not-over-m": ((*MTP, "mean_of_its_steps"), r"mtp_1 loss"),
    "mtp-log-of-failed-steps": ((*MTP, "mean_of_its_steps"), r"mtp_1 loss"),
    "mtp-experts-not-in-the-log": ((*MTP, "balance_has"), r"IndexError"),
}
