"""The cases of the worked problems and of the exam: the package's own functions on small numbers.

Called by: `macros`, which evaluates expressions with these names too. Calls: `cases`, the arithmetic
of groups, stages, data and buffers, the planner. What needs tensors is in `tensor_cases`.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace

from cases import (
    contracts,  # noqa: F401  for pages
    graphs,  # noqa: F401  for pages
    policy,  # noqa: F401  for pages
    reruns,  # noqa: F401  for pages
)
from cases.case_words import size_words, table
from cases.cases import (
    BUFFER_PARAMS,
    bubble,
    bubble_by_formula,
    messages,
    number_words,
    percent,
    placement,
    plan,
    stage_config,
    step,
)
from cases.exam_cases import *  # noqa: F403  for pages
from cases.short_warmup import both_warmups
from cases.tensor_cases import *  # noqa: F403  for pages
from minimegatron.core.distributed.buffer_layout import lay_out_buffer
from minimegatron.core.orders.placement import LOOP, V
from minimegatron.core.orders.send_limits import FORWARD_ONLY_SEND_LIMIT
from minimegatron.core.pipeline_parallel.interleaving_checks import check_interleaving
from minimegatron.core.pipeline_parallel.schedule_table import (
    get_schedule_table,
)
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.rank_generator import DEFAULT_ORDER, all_groups, make_grids
from minimegatron.core.transformer.layer_placement import (
    num_layers_before_chunk,
    num_layers_of_chunk,
)
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.planner.actions import BACKWARD, FORWARD, GRADIENT, RECEIVE
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.training import failures
from minimegatron.training.argument_checks import check_batch, check_world
from minimegatron.training.datasets.data_samplers import MegatronPretrainingSampler
from minimegatron.training.process_group import BAD_ARGUMENTS

# -- Groups and refusals --


def refusal(call: Callable[[], object]) -> str:
    """The message with which the package refuses; AssertionError if it does not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("this is not refused")


def refused_world(world: int, t: int, p: int) -> str:
    args = SimpleNamespace(
        tensor_model_parallel_size=t,
        pipeline_model_parallel_size=p,
        context_parallel_size=1,
        world_size=world,
        rank=0,
    )
    return refusal(lambda: check_world(args))


def refused_batch(batch: int, micro: int, copies: int) -> str:
    args = SimpleNamespace(
        micro_batch_size=micro,
        data_parallel_size=copies,
        global_batch_size=batch,
        rampup_batch_size=None,
    )
    return refusal(lambda: check_batch(args))


def group_of(rank: int, kind: str, world: int, **sizes: object) -> list[int]:
    """The group of this kind that the rank is in; [] if it is in none."""
    found = [group for group in all_groups(world, **sizes)[kind] if rank in group]
    return found[0] if found else []


def ranks_words(ranks: Sequence[int]) -> str:
    """
    >>> ranks_words([1, 5, 9])
    '1, 5, 9'
    """
    return ", ".join(map(str, ranks))


def num_copies(world: int, **sizes: int) -> int:
    return len(all_groups(world, **sizes)["dp"][0])


def place_of_rank(rank: int, world: int, **sizes: int) -> str:
    """Its coordinates in the dense grid, without those that everybody shares."""
    dense, _ = make_grids(world, **sizes)
    words = {"tp": "tensor", "dp": "data", "pp": "pipeline", "cp": "context"}
    places = dense.coordinates(rank).items()
    return ", ".join(
        f"{words[name]} {number}"
        for name, number in places
        if name in words and dense.name_to_size[name] > 1
    )


