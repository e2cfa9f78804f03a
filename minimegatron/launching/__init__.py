"""Starts ranks without torchrun. This file imports nothing; Megatron is started by torchrun alone."""
