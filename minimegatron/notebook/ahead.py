"""Starts the server that ranks are forked from, while the notebook itself still imports torch.

`minimegatron.notebook` imports it before anything that takes long. Torch-free. Megatron has no
counterpart.

Both import torch, which takes seconds; at the same time, it takes them once. Only in a notebook: a
program may want another server, or none.
"""

import multiprocessing
import os
from multiprocessing import forkserver

from minimegatron.doctor.folders import keep_sockets

try:
    from IPython import get_ipython
except ImportError:  # an extra; `live_ranks` says so
    get_ipython = None

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which the first embedding, or optimizer, would import for a second
    "minimegatron.launching.launcher",
    "minimegatron.notebook.engines",
]
"""The launcher's list and the engines; it is written here again, for to import it takes seconds."""

# The engines import ipykernel's debugger, which warns of this Python's frozen modules; a notebook would
# show that, in red, as its first output.
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"

if get_ipython is not None and get_ipython() is not None:
    keep_sockets()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
