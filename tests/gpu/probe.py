"""What torch says of itself and of the GPUs here, as JSON: `python -m tests.gpu.probe FILE`.

Called by: `report`, first of all and in a process of its own: a driver that hangs ends there.
"""

import json
import sys
from pathlib import Path


def facts() -> dict:
    """Name and number of GPUs, versions of torch, CUDA, NCCL; memory of the first GPU."""
    import torch

    found = {"torch": torch.__version__, "gpu": "none", "num_gpus": 0}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "num_gpus": torch.cuda.device_count()}
        memory = torch.cuda.get_device_properties(0).total_memory
        found["memory of a GPU"] = f"{memory / 2**30:.0f} GiB"
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts()))
