"""Configurations of `train_rl` that cannot work; `bad_configs` has these rows too."""

GOOD = (
    "--seq-length 8 --grpo-prompts-per-step 8 --grpo-group-size 4 --global-batch-size 16 "
    "--position-embedding-type rope "
)

# (flags, words of the answer, world size); each after GOOD
ROWS = [
    ("--grpo-group-size 1", ("--grpo-group-size is 1", "compared with others", "2 or more"), 1),
    (
        "--grpo-prompts-per-step 5",
        ("5 x --grpo-group-size 4 = 20 rows", "--global-batch-size 16", "divides 20"),
        1,
    ),
    (
        "--rl-default-temperature 0",
        ("--rl-default-temperature is 0.0", "divided by it", "above 0"),
        1,
    ),
    ("--rl-default-temperature nan", ("--rl-default-temperature is nan", "above 0"), 1),
    ("--grpo-iterations 0", ("--grpo-iterations is 0", "1 or more"), 1),
    ("--grpo-prompts-per-step 0", ("--grpo-prompts-per-step is 0", "1 or more"), 1),
    ("--grpo-clamp-eps-lower 1", ("--grpo-clamp-eps-lower is 1.0", "below 1"), 1),
    ("--grpo-clamp-eps-upper -0.1", ("--grpo-clamp-eps-upper is -0.1", "0 or more"), 1),
    ("--grpo-kl-beta -1", ("--grpo-kl-beta is -1.0", "0 or more"), 1),
    ("--grpo-entropy-term-weight inf", ("--grpo-entropy-term-weight", "finite"), 1),
    (
        "--rl-importance-sampling-truncation-coef 2",
        ("2.0 bounds weights", "--rl-inference-logprobs-is-correction"),
        1,
    ),
    (
        "--rl-importance-sampling-truncation-coef 0 --rl-inference-logprobs-is-correction",
        ("--rl-importance-sampling-truncation-coef is 0.0", "more than 0"),
        1,
    ),
    ("--hidden-dropout 0.1", ("--hidden-dropout is 0.1", "ratios", "--hidden-dropout 0"), 1),
    ("--attention-dropout 0.1", ("--attention-dropout is 0.1", "ratios"), 1),
    ("--rampup-batch-size 4 4 8", ("--rampup-batch-size", "each rollout", "drop it"), 1),
    ("--mtp-num-layers 1", ("--mtp-num-layers is 1", "further tokens", "drop it"), 1),
    (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm",
        ("--overlap-moe-expert-parallel-comm", "a plan", "drop it"),
        2,
    ),
    (
        "--cuda-graph-impl full_iteration --hidden-dropout 0 --attention-dropout 0 "
        "--no-check-for-nan-in-loss-and-grad",
        ("--cuda-graph-impl full_iteration", "a rollout has several", "drop it"),
        1,
    ),
    ("--data-path some", ("--data-path", "some"), 1),
    ("--seq-length 7", ("prompt of 4 tokens and answers of 4", "--seq-length 7", "give 8"), 1),
    ("--vocab-size 5", ("has 8 tokens, but the tokenizer 6", "--vocab-size 7"), 1),
    ("--rl-task sort_letters", ("'sort_letters' is unknown", "sort_digits", "FILE.py:FUNCTION"), 1),
    ("--rl-task none.py:task", ("--rl-task", "there is no file none.py"), 1),
    ("--grpo-group-size many", ("--grpo-group-size", "invalid int value: 'many'"), 1),
]
