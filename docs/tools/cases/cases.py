"""The concrete small cases of the pages: every number, table and picture in prose comes from here.

Called by: `macros`, which evaluates expressions with these names; `problem_cases`. Calls:
`memory_cases`, the planner, the layouts, the layers themselves, and grading for its limits. Times
are in units of one forward unless a page says otherwise.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace

from cases import (
    backend,  # noqa: F401  for pages
    buffers,  # noqa: F401  for pages
    experts,  # noqa: F401  for pages
    families,  # noqa: F401  for pages
    mtp,  # noqa: F401  for pages
    rings,  # noqa: F401  for pages
    states,  # noqa: F401  for pages
    symptoms,  # noqa: F401  for pages
)
from cases.case_words import count_words, fraction_words, size_words, table  # noqa: F401  for pages
from cases.gpu_page import statement as gpu_statement  # noqa: F401  for pages
from cases.held_against import (  # noqa: F401  for pages
    held_internals,
    held_runs,
    names_not_there,
    older_torch,
    torch_range,
)
from cases.memory_cases import (  # noqa: F401  for pages
    GPT3,
    SEVEN,
    activation_table,
    layer_activations,
    layer_flops_per_token,
    mfu,
    model_flops_per_token,
    parameters,
    stage_activations,
    state_bytes_per_parameter,
    state_table,
    state_words,
)
from cases.page_counts import *  # noqa: F403  for pages
from cases.short_warmup import both_warmups, makespan
from minimegatron.core.optimizer import OptimizerConfig, _get_grad_scaler
from minimegatron.core.orders.send_limits import get_interleaved_send_limits
from minimegatron.core.pipeline_parallel.schedule_table import (
    convert_schedule_table_to_order,
    count_rank_microbatches,
    get_num_warmup_microbatches,
    get_schedule_table,
)
from minimegatron.core.rank_generator import GROUP_KINDS, all_groups
from minimegatron.core.transformer.layer_placement import layers_of_virtual_stages
from minimegatron.exercises.exercise import exercises
from minimegatron.exercises.grading import archives, collection
from minimegatron.planner import formulas, memory
from minimegatron.planner.actions import Action
from minimegatron.planner.memory import (  # noqa: F401  for pages
    activation_bytes_per_layer,
    message_bytes,
    num_layer_parameters,
)
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_report import number_words, percent
from minimegatron.planner.registry import ScheduleFunction
from minimegatron.planner.render_svg import render_svg
from minimegatron.planner.simulator import Costs, Simulation, simulate
from minimegatron.planner.stage import PlanConfig, Stage
from pictures import pictures
from pictures.own_words import in_own_words
from source.page_words import say

# -- Schedules --


def step(
    schedule: str | ScheduleFunction = "1f1b",
    pp: int = 4,
    m: int = 8,
    vpp: int | None = None,
    group: int | None = None,
    forward: object = 1,
    backward: object = 2,
    message: object = 0,
    imbalance: Sequence[object] | None = None,
    forward_only: bool = False,
) -> Simulation:
    """A simulated step; times are of a whole stage."""
    planned = plan(schedule, pp, m, vpp=vpp, group_size=group, forward_only=forward_only)
    costs = Costs.of_stages(
        Fraction(forward), Fraction(backward), vpp or 1, imbalance, Fraction(message), None
    )
    return simulate(planned, costs)


def timeline(*args: object, critical: bool = False, **kwargs: object) -> str:
    """The step as a picture."""
    svg = render_svg(step(*args, **kwargs), critical)
    return f'<div class="mm-timeline">{in_own_words(pictures.without_style(svg))}</div>'


def one_at_a_time(stage: Stage) -> Iterator[Action]:
    """Right, and as slow as can be: a microbatch starts when the one before it is done."""
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


def order(schedule: str, pp: int, m: int, rank: int, vpp: int | None = None) -> str:
    """F0 F1 B0 ...: what one rank does."""
    planned = plan(schedule, pp, m, vpp=vpp)
    return " ".join(
        f"{a.kind[0].upper()}{a.microbatch}" + ("" if not vpp else f".{a.chunk}")
        for a in planned.work(rank)
    )


def bubble(pp: int, m: int, v: int = 1) -> Fraction:
    """Idle over total time: the formula, held against a simulation first."""
    value = bubble_by_formula(pp, m, v)
    schedule = "interleaved" if v > 1 else "1f1b"
    counted = step(schedule, pp, m, vpp=v if v > 1 else None).bubble_over_total
    assert value == counted, (value, counted)
    return value


def bubble_by_formula(pp: int, m: int, v: int = 1) -> Fraction:
    """The same without the simulation, for a search through many sizes."""
    config = PlanConfig("interleaved" if v > 1 else "1f1b", pp, m, v, pp if v > 1 else None)
    return formulas.bubble_formulas(config)[1].value


def overhead(pp: int, m: int, v: int = 1) -> Fraction:
    """Idle over computing time."""
    return step(
        "interleaved" if v > 1 else "1f1b", pp, m, vpp=v if v > 1 else None
    ).bubble_over_ideal


def bubble_table(pps: Sequence[int] = (2, 4, 8), ms: Sequence[int] = (4, 8, 32, 128)) -> str:
    rows = [[f"p = {p}", *(percent(bubble(p, m)) for m in ms)] for p in pps]
    return table(["idle / total", *(f"M = {m}" for m in ms)], rows)


def chunk_table(pp: int = 4, m: int = 8, vs: Sequence[int] = (1, 2, 4)) -> str:
    """What interleaving buys and costs."""
    rows = []
    for v in vs:
        done = step("interleaved" if v > 1 else "1f1b", pp, m, vpp=v if v > 1 else None)
        counts = done.plan.message_counts()
        held = [Fraction(done.plan.peak_in_flight(r), v) for r in range(pp)]
        rows.append(
            [
                v,
                number_words(done.makespan),
                percent(done.bubble_over_total),
                counts["activation"] + counts["gradient"],
                ", ".join(number_words(h) for h in held),
            ]
        )
    return table(
        [
            "v",
            "makespan",
            "idle / total",
            "messages",
            "held per rank, in whole stages' activations",
        ],
        rows,
    )


def held_words(pp: int, m: int, vs: Sequence[int] = (1, 2, 4)) -> str:
    """What rank 0 holds with v chunks, in whole stages' activations: the formula, held to a plan."""
    words = []
    for v in vs:
        planned = plan("interleaved" if v > 1 else "1f1b", pp, m, vpp=v if v > 1 else None)
        held = Fraction(planned.peak_in_flight(0), v)
        assert held == (pp + Fraction(pp - 1, v) if v > 1 else pp), (v, held)
        words.append(f"{number_words(held)} for v = {v}")
    return ", ".join(words)


