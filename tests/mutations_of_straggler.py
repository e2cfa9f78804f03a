"""What notices each known mistake in finding the slow rank; a row is as in tests/test_mutations.py."""

DETECTOR = ("pytest", "tests/core/test_straggler_detector.py", "-k")

CAUGHT_OF_STRAGGLERS = {
    "straggler-counts-the-wait": ((*DETECTOR, "names_ranks"), r"slowest: rank 3"),
    "straggler-runs-on-after-an-error": ((*DETECTOR, "failed_forward"), r"runs already"),
    "straggler-names-the-fastest": ((*DETECTOR, "names_ranks"), r"slowest: rank 0"),
    "straggler-adds-up-reports": ((*DETECTOR, "begins_anew"), r"stage 0: 500\.00"),
}
