"""`pretrain_gpt`, but at the end a message is still being freed. Started by `test_ending`, as ranks."""

import atexit

import torch.distributed as dist

from minimegatron import pretrain_gpt
from tests.lingering import linger

if __name__ == "__main__":
    # Registered first, so called last.
    atexit.register(lambda: print("groups at the end:", dist.is_initialized()))
    pretrain_gpt.main()
    linger()
