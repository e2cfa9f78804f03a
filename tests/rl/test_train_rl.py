"""Runs of `train_rl`: rollouts that no layout changes, inner steps, checkpoints, repeated steps."""

import contextlib
import io
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minimegatron import train_rl
from minimegatron.core import parallel_state
from minimegatron.core.inference.communication_utils import broadcast_from_last_pipeline_stage
from minimegatron.core.rerun import current
from minimegatron.core.rerun_state_machine import RerunMode, RerunStateMachine
from minimegatron.rl import grpo_data
from minimegatron.rl.rl_arguments import add_rl_arguments
from minimegatron.rl.rollout import draw
from minimegatron.rl.tasks import sort_digits
from minimegatron.training.arguments import parse_args
from tests.ranks import run_ranks
from tests.rl.short_rl_runs import LAYOUTS, MODEL, leave, run

STEPS, PER_ROLLOUT = 6, 4
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ONE_ORDER = "--untie-embeddings-and-output-weights --clip-grad 0"
"""Sums that stages make of parts are the embedding's gradient and the norm; without them every number
is computed by one rank, in one order."""


def runs(jobs):
    """In a rank: what each of several runs found out, by name."""
    return {name: run(*how) for name, how in jobs.items()}


@pytest.fixture(scope="module")
def alone():
    jobs = {
        "float32": ("", STEPS),
        "float64": ("", STEPS, True),
        "one order": (ONE_ORDER, STEPS),
    }
    return run_ranks(runs, 1, jobs)[0]


def largest_difference(rows, wanted, name):
    return float((rows[name] - wanted[name]).abs().max())


def test_the_first_inner_step_has_ratio_one_and_clips_nothing(alone):
    for kind in ("float32", "float64"):
        for number, found in enumerate(alone[kind]["figures"]):
            outside = found["rl/truncated_from_above"] + found["rl/truncated_from_below"]
            if number % PER_ROLLOUT == 0:
                assert found["rl/pi_over_pi_old"] == 1.0 and outside == 0.0
            else:
                assert found["rl/pi_over_pi_old"] != 1.0 and outside > 0.0
        # Before the first update the model is its own reference; later it is not.
        assert alone[kind]["figures"][0]["rl/kl_term"] == 0.0
        assert alone[kind]["figures"][PER_ROLLOUT]["rl/kl_term"] > 0.0


def test_scores_are_what_tokens_were_drawn_with(alone):
    for kind, bound in (("float32", 5e-6), ("float64", 1e-12)):
        rows = alone[kind]["rows"]
        is_answer = rows["loss_mask"][:, 1:] > 0
        difference = (rows["old_logprobs"] - rows["inference_logprobs"]).abs()[is_answer]
        assert is_answer.any(dim=1).all() and difference.max() < bound
        assert not rows["inference_logprobs"][~is_answer].any()


def test_two_stages_repeat_one_process_to_the_bit(alone):
    found, _ = run_ranks(runs, 2, {"p=2": (f"{LAYOUTS['p=2']} {ONE_ORDER}", STEPS)})
    for name, rows in found["p=2"]["rows"].items():
        assert torch.equal(rows, alone["one order"]["rows"][name]), name
    for here, there in zip(found["p=2"]["figures"], alone["one order"]["figures"], strict=True):
        # The norm is a sum of the stages' parts; it changes nothing here.
        assert here | {"norm": 0} == there | {"norm": 0}


def test_no_layout_changes_a_rollout_or_what_is_learned(alone):
    layouts = {
        name: (flags, STEPS, True)
        for name, flags in (LAYOUTS | {"ZeRO-1": ZERO1}).items()
        if name != "alone"
    }
    found, _ = run_ranks(runs, 2, layouts, timeout=120)
    for layout, result in found.items():
        agree(result, alone["float64"], layout)


def agree(result, wanted, name):
    """The last rollout comes after four updates: tokens are equal, scores to 1e-10."""
    for field, rows in result["rows"].items():
        difference = largest_difference({field: rows}, wanted["rows"], field)
        assert difference <= (0 if field in ("tokens", "loss_mask") else 1e-10), (name, field)
    for here, there in zip(result["figures"][::-1], wanted["figures"][::-1], strict=False):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-6), name  # reported in float32


