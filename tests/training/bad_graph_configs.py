"""Configurations of a captured step that cannot work; `bad_configs` has these rows too."""

QUIET = "--no-check-for-nan-in-loss-and-grad"
FLAG = "--cuda-graph-impl full_iteration"
GRAPH = f"{FLAG} {QUIET} --attention-dropout 0"
TP2 = "--tensor-model-parallel-size 2"

# (flags, words of the answer, world size)
ROWS = [
    # -- What is asked for --
    (
        "--cuda-graph-impl transformer_engine",
        ("--cuda-graph-impl is transformer_engine", "give"),
        1,
    ),
    ("--cuda-graph-impl local", ("--cuda-graph-impl local", "add --cuda-graph-scope"), 1),
    ("--enable-cuda-graph", ("--enable-cuda-graph", "add --cuda-graph-scope full_iteration"), 1),
    (
        "--enable-cuda-graph --cuda-graph-scope attn",
        ("--cuda-graph-scope is attn", "a whole step", "full_iteration"),
        1,
    ),
    (
        "--cuda-graph-scope full_iteration",
        ("nothing is captured", "add --enable-cuda-graph"),
        1,
    ),
    ("--cuda-graph-warmup-steps -1", ("--cuda-graph-warmup-steps is -1", "0 or more"), 1),
    # -- What reads a number --
    (FLAG, (FLAG, "the check for NaN", f"add {QUIET}"), 1),
    (
        "--enable-cuda-graph --cuda-graph-scope full_iteration",
        (FLAG, "the check for NaN", f"add {QUIET}"),
        1,
    ),
    (f"{GRAPH} --check-for-spiky-loss", ("--check-for-spiky-loss", "reads", "drop it"), 1),
    (f"{GRAPH} --num-experts 4", ("--num-experts 4", "depend on the tokens", "drop it"), 1),
    (f"{FLAG} {QUIET}", ("--attention-dropout 0.1", "random generator", "give 0"), 1),
    (
        f"{GRAPH} {TP2} --sequence-parallel",
        ("--hidden-dropout 0.1 and --sequence-parallel", "give --hidden-dropout 0"),
        2,
    ),
    (
        f"{GRAPH} --recompute-granularity selective",
        ("--recompute-granularity selective", "puts the random generator back", "drop it"),
        1,
    ),
    (f"{GRAPH} --empty-unused-memory-level 1", ("--empty-unused-memory-level 1", "give 0"), 1),
    # -- What a replay would not do again --
    (f"{GRAPH} --fp16", ("the loss scale of --fp16", "--loss-scale and a number", "--bf16"), 1),
    (f"{GRAPH} --rampup-batch-size 8 8 16", ("--rampup-batch-size 8 8 16", "drop it"), 1),
    (
        f"{GRAPH} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ("--overlap-param-gather", "from the optimizer", "drop it"),
        1,
    ),
    (f"{GRAPH} --DDP-impl torch", ("--DDP-impl torch", "use --DDP-impl local"), 1),
    (
        f"{GRAPH} --mtp-num-layers 1 --position-embedding-type rope",
        ("--mtp-num-layers 1", "for the log", "drop it"),
        1,
    ),
    (f"{GRAPH} --timing-log-level 1", ("--timing-log-level 1", "sees no call", "give 0"), 1),
    (f"{GRAPH} --log-straggler", ("--log-straggler", "sees no call", "drop it"), 1),
    (
        f"{FLAG} --attention-dropout 0 --rerun-mode report_stats {QUIET}",
        ("--rerun-mode report_stats", "looks at each result", "give --rerun-mode disabled"),
        1,
    ),
    (f"{GRAPH} --trace {{folder}}", ("--trace", "sees no call", "drop it"), 1),
    (
        f"{GRAPH} --pace-forward-ms 1 --pace-backward-ms 2",
        ("--pace-forward-ms 1.0", "sees no call", "drop it"),
        1,
    ),
    # -- Ranks --
    (
        f"{GRAPH} --pipeline-model-parallel-size 2",
        ("--pipeline-model-parallel-size 2", "nobody has yet shown", "give 1"),
        2,
    ),
    (
        f"{GRAPH} --context-parallel-size 2",
        ("--context-parallel-size 2", "nobody has yet shown", "give 1"),
        2,
    ),
    (GRAPH, (FLAG, "2 processes on CPUs", "one process"), 2),
    (f"{GRAPH} --device cpu {TP2}", (FLAG, "4 processes on CPUs", "(nccl)"), 4),
]
