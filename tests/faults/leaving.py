"""Programs in the middle of something, for `test_leftovers` to kill.

    python -m tests.faults.leaving NAME

Each rank writes its process number into the folder READY and then waits for ever.
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from minimegatron.launching import launcher

# Ranks that only wait need no more of what is imported once for all.
launcher.PRELOADED[:] = ["torch", "torch.distributed", "minimegatron.launching.launcher"]


def ready(name: object) -> None:
    """This process has come to where it is to be killed."""
    path = Path(os.environ["READY"]) / f".{name}"
    path.write_text(str(os.getpid()))
    path.rename(path.with_name(str(name)))


def wait_on_rank() -> None:
    """In a rank: is ready, and waits, with a process of its own."""
    ready(dist.get_rank())
    while True:
        time.sleep(0.1)


def launched() -> None:
    """Two ranks of the launcher."""
    launcher.launch(wait_on_rank, 2, backend="gloo", device="cpu", hang_timeout=600)


def between() -> None:
    """No rank runs any more, but the process that they were forked from does."""
    launcher.launch(os.getpid, 2, backend="gloo", device="cpu")
    ready(0)
    time.sleep(600)


def live() -> None:
    """Ranks of a notebook, in the middle of a cell."""
    from minimegatron.notebook import live_ranks

    ranks = live_ranks(2, hang_timeout=600)
    ranks.run("from tests.faults.leaving import wait_on_rank\nwait_on_rank()")


def forward_step(data_iterator, model):
    """Ready in the first forward."""
    wait_on_rank()


def training() -> None:
    """A rank of a training run under torchrun, watched by the hang doctor."""
    from minimegatron import pretrain_gpt
    from minimegatron.core.enums import ModelType
    from minimegatron.training.training import pretrain

    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )


def starting() -> None:
    """Under torchrun: rank 0 waits for rank 1, which does not start before torchrun is gone."""
    launcher_id, rank = os.getppid(), os.environ["RANK"]
    ready(rank)
    while rank == "1" and os.getppid() == launcher_id:
        time.sleep(0.1)
    training()


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
