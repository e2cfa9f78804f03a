"""The proof of the seam: schedules that this file adds train, with nothing changed outside of it.

A V (hand-over on one rank, loss on rank 0), a loop whose work is shuffled, and a loop whose ranks are:
losses and gradients as in one process, trace = plan, evaluation between steps, checkpoints, and a
schedule of twelve lines from the command line.
"""

import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minimegatron
from minimegatron.core.orders.orders import register_order, unregister
from minimegatron.core.orders.placement import BOTH, LOOP, Placement, V
from minimegatron.core.orders.work import BACKWARD, FORWARD, Work
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_check import check
from minimegatron.tracing.compare import compare_with_plan, wrong_messages
from minimegatron.training.tiny_gpt import TinyGPT
from tests.figures import figure
from tests.ranks import has_shared_memory, run_ranks

# -- The orders --


@register_order("fill-and-drain", placement=V)
def fill_and_drain(rank):
    for chunk in (0, 1):
        for i in range(rank.num_microbatches):
            yield rank.forward(i, chunk)
    for chunk in (1, 0):
        for i in range(rank.num_microbatches):
            yield rank.backward(i, chunk)


@register_order("shuffled", placement=LOOP)
def shuffled(rank):
    yield from shuffled_orders(rank.placement, rank.num_microbatches, 1)[rank.pp_rank]


TURNED = {1: (0,), 2: (1, 0), 3: (2, 0, 1), 4: (1, 3, 0, 2)}
"""By the number of ranks, each rank's first stage. With 4, stages 0 and 1 are on ranks 2 and 0."""


def turned(pp_size: int, num_model_chunks: int | None) -> Placement:
    """A loop that begins on another rank than 0, and goes on where no ring has a link."""
    stages = TURNED[pp_size]
    return Placement("turned", [[chunk * pp_size + stage for chunk in (0, 1)] for stage in stages])


@register_order("turned", placement=turned)
def shuffled_and_turned(rank):
    yield from shuffled_orders(rank.placement, rank.num_microbatches, 2)[rank.pp_rank]


@cache
def shuffled_orders(placement: Placement, num_microbatches: int, seed: int) -> list[list[Work]]:
    """Any order that can be done: at each turn any rank does any work whose input exists."""
    draw = random.Random(seed)
    orders = [[] for _ in range(placement.pp_size)]
    last = placement.num_stages - 1
    # Of each microbatch: the stage whose forward, then whose backward, comes next.
    ready = [(FORWARD, microbatch, 0) for microbatch in range(num_microbatches)]
    while ready:
        kind, microbatch, stage = ready.pop(draw.randrange(len(ready)))
        rank, chunk = placement.place_of(stage)
        orders[rank].append(Work(kind, microbatch, chunk))
        if kind == FORWARD:
            ready.append(
                (FORWARD, microbatch, stage + 1) if stage < last else (BACKWARD, microbatch, last)
            )
        elif stage:
            ready.append((BACKWARD, microbatch, stage - 1))
    return orders


# -- Real ranks --

LAYERS = {"num_layers": 8, "params_dtype": torch.float64, "hidden_size": 16}
OVERLAPPED = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {
    2: [
        ("fill-and-drain", 3, {}),
        ("fill-and-drain", 1, {"deallocate_pipeline_outputs": True}),
        ("fill-and-drain", 4, {"variable_seq_lengths": True, "batch_p2p_comm": True}),
        ("shuffled", 5, {"calculate_per_token_loss": True}),
        ("turned", 4, {"delay_wgrad_compute": True}),
        ("shuffled", 4, {"defer_embedding_wgrad_compute": True, "vp": 4}),
    ],
    4: [
        ("fill-and-drain", 6, {"pp": 4, "deallocate_pipeline_outputs": True}),
        ("shuffled", 6, {"pp": 4, "vp": 2}),
        ("turned", 6, {"pp": 4}),
        ("breadth-first", 5, {"pp": 4, "vp": 2}),
        ("fill-and-drain", 4, {"ddp": OVERLAPPED}),
        ("shuffled", 4, {"ddp": OVERLAPPED, "vp": 2, "calculate_per_token_loss": True}),
        ("fill-and-drain", 3, {"tp": 2, "sequence_parallel": True}),
        ("gpipe", 3, {"tp": 2, "pp": 2, "vp": None, **RECOMPUTED}),
    ],
}
CASES[3] = [
    ("fill-and-drain", 4, {"pp": 3, "num_layers": 6}),
    ("turned", 5, {"pp": 3, "num_layers": 6}),
]


