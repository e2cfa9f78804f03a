"""What else ranks that share sequences touch: the loss contract row by row, runs, checkpoints."""

import contextlib
import io
from functools import partial

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.utils import get_batch_on_this_cp_rank, unwrap_model
from minimegatron.training import failures, model_setup
from minimegatron.training.random_state import rng_layout
from minimegatron.training.utils import (
    average_losses_across_data_parallel_group,
    sum_over_microbatches,
)
from tests.fake_transport import FakeGroup
from tests.figures import figure
from tests.parity import MICRO_BATCH, SEQ, Case, batches, build, run_step
from tests.ranks import run_ranks
from tests.training.short_runs import PP2, TP2, ZERO1, run
from tests.training.test_expert_checkpoints import from_one_to_each

CP2 = "--context-parallel-size 2"

# -- The loss contract --


def tokens_and_sum(mask, num_of_all, output):
    total, num_tokens = (output * mask).sum(), mask.sum().int()
    return total, num_tokens, {"loss": total.detach().clone()}


def share_of_the_mean(mask, num_of_all, output):
    loss = (output * mask).sum() / num_of_all
    return loss, {"loss": loss.detach().clone()}


def local_mean(mask, num_of_all, output):
    loss = (output * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"loss": loss.detach().clone()}


def step_with(loss, group, data_iterator, model):
    batch = next(data_iterator)
    num_of_all = batch["mask"].sum()
    batch |= {"positions": torch.arange(SEQ).expand(MICRO_BATCH, SEQ)}
    batch = get_batch_on_this_cp_rank(batch, group)
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, partial(loss, batch["mask"], num_of_all)


def gradients_of(loss, mask: str, per_token: bool, groups=None) -> dict[str, torch.Tensor]:
    """Of a step over two microbatches; without groups, in one process."""
    case = Case(cp=1 if groups is None else 2, M=2, num_layers=1, per_token=per_token, llama=True)
    if groups is None:
        names = ProcessGroupCollection.__dataclass_fields__
        groups = ProcessGroupCollection(**{name: FakeGroup() for name in names})
    data = batches(2)
    for batch in data:
        if mask != "uneven":
            batch["mask"] = torch.ones_like(batch["mask"])
        if mask == "padded":
            batch["mask"][:, 2:] = 0.0  # rank 1 of 2 has tokens 2 to 5
    chunks, _ = build(case, groups)
    step = partial(step_with, loss, groups.cp)
    run_step(case, groups, chunks, [iter(data)], False, step_func=step)
    params = named_global_parameters(unwrap_model(chunks[0]))
    return {name: param.main_grad.clone() for name, param in params}


def off(found: dict, wanted: dict, factor: float = 1.0) -> float:
    """The largest difference, relative to the largest gradient."""
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    assert all(tensor.isfinite().all() for tensor in found.values())
    return max(
        (found[name] - factor * tensor).abs().max().item() / largest
        for name, tensor in wanted.items()
    )