def crossing(world: int, per_machine: int, order: str = DEFAULT_ORDER, **sizes: int) -> str:
    """The kinds of groups that have ranks on several machines."""
    found = all_groups(world, order=order, **sizes)
    kinds = [("tp", "tensor groups"), ("dp", "data groups"), ("pp", "pipelines")]
    return " and ".join(
        words
        for name, words in kinds
        if any(len({rank // per_machine for rank in group}) > 1 for group in found[name])
    )


def code(name: str) -> str:
    """The name as code: macros within a code span are left alone."""
    return f"`{name}`"


def layer_name(number: int) -> str:
    """What a checkpoint calls the layer with this number in the whole model."""
    return code(f"decoder.layers.{number}")


def exit_code_of_refusal() -> int:
    return BAD_ARGUMENTS


def seconds_until_end() -> float:
    """How long the ranks on a killed rank's machine go on, at most: look, wait for a cause, end."""
    return failures.LOOK_SECONDS + failures.PATIENCE_SECONDS + failures.LINGER_SECONDS


# -- Stages --


def first_layer(num_layers: int, p: int, v: int, rank: int, chunk: int = 0) -> int:
    """The number, in the whole model, of the chunk's first layer."""
    return num_layers_before_chunk(stage_config(num_layers, p, v), chunk, rank)


def num_layers_built(num_layers: int, p: int, v: int, rank: int, chunk: int = 0) -> int:
    return num_layers_of_chunk(stage_config(num_layers, p, v), chunk, rank)


def layers_on_rank(rank: int, num_layers: int, p: int, v: int, up_again: bool = False) -> str:
    """The layers of a rank, in Megatron's placement or in the one that goes down and up again."""
    stages = placement(num_layers, p, v)
    placed = V(p) if up_again else LOOP(p, v)
    names = [name for stage in placed.stages[rank] for name in stages[stage]]
    return ", ".join(name.removeprefix("layer ") for name in names)


def refused_layers(num_layers: int, p: int) -> str:
    return refusal(lambda: placement(num_layers, p))


def layout_fault(layout: str, p: int) -> str:
    """What the package says of a layout that it refuses; a block, since a caret points at the fault."""
    return f"```text\n{refusal(lambda: PipelineParallelLayerLayout(layout, p))}\n```"


def layout_counts(layout: str, p: int) -> str:
    """Transformer layers of each stage."""
    found = PipelineParallelLayerLayout.from_str(layout, p)
    return ", ".join(str(found.get_num_layers_to_build(pp_rank=rank)) for rank in range(p))


def layout_makespan(layout: str, p: int, m: int, embedding: object = 0, loss: object = 1) -> str:
    """A step where a layer's forward takes 1, the embedding's and the loss's what is said, and each
    backward twice that."""
    found = PipelineParallelLayerLayout.from_str(layout, p)
    times = {"decoder": 1, "embedding": Fraction(embedding), "loss": Fraction(loss)}
    costs = Costs.from_layout(found, {name: (time, 2 * time) for name, time in times.items()})
    return number_words(simulate(plan("1f1b", p, m), costs).makespan)


def shortest_layout(layouts: Sequence[str], p: int, m: int) -> str:
    """The one with the shortest step, where embedding and loss take as long as a layer."""
    return min(layouts, key=lambda layout: Fraction(layout_makespan(layout, p, m, 1, 1)))


# -- Data --


def samples_of(copy: int, total: int, consumed: int, micro: int, copies: int, count: int) -> str:
    """The next microbatches of one copy, as sample numbers."""
    sampler = iter(MegatronPretrainingSampler(total, consumed, micro, copy, copies))
    return ", ".join(str(next(sampler)) for _ in range(count))


def shared_iterator(m: int, v: int, group: int) -> str:
    """What a stage's second chunk reads first, if all chunks draw from one iterator."""
    drawn = [read for read, (_, chunk) in enumerate(get_schedule_table(m, v, group)) if chunk == 1]
    return ranks_words(drawn[:group])


# -- Schedules --


def chosen(p: int, v: int | None) -> str:
    """The name of the schedule function for these sizes."""
    return get_forward_backward_func(p, v).__name__.lstrip("_")


def forwards(schedule: str, p: int, m: int, rank: int = 0, v: int | None = None) -> int:
    return sum(action.kind == FORWARD for action in plan(schedule, p, m, vpp=v).work(rank))


def smallest_m(p: int, share: Fraction) -> int:
    """The fewest microbatches with which stages idle at most this share of the step."""
    found = next(m for m in range(1, 10_000) if bubble_by_formula(p, m) <= share)
    # The two on either side of the answer are simulated too.
    assert bubble(p, found) <= share and (found == 1 or bubble(p, found - 1) > share), found
    return found


def twice_as_many(p: int, m: int) -> str:
    """What changes in plain 1F1B when the number of microbatches doubles."""
    rows = []
    for count in (m, 2 * m):
        done = step("1f1b", p, count)
        rows.append(
            [
                count,
                number_words(done.makespan),
                percent(done.bubble_over_total),
                done.plan.peak_in_flight(0),
                sum(done.plan.message_counts().values()),
            ]
        )
    return table(["M", "makespan", "idle / total", "held on the first stage", "messages"], rows)


def time_of(rank: int, kind: str, microbatch: int, p: int, m: int, end: bool = False) -> str:
    """When a rank's forward or backward begins (or ends), in plain 1F1B."""
    done = step("1f1b", p, m)
    (index,) = [
        i
        for i, action in enumerate(done.plan.ranks[rank])
        if action.kind == kind and action.microbatch == microbatch
    ]
    return number_words((done.ends if end else done.starts)[rank][index])


def gaps(rank: int, p: int, m: int) -> str:
    """The lengths of a rank's gaps in plain 1F1B."""
    return " + ".join(number_words(gap.length) for gap in step("1f1b", p, m).gaps(rank))


def table_entry(k: int, m: int, v: int, group: int) -> tuple[int, int]:
    """(microbatch, chunk) of the k-th forward."""
    return get_schedule_table(m, v, group)[k]


def refused_interleaving(p: int, m: int, group: int) -> str:
    return refusal(lambda: check_interleaving(p, m, group))


def forwards_before_gradient(rank: int, p: int, m: int, v: int) -> int:
    """How many forwards a rank has done when a gradient first arrives."""
    count = 0
    for action in plan("interleaved", p, m, vpp=v).ranks[rank]:
        if any(x.payload == GRADIENT and x.direction == RECEIVE for x in action.messages):
            return count
        count += action.kind == FORWARD
    raise AssertionError("no gradient arrives")


def chunks_held(p: int, m: int, v: int) -> tuple[int, int]:
    """What rank 0 holds with two forwards of warm-up per stage, and with one; overlapped messages."""
    two, one = (planned.peak_in_flight(0) for planned in both_warmups(p, m, v, overlap=True))
    return two, one


def sent_by(rank: int, p: int, m: int, num_bytes: int) -> str:
    """Bytes that one stage sends in a step, both ways."""
    return size_words(plan("1f1b", p, m, message_bytes=num_bytes).bytes_sent(rank))


def forwards_until_wait() -> int:
    """Of the first stage in a forward-only step, if the second one receives nothing."""
    return FORWARD_ONLY_SEND_LIMIT + 1


# -- Buffers --


def buckets_words(bucket_size: int | None, num_shards: int | None = None) -> str:
    """Which of the page's four parameters lie in which bucket."""
    layout = lay_out_buffer(
        [n for _, n in BUFFER_PARAMS], [False] * len(BUFFER_PARAMS), bucket_size, num_shards
    )
    found: dict[int, list[str]] = {}
    for (name, _), (start, _, bucket) in zip(BUFFER_PARAMS, layout.params, strict=True):
        found.setdefault(bucket, []).append((start, name))
    return "; ".join(
        f"bucket {bucket} has " + ", ".join(name for _, name in sorted(members))
        for bucket, members in sorted(found.items())
    )


def bucket_lengths(numels: Sequence[int], bucket_size: int) -> list[int]:
    """Elements of each bucket."""
    layout = lay_out_buffer(numels, [False] * len(numels), bucket_size)
    return [end - start for start, end in layout.buckets]


def padded(num_shards: int) -> tuple[int, int, int]:
    """Of the four parameters in one bucket: its length, its padding, the length of a shard."""
    layout = lay_out_buffer([n for _, n in BUFFER_PARAMS], [False] * 4, None, num_shards)
    return (
        layout.numel,
        layout.numel - sum(n for _, n in BUFFER_PARAMS),
        layout.numel // num_shards,
    )


def first_save_before(failed: int, interval: int) -> int:
    """The last step that a run has saved when it fails in the middle of step `failed`."""
    return max(done for done in range(failed) if done % interval == 0)


__all__ = [name for name in globals() if not name.startswith("_")] + ["BACKWARD", "messages"]
