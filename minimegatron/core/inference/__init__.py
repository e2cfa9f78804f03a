"""What a model's answers need beside its forward pass.

Counterpart: `megatron.core.inference`, an engine that keeps keys and values. Here is what the stages
of a pipeline tell each other; who wants a model's text computes all positions anew (see
`training.text_generation` and `rl.rollout`).
"""
