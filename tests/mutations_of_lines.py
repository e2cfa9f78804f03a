"""What notices each known mistake in unrolled steps; a row is as in tests/test_mutations.py."""

RECORDER = ("pytest", "tests/trace/test_line_recorder.py", "-k")
UNROLLED = ("pytest", "tests/trace/test_unrolled.py", "-k")

CAUGHT_OF_LINES = {
    "lines-of-a-describer": ((*RECORDER, "another_recorder or how_many_calls"), r"assert "),
    "generator-called-anew": ((*RECORDER, "in_order"), r"'numbers'"),
    "comprehension-ends-its-function": ((*UNROLLED, "one_node"), r"IndexError|assert "),
    "lines-recorded-for-ever": ((*RECORDER, "nothing_is_left_on"), r"assert "),
    "message-meets-another": ((*UNROLLED, "other_end"), r"KeyError|assert "),
    "microbatch-of-the-outer-call": ((*UNROLLED, "one_node"), r"\(0, 0\)"),
    "first-call-out-of-sight": ((*UNROLLED, "first_called_within"), r"assert "),
    "one-line-of-a-statement": ((*UNROLLED, "what_is_folded"), r"assert "),
}
