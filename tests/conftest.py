"""What holds for every test: one torch thread per process, set before torch is imported; Hypothesis
draws the same examples in every run."""

import os

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")
