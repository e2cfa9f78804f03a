"""Combined 1F1B: its order and messages on strict streams, and on real ranks the ordinary numbers.

What its nodes do is in `tests/core/models/test_schedule_plan.py`.
"""

import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state, tracing
from minimegatron.core.pipeline_parallel import combined_1f1b
from minimegatron.core.pipeline_parallel.schedule_table import get_schedule_table
from minimegatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.core.pipeline_parallel import fake_step
from tests.core.pipeline_parallel.fake_step import (
    Case,
    computations,
    done_by,
    planned_for,
    run_case,
)
from tests.core.pipeline_parallel.test_order import legal_groups, variants
from tests.fake_streams import Post
from tests.figures import figure
from tests.parity import Case as Layout
from tests.parity import batches, build, reference, run_cases, train_steps
from tests.ranks import run_ranks

# -- Order and messages, without processes --

SIZES = [(1, M, None, None) for M in (1, 2, 4)] + [
    (p, M, v, G) for p in (2, 3, 4) for v in (1, 2, 3) for M in (3, 5) for G in legal_groups(p, M)
]


def combined(p: int, M: int, v: int | None = None, G: int | None = None, **options) -> Case:
    return Case(p, M, v, G, combined=True, **options)


def expected_order(case: Case, rank: int) -> list[tuple]:
    """One more forward warms up than usual; then forward and backward in turn; then the rest."""
    p, M, v = case.p, case.M, case.v or 1
    table = [(i, 0) for i in range(M)] if case.v is None else get_schedule_table(M, v, case.G)
    num_warmup = 1 if p == 1 else 2 * (p - rank - 1) + (v - 1) * case.G + 1
    num_warmup = min(num_warmup, len(table))
    forwards = [("F", microbatch, chunk * p + rank) for microbatch, chunk in table]
    if case.forward_only:
        return forwards
    backwards = [("B", microbatch, (v - 1 - chunk) * p + rank) for microbatch, chunk in table]
    order = forwards[:num_warmup]
    for i in range(num_warmup, len(table)):
        order += [forwards[i], backwards[i - num_warmup]]
    return order + backwards[len(table) - num_warmup :]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_order_and_the_messages_are_those_of_the_plan(sizes):
    """On streams as strict as NCCL's, with each choice of communicators; with freed outputs."""
    for case in variants(combined(*sizes)):
        case = replace(case, combined=True)
        reports, network, machine = run_case(case)
        step = case.plan()
        for rank in range(case.p):
            done = computations(network.log[rank])
            assert done == expected_order(case, rank), f"rank {rank} of {case}"
            assert done_by(rank, network, machine) == planned_for(rank, step), f"{rank} of {case}"
        assert [report["microbatch"] for report in reports[-1]] == list(range(case.M))


def test_no_pair_holds_one_microbatch_of_one_chunk_twice():
    for sizes in SIZES:
        case = combined(*sizes, batched=False)
        if case.v is None:
            continue
        for rank in range(case.p):
            done = expected_order(case, rank)
            backwards = [i for i, work in enumerate(done) if work[0] == "B"]
            pairs = [(done[i - 1], done[i]) for i in backwards if done[i - 1][0] == "F"]
            assert all(f[1:] != b[1:] for f, b in pairs), f"rank {rank} of {case}"


def test_messages_follow_the_whole_pair():
    """Both at its end, the activation's first; then nothing of the next step has begun."""
    _, network, _ = run_case(combined(2, 4, 2, 2, batched=False, overlap=True))
    log = network.log[0]
    work = [i for i, entry in enumerate(log) if not isinstance(entry, Post)]
    at = next(i for i in work if log[i][0] == "B")
    assert log[at - 1][0] == "F"  # no message between the two
    sent = [e.parts[0].payload for e in log[at + 1 :] if isinstance(e, Post) and e.parts[0].is_send]
    assert sent[:2] == ["activation", "gradient"]


