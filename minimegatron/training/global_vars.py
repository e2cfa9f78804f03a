"""The few objects that a user's `forward_step` may ask for by name instead of being given them.

`core` never asks it. Counterpart: `megatron.training.global_vars`.
"""

from dataclasses import dataclass, field
from typing import Any

from minimegatron.core.datasets.megatron_tokenizer import MegatronTokenizer
from minimegatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from minimegatron.core.timers import Timers
from minimegatron.exports import lazily
from minimegatron.training import global_checks
from minimegatron.training.config import Arguments
from minimegatron.training.curves import open_writer
from minimegatron.training.tokenizer.tokenizer import build_tokenizer
from minimegatron.training.train_state import TrainState

__getattr__, __dir__ = lazily(
    __name__,
    {
        "destroy_global_vars": "minimegatron.training.next_run:destroy_global_vars",
        "get_adlr_autoresume": "minimegatron.training.curves:get_adlr_autoresume",
        "get_one_logger": "minimegatron.training.curves:get_one_logger",
        "get_tensorboard_writer": "minimegatron.training.curves:get_tensorboard_writer",
        "get_wandb_writer": "minimegatron.training.curves:get_wandb_writer",
    },
)


@dataclass
class _Globals:
    args: Arguments | None = None
    tokenizer: MegatronTokenizer | None = None
    timers: Timers | None = None
    train_state: TrainState = field(default_factory=TrainState)


_globals = _Globals()


def set_global_variables(args: Arguments) -> None:
    """Builds them all from the arguments. Raises RuntimeError if they are set already."""
    if _globals.args is not None:
        global_checks.refuse_second_set()
    set_args(args)
    _globals.tokenizer = build_tokenizer(args)
    _globals.timers = Timers(args.timing_log_level, "minmax")
    open_writer(args)
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )


def set_args(args: Any) -> None:
    """What `get_args` returns from now on, for a program that initialises the rest itself."""
    _globals.args = args


def get_args() -> Arguments:
    """The run's arguments, frozen."""
    return _globals.args or global_checks.refuse_unset("args")


def get_tokenizer() -> MegatronTokenizer:
    """The run's tokenizer."""
    return _globals.tokenizer or global_checks.refuse_unset("tokenizer")


def get_timers() -> Timers:
    """The run's timers."""
    return _globals.timers or global_checks.refuse_unset("timers")


def get_train_state() -> TrainState:
    """The run's progress."""
    return _globals.train_state
