"""What notices each known mistake in the backend; a row is as in tests/test_mutations.py."""

WAITING = ("pytest", "tests/backend/test_waiting.py", "-k")
STEPS = ("pytest", "tests/backend/test_step_methods.py", "-k")

CAUGHT_OF_BACKEND = {
    "who-waits-reads-for-itself-alone": (
        (*WAITING, "of_other_connections"),
        r"where False = is_taken",
    ),
    "who-comes-later-does-not-ring": ((*WAITING, "comes_later"), r"\[\] == \[True\]"),
    "takes-the-later-part-first": ((*WAITING, "takes_nothing_before"), r"\[2.0, 1.0\] == \[1, 2\]"),
    "any-call-will-do": ((*WAITING, "different_things"), r"DID NOT RAISE"),
    "results-for-who-waits-alone": ((*WAITING, "nobody_has_the_handle"), r"\[\] == \[1\]"),
    "any-number-of-gloos-collectives": ((*STEPS, "not_paired"), r"DID NOT RAISE|WireError"),
    "leaves-before-it-has-written": ((*STEPS, "after_its_sender"), r"has left the group"),
}
