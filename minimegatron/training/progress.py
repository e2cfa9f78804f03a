"""What a person watching a run sees: one bar, and a line every `--log-interval` steps and at the end.

The last stage knows the loss, so it tells all ranks. Counterpart: `training_log` of
`megatron.training.training`; the bar is ours.
"""

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from tqdm import tqdm

from minimegatron.core import collectives, parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.num_microbatches_calculator import get_current_global_batch_size
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.core.utils import get_device
from minimegatron.training.curves import write_curves
from minimegatron.training.global_vars import (
    get_args,
    get_timers,
    get_train_state,
)
from minimegatron.training.utils import print_rank_0

MESSAGE_BYTES = 4096
"""Length of what `broadcast_from_last_stage` sends: one message, whose size all ranks know."""


def broadcast_from_last_stage(values: dict[str, float]) -> dict[str, float]:
    """The last stage's `values` on every rank: losses exist there, but rank 0 prints them."""
    text = json.dumps(values).encode().ljust(MESSAGE_BYTES)
    if len(text) > MESSAGE_BYTES:
        raise ValueError(f"{len(values)} logged values take over {MESSAGE_BYTES} bytes; log fewer")
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(get_device())
    group = parallel_state.get_pipeline_model_parallel_group()
    collectives.broadcast(message, parallel_state.get_pipeline_placement().last_rank, group)
    return json.loads(bytes(message.tolist()))


stimer = StragglerDetector()


class Progress:
    """The bar, and the clock and token count since the last log line.

    `describe_more` is called on every rank for each line: numbers that go on it.
    """

    def __init__(
        self, total: int, done: int, describe_more: Callable[[], dict[str, float]] | None = None
    ):
        self.describe_more = describe_more or dict
        # A terminal redraws one line; a file gets a new line each time, so it gets fewer.
        interval = 0.5 if sys.stderr.isatty() else 15.0
        self.bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            mininterval=interval,
            maxinterval=interval,
            disable=dist.get_rank() != 0,
        )
        self.restart()

    def restart(self) -> None:
        """Begins a new interval, now."""
        self.begin, self.tokens, self.steps = time.perf_counter(), 0, 0
        stimer.reset()

    def advance(self, tokens: int) -> None:
        """Counts one step."""
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        self.bar.update()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        story: TracebackType | None,
    ) -> None:
        self.bar.close()


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, torch.Tensor],
    learning_rate: float,
    iteration: int,
    loss_scale: float,
    skipped_iter: int,
    grad_norm: float | None,
    num_zeros_in_grad: float | None,
    progress: Progress,
) -> None:
    """Counts one step; every `--log-interval` steps, and after the last, logs the interval. Every rank
    must call it.

    `loss_dict` is what `train_step` returned: scalar tensors on the last stage, empty elsewhere.
    `total_loss_dict` carries their sums, and the counts of good and of skipped steps, through the
    interval. An evaluation in it restarts the clock, so `progress` does not know them.
    """
    args, state = get_args(), get_train_state()
    progress.advance(get_current_global_batch_size() * args.seq_length)
    if not skipped_iter:
        for key, loss in loss_dict.items():
            total_loss_dict[key] = total_loss_dict.get(key, 0.0) + loss
    good = total_loss_dict.pop("good steps", 0) + 1 - skipped_iter
    skipped = total_loss_dict.pop("skipped steps", 0) + skipped_iter
    total_loss_dict |= {"good steps": good, "skipped steps": skipped}
    if iteration % args.log_interval and iteration != args.train_iters:
        return

    del total_loss_dict["good steps"], total_loss_dict["skipped steps"]
    means = {key: float(total) / max(good, 1) for key, total in total_loss_dict.items()}
    total_loss_dict.clear()
    losses = broadcast_from_last_stage(means)
    seconds = time.perf_counter() - progress.begin
    values = losses | {
        "lr": learning_rate,
        "grad norm": grad_norm,
        "zeros in grad": num_zeros_in_grad,
        "loss scale": loss_scale if loss_scale != 1.0 else None,
        "skipped": skipped or None,
        **progress.describe_more(),
    }
    values = {name: value for name, value in values.items() if value is not None}
    write_curves(values | {"tokens/s": progress.tokens / seconds}, iteration)
    parts = [f"{name} {value:{FORMATS.get(name, '.4f')}}" for name, value in values.items()]
    parts += [f"{progress.tokens / seconds:,.0f} tokens/s"]
    progress.bar.set_postfix_str(parts[0], refresh=False)  # the line above has the others
    print_rank_0(
        f" iteration {iteration:>{len(str(args.train_iters))}}/{args.train_iters} | "
        + " | ".join(parts)
        + f" | {1000 * seconds / progress.steps:.0f} ms/step | "
        f"{state.consumed_train_samples} samples"
    )
    if args.timing_log_level > 0:
        # All steps of the interval: the clock above may have begun again, the timers have not.
        get_timers().log(rank=0, normalizer=good + skipped)
    stimer.report(log_interval=progress.steps)
    progress.restart()


FORMATS = {
    "lr": ".2e",
    "grad norm": ".3f",
    "params norm": ".3f",
    "zeros in grad": ".0f",
    "loss scale": "g",
    "skipped": "d",
    "load imbalance": ".2f",
}
"""How the log line shows values other than losses."""


def describe_model(config: ModelParallelConfig, model: list[torch.nn.Module]) -> dict[str, float]:
    """What parts of the model have to say for a line of the log."""
    found: dict[str, float] = {}
    for describe in config.log_funcs:
        found |= describe(model, ProcessGroupCollection.use_mpu_process_groups())
    return found
