"""Against megatron-core: where further tokens are predicted, rolled sequences, what the log shows.

Without processes: both packages are told where this rank would be.
"""

import contextlib
from collections.abc import Iterator
from itertools import product
from unittest import mock

import pytest
import torch

from minimegatron.core import parallel_state as our_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer import multi_token_prediction as ours
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.fake_transport import FakeGroup

theirs = megatron_module("transformer.multi_token_prediction")
their_config = megatron_module("transformer.transformer_config")
pytestmark = pytest.mark.filterwarnings("ignore")
their_state = megatron_module("parallel_state")


# -- Where --

PLACES = [
    *((1, None, K, None) for K in (None, 1, 3)),
    *((p, v, K, None) for p, v, K in product((2, 4), (None, 2), (None, 1, 3))),
    (2, None, 1, "Ett|tmL"),
    (3, None, 2, "Et|tmm|L"),
    (4, None, 1, "Ett|tt|m|L"),
    (2, 2, 1, "Et|t|t|tmL"),
    (3, 2, 2, "Et|t|t|t|tmm|L"),
]


@contextlib.contextmanager
def standing(p: int, v: int | None, rank: int) -> Iterator[None]:
    """Both packages believe to be this stage of p, with v chunks."""
    answers = {
        "get_pipeline_model_parallel_rank": lambda: rank,
        "get_pipeline_model_parallel_world_size": lambda: p,
        "get_virtual_pipeline_model_parallel_world_size": lambda: v,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(their_state, **answers))
        stack.enter_context(mock.patch.multiple(our_state, **answers))
        groups = ProcessGroupCollection(pp=FakeGroup(rank, p))
        stack.enter_context(
            mock.patch.object(ProcessGroupCollection, "use_mpu_process_groups", lambda *_: groups)
        )
        yield


def answers_of(module, config, p: int, v: int | None) -> list:
    """What each stage and chunk says, and which ranks of a pipeline's have some."""
    found = [sorted(module.get_mtp_ranks([10 * i for i in range(p)], config))]
    for rank, vp_stage in product(range(p), range(v) if v else (None,)):
        with standing(p, v, rank):
            found.append(
                (
                    module.mtp_on_this_rank(config, ignore_virtual=True),
                    module.mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage),
                    module.get_mtp_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=rank),
                    module.get_mtp_layer_offset(config, vp_stage=vp_stage),
                )
            )
    return found


@pytest.mark.parametrize(("p", "v", "K", "layout"), PLACES)
def test_same_places(p: int, v: int | None, K: int | None, layout: str | None):
    options = {
        "num_layers": layout.count("t") if layout else 2 * p * (v or 1),
        "hidden_size": 8,
        "num_attention_heads": 2,
        "mtp_num_layers": K,
        "pipeline_model_parallel_size": p,
        "virtual_pipeline_model_parallel_size": v,
        "pipeline_dtype": torch.float32,
        "pipeline_model_parallel_layout": layout,
    }
    mine = TransformerConfig(**options)
    with cuda_calls_on_cpu():
        other = their_config.TransformerConfig(**options)
    assert answers_of(ours, mine, p, v) == answers_of(theirs, other, p, v)


# -- What is rolled --


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize(("shape", "dims"), [((2, 5), -1), ((5,), 0), ((2, 4, 3), 1), ((3, 1), -1)])
def test_same_rolled(shape: tuple[int, ...], dims: int, dtype: torch.dtype):
    tensor = torch.arange(1, torch.Size(shape).numel() + 1).view(shape).to(dtype)
    kept = tensor.clone()
    mine, my_sum = ours.roll_tensor(tensor, shifts=-1, dims=dims)
    other, their_sum = theirs.roll_tensor(tensor, shifts=-1, dims=dims)
    assert torch.equal(mine, other)
    assert mine.dtype == other.dtype == dtype
    assert my_sum == their_sum
    assert torch.equal(tensor, kept)


# -- What the log shows --


class Writer:
    """Of TensorBoard and of Weights and Biases, as far as they are called."""

    def __init__(self):
        self.lines: list = []

    def add_scalar(self, name, value, iteration):
        self.lines.append((name, float(value), iteration))

    def log(self, values, iteration):
        self.lines.append(({name: float(value) for name, value in values.items()}, iteration))


def logged(module) -> list:
    """Two iterations of two microbatches of three depths, after one of none."""
    helper, writer, wandb, total = module.MTPLossLoggingHelper, Writer(), Writer(), {"lm loss": 1.0}
    helper.tracker.clear()
    with cuda_calls_on_cpu():
        helper.track_mtp_metrics(0.5, 0, writer, wandb, total)
        for iteration in (1, 2):
            for _, depth in product(range(2), range(3)):
                helper.save_loss_to_tracker(torch.tensor(1.0 + iteration * depth), depth, 3)
            helper.save_loss_to_tracker(torch.tensor(99.0), None, 3)
            helper.track_mtp_metrics(0.5, iteration, writer, wandb, total)
    left = [float(value) for value in helper.tracker["values"]]
    helper.tracker.clear()
    return [writer.lines, wandb.lines, {k: float(v) for k, v in total.items()}, left]


def test_same_log():
    mine = logged(ours)
    assert mine == logged(theirs)
    assert mine[0][0] == ("mtp_1 loss", 1.0, 1)
