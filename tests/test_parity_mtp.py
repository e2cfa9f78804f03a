"""With further tokens too, parallel equals serial: losses, raw gradients, weights after three steps.

`core/transformer/test_multi_token_prediction.py` shows that the one process is right. What concerns
ranks that share sequences is also in `test_parity_context.py`.
"""

import pytest
import torch

from minimegatron.core.orders.orders import register_order
from minimegatron.core.orders.placement import V
from minimegatron.training.tiny_gpt import TinyGPT
from tests.parity import Case
from tests.ranks import run_ranks
from tests.test_parity import check

RING = {"pp": 2, "vp": 2, "G": 2, "M": 2, "batched": False, "overlap": True, "mtp": 1}
ZERO1 = {"dist_opt": True, "overlap_grad_reduce": True, "overlap_param_gather": True}

NAMED_CASES = {
    "two stages": Case(pp=2, M=3, mtp=2, deallocate=True, weights=True, fails=True),
    "two stages, untied": Case(pp=2, M=2, mtp=1, llama=True, frozen="embedding"),
    "chunks that overlap": Case(**RING),
    "beside the last layer of a layout": Case(
        pp=2, M=3, mtp=1, num_layers=4, layout="Ettt|tmL", deallocate=True, per_token=True
    ),
    "three copies of the embedding": Case(
        pp=3, M=3, mtp=1, num_layers=2, layout="Et|tm|L", deallocate=True
    ),
    "two copies, none at the loss": Case(
        pp=3, M=2, mtp=1, num_layers=2, layout="Et|tm|L", llama=True
    ),
    "a stage of its own, then one without layers": Case(
        pp=4, M=3, mtp=2, num_layers=4, layout="Ett|tt|mm|L", deallocate=True
    ),
    "every stage one thing": Case(pp=4, M=2, mtp=1, num_layers=1, layout="E|t|m|L", llama=True),
    "a stage of its own among chunks": Case(
        **RING, num_layers=4, layout="Ett|t|tm|L", deallocate=True
    ),
    "sequence parallelism": Case(tp=2, sp=True, M=2, mtp=2, frozen="all but low rank"),
    "copies of the model, per token": Case(dp=2, M=3, mtp=2, per_token=True, weights=True),
    "a loss scale and evaluations": Case(pp=2, M=3, mtp=1, loss_scale=65536.0, evaluates=True),
    "ZeRO-1 with overlap": Case(pp=2, dp=2, M=2, mtp=1, llama=True, **ZERO1),
    "a12: lent by the embedding, gathered late, evaluated": Case(
        pp=2, dp=2, M=2, mtp=1, evaluates_in="no_grad", fails=True, **ZERO1
    ),
    "recomputed": Case(pp=2, M=2, mtp=2, recompute="full", num_partial=1),
    "a2: recomputed, all but further tokens' layers frozen": Case(
        dp=2, M=2, mtp=1, recompute="full", frozen="all but further tokens", weights=True
    ),
    "planned, weight gradients later": Case(
        pp=2, M=3, mtp=2, planned=True, delay_wgrad=True, llama=True
    ),
    "the output layer's weight gradients at the end": Case(
        pp=2, M=3, mtp=2, defer_embedding=True, deferral_limit=2
    ),
    "experts": Case(pp=2, dp=2, M=1, mtp=1, experts=4, ep=2, balance="aux", num_layers=2),
    "two ranks share sequences": Case(cp=2, M=2, mtp=2),
    "the same, per token": Case(cp=2, M=2, mtp=1, per_token=True),
}
"""By what is said of them."""


@pytest.mark.parametrize("world", sorted({case.world for case in NAMED_CASES.values()}))
def test_named_cases_equal_one_process(world, tmp_path_factory):
    check(list(NAMED_CASES.values()), world, tmp_path_factory.getbasetemp())


def down_and_up(rank):
    """An order of work whose placement has both ends of the model on one rank."""
    for i in range(rank.num_microbatches):
        for chunk in range(2):
            yield rank.forward(i, chunk)
        for chunk in reversed(range(2)):
            yield rank.backward(i, chunk)


ORDERS = (
    {"pp": 1},
    {"pp": 2, "pipeline_schedule": "gpipe"},
    {"pp": 2, "vp": 2, "pipeline_schedule": "breadth-first", "layout": "Et|tt|t|mmL"},
    {"pp": 2, "pipeline_schedule": "down-and-up"},
    {"pp": 2, "pipeline_schedule": "down-and-up", "layout": "Ett|t|tmm|L"},
)
"""On two ranks; without a pipeline they are copies of the model."""


def steps_by_orders() -> list[tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """Gradients, and what a line of the log has, of a step by each of `ORDERS`."""
    register_order("down-and-up", placement=V)(down_and_up)
    found = []
    for options in ORDERS:
        options = {"pipeline_model_parallel_layout": options.get("layout")} | options
        options.pop("layout", None)
        gpt = TinyGPT(**options, mtp_num_layers=2, params_dtype=torch.float64)
        gpt.step(num_microbatches=4 // gpt.groups.dp.size())
        (describe,) = gpt.config.log_funcs
        found.append((gpt.gradients(), describe(gpt.chunks, gpt.groups)))
    return found


def test_orders_and_placements_and_the_line_of_the_log_on_every_rank():
    (first, *others), (first_there, *others_there) = run_ranks(steps_by_orders, 2)
    wanted, logged = first
    assert logged.keys() == {"mtp_1 loss", "mtp_2 loss"} and min(logged.values()) > 1.0
    for gradients, log in (first_there, *others, *others_there):
        assert log == pytest.approx(logged, rel=1e-12)
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).abs().max() < 1e-14, name
    for (gradients, _), (there, _) in zip(others, others_there, strict=True):
        assert gradients.keys() | there.keys() == wanted.keys()
