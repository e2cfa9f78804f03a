"""`pretrain_gpt`, but its last rank is stopped in its third forward of the second step."""

import os
import signal
from functools import partial

from minimegatron import pretrain_gpt
from minimegatron.core.enums import ModelType
from minimegatron.training.global_vars import get_args, get_train_state
from minimegatron.training.training import pretrain

num_forwards = 0


def forward_step(data_iterator, model):
    global num_forwards
    num_forwards += get_train_state().iteration == 1
    if get_args().rank == get_args().world_size - 1 and num_forwards == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return pretrain_gpt.forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        partial(pretrain_gpt.model_provider),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"eval_iters": 0, "log_interval": 1},
    )
