"""What notices each known mistake in state-space layers; a row is as in tests/test_mutations.py."""

SCAN = ("pytest", "tests/core/ssm/test_ssd_combined.py", "-k")
MIXER = ("pytest", "tests/core/ssm/test_mamba_mixer.py", "-k")
LAYERS = ("pytest", "tests/core/ssm/test_hybrid_layers.py", "-k")

CAUGHT_OF_MAMBA = {
    "decay-before-input": ((*SCAN, "by_hand and chunks"), r"assert \[4\.0"),
    "chunk-state-dropped": ((*SCAN, "by_hand and chunks"), r"assert \[8\.0.* 26\.0.* 100"),
    "decay-as-a-ratio": ((*SCAN, "do_not_overflow"), r"AssertionError: gradient of|nan"),
    "conv-not-causal": ((*MIXER, "do_not_see_a_later"), r"assert False"),
    "in-proj-cut-across-sections": ((*MIXER, "part_of_every_section"), r"assert False"),
    "gate-after-norm": ((*MIXER, "inside_the_norm"), r"assert tensor"),
    "gated-norm-over-whole-width": ((*MIXER, "inside_the_norm"), r"assert tensor"),
    "a-log-cast": ((*MIXER, "stay_float32"), r"A_log|dtype"),
    "letters-of-the-first-stage": ((*LAYERS, "stages_share"), r"assert"),
}
