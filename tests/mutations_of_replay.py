"""What notices each known mistake around a step that is replayed, or run again.

A row is as in tests/test_mutations.py.
"""

WRAPPER = ("pytest", "tests/core/test_full_cuda_graph.py", "-k")
RUNS = ("pytest", "tests/training/test_captured_step.py", "-k")
MACHINE = ("pytest", "tests/core/test_rerun_state_machine.py", "-k")
AROUND = ("pytest", "tests/training/test_order_of_reruns.py", "-k")

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

RERUN = {
    "rerun-does-not-rewind": ((*MACHINE, "reads_the_same"), r"assert \[\[\[0, 1\]\]"),
    "rerun-keeps-rng": ((*MACHINE, "ones_own_state_are_put_back"), r"assert \["),
    "rerun-without-zero-grad": ((*AROUND, "again_from_zero"), r"ate by 101"),
    "rerun-forgets-buffers": ((*AROUND, "counted_once"), r"assert 2"),
    "rerun-decided-alone": ((*MACHINE, "without_a_bad_result"), r"StopIteration|fewer runs"),
    "step-before-verdict": ((*AROUND, "no_update"), r"one more item: 'update by"),
    "fatal-is-outvoted": ((*MACHINE, "counts_more"), r"assert \(False, False, 0\) =="),
    "verdict-of-an-earlier-step": ((*MACHINE, "earlier_step_is_forgotten"), r"transient error"),
    "rerun-compares-first-call": ((*MACHINE, "nth_call"), r"assert \(True, True, 16\) =="),
    "first-run-not-kept": ((*MACHINE, "kept_as_it_was"), r"assert \(True, True, 16\) =="),
    "nan-is-within-the-tolerance": ((*MACHINE, "of_ones_own"), r"assert \(True, True, 16\) =="),
    "same-device-for-ever": ((*MACHINE, "not_asked_for_ever"), r"assert \[16, 16, 16\]"),
}
