"""Mixture of experts. Counterpart: `megatron.core.transformer.moe`.

A model without experts needs nothing of this folder. In the order in which one reads it: `moe_config`,
`moe_layer`, `router`, `moe_utils`, `token_dispatcher`, `experts`.
"""
