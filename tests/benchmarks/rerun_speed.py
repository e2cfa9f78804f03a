"""What it costs that a step may be run again, and what a run with `stimer` on costs.

Run: python -m tests.benchmarks.rerun_speed. Calls: `train_step` of one small GPT, in one process.

The same model makes steps in each mode in turn, so that a busy machine is busy for all of them. In mode
`validate_results` all results are good: what is paid is one message, and the state that is kept. Each
step of `report_determinism_stats` runs twice.
"""

import contextlib
import statistics
import sys
import time

import minimegatron
from minimegatron import pretrain_gpt
from minimegatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    RerunState,
    get_rerun_state_machine,
)
from minimegatron.core.utils import StragglerDetector, get_model_config
from minimegatron.launching import launcher
from minimegatron.training import training
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.pipeline_schedule import schedule_of_run
from tests.benchmarks import results
from tests.training.short_runs import little_text

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 16 --train-iters 1000 "
    "--lr 1e-3 --eval-iters 0 --padded-vocab-size 512 --hidden-dropout 0.1"
)
WAYS = {
    "disabled": (RerunMode.DISABLED, False),
    "disabled, once more": (RerunMode.DISABLED, False),
    "validate_results": (RerunMode.VALIDATE_RESULTS, False),
    "report_determinism_stats": (RerunMode.REPORT_DETERMINISM_STATS, False),
    "disabled, stimer on": (RerunMode.DISABLED, True),
}


def measure(num_rounds: int) -> dict[str, list[float]]:
    """In a rank: seconds of each step, by way."""
    sys.argv = ["rerun_speed", *FLAGS.split()]
    with contextlib.redirect_stdout(None), little_text():
        initialize_megatron()
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            pretrain_gpt.model_provider
        )
        iterator, _, _ = training.build_train_valid_test_data_iterators(
            pretrain_gpt.train_valid_test_datasets_provider
        )
        config = get_model_config(model[0])
        training._connect_schedule(config, model, optimizer)
        given = RerunDataIterator(iterator)
        machine, stimer = get_rerun_state_machine(), StragglerDetector()
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for round_id in range(num_rounds + 1):
            for way, (mode, is_timed) in WAYS.items():
                machine.set_mode(mode)
                stimer.configure(1, 0, enabled=is_timed)
                begun = time.perf_counter()
                training.train_step(
                    pretrain_gpt.forward_step,
                    given,
                    model,
                    optimizer,
                    scheduler,
                    config,
                    schedule_of_run(),
                )
                if round_id:  # the first of each is slow
                    seconds[way].append(time.perf_counter() - begun)
                assert machine.state is RerunState.NOT_RUNNING_YET
    return seconds


COLUMNS = {
    "way": ("mode", ""),
    "step": ("ms a step", ".2f"),
    "ratio": ("beside disabled", ".3f"),
}


def rows_of(num_rounds: int) -> list[dict]:
    """A row per way: medians over the rounds, and the median of the ratios in each round."""
    launcher.PRELOADED.append("tests.benchmarks.preload")
    (found,) = minimegatron.launch(measure, 1, num_rounds, backend="gloo", device="cpu")
    plain = found["disabled"]
    return [
        {
            "way": way,
            "step": statistics.median(times) * 1e3,
            "ratio": statistics.median(t / p for t, p in zip(times, plain, strict=True)),
        }
        for way, times in found.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=60)
    report = results.Report("rerun_speed", __doc__, arguments, argv)
    rows = rows_of(3 if report.options.quick else report.options.rounds)
    note = "One process, one thread; a round has a step of each, one after the other."
    report.table("A step that may be run again", COLUMNS, rows, note)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
