"""Orders of work: what a schedule does, written down, checked and run from data.

Megatron has no counterpart.
"""
