"""What notices each known mistake that needs experts; used by tests/test_mutations.py.

A row is as in that file. At most eight of these start ranks: the others are noticed without.
"""

LAYER = ("pytest", "tests/core/transformer/moe/test_moe_layer.py", "-k")
PAIR = '{"dp": 2, "M": 1, "experts": 4, "ep": 2, "num_layers": 1}'
CUT = '{"dp": 2, "M": 1, "experts": 4, "etp": 2, "llama": true, "num_layers": 1}'
ON_TENSOR_RANKS = '{"tp": 2, "sp": true, "M": 1, "experts": 4, "ep": 2, "num_layers": 1}'

CAUGHT_WITH_EXPERTS = {
    "expert-grads-over-edp": (("tests.probes", PAIR), r"gradient of .*local_experts.* is off"),
    "experts-in-dense-buffer": (("tests.probes", PAIR), r"gradient of .*local_experts.* is off"),
    "expert-mark-by-ep-only": (("tests.probes", CUT), r"size of tensor|local_experts.* is off"),
    "expert-norm-by-tp-rank": (("tests.probes", ON_TENSOR_RANKS), r"norm is off"),
    "expert-bias-summed-over-tp": (LAYER + ("not_summed",), r"local_experts.*bias"),
    "expert-key-local": (LAYER + ("are_named",), r"assert"),
}
