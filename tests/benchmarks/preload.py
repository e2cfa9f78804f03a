"""What the fork server of the benchmarks imports once, so that its ranks start quickly."""

import contextlib
import importlib
import os
import warnings

import torch
import torch.distributed
import torch.distributed.pipelining

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (
        "tests.benchmarks.peers",
        "minimegatron.core.pipeline_parallel.schedules",
        "megatron.core.pipeline_parallel.schedules",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