def loss_table() -> dict[tuple, float]:
    """(row, mask) -> how far the gradient is from one process's; row 4 also from 2 x row 3's."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    found: dict[tuple, float] = {}
    for mask in ("uneven", "even", "padded"):
        tokens = gradients_of(tokens_and_sum, mask, per_token=True)
        mean = gradients_of(tokens_and_sum, mask, per_token=False)
        rows = {
            1: (tokens_and_sum, True, tokens),
            2: (share_of_the_mean, False, mean),
            3: (tokens_and_sum, False, mean),
            4: (local_mean, False, mean),
        }
        of_row = {}
        for row, (loss, per_token, wanted) in rows.items():
            of_row[row] = gradients_of(loss, mask, per_token, groups)
            found[row, mask] = off(of_row[row], wanted)
        found["4 = 2 x 3", mask] = off(of_row[4], of_row[3], 2.0)
        found["4 = 2 x one process", mask] = off(of_row[4], mean, 2.0)
    parallel_state.destroy_model_parallel()
    return found


# -- Runs from the command line's flags --


def runs(folder: str) -> dict:
    shape = "--position-embedding-type rope --seed 5"
    plain = f"{shape} --attention-dropout 0 --hidden-dropout 0"
    losses = {
        name: run(f"{plain} {flags}", 2, double=True)["losses"]
        for name, flags in {
            "copies": "",
            "a ring": CP2,
            "a gather": f"{CP2} --cp-comm-type all_gather",
            "a way per layer": f"{CP2} --cp-comm-type p2p a2a all_gather p2p",
            "tokens counted": f"{CP2} --calculate-per-token-loss",
        }.items()
    }
    float32 = [run(f"{plain} {flags}", 2)["losses"] for flags in ("", f"{CP2} --DDP-impl torch")]
    random = f"{shape} {CP2} --attention-dropout 0.2 --hidden-dropout 0.1"
    whole = run(f"{random} --recompute-granularity selective", 4)["losses"]
    first = run(f"{random} --save {folder}", 2)["losses"]
    second = run(f"{random} --load {folder}", 4)["losses"]
    other = run(f"{shape} {ZERO1} --load {folder} --attention-dropout 0.2", 3)
    return {
        "losses": losses,
        "float32": float32,
        "whole": whole,
        "resumed": first + second,
        "at c = 1": (other["began"], len(other["losses"])),
    }


# -- Reports --


def reports() -> dict:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    rank = dist.get_rank()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model_setup._print_number_of_parameters([torch.nn.Linear(2, 2)])
    told = {
        "average": average_losses_across_data_parallel_group([torch.tensor(1.0 + 2 * rank)]).item(),
        "evaluated": sum_over_microbatches([{"lm loss": torch.tensor([1.0 + rank, 5.0])}]),
        "place": str(failures.identify()),
        "layouts": (rng_layout(False), rng_layout(True)),
        "printed": printed.getvalue().count("number of parameters"),
    }
    parallel_state.destroy_model_parallel()
    return told


def on_two_ranks(folder: str) -> tuple[dict, dict, dict]:
    return loss_table(), runs(folder), reports()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("saved")), timeout=200)


@pytest.mark.parametrize("mask", ["uneven", "even", "padded"])
def test_rows_one_and_two_of_the_contract_equal_one_process(seen, mask):
    for table, _, _ in seen:
        assert table[1, mask] <= 1e-10 and table[2, mask] <= 1e-10, table


def test_row_three_is_another_mean_unless_counts_are_equal(seen):
    table = seen[0][0]
    figure(f"mean of local means, off by {table[3, 'uneven']:.2g} of the largest gradient")
    assert table[3, "even"] <= 1e-10
    assert table[3, "uneven"] > 1e-2 < table[3, "padded"]


def test_row_four_is_twice_as_large(seen):
    for table, _, _ in seen:
        assert all(table["4 = 2 x 3", mask] <= 1e-10 for mask in ("uneven", "even", "padded"))
        assert table["4 = 2 x one process", "even"] <= 1e-10 < table[4, "even"]


def test_runs_have_the_losses_of_copies(seen):
    for _, told, _ in seen:
        wanted = told["losses"].pop("copies")
        for name, losses in told["losses"].items():
            assert losses == pytest.approx(wanted, abs=1e-10), name
        alone, by_torch = told["float32"]
        assert by_torch == pytest.approx(alone, abs=1e-5)


def test_a_resumed_run_with_dropout_is_bit_identical(seen):
    """Also: recompute, with which the whole run was made, drops the same."""
    for _, told, _ in seen:
        assert told["resumed"] == told["whole"]
        assert told["at c = 1"] == (2, 1)


def test_reports_know_context_ranks(seen):
    told = [reports for _, _, reports in seen]
    assert [entry["average"] for entry in told] == [2.0, 2.0]
    assert [entry["printed"] for entry in told] == [1, 0]
    assert [entry["evaluated"]["lm loss"].tolist() for entry in told] == [[3.0, 10.0]] * 2
    for rank, entry in enumerate(told):
        assert entry["place"] == f"rank {rank} (stage 0/1, tp 0, dp 0, cp {rank})"
        assert [layout["cp"] for layout in entry["layouts"]] == [2, 2]


# -- Checkpoints over layouts --

SAME = {"num_layers": 2, "llama": True, "per_token": True}
SAVED = Case(cp=2, dp=2, M=2, dist_opt=True, **SAME)
LAYOUTS = [
    Case(cp=4, M=4, dist_opt=True, comm="a2a", **SAME),
    Case(tp=2, cp=2, sp=True, M=4, dist_opt=True, **SAME),
    Case(pp=2, cp=2, M=4, **SAME),
    Case(tp=2, dp=2, M=2, dist_opt=True, **SAME),
]


def from_two_context_ranks(folder: str) -> None:
    from_one_to_each(SAVED, LAYOUTS, folder)


def random_states(folder: str) -> list[list[float]]:
    """Losses with dropout: of 3 steps, and of 1 + 2 with a checkpoint between; c = 2, with others."""
    found = []
    for number, flags in enumerate(
        (f"{TP2} --sequence-parallel", f"{PP2} --data-parallel-random-init")
    ):
        flags = f"{CP2} {flags} --attention-dropout 0.3"
        place = f"{folder}/random-{number}"
        whole = run(flags, 3)["losses"]
        parts = (
            run(f"{flags} --save {place}", 1)["losses"]
            + run(f"{flags} --load {place}", 3)["losses"]
        )
        found.append([whole, parts])
    return found


def on_four_ranks(folder: str) -> list:
    from_two_context_ranks(folder)
    parallel_state.destroy_model_parallel()
    return random_states(folder)


def test_saved_by_one_layout_and_loaded_by_others(tmp_path):
    for of_rank in run_ranks(on_four_ranks, 4, str(tmp_path), timeout=200):
        for whole, parts in of_rank:
            assert whole == parts
