"""Mixture of experts. Counterpart: `megatron.core.transformer.moe`.

A model without experts runs nothing of this folder; its configuration has the fields of
`core.transformer.moe_config`. In the order in which one reads it: `moe_config`, `moe_layer`, `router`,
`moe_utils`, `token_dispatcher`, `permutation`, `experts`, `shared_experts`; around a step
`expert_bias`, `moe_logging`.
"""
