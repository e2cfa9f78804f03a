"""`pretrain_gpt`, but one rank comes to a bad end. Started by `test_failures`, under torchrun."""

import os
import signal
from functools import partial

from minimegatron import pretrain_gpt
from minimegatron.core.enums import ModelType
from minimegatron.training.global_vars import get_args, get_train_state
from minimegatron.training.training import pretrain


def add_arguments(parser):
    parser.add_argument("--fail-rank", type=int, required=True)
    parser.add_argument("--fail-how", choices=("raise", "kill", "none"), required=True)
    return parser


def forward_step(data_iterator, model):
    args = get_args()
    if args.rank == args.fail_rank and get_train_state().iteration == 1:
        if args.fail_how == "raise":
            raise ValueError("the planted error")
        if args.fail_how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return pretrain_gpt.forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        partial(pretrain_gpt.model_provider),
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_arguments,
        args_defaults={"eval_iters": 0, "log_interval": 1},
    )
