"""Starts ranks without torchrun. This file imports nothing; Megatron has no counterpart."""
