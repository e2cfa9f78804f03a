"""What notices each known mistake around a replayed step; a row is as in tests/test_mutations.py."""

WRAPPER = ("pytest", "tests/core/test_full_cuda_graph.py", "-k")
RUNS = ("pytest", "tests/training/test_captured_step.py", "-k")

GRAPH = {
    "static-buffer-rebound": ((*WRAPPER, "to_the_bit"), r"assert \[\["),
    "capture-without-replay": ((*WRAPPER, "to_the_bit"), r"nan"),
    "first-replay-twice": ((*WRAPPER, "to_the_bit"), r"assert \[\["),
    "one-graph-for-both": ((*WRAPPER, "own_count"), r"assert \["),
    "graph-result-not-cloned": ((*RUNS, "before_the_next"), r"assert \["),
    "graph-of-other-sizes": ((*WRAPPER, "stays_as_it_is"), r"DID NOT RAISE"),
    "labels-unseen-by-a-graph": ((*RUNS, "as_it_is_read"), r"DID NOT RAISE"),
    "graph-of-the-last-run": ((*RUNS, "as_it_is_read"), r"'training': 1"),
    "capture-leaves-its-gradients": ((*WRAPPER, "changes_nothing"), r"assert .*2\.0"),
    "graph-follows-the-tensor": ((*WRAPPER, "no_longer_has"), r"size|shape|assert \["),
}
