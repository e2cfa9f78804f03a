"""Where the time of reinforcement learning goes: drawing answers, scoring them, learning from them.

Run: python -m tests.benchmarks.policy_speed. Calls: `train_rl`'s functions, in ranks.

The model and the sizes of `make demo MODEL=rl`: 256 answers of 4 tokens, scored by the model and by its
reference, learned from twice. Each layout's rollouts are timed one by one, the first not; times are of
the last stage. Drawing computes all 8 positions again for each of the 4 tokens.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import minimegatron
from minimegatron import pretrain_gpt, train_rl
from minimegatron.core import parallel_state
from minimegatron.core.utils import get_model_config
from minimegatron.launching import launcher
from minimegatron.rl import grpo_data
from minimegatron.rl.rl_arguments import add_rl_arguments
from minimegatron.training import training
from minimegatron.training.global_vars import destroy_global_vars, get_args
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.pipeline_schedule import schedule_of_run
from tests.benchmarks import results

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 64 --global-batch-size 256 "
    "--grpo-prompts-per-step 32 --grpo-group-size 8 --train-iters 1000 --lr 1e-3"
)
LAYOUTS = {
    "one process": (1, ""),
    "two stages": (2, "--pipeline-model-parallel-size 2"),
    "two copies": (2, ""),
    "two tensor ranks": (2, "--tensor-model-parallel-size 2"),
}
PARTS = ("drawing", "scores", "learning")


def measure(flags: str, num_rollouts: int) -> list[dict[str, float]]:
    """In a rank: seconds of each part, for each rollout but the first."""
    sys.argv = ["policy_speed", *FLAGS.split(), *flags.split()]
    initialize_megatron(
        add_rl_arguments,
        train_rl.DEFAULTS,
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
    )
    rollouts = grpo_data.GrpoData()
    model, optimizer, scheduler = training.setup_model_and_optimizer(
        lambda **where: train_rl.model_provider(rollouts, **where)
    )
    config = get_model_config(model[0])
    training._connect_schedule(config, model, optimizer)
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            found = function(*args, **kwargs)
            seconds[part] += time.perf_counter() - begun
            return found

        return call

    grpo_data.generate_answers = timed("drawing", grpo_data.generate_answers)
    grpo_data.score = timed("scores", grpo_data.score)
    step = timed("learning", training.train_step)
    found = []
    for _ in range(num_rollouts + 1):
        seconds.update(dict.fromkeys(PARTS, 0.0))
        for iteration in range(get_args().grpo_iterations):
            iterator = rollouts(model, optimizer, iteration)
            schedule = schedule_of_run()
            step(train_rl.forward_step, iterator, model, optimizer, scheduler, config, schedule)
        rollouts.rows = {}
        found.append(dict(seconds))
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    return found[1:]


COLUMNS = {
    "layout": ("layout", ""),
    "total": ("ms a rollout", ".1f"),
    **{part: (f"{part}, ms", ".1f") for part in PARTS},
    "share": ("drawing / all", ".2f"),
}


def rows_of(layouts: dict[str, tuple[int, str]], num_rollouts: int) -> list[dict]:
    """A row per layout: medians over its rollouts."""
    launcher.PRELOADED.append("tests.benchmarks.preload")
    rows = []
    for layout, (num_ranks, flags) in layouts.items():
        options = {"backend": "gloo", "device": "cpu"}
        *_, last = minimegatron.launch(measure, num_ranks, flags, num_rollouts, **options)
        times = {part: statistics.median(found[part] for found in last) * 1e3 for part in PARTS}
        total = sum(times.values())
        share = times["drawing"] / total
        rows.append({"layout": layout, "total": total, **times, "share": share})
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--rollouts", type=int, default=15)
    report = results.Report("policy_speed", __doc__, arguments, argv)
    is_quick = report.options.quick
    layouts = {"one process": LAYOUTS["one process"]} if is_quick else LAYOUTS
    rows = rows_of(layouts, 1 if is_quick else report.options.rollouts)
    report.table("One rollout and what is learned from it", COLUMNS, rows, "One thread a rank.")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
