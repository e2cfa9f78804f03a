"""What notices each known mistake of T5.

Used by tests/test_mutations.py; a row is as in that file. None of these starts ranks.
"""

TENSORS = ("pytest", "tests/core/pipeline_parallel/test_two_tensors.py", "-k")
MODEL = ("pytest", "tests/core/models/T5/test_t5_model.py", "-k")

CAUGHT_OF_T5: dict[str, tuple[tuple[str, ...], str]] = {
    "encoder-gradient-not-added": (
        (*TENSORS, "3-1 or middle"),
        r"expected its gradient|assert \[21\.0",
    ),
    "encoder-gradient-added-to-decoder": (
        (*TENSORS, "4-1 or middle"),
        r"no attribute 'of'|must match the size",
    ),
    "position-embedding-of-one-stack": ((*MODEL, "share_weights"), r"assert \[10\] == \[10, 12\]"),
    "position-copies-without-own-bucket": ((*MODEL, "bucket"), r"position_embeddings"),
    "cross-attention-on-decoder-states": (
        (*MODEL, "plain_model"),
        r"not close|size of tensor|expand|attention_mask is",
    ),
    "cross-attention-global-tp-group": (
        (*MODEL, "plain_model"),
        r"tensor group does not exist",
    ),
}