def test_one_more_forward_warms_up():
    for overlap, wanted in ((False, [4, 2]), (True, [5, 3])):
        counts = []
        for rank in range(2):
            p2p = fake_communicator(rank)
            counts.append(get_pp_rank_microbatches(4, 2, 2, False, overlap, p2p).num_warmup)
        assert counts == wanted


def fake_communicator(rank: int):
    class Communicator:
        pp_group = fake_step.FakeGroup(rank, 2)
        virtual_pipeline_model_parallel_size = 2

    return Communicator()


def test_each_chunk_s_gradients_are_launched_as_in_an_ordinary_step(monkeypatch):
    """Chunk 0 too: its number is no yes or no."""
    launched: list[tuple] = []

    def launches_of(case):
        launched.clear()
        config = Case.config

        def with_hooks(self):
            found = config(self)
            found.grad_sync_func = [partial(launch, 0), partial(launch, 1)]
            return found

        def launch(chunk, params):
            launched.append(chunk)

        monkeypatch.setattr(Case, "config", with_hooks)
        run_case(case)
        monkeypatch.undo()
        return list(launched)

    ordinary = launches_of(Case(2, 4, 2, 2, batched=False))
    assert launches_of(combined(2, 4, 2, 2, batched=False)) == ordinary
    assert set(ordinary) == {0, 1}


def test_a_backward_of_chunk_0_is_counted_before_the_step_ends(monkeypatch):
    """What follows a chunk's last backward does so at once, not when all ranks are done."""
    seen = []
    finish = combined_1f1b.CombinedSteps._finish_backward

    def noting(run, k):
        finish(run, k)
        seen.append((k, run.order.model_chunk_id(k, forward=False)))

    monkeypatch.setattr(combined_1f1b.CombinedSteps, "_finish_backward", noting)
    run_case(combined(2, 2, 2, 2, batched=False))
    assert {chunk for _, chunk in seen} == {0, 1}
    assert len(seen) % (2 * 2 * 2) == 0


def test_functions_take_megatron_s_arguments():
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return " ".join(x.name for x in parameters if x.kind is not x.KEYWORD_ONLY)

    assert names(combined_1f1b.combined_1f1b_schedule_for_no_pipelining) == (
        "forward_step_func data_iterator model num_microbatches input_tensor output_tensor_grad "
        "forward_data_store config collect_non_loss_data first_val_step forward_only no_sync_func "
        "total_num_tokens check_first_val_step"
    )
    assert names(combined_1f1b.combined_1f1b_schedule_for_interleaved_pipelining) == (
        "config forward_step_func data_iterator model num_microbatches forward_data_store "
        "forward_step_helper_preprocess forward_step_helper_postprocess "
        "backward_step_helper_preprocess backward_step_helper_postprocess "
        "get_microbatch_id_in_model_chunk get_model_chunk_id check_first_val_step "
        "is_first_microbatch_for_model_chunk collect_non_loss_data f_virtual_microbatch_id "
        "b_virtual_microbatch_id pre_forward pre_backward post_forward post_backward"
    )
    assert names(combined_1f1b.combined_forward_backward_step) == (
        "forward_step_func data_iterator f_model num_microbatches input_tensor "
        "forward_data_store b_model b_input_tensor b_output_tensor b_output_tensor_grad config "
        "f_model_chunk_id pre_forward pre_backward post_forward post_backward "
        "collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch "
        "current_microbatch"
    )


# -- Real ranks: equal to one process --

EXPERTS = {"experts": 4, "ep": 2, "combined": True}
OVERLAP = {"overlap_grad_reduce": True, "dist_opt": True, "overlap_param_gather": True}
LATER = {"delay_wgrad": True, "defer_embedding": True}
TWO_CHUNKS = {"pp": 2, "vp": 2, "G": 2, "batched": False, **EXPERTS}

