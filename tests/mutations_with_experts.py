"""What notices each known mistake that needs experts; used by tests/test_mutations.py.

A row is as in that file. At most eight of these start ranks: the others are noticed without.
"""

LAYER = ("pytest", "tests/core/transformer/moe/test_moe_layer.py", "-k")
PAIR = '{"dp": 2, "M": 1, "experts": 4, "ep": 2, "num_layers": 1}'
CUT = '{"dp": 2, "M": 1, "experts": 4, "etp": 2, "llama": true, "num_layers": 1}'
ON_TENSOR_RANKS = '{"tp": 2, "sp": true, "M": 1, "experts": 4, "ep": 2, "num_layers": 1}'
ROUTER = ("pytest", "tests/core/transformer/moe/test_router.py", "-k")
SCORES = ("pytest", "tests/core/transformer/moe/test_moe_utils.py", "-k")
BALANCE = ("pytest", "tests/core/transformer/moe/test_expert_bias.py", "-k")
DISPATCH = ("pytest", "tests/core/transformer/moe/test_token_dispatcher.py", "-k")
ALL_TO_ALL = ("pytest", "tests/core/test_all_to_all.py", "-k")
COMBINED = ("pytest", "tests/core/pipeline_parallel/test_combined_1f1b.py", "-k")
PLANS = ("pytest", "tests/core/models/test_schedule_plan.py", "-k")
NODES = ("pytest", "tests/core/pipeline_parallel/test_schedule_node.py", "-k")
GRADIENTS_OFF = r"assert \[.*\] == \[\]"
NOT_CLOSE = r"Tensor-likes are not close"

CAUGHT_WITH_EXPERTS = {
    "expert-grads-over-edp": (("tests.probes", PAIR), r"gradient of .*local_experts.* is off"),
    "experts-in-dense-buffer": (
        ("tests.probes", PAIR),
        r"4 of 8 weights, such as .*local_experts.* are not the same",
    ),
    "expert-mark-by-ep-only": (("tests.probes", CUT), r"do not say whether each expert"),
    "expert-norm-by-tp-rank": (("tests.probes", ON_TENSOR_RANKS), r"norm is off"),
    "expert-bias-summed-over-tp": (LAYER + ("not_summed",), r"local_experts.*bias"),
    "expert-key-local": (LAYER + ("are_named",), r"assert"),
    "aux-per-token-local": ((*ROUTER, "gradient_of_one and token and aux"), NOT_CLOSE),
    "aux-scale-not-over-M": ((*ROUTER, "one_rank_is"), NOT_CLOSE),
    "aux-scale-forgets-context-ranks": ((*ROUTER, "gradient_of_one and means"), NOT_CLOSE),
    "seq-aux-ignores-batch": ((*ROUTER, "one_rank_is and seq"), NOT_CLOSE),
    "seq-aux-mixes-sequences": ((*ROUTER, "one_rank_is and seq"), NOT_CLOSE),
    "aux-loss-discarded": ((*ROUTER, "one_rank_is"), r"NoneType|not close"),
    "aux-counts-local": ((*ROUTER, "gradient_of_one and aux"), NOT_CLOSE),
    "aux-counted-in-recompute": ((*ROUTER, "recompute"), r"assert \("),
    "bias-counts-in-half": ((*BALANCE, "once_per_step"), r"approx"),
    "expert-bias-in-half": ((*BALANCE, "once_per_step"), r"approx|bfloat16"),
    "bias-in-combine-weight": ((*SCORES, "changes_the_choice"), NOT_CLOSE),
    "global-aux-current-tokens": ((*ROUTER, "counts_tokens_not"), NOT_CLOSE),
    "global-aux-over-replicas": ((*ROUTER, "gradient_of_one and global"), NOT_CLOSE),
    "probs-gradient-dropped": (
        (*DISPATCH, "one_rank_sorts"),
        r"gradient of the probabilities|None",
    ),
    "gather-backward-slices": ((*DISPATCH, "gathered_are_summed"), r"gradients must be summed"),
    "unsorted-local-experts": (
        (*DISPATCH, "sorted_by_local_expert"),
        r"order of the local experts",
    ),
    "a2a-backward-same-splits": (
        (*ALL_TO_ALL, "exchanges_the_splits"),
        r"splits of the backward|shape",
    ),
    "empty-expert-skipped": ((*DISPATCH, "without_tokens_runs"), r"NoneType"),
    "combined-without-extra-warmup": (
        (*COMBINED, "test_the_order and 4-3-2-3 or more_forward"),
        r"schedule_plan|assert \[4, 2\]|deque|KeyError|StopIteration",
    ),
    "chunk-zero-is-false": ((*COMBINED, "chunk_0"), r"assert \{1\}"),
    "residual-gradient-lost": ((*PLANS, "layers_of_experts and plain"), GRADIENTS_OFF),
    "shared-expert-gradient-lost": (
        (*PLANS, "layers_of_experts and shared"),
        GRADIENTS_OFF,
    ),
    "free-saved-input": ((*PLANS, "inputs_are_freed"), r"assert not True"),
    "free-input-of-one-rank": ((*PLANS, "inputs_are_freed"), r"assert not True"),
    "final-norm-outside-plan": ((*PLANS, "dense_layers and plain"), GRADIENTS_OFF),
    "loss-in-half": ((*PLANS, "half_precision"), r"torch.bfloat16"),
    "combined-loss-from-globals": ((*PLANS, "loss_scale"), GRADIENTS_OFF),
    "wgrad-not-beside-the-all-to-all": ((*PLANS, "under_way and True"), r"backward-weight"),
    "plan-kept": ((*PLANS, "keeps_no_plan"), r"SchedulePlan"),
    "a2a-not-overlapped": ((*PLANS, "under_way"), r"wait"),
    "exchange-of-another-forward": ((*NODES, "start_and_a_wait"), r"NoneType|another forward"),
    "dropout-of-all-ranks-alike": ((*PLANS, "stream_of_its_own or own_stream"), GRADIENTS_OFF),
    "tied-weight-has-two-gradients": (
        (*PLANS, "dense_layers and plain and tied"),
        r"word_embeddings",
    ),
}