def test_a_run_goes_on_within_a_rollout(alone, tmp_path):
    """It ends after 3 of a rollout's 4 steps; the next rollout shows what weights came of it."""
    folders = {"float32": tmp_path / "32", "float64": tmp_path / "64"}
    jobs = {}
    for kind, folder in folders.items():
        jobs[f"{kind}, first"] = (f"--save {folder}", 3, kind == "float64")
        jobs[f"{kind}, rest"] = (f"--load {folder}", STEPS, kind == "float64")
    (found,) = run_ranks(runs, 1, jobs)
    for kind in folders:
        first, rest = found[f"{kind}, first"], found[f"{kind}, rest"]
        assert rest["began"] == 3
        assert first["figures"] + rest["figures"] == alone[kind]["figures"]  # bit for bit
        for name, rows in rest["rows"].items():
            assert torch.equal(rows, alone[kind]["rows"][name]), name
    with pytest.raises(
        ValueError, match=r"--grpo-group-size is 8, but 4 in .*; use 4, or --finetune"
    ):
        argv = [*MODEL.split(), "--load", str(folders["float32"]), "--grpo-group-size", "8"]
        parse_args(add_rl_arguments, args_defaults=train_rl.DEFAULTS, argv=argv, environ={})
    jobs = {
        name: (f"{LAYOUTS[name]} --load {folders['float64']}", STEPS, True)
        for name in ("d=2", "p=2, v=2", "t=2", "c=2")
    }
    found, _ = run_ranks(runs, 2, jobs, timeout=120)
    for layout, result in found.items():
        assert result["began"] == 3
        agree(result, alone["float64"], layout)


# -- The program itself --