def steps_of(name: str | None, num_microbatches: int, cut: dict) -> dict:
    """Two steps with an evaluation between; the second is recorded."""
    cut = {"pp": 2, **cut} if name else cut
    if name in ("shuffled", "breadth-first"):
        cut = {"vp": 2, **cut}
    gpt = TinyGPT(**{**LAYERS, **cut}, pipeline_schedule=name)
    optimizer = gpt.optimizer(adam_eps=1e-3)
    found = {"copy": gpt.groups.dp.rank(), "losses": [], "gradients": []}
    for _ in range(2):
        with minimegatron.trace() as recorded:
            reports = gpt.step(num_microbatches // gpt.groups.dp.size())
        found["losses"] += [float(report["loss"]) for report in reports]
        found["gradients"].append(gpt.gradients())
        optimizer.step()
        with torch.no_grad():
            reports = gpt.step(num_microbatches // gpt.groups.dp.size(), forward_only=True)
        found["losses"] += [float(report["loss"]) for report in reports]
    if name is not None and dist.get_rank() == 0:
        recorded_step = recorded.step(0)
        found["divergences"] = list(map(str, compare_with_plan(recorded_step)))
        found["wrong"] = wrong_messages(recorded_step)
        found["messages"] = len(recorded_step.transfers)
        found["schedule"] = recorded_step.config.schedule
    return found


def all_steps(cases: list) -> list[dict]:
    return [steps_of(*case) for case in cases]


def serial_cut(cut: dict) -> dict:
    """What of a case matters to one process too."""
    kept = ("calculate_per_token_loss", "num_layers")
    return {key: value for key, value in cut.items() if key in kept}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_new_schedules_train_as_one_process_does(size):
    cases = CASES[size]
    copies = [size // (cut.get("tp", 1) * cut.get("pp", 2)) for _, _, cut in cases]
    alone = [(None, M, serial_cut(cut)) for _, M, cut in cases]
    expected = run_ranks(all_steps, 1, alone, timeout=120)[0]
    of_ranks = run_ranks(all_steps, size, cases, timeout=100)
    worst = num_messages = 0.0
    for number, (name, _, cut) in enumerate(cases):
        found, serial = [results[number] for results in of_ranks], expected[number]
        assert found[0]["schedule"] == name
        assert found[0]["divergences"] == [] and found[0]["wrong"] == [], (name, cut)
        num_messages += found[0]["messages"]
        losses = [one for one in found if one["losses"]]
        # Of a tensor-parallel group each rank has them; of a pipeline, the rank where the model ends.
        assert len(losses) == copies[number] * cut.get("tp", 1), (name, cut)
        for one in losses:
            mine = serial["losses"][one["copy"] :: copies[number]]
            assert one["losses"] == pytest.approx(mine, abs=1e-9, rel=0), (name, cut)
        for step in range(2):
            seen = set()
            for one in found:
                for parameter, grad in one["gradients"][step].items():
                    seen.add(parameter)
                    whole = serial["gradients"][step][parameter]
                    if grad.shape == whole.shape and "ddp" not in cut:
                        worst = max(worst, (grad - whole).abs().max().item())
            assert seen == set(serial["gradients"][step]), (name, cut)
    figure(
        f"{size} ranks: {len(cases)} cases, {num_messages:.0f} messages, worst gradient {worst:.1e}"
    )
    assert worst <= 1e-10


def test_the_loss_of_a_v_is_on_the_rank_that_has_the_data():
    step = plan("fill-and-drain", 4, 4)
    assert check(step) == []
    assert step.config.placement.is_first_rank(0) and step.config.placement.is_last_rank(0)
    handed_over = step.config.placement.next_of(3, 0)
    assert handed_over == (3, 1)
    assert step.message_counts() == {"activation": 4 * 6, "gradient": 4 * 6}


# -- A user's schedule of twelve lines, from the command line --

TWELVE_LINES = """\
from minimegatron.core.orders.orders import register_order, unregister
from minimegatron.core.orders.placement import V


@register_order("down-and-up", placement=V)
def down_and_up(rank):
    for i in range(rank.num_microbatches):
        yield rank.forward(i, 0)
        yield rank.forward(i, 1)
    for i in range(rank.num_microbatches):
        yield rank.backward(i, 1)
        yield rank.backward(i, 0)
"""
RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 "
    "--log-interval 2 --eval-iters 1 --eval-interval 2 --pipeline-model-parallel-size 2"
)


def test_twelve_lines_train_from_the_command_line(tmp_path):
    assert len(TWELVE_LINES.splitlines()) == 12
    file = tmp_path / "mine.py"
    file.write_text(TWELVE_LINES)
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "minimegatron.pretrain_gpt"]
    command += [*RUN.split(), "--pipeline-schedule", f"{file}:down_and_up"]
    command += ["--save", str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^ iteration (\d)/4 \| lm loss (\d\.\d+) \|", done.stdout, re.M)
    assert [number for number, _ in lines] == ["2", "4"]
    assert float(lines[1][1]) < float(lines[0][1])
    assert "validation loss at iteration 2" in done.stdout
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "4"


# -- What is refused --


@register_order("halves")
def halves(rank):
    for i in range(rank.num_microbatches):
        yield rank.forward(i)
        yield rank.backward_input(i)
        yield rank.backward_weight(i)


@register_order("two-ways", placement=BOTH)
def two_ways(rank):
    half = (rank.num_microbatches + 1) // 2
    for chunk, of_copy in enumerate((range(half), range(half, rank.num_microbatches))):
        for i in of_copy:
            yield rank.forward(i, chunk)
    for chunk, of_copy in enumerate((range(half), range(half, rank.num_microbatches))):
        for i in of_copy:
            yield rank.backward(i, chunk)


def refusals(cut: dict, name: str | None) -> str:
    gpt = TinyGPT(**{**LAYERS, **cut})
    schedule = get_forward_backward_func(pipeline_schedule=name)
    try:
        gpt.step(4, schedule)
    except ValueError as error:
        return str(error)
    return ""


def all_refusals() -> list[str]:
    in_a_v = {"pp": 2, "pipeline_schedule": "fill-and-drain"}
    return [
        refusals(in_a_v, None),
        refusals(in_a_v, "shuffled"),
        refusals({"pp": 2, "vp": 2}, "fill-and-drain"),
        refusals({"pp": 2}, "halves"),
        refusals({"pp": 2, "vp": 2}, "two-ways"),
        refusals({"pp": 2}, "1f1b"),
        refusals({"pp": 1}, "1f1b") or refusals({"pp": 1}, "gpipe"),
    ]


def test_a_schedule_that_does_not_fit_the_model_is_refused_on_every_rank():
    for found in run_ranks(all_refusals, 2):
        words = [
            "built for schedule fill-and-drain, which places its stages as [[0, 3], [1, 2]]",
            "schedule shuffled places the model's stages as loop [[0, 2], [1, 3]], but the model",
            "schedule fill-and-drain places the model's stages as v [[0, 3], [1, 2]], but the",
            "schedule halves has work of the kind backward-input",
            "schedule two-ways runs 2 copies of the model against each other",
        ]
        for text, wanted in zip(found, words, strict=False):
            assert wanted in text
        assert found[5:] == ["", ""]


def test_names_of_schedules_that_do_not_fit_the_sizes_are_refused():
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'; known are no-pipelining"):
        get_forward_backward_func(2, None, "zigzag")
    for sizes, name in (((2, None), "interleaved"), ((2, 2), "1f1b"), ((2, None), "no-pipelining")):
        with pytest.raises(ValueError, match=f"{name} does not fit pp_size 2"):
            get_forward_backward_func(*sizes, name)


# -- A step that fails --


def fails_then_goes_on(name: str, pp: int) -> list:
    """A step fails on the last rank, then on the first; after each, a good step."""
    gpt = TinyGPT(**LAYERS, pp=pp, vp=2, pipeline_schedule=name)
    found = []
    for rank, number in ((pp - 1, 3), (0, 1)):
        calls = iter(range(100))

        def forward_step(data_iterator, model, rank=rank, number=number, calls=calls):
            if dist.get_rank() == rank and next(calls) == number:
                raise RuntimeError("planted")
            return gpt.forward_step(data_iterator, model)

        try:
            gpt.step(4, forward_step_func=forward_step)
        except (RuntimeError, ConnectionError) as error:
            found.append(type(error).__name__ + ("planted" in str(error)) * " planted")
        found.append([float(report["loss"]) for report in gpt.step(4)])
    return found


@pytest.mark.skipif(not has_shared_memory(), reason="gloo cannot tell a rank that another failed")
@pytest.mark.parametrize(("name", "pp"), [("fill-and-drain", 2), ("turned", 4)])
def test_a_good_step_follows_one_that_failed(name, pp):
    (serial,) = run_ranks(steps_of, 1, None, 4, {})
    good = pytest.approx(serial["losses"][:4], abs=1e-9, rel=0)
    ranks = run_ranks(fails_then_goes_on, pp, name, pp)
    for rank, found in enumerate(ranks):
        for failing, (error, losses) in zip((pp - 1, 0), (found[:2], found[2:]), strict=True):
            own = "RuntimeError planted"
            assert error == own if rank == failing else error == "ConnectionError planted"
            assert losses == [] or losses == good
    assert sum(bool(found[1]) for found in ranks) == 1


@register_order("by-chance")
def by_chance(rank):
    microbatches = list(range(rank.num_microbatches))
    random.Random(os.urandom(4)).shuffle(microbatches)
    for i in microbatches:
        yield rank.forward(i)
    for i in microbatches:
        yield rank.backward(i)


def by_chance_on_stage_0() -> list[list[float]]:
    gpt = TinyGPT(**LAYERS, pp=2, pipeline_schedule="by-chance")
    return [[float(report["loss"]) for report in gpt.step(12)] for _ in range(2)]


def test_an_order_that_is_another_one_on_each_rank_is_that_of_stage_0():
    """One rank plans for all, so what chance decides is decided once."""
    (serial,) = run_ranks(steps_of, 1, None, 12, {})
    last, good = (
        run_ranks(by_chance_on_stage_0, 2)[1],
        pytest.approx(serial["losses"][:12], abs=1e-9, rel=0),
    )
    assert last == [good, good]


def with_wrong_data() -> list[str]:
    gpt = TinyGPT(**LAYERS, pp=2, pipeline_schedule="fill-and-drain")
    found = []
    for chunks, data in (
        (gpt.chunks, None),
        (gpt.chunks, [iter(()), iter([])]),
        (gpt.chunks[:1], None),
    ):
        try:
            get_forward_backward_func(pipeline_schedule="fill-and-drain")(
                forward_step_func=gpt.forward_step,
                data_iterator=data,
                model=chunks,
                num_microbatches=2,
                seq_length=gpt.seq_length,
                micro_batch_size=gpt.micro_batch_size,
            )
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_data_that_does_not_fit_is_refused_or_missed():
    first, second = run_ranks(with_wrong_data, 2)
    for found in (first, second):
        assert "ValueError: the model is 2 chunks, but there are 1 data iterators" in found[0]
        assert "runs 2 chunks on each rank, but the model is 1" in found[2]
    assert first[1].startswith("StopIteration") and second[1].startswith("ConnectionError")


NO_ORDERS = {
    "returned Work": lambda rank: rank.forward(0),
    "returned None; it must yield": lambda rank: None,
    "must be a function of one argument, the rank": lambda: iter(()),
    "return for whole numbers, such as rank.forward(0)": lambda rank: [rank.forward(0.0)],
    "such as rank.forward(0)": lambda rank: [Work("forwards", 0)],
    "8 pieces": lambda rank: (rank.forward(0) for _ in range(10**9)),
}


@pytest.mark.parametrize("words", NO_ORDERS)
def test_what_is_no_order_is_refused(words):
    register_order("wrong")(NO_ORDERS[words])
    try:
        with pytest.raises(ValueError, match=re.escape(words.replace("8 pieces", "6 pieces"))):
            plan("wrong", 2, 2)
    finally:
        unregister("wrong")


def test_an_order_without_a_name_or_a_placement_is_refused():
    with pytest.raises(ValueError, match="the name is missing"):
        register_order(by_chance)
    for rule, words in (
        (V(2), "its placement is not a function of p and v"),
        (
            lambda p, v: [range(v)],
            "its placement is not a function of p and v, or fails for p = 2 and",
        ),
        (lambda p, v: [[0], [1]], "its placement rule returned"),
    ):
        register_order("wrong", placement=rule)(by_chance)
        try:
            with pytest.raises(ValueError, match=words):
                plan("wrong", 2, 2)
        finally:
            unregister("wrong")
