"""Exercises and labs: pieces of the chain to write, and to break on purpose.

This file imports nothing. Megatron has no counterpart.
"""
