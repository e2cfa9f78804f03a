"""Configurations of ranks that share sequences that cannot work; `bad_configs` has these rows too."""

CP2 = "--context-parallel-size 2"
CP4 = "--context-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"

# (flags, words of the answer, world size)
ROWS = [
    ("--context-parallel-size 0", ("--context-parallel-size", "0", "1 or more"), 1),
    (CP2, ("1 processes", f"{CP2} x", "= 2", "--nproc-per-node 2"), 1),
    (f"{CP4} {TP2}", ("4 processes", f"{TP2} x {CP4} x", "= 8"), 4),
    (f"{CP4} --seq-length 60", ("--seq-length 60", "2 x --context-parallel-size 4 = 8", "56"), 4),
    (
        f"{CP2} --tensor-model-parallel-size 4 --sequence-parallel --seq-length 60",
        ("--seq-length 60 / --context-parallel-size 2 = 30", "parallel-size 4", "try 48"),
        8,
    ),
    (
        f"{CP2} --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
        ("--use-tp-pp-dp-mapping", CP2, "behind the 2", "experts behind 1", "drop"),
        8,
    ),
    (
        "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --num-experts 4 "
        "--expert-model-parallel-size 2",
        ("--use-tp-pp-dp-mapping", "behind the 1", "experts behind 2", "make these products equal"),
        4,
    ),
    (f"{CP2} --cp-comm-type ring", ("ring", "unknown", "p2p, all_gather, a2a"), 2),
    (f"{CP2} --cp-comm-type a2a+p2p", ("a2a+p2p", "not implemented", "p2p, all_gather, a2a"), 2),
    (f"{CP2} --cp-comm-type p2p a2a p2p", ("3 entries", "8", "one for all layers"), 2),
    (
        "--context-parallel-size 16 --cp-comm-type a2a",
        ("a2a", "heads", "8", "16", "use p2p or all_gather"),
        16,
    ),
    (
        f"{CP4} --cp-comm-type a2a --group-query-attention --num-query-groups 2",
        ("a2a", "groups", "2", "4", "use p2p or all_gather"),
        4,
    ),
    (
        f"{CP4} {TP2} --cp-comm-type a2a --group-query-attention --num-query-groups 4",
        ("a2a", "groups 4", "= 2", "4"),
        8,
    ),
    (f"{CP2} --sample-tokens 20", ("--sample-tokens 20", f"{CP2}", "checkpoint"), 2),
    (f"{CP2} --global-batch-size 3 --micro-batch-size 2", ("--global-batch-size 3", "try 2"), 2),
]
