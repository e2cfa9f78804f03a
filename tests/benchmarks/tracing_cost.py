"""What tracing costs: one training step without the seam, with it unused, and while recording.

Run: python -m tests.benchmarks.tracing_cost [--rounds 60]. Calls: GPT of `make demo` on two stages.

All take turns in the same two processes, a few steps at a time, in another order each round,
so that what else the machine does meets all alike. Each round gives one ratio per pair; the median is
shown, with the quartiles. Besides the wall clock, the processors' own time (all ranks together) is
compared: it says the same on a machine that is busy with other things.

* "without": every `@traced` function replaced by the plain one, as if the seam were not there;
* "off": as shipped, nobody watching. Bound: 1.01;
* "on": `trace()` recording. Bound: 1.03. What follows the last step is timed apart;
* "lines of another step": the same, where another step's lines are wanted, over "on". Bound: 1.01;
* "lines": the lines of every step recorded too, over "off". Bound: 3.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType

import torch
import torch.distributed as dist

import minimegatron
from minimegatron.core import parallel_state, tracing
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.tracing.clock import Alignment
from minimegatron.tracing.line_recorder import LineRecorder
from minimegatron.tracing.recorder import Recorder
from minimegatron.tracing.to_events import to_rank_trace
from tests.benchmarks import results

NUM_STAGES, NUM_MICROBATCHES, SEQ, BATCH, VOCAB = 2, 8, 64, 8, 256
BOUNDS = {
    "off": ("without", 1.01),
    "on": ("without", 1.03),
    "lines of another step": ("on", 1.01),
    "lines": ("off", 3.0),
}
"""Way -> the way whose time it is held against, and the largest ratio."""
STEPS_PER_TURN = 4
QUICK = (2, 1, 1)
"""Rounds, batch and steps a turn of the smallest run."""


def build_step(batch: int = BATCH) -> Callable[[], None]:
    """Forwards and backwards of one global batch, with the sizes of `make demo`."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=NUM_STAGES)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=96,
        num_attention_heads=4,
        pipeline_model_parallel_size=NUM_STAGES,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, pp_rank=rank),
        VOCAB,
        SEQ,
        pre_process=rank == 0,
        post_process=rank == NUM_STAGES - 1,
        position_embedding_type="rope",
    )
    tokens = torch.randint(0, VOCAB, (batch, SEQ + 1))
    positions = torch.arange(SEQ).expand(batch, SEQ)

    def loss_func(output):
        loss = output.mean()
        return loss, {"loss": loss.detach()}

    def forward_step(data_iterator, model):
        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), loss_func

    def step() -> None:
        model.zero_grad(set_to_none=True)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ,
            micro_batch_size=batch,
        )

    return step


# -- The three ways --