ON_TWO = {
    "experts over data": Layout(dp=2, M=1, num_layers=3, moe_freq=(1, 0, 1), **OVERLAP, **EXPERTS),
    "one expert each, deferred, scaled, evaluated": Layout(
        dp=2, M=3, num_layers=2, overlap_grad_reduce=True, loss_scale=4.0, evaluates=True,
        balance="bias", **LATER, **{**EXPERTS, "experts": 2},
    ),
    "experts over tensor ranks": Layout(
        tp=2, sp=True, M=3, num_layers=2, llama=True, shared=True, balance="two and z",
        per_token=True, recompute="selective", **LATER, **EXPERTS,
    ),
}  # fmt: skip
ON_FOUR = {
    "overlapped messages, unequal chunks": Layout(
        **{**TWO_CHUNKS, "G": 3}, dp=2, M=3, overlap=True, num_layers=5, layout="Et|ttt|t|L",
        moe_freq=(1, 1, 0, 1, 1), deallocate=True,
    ),
    "aligned, sharded": Layout(
        **TWO_CHUNKS, dp=2, deallocate=True, align_grad_reduce=True, align_param_gather=True,
        balance="seq", **OVERLAP,
    ),
    "tensor ranks, delayed, scaled, evaluated": Layout(
        **TWO_CHUNKS, tp=2, sp=True, overlap=True, delay_wgrad=True, overlap_grad_reduce=True,
        num_layers=4, moe_freq=(1, 0, 0, 1), evaluates=True, loss_scale=2.0,
    ),
}  # fmt: skip


def order_of_collectives(case: Layout) -> list[tuple]:
    """In a rank: (what, layer, microbatch, chunk) of the all-to-alls of one step, and of the waits."""
    seen: list[tuple] = []
    node: list[tuple] = [()]

    class Watch:
        def start(self, call):
            about = call.attributes
            if call.name == "layer-node":
                keys = ("direction", "node", "layer", "microbatch", "chunk")
                node[0] = tuple(about[key] for key in keys)
            elif call.name == "all-to-all":
                seen.append(("start", *node[0]))
            elif call.name == "collective-wait" and about["collective"] == "all-to-all":
                seen.append(("wait",))

        def stop(self, call):
            pass

    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks, optimizer = build(case, groups)
    watch = Watch()
    tracing.add_observer(watch)
    list(train_steps(case, chunks, optimizer, groups, batches(case.M * case.dp), num_steps=1))
    tracing.remove_observer(watch)
    return seen


def run_two(work: list) -> tuple[list, list]:
    """In a rank of two."""
    results = run_cases(work)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    order = order_of_collectives(Layout(dp=2, M=2, num_layers=2, **EXPERTS))
    assert dist.get_world_size() == 2 and torch.is_grad_enabled()
    return results, order


def check(results: list, number: int) -> None:
    problems = [problem for rank in results for *_, found in rank for problem in found]
    assert problems == []
    compared = sum(count for rank in results for _, count, _, _ in rank)
    worst = max(worst for rank in results for _, _, worst, _ in rank)
    figure(f"{number} combined cases, {compared} tensors, worst difference {worst:.1e}")
    assert compared > 20 * number


def test_two_ranks_equal_one_process_and_start_all_to_alls_in_one_order(tmp_path):
    work = [(case, reference(case.serial(), tmp_path)) for case in ON_TWO.values()]
    ranks = run_ranks(run_two, 2, work, timeout=120)
    check([results for results, _ in ranks], len(ON_TWO))
    first, second = (order for _, order in ranks)
    assert first == second
    starts = [event[1:3] for event in first if event[0] == "start"]
    # A dispatch is two: tokens and their probabilities.
    forward = [("forward", "dispatch")] * 2 + [("forward", "combine")]
    backward = [("backward", "combine")] + [("backward", "dispatch")] * 2
    pair = [backward[0], *forward[:2], *backward[1:], forward[2]]
    assert starts == 2 * forward + 2 * pair + 2 * backward
    assert [event[0] for event in first].count("wait") == len(starts)


def test_four_ranks_equal_one_process(tmp_path):
    work = [(case, reference(case.serial(), tmp_path)) for case in ON_FOUR.values()]
    check(run_ranks(run_cases, 4, work, timeout=120), len(ON_FOUR))