def compare_schedules(pp: int = 4, m: int = 8) -> str:
    rows = []
    for name in ("gpipe", "1f1b"):
        done = step(name, pp, m)
        held = ", ".join(str(done.plan.peak_in_flight(r)) for r in range(pp))
        rows.append([name, number_words(done.makespan), percent(done.bubble_over_total), held])
    head = ["page.schedule", "page.makespan", "page.idle-of-total", "page.held-per-rank"]
    return table([say(name) for name in head], rows)


def warmups(pp: int = 4, m: int = 8) -> str:
    return ", ".join(str(get_num_warmup_microbatches(pp, r, m)) for r in range(pp))


def warmups_interleaved(pp: int = 4, m: int = 8, v: int = 2, group: int = 4) -> str:
    return ", ".join(str(count_rank_microbatches(pp, r, m, v, group).num_warmup) for r in range(pp))


def warmup_table(pp: int = 4, m: int = 16, vpp: int = 2, message: object = "1/5") -> str:
    """Interleaving with two forwards of warm-up per stage and with one, in both modes."""
    rows = []
    for mode, overlap in (("one exchange", False), ("overlapped messages", True)):
        for steps, planned in zip((2, 1), both_warmups(pp, m, vpp, overlap), strict=True):
            times = [makespan(planned, x) for x in (0, message)]
            words = ["waits for ever" if t is None else number_words(t) for t in times]
            rows.append([mode, steps, *words, planned.peak_in_flight(0)])
    head = ["messages", "forwards per stage", "makespan, messages free"]
    head += [f"makespan, messages of {message}", "chunks held on rank 0"]
    return table(head, rows)