def is_link(value: object) -> bool:
    """True for what `@traced` made of a function."""
    code = getattr(value, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    return code.co_name == "link" and code.co_filename == tracing.__file__


@contextmanager
def without_seam() -> Iterator[None]:
    """Puts the plain function in every place where a traced one stands."""
    places = []
    for name, module in list(sys.modules.items()):
        if name.startswith("minimegatron.") and module is not None:
            places.append(module)
            places += [value for value in vars(module).values() if isinstance(value, type)]
    replaced = []
    for place in places:
        for name, value in list(vars(place).items()):
            if is_link(value):
                replaced.append((place, name, value))
                setattr(place, name, value.__wrapped__)
            elif value is tracing.call_traced and place is not tracing:
                replaced.append((place, name, value))
                setattr(place, name, lambda _, function, *args: function(*args))
    try:
        yield
    finally:
        for place, name, value in replaced:
            setattr(place, name, value)


class OfEveryStep(LineRecorder):
    """Records the lines of all steps, not of one."""

    def _begins_step(self, call: tracing.Call) -> bool:
        self._step = self._num_steps
        return super()._begins_step(call)


@contextmanager
def recording(recorders: list[Recorder], lines: str = "") -> Iterator[None]:
    """Some steps' recording, kept in `recorders` and not yet turned into events.

    `lines`: "every" step's, those of "another" that does not come, or none.
    """
    recorder = Recorder(lines_of_step=10**6 if lines == "another" else None)
    if lines == "every":
        recorder.lines = OfEveryStep(0, recorder.innermost_call)
    recorder.open()
    try:
        yield
    finally:
        recorder.close()
        recorders[:] = [recorder]


def timed(step: Callable[[], None], surround: Callable, num_steps: int) -> tuple[float, float]:
    """Of `num_steps` steps: seconds until all ranks are done, and processor seconds of all ranks.

    An untimed step comes first: what was done to get here (to replace functions, say) leaves the
    processor faster or slower than it found it, for a while.
    """
    with surround():
        step()
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step()
        processor = torch.tensor([time.process_time() - processor], dtype=torch.float64)
        dist.barrier()
        wall = time.perf_counter() - wall
    dist.all_reduce(processor)
    return wall, processor.item()


def take_rounds(
    step: Callable[[], None], ways: dict[str, Callable], rounds: int, num_steps: int
) -> dict[str, list[tuple[float, float]]]:
    """`timed` of every round by way; in each round they come in another order, alike on all ranks."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for way in shuffled.sample(list(ways), len(ways)):
            times[way].append(timed(step, ways[way], num_steps))
    return times


def measure(
    rounds: int, batch: int, num_steps: int
) -> tuple[dict[str, list[tuple[float, float]]], float, float]:
    """(wall, processor) seconds of every round by way; calls per step; seconds to make events."""
    torch.manual_seed(dist.get_rank())
    step, recorders = build_step(batch), []
    ways = {
        "without": without_seam,
        "off": nullcontext,
        "on": lambda: recording(recorders),
        "lines of another step": lambda: recording([], "another"),
        "lines": lambda: recording([], "every"),
    }
    for surround in ways.values():
        timed(step, surround, num_steps)
    times = take_rounds(step, ways, rounds, num_steps)
    began = time.perf_counter()
    events = to_rank_trace(recorders[0], Alignment(), None).events
    recorded = num_steps + 1  # and the untimed one
    return times, len(events) / recorded, (time.perf_counter() - began) / recorded


COLUMNS = {
    "way": ("way", ""),
    "base": ("over", ""),
    "time": ("time", ""),
    "ratio": ("median ratio", ".4f"),
    "low": ("quartile", ".4f"),
    "high": ("quartile", ".4f"),
    "bound": ("bound", ".2f"),
}


def main(argv: list[str] | None = None) -> int:
    """Prints the ratios; exit code 1 if a bound on processor time is broken."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=60, metavar="N")
    report = results.Report("tracing_cost", __doc__, arguments, argv)
    sizes = QUICK if report.options.quick else (report.options.rounds, BATCH, STEPS_PER_TURN)
    launched = minimegatron.launch(measure, NUM_STAGES, *sizes, backend="gloo", device="cpu")
    times, num_calls, seconds = launched[0]
    rows = []
    for way, (base, bound) in BOUNDS.items():
        rows += ratio_rows(way, bound, times[way], times[base], base)
    made = f"events made of them in {seconds * 1e3:.1f} ms"
    note = f"On: {num_calls:.0f} calls per step on rank 0; {made}."
    report.table("A step, as a ratio to one that does less", COLUMNS, rows, note)
    claim_bounds(report, rows)
    return report.finish()


def ratio_rows(
    way: str, bound: float, times: list[tuple], base: list[tuple], of: str = "off"
) -> list[dict]:
    """Wall clock and processor time, each round's over the same round's `base`, the way `of`."""
    rows = []
    for which, name in enumerate(("wall clock", "processor")):
        ratios = [a[which] / b[which] for a, b in zip(times, base, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        row = {"way": way, "base": of, "time": name, "ratio": median, "low": low, "high": high}
        rows.append({**row, "bound": bound, "rounds": len(ratios)})
    return rows


def claim_bounds(report: results.Report, rows: list[dict]) -> None:
    """On processor time, which says the same on a busy machine."""
    for row in rows:
        if row["time"] == "processor":
            text = f"{row['way']}: at most {row['bound']:.2f} x the processor time"
            report.claim(text, f"{row['ratio']:.4f}", row["ratio"] <= row["bound"])


if __name__ == "__main__":
    sys.exit(main())
