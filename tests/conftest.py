"""What holds for every test: one torch thread per process, set before torch is imported."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
