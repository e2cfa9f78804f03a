"""What notices each known mistake of samples with masked tokens.

Used by tests/test_mutations.py; a row is as in that file. None of these starts ranks.
"""

SAMPLES = ("pytest", "tests/core/datasets/test_masked_datasets.py", "-k")

CAUGHT_OF_MASKED_DATA = {
    "padding-mask-holds-pad-id": ((*SAMPLES, "cls_a_sep"), r"assert"),
    "masked-tokens-not-whole-words": ((*SAMPLES, "whole_words"), r"AssertionError: \d+"),
    "separators-are-masked": ((*SAMPLES, "whole_words"), r"assert not "),
    "replaced-nine-times-in-ten": ((*SAMPLES, "eighty"), r"assert np.float64\(0\.10"),
    "sentinel-twice": ((*SAMPLES, "taken_out_and"), r"assert \["),
    "mask-from-ids": ((*SAMPLES, "id_0_is"), r"assert"),
    "short-samples-hide-as-many": ((*SAMPLES, "how_many"), r"assert np.int64\(\d+\) <= "),
}