def schedule_table_words(m: int, v: int, group: int) -> str:
    rows = get_schedule_table(m, v, group)
    return table(
        ["position", *range(len(rows))],
        [["microbatch", *(r[0] for r in rows)], ["chunk", *(r[1] for r in rows)]],
    )


def schedule_order_words(m: int, v: int, group: int, num_warmup: int) -> str:
    """Megatron's signed form: chunk + 1 for a forward, its negative for a backward."""
    found = convert_schedule_table_to_order(num_warmup, v, get_schedule_table(m, v, group))
    return " ".join(f"{n:+d}" for n in found)


def send_limits(pp: int, m: int, v: int, group: int) -> str:
    """K of each stage."""
    limits = get_interleaved_send_limits(pp, m, v, group, False)
    return ", ".join(f"K = {k} on stage {rank}" for rank, k in enumerate(limits))


def messages(pp: int, m: int, v: int = 1) -> int:
    return step(
        "interleaved" if v > 1 else "1f1b", pp, m, vpp=v if v > 1 else None
    ).plan.message_counts()["activation"]


def message_table() -> str:
    """Bytes between stages in one step, both directions, for one model and one tensor rank."""
    rows = []
    for name, t, sp in (
        ("t = 1", 1, False),
        ("t = 8", 8, False),
        ("t = 8, sequence parallel", 8, True),
    ):
        one = message_bytes(4096, 1, 8192, t, sequence_parallel=sp)
        for v in (1, 2):
            count = messages(4, 16, v)
            rows.append([name, v, size_words(one), 2 * count, size_words(2 * count * one)])
    return table(
        ["", "v", "one message", "messages, both ways", "bytes in a step, over p stages"], rows
    )


# -- Groups, stages, buffers --

TITLES = {kind.name: kind.title for kind in GROUP_KINDS}


def groups(kind: str, world: int = 16, **sizes: int) -> str:
    return " ".join(str(g) for g in all_groups(world, **sizes)[kind])


def groups_figure(world: int = 16, kinds: Sequence[str] = ("tp", "pp", "dp"), **sizes: int) -> str:
    return pictures.groups_picture(all_groups(world, **sizes), kinds, TITLES)


def num_groups(world: int = 16, **sizes: int) -> int:
    """Distinct sets of ranks."""
    return len({tuple(g) for gs in all_groups(world, **sizes).values() for g in gs})