def programs(folder):
    """In a rank: `main` in one go, and with an end after 3 steps; what it printed here."""
    said = []
    for name, more in (("whole", ""), ("parts", "--exit-interval 3"), ("parts", "")):
        sys.argv = ["train_rl", *MODEL.split(), *LAYOUTS["p=2, v=2"].split(), *more.split()]
        sys.argv += ["--train-iters", "6", "--log-interval", "1", "--tensorboard-dir"]
        sys.argv += [f"{folder}/{name}", "--save", f"{folder}/{name}", "--load", f"{folder}/{name}"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train_rl.main()
        said.append(printed.getvalue())
        leave()
    return said


def test_the_program_ends_and_goes_on_with_its_curves(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is missing")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (whole, first, rest), _ = run_ranks(programs, 2, str(tmp_path), timeout=120)
    assert "exiting after iteration 3" in first and "loaded checkpoint of iteration 3" in rest
    line = r"iteration 6/6 \| lm loss .*rl/kl_term .* reward \d.* \| exact .* \| held-out \d"
    assert re.search(line, whole) and re.search(line, rest)
    for text in (whole, rest):
        assert re.search(
            r"exact answers \d\.\d+ \(mean of the last [12] rollouts\), held-out", text
        )
    found = {}
    for name in ("whole", "parts"):
        curves = EventAccumulator(str(tmp_path / name))
        curves.Reload()
        found[name] = {
            tag: [(event.step, event.value) for event in curves.Scalars(tag)]
            for tag in curves.Tags()["scalars"]
            if tag != "tokens/s"
        }
    assert {"lm loss", "rl/kl_term", "reward", "exact", "held-out"} <= found["whole"].keys()
    assert [step for step, _ in found["whole"]["reward"]] == [1, 2, 3, 4, 5, 6]
    assert found["parts"] == found["whole"]


# -- Repeated steps --


def run_twice(flags):
    """In a rank: figures of a run whose steps are repeated, and how many rollouts it made."""
    with mock.patch.object(
        grpo_data, "generate_answers", wraps=grpo_data.generate_answers
    ) as rollout:
        plain = run(flags, STEPS)["figures"]
        once = rollout.call_count
        repeated = run(f"{flags} --rerun-mode report_stats", STEPS)["figures"]
        return plain, repeated, once, rollout.call_count - once


@pytest.mark.parametrize("layout", ["p=2", "p=2, v=2"])
def test_a_repeated_step_reads_the_same_rows(layout):
    for plain, repeated, once, twice in run_ranks(run_twice, 2, LAYOUTS[layout]):
        assert repeated == plain
        assert once == twice == 2  # at iterations 0 and 4


# -- What is rewarded --


def learned_from(flags):
    """In a rank: for each of several settings, what a first rollout says is to be learned."""
    found = {}
    for name, more in flags.items():
        result = run(more, 1)
        found[name] = result["rows"] | {"figures": result["figures"]}
    return found


def test_advantages_rewards_by_lot_and_groups_that_say_nothing():
    flags = {
        "plain": "",
        "shuffled": "--rl-shuffle-rewards",
        "cool": "--rl-default-temperature 0.3",
        "filtered": "--rl-default-temperature 0.3 --grpo-filter-groups-with-same-reward",
        "cold": "--rl-default-temperature 0.005",
    }
    (found,) = run_ranks(learned_from, 1, flags)
    task, plain, cool = sort_digits(), found["plain"], found["cool"]
    for rows in (plain, cool):
        prompts, answers = prompts_and_answers(rows)
        rewards = torch.tensor([task.reward(*pair) for pair in zip(prompts, answers, strict=True)])
        groups = rewards.view(4, 4)
        means = groups.mean(1, keepdim=True)
        deviations = groups.std(1, keepdim=True, correction=0)
        wanted = ((groups - means) / (deviations + 1e-4)).flatten()
        torch.testing.assert_close(rows["advantages"], wanted, rtol=1e-4, atol=1e-4)
        assert rewards.any() and rows["advantages"].any()
        assert prompts[::4] == prompts[3::4]
        assert not any(task.end in answer[:-1] for answer in answers)
    # By lot: the same answers, other advantages.
    assert torch.equal(found["shuffled"]["tokens"], plain["tokens"])
    assert not torch.equal(found["shuffled"]["advantages"], plain["advantages"])
    # Groups that say nothing are rows without a token, where they lie.
    says_nothing = (groups == groups[:, :1]).all(dim=1).repeat_interleave(4)
    kept = found["filtered"]["loss_mask"]
    assert says_nothing.any() and not says_nothing.all()
    assert not kept[says_nothing].any()
    assert torch.equal(kept[~says_nothing], cool["loss_mask"][~says_nothing])
    # Cold, a model says the same to the same.
    for group in found["cold"]["tokens"].view(4, 4, -1):
        assert (group == group[0]).all(dim=1).float().mean() > 0.7


def prompts_and_answers(rows):
    answers = [
        tuple(tokens[mask > 0].tolist())
        for tokens, mask in zip(rows["tokens"], rows["loss_mask"], strict=True)
    ]
    return [tuple(tokens[:4].tolist()) for tokens in rows["tokens"]], answers


def tokens_of(flags):
    return [run(more, 1)["rows"]["tokens"] for more in flags]


def test_two_copies_draw_what_one_does():
    """With answers to several prompts on each copy, and with a group that lies on both."""
    flags = [
        "--grpo-prompts-per-step 2 --grpo-group-size 4",
        "--grpo-prompts-per-step 1 --grpo-group-size 8",
    ]
    (alone,), (one, other) = (run_ranks(tokens_of, num_ranks, flags) for num_ranks in (1, 2))
    for wanted, *found in zip(alone, one, other, strict=True):
        assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted)
        assert len({tuple(row) for row in wanted.tolist()}) > 4


def kl_of_runs(flags):
    return [run(more, 8)["figures"][-1]["rl/kl_term"] for more in flags]


def test_the_distance_to_the_reference_falls_with_beta():
    flags = [f"--grpo-kl-beta {beta} --lr 3e-3" for beta in (0.0, 0.3, 3.0)]
    (found,) = run_ranks(kl_of_runs, 1, flags)
    assert found[0] > found[1] > found[2] > 0


def test_what_is_drawn_has_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(4000, 4)
    uniforms = torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shares = torch.bincount(draw(logits, uniforms), minlength=4) / 4000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.02, rtol=0)
    assert shares[2] == 0
    edges = torch.tensor([0.0, 1 - 2**-53]).double()
    assert draw(logits[:2], edges).tolist() == [0, 3]


