"""`pretrain_gpt`, but one rank comes to its end in the middle of a step, once.

Run by: `restart` and `verdicts`, under torchrun. Calls: `minimegatron.pretrain_gpt`.

The rank kills itself, with the signal that the kernel sends when memory runs out; or it stops itself,
as Ctrl-Z and a debugger do. After torchrun's restart it does so no more.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterator

import torch

from minimegatron import pretrain_gpt
from minimegatron.core.enums import ModelType
from minimegatron.training.global_vars import get_args, get_train_state
from minimegatron.training.training import pretrain

num_forwards = 0


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Which rank dies, and where."""
    parser.add_argument("--dying-rank", type=int, default=-1)
    parser.add_argument("--dying-step", type=int, default=0, help="counted from 1, as the log does")
    parser.add_argument("--dying-forward", type=int, default=2, help="of that step, from 1")
    parser.add_argument("--dying-signal", choices=("SIGKILL", "SIGSTOP"), default="SIGKILL")
    return parser


def forward_step(
    data_iterator: Iterator | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable]:
    """`pretrain_gpt.forward_step`, or the end of this process."""
    global num_forwards
    args = get_args()
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if args.rank == args.dying_rank and is_first_life:
        num_forwards += get_train_state().iteration + 1 == args.dying_step
        if num_forwards == args.dying_forward:
            os.kill(os.getpid(), signal.Signals[args.dying_signal])
    return pretrain_gpt.forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_arguments,
    )
