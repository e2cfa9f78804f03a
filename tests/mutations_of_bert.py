"""What notices each known mistake in BERT.

Used by tests/test_mutations.py; a row is as in that file. None of these starts ranks.
"""

BERT = ("pytest", "tests/core/models/bert/test_bert_model.py", "-k")
PROGRAM = ("pytest", "tests/training/test_pretrain_bert.py", "-k")
NOT_EQUAL = r"AssertionError: (embedding|encoder|lm_head|output|pooler|binary)|not close"

CAUGHT_OF_BERT = {
    "padding-masks-queries-only": ((*BERT, "looks_at_padding"), r"AssertionError|assert"),
    "mask-only-on-first-stage": ((*BERT, "three_stages"), NOT_EQUAL),
    "mlm-head-without-bias": ((*BERT, "torchs_encoder and tied"), r"KeyError: 'output_layer.bias'"),
    "lm-head-dense-unflagged": ((*BERT, "cut_the_sequence"), r"lm_head.dense"),
    "pooler-flagged-partial": ((*BERT, "cut_the_sequence"), r"pooler.dense"),
    "mlm-loss-without-mask": ((*PROGRAM, "masked_tokens"), r"assert"),
}
