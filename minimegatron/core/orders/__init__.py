"""Orders of work: which rank does what, in which order; written down, checked, and run from data.

Megatron has no counterpart: a schedule there is the code that runs it. Where the stages of the model
are (`placement`) and what kinds of work there are (`work`) is asked everywhere; the rest is behind this
door. It loads without torch but for `runnable`, `shared_step` and `planned_schedule`, which train.
"""