def test_each_chunk_has_an_iterator_that_begins_again():
    data = grpo_data.GrpoData()
    names = ("advantages", "old_logprobs", "loss_mask", "ref_logprobs", "inference_logprobs")
    data.rows = {name: torch.zeros(2, 6, 1) for name in names}
    data.rows["tokens"] = torch.arange(12).view(2, 6, 1)
    args = SimpleNamespace(
        grpo_prompts_per_step=3,
        grpo_group_size=4,
        global_batch_size=6,
        grpo_iterations=2,
        micro_batch_size=2,
    )
    size = "get_virtual_pipeline_model_parallel_world_size"
    with (
        mock.patch.object(grpo_data, "get_args", lambda: args),
        mock.patch.object(parallel_state, size, lambda: 2),
    ):
        first, second = data([None, None], None, 3)  # the second batch, for the second time
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    with mock.patch.object(current, "machine", machine):
        for iterator in (first, second):
            read = [[next(iterator)[0].flatten().tolist() for _ in range(3)]]
            with pytest.raises(StopIteration):
                next(iterator)
            iterator.rewind()
            read.append([next(iterator)[0].flatten().tolist() for _ in range(3)])
            assert read == [[[6, 7], [8, 9], [10, 11]]] * 2


@pytest.mark.parametrize(("smallest", "copies"), [(1, 1), (2, 2), (3, 1)])
def test_held_out_prompts_are_asked_in_whole_microbatches(smallest, copies):
    """43 of them, which nothing divides; each copy has equally many, and the last ones do not count."""
    args = SimpleNamespace(rl_task="sort_digits", micro_batch_size=4, data_parallel_size=copies)
    asked = []

    def answers(model, prompts, task, uniforms):
        assert uniforms is None
        asked.append(prompts)

    def verdict(task, answers, mine, num_rows):
        return None, (torch.arange(num_rows) < len(task.held_out)).double()

    with (
        mock.patch.object(grpo_data, "get_args", lambda: args),
        mock.patch.object(grpo_data, "smallest_num_microbatches", lambda: smallest),
        mock.patch.object(grpo_data, "generate_answers", answers),
        mock.patch.object(grpo_data, "judge", verdict),
        mock.patch.object(parallel_state, "get_data_parallel_rank", lambda: copies - 1),
    ):
        assert grpo_data.GrpoData()._ask_held_out([]) == 1.0
    (prompts,) = asked
    assert len(prompts) % (4 * smallest) == 0 and len(prompts) * copies >= 43
    assert set(prompts) <= set(sort_digits().held_out)


# -- From the last stage to all --


def on_all_stages(pp_size):
    parallel_state.initialize_model_parallel(1, pp_size)
    try:
        rank = dist.get_rank()
        mine = torch.arange(6.0).view(3, 2).t() if rank == pp_size - 1 else None
        group = parallel_state.get_pipeline_model_parallel_group()
        found = [
            broadcast_from_last_pipeline_stage((2, 3), torch.float32, mine),
            broadcast_from_last_pipeline_stage((2, 3), torch.float32, mine, group),
        ]
        refused = ""
        if rank == pp_size - 1:
            try:
                broadcast_from_last_pipeline_stage((3, 2), torch.float64, mine)
            except ValueError as error:
                refused = str(error)
        return found, refused
    finally:
        parallel_state.destroy_model_parallel()


def test_the_last_stages_tensor_on_all_stages():
    per_rank = run_ranks(on_all_stages, 3, 3)
    for found, _ in per_rank:
        for tensor in found:
            assert tensor.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert "has [2, 3] of torch.float32" in per_rank[-1][1]
    assert "expect [3, 2] of torch.float64" in per_rank[-1][1]