def stage_config(num_layers: int, p: int, v: int = 1, **more: object) -> SimpleNamespace:
    """What decides how a model's layers are placed."""
    config = {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": p,
        "virtual_pipeline_model_parallel_size": v if v > 1 else None,
        "pipeline_schedule": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    return SimpleNamespace(**config | more)


def placement(num_layers: int, p: int, v: int = 1, **more: object) -> list[list[str]]:
    """What each virtual stage holds, in model order."""
    config = stage_config(num_layers, p, v, **more)
    stages, layer = [], 0
    for count in layers_of_virtual_stages(config):
        stages.append([f"layer {layer + i}" for i in range(count)])
        layer += count
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def placement_figure(num_layers: int, p: int, v: int = 1, **more: object) -> str:
    return pictures.stages_picture(placement(num_layers, p, v, **more), p)


def layout_figure(layout: str, p: int) -> str:
    """A layout string, drawn."""
    from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    found = PipelineParallelLayerLayout.from_str(layout, p)
    v = found.virtual_pipeline_model_parallel_size
    words = {"decoder": "layer", "embedding": "embedding", "loss": "loss", "mtp": "mtp"}
    stages, layer = [], 0
    for chunk in range(v):
        for rank in range(p):
            stage = []
            for kind in found.layout[rank][chunk]:
                name = words.get(kind.name, kind.name)
                if name == "layer":
                    name, layer = f"layer {layer}", layer + 1
                stage.append(name)
            stages.append(stage)
    return pictures.stages_picture(stages, p)


BUFFER_PARAMS = [("embed", 400), ("layer 0", 300), ("layer 1", 300), ("head", 250)]


def _buffer(bucket_size: int | None, num_shards: int | None) -> tuple:
    from minimegatron.core.distributed.buffer_layout import lay_out_buffer

    layout = lay_out_buffer(
        [n for _, n in BUFFER_PARAMS], [False] * len(BUFFER_PARAMS), bucket_size, num_shards
    )
    params = sorted(
        (start, end, name, bucket)
        for (name, _), (start, end, bucket) in zip(BUFFER_PARAMS, layout.params, strict=True)
    )
    return layout, params


def buffer_figure(bucket_size: int | None = 500, num_shards: int | None = None) -> str:
    """The grad buffer of four parameters, with its buckets, and shards if there are any."""
    layout, params = _buffer(bucket_size, num_shards)
    rows = [
        ("gradients", [(s, e, name, i) for i, (s, e, name, _) in enumerate(params)]),
        ("buckets", [(s, e, f"bucket {b}", b + 4) for b, (s, e) in enumerate(layout.buckets)]),
    ]
    if num_shards:
        pieces = []
        for start, end in layout.buckets:
            share = (end - start) // num_shards
            pieces += [
                (start + r * share, start + (r + 1) * share, f"r{r}", r) for r in range(num_shards)
            ]
        rows.append(("who updates", pieces))
    return pictures.strip_picture(rows, layout.numel, "elements")


def buffer_words(bucket_size: int | None = 500, num_shards: int | None = None) -> str:
    layout, _ = _buffer(bucket_size, num_shards)
    padding = layout.numel - sum(n for _, n in BUFFER_PARAMS)
    return f"{len(layout.buckets)} buckets, {layout.numel} elements, {padding} of them padding"


# -- Losses --

COUNTS = ((4, 1), (2, 3))
"""Tokens that count, by data-parallel rank and microbatch."""
SUMS = ((8, 5), (2, 9))
"""Summed losses, likewise."""


def loss_case() -> str:
    rows = []
    for rank, (counts, sums) in enumerate(zip(COUNTS, SUMS, strict=True)):
        for mb, (n, total) in enumerate(zip(counts, sums, strict=True)):
            rows.append([rank, mb, n, total, Fraction(total, n)])
    return table(["data-parallel rank", "microbatch", "tokens n", "summed loss", "mean"], rows)


def loss_off() -> Fraction:
    """What is optimised without `calculate_per_token_loss`: a mean of means."""
    means = [
        Fraction(s, n)
        for ss, ns in zip(SUMS, COUNTS, strict=True)
        for s, n in zip(ss, ns, strict=True)
    ]
    return sum(means) / len(means)


def loss_on() -> Fraction:
    """And with it: all losses over all tokens."""
    return Fraction(sum(map(sum, SUMS)), sum(map(sum, COUNTS)))


# -- What the code itself does --


def freed_output() -> str:
    """Frees a stage's output as the schedule does, and asks both kinds of backward."""
    import torch

    from minimegatron.core.pipeline_parallel.steps import custom_backward, deallocate_output_tensor

    weight = torch.ones(3, requires_grad=True)
    output = weight * torch.tensor([1.0, 2.0, 3.0])
    grad = torch.ones(3)
    before = output.untyped_storage().nbytes()
    deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
    try:
        torch.autograd.backward(output, grad)
        refused = "accepted"
    except RuntimeError as error:
        refused = str(error).split(";")[0].split("(")[0].strip()
    custom_backward(output, grad)
    return table(
        ["", ""],
        [
            [say("page.bytes-before"), before],
            [say("page.bytes-after"), output.untyped_storage().nbytes()],
            [say("page.backward-says"), f"“{refused[:90]}”"],
            [say("page.backward-gives"), weight.grad.tolist()],
        ],
    )


def column_row() -> str:
    """A two-layer MLP cut over two ranks by hand: the same numbers as uncut."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(2, 4, dtype=torch.float64)
    a, b = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    whole = torch.relu(x @ a.T) @ b.T
    terms = [torch.relu(x @ a[r * 4 : r * 4 + 4].T) @ b[:, r * 4 : r * 4 + 4].T for r in (0, 1)]
    rows = [
        ["uncut", *(f"{v:.4f}" for v in whole[0])],
        ["rank 0's term", *(f"{v:.4f}" for v in terms[0][0])],
        ["rank 1's term", *(f"{v:.4f}" for v in terms[1][0])],
        ["their sum", *(f"{v:.4f}" for v in (terms[0] + terms[1])[0])],
    ]
    assert torch.allclose(whole, terms[0] + terms[1])
    return table(["first row of Y", "", "", "", ""], rows)


def scaler_history() -> str:
    """The dynamic loss scale over seven steps. Three of them overflow. Two good ones let it grow."""
    scaler = _get_grad_scaler(
        OptimizerConfig(lr=1.0, fp16=True, initial_loss_scale=65536.0, loss_scale_window=2)
    )
    rows = []
    for number, overflow in enumerate((False, False, True, False, True, True, False)):
        before = float(scaler.scale)
        scaler.update(overflow)
        rows.append(
            [number, f"{before:g}", "yes" if overflow else "no", f"{float(scaler.scale):g}"]
        )
    return table(["step", "scale", "overflow", "scale afterwards"], rows)


def bf16_update() -> str:
    """Why main parameters are fp32: a small update to a bf16 weight is lost."""
    import torch

    weight, update = torch.tensor(1.0, dtype=torch.bfloat16), 1e-3
    main = weight.float()
    for _ in range(100):
        weight = weight - update
        main = main - update
    return table(
        ["after 100 updates of 0.001", "weight"],
        [
            ["in bf16", f"{weight.item():.4g}"],
            ["in fp32, then rounded to bf16", f"{main.bfloat16().item():.4g}"],
        ],
    )


def bf16_gap_below_one() -> str:
    import torch

    one = torch.tensor(1.0, dtype=torch.bfloat16)
    return f"{float(one - torch.nextafter(one, torch.zeros_like(one))):.2g}"


def norm_case() -> str:
    """A gradient norm over two tensor-parallel ranks, right and wrong."""
    cut, whole = [3.0, 4.0], 12.0
    right = (sum(g * g for g in cut) + whole**2) ** 0.5
    twice = (sum(g * g for g in cut) + 2 * whole**2) ** 0.5
    local = [(g * g + whole**2) ** 0.5 for g in cut]
    return table(
        ["counted", "norm"],
        [
            ["each gradient once", number_words(right)],
            ["the replicated one on both ranks", number_words(twice)],
            ["rank 0 alone, rank 1 alone", ", ".join(number_words(v) for v in local)],
        ],
    )


def num_exercises() -> int:
    return len(exercises())


def submission_limits() -> str:
    """What of a submission is read, at most."""
    return (
        f"{size_words(collection.MOST_BYTES)} of a file, {collection.MOST_FILES:,} files of a folder "
        f"or an archive, {size_words(archives.MOST_UNPACKED)} of a tar archive, unpacked"
    )


def plan_data(**kwargs: object) -> str:
    """A simulation as JSON, for scripts."""
    return json.dumps(step(**kwargs).to_json(), separators=(",", ":"))


def fields(config: object) -> list[str]:
    return [f.name for f in dataclasses.fields(config)]


__all__ = [name for name in globals() if not name.startswith("_")] + ["memory"]
