"""A second kind of parameter needs no special case: toy experts on four ranks equal one process.

Losses, raw gradients, norm, zeros, steps, initial weights, checkpoints from one layout to another.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.dist_checkpointing import serialization
from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.parameter import KINDS
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.sharding import shard_parameter
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.training.checkpointing import sharded_model_state, sharded_optimizer_state
from tests.groups import PretendGroup
from tests.ranks import run_ranks
from tests.toy_expert import EXPERTS, HIDDEN, LAYERS, SECTIONS, ToyModel, make_config

SEQ, BATCH, MICROBATCHES, STEPS = 4, 2, 2, 2
REPLICAS = 4
"""Samples are made for so many data-parallel ranks; two ranks have two each."""
TOLERANCE = 1e-12

# -- Layouts of four ranks: sizes of the tensor, expert and expert-tensor groups --
LAYOUTS = {
    "experts over pairs": (1, 2, 1),
    "experts over all": (1, 4, 1),
    "experts over the tensor pair": (2, 2, 1),
    "pairs, each expert cut like a dense layer": (2, 2, 2),
    "each expert cut, nothing else": (1, 1, 2),
    "copies of experts, dense layers cut": (2, 1, 1),
}
PLAIN = {}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 40}
ZERO1 = {"use_distributed_optimizer": True}
ALL = {**ZERO1, **OVERLAP, "overlap_param_gather": True}
AVERAGE = {"average_in_collective": True}
EXPERT = {"allreduce": False}


@contextmanager
def layout(sizes: tuple[int, int, int]) -> Iterator[ProcessGroupCollection]:
    tp, ep, etp = sizes
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()


def one_process() -> ProcessGroupCollection:
    names = [entry.name for entry in dataclasses.fields(ProcessGroupCollection)]
    return ProcessGroupCollection(**dict.fromkeys(names, PretendGroup()))


class Training:
    """The toy model in its wrapper, with its optimizer; steps as `train_step` does them."""

    def __init__(self, groups, mark=EXPERT, scaled=False, **ddp_options):
        self.groups = groups
        model = ToyModel(groups, mark)
        ddp_config = DistributedDataParallelConfig(**ddp_options)
        self.model = DistributedDataParallel(model.config, ddp_config, model, pg_collection=groups)
        self.model.broadcast_params()
        options = {
            name: ddp_options.get(name, False)
            for name in ("use_distributed_optimizer", "overlap_param_gather")
        }
        if scaled:  # what an optimizer must have to look for overflow
            options |= {"bf16": True, "loss_scale": 1.0}
        config = OptimizerConfig(
            optimizer="sgd", lr=0.3, clip_grad=0.5, log_num_zeros_in_grad=True, **options
        )
        self.optimizer = get_megatron_optimizer(config, [self.model], pg_collection=groups)

    def parameters(self):
        return dict(named_global_parameters(self.model))

    def microbatches(self, step):
        """This rank's samples, of which each rank of its tensor group has its part."""
        tp, dp = self.groups.tp, self.groups.dp
        number = REPLICAS // dp.size()
        for sample in range(MICROBATCHES * REPLICAS):
            if sample // MICROBATCHES // number == dp.rank():
                generator = torch.Generator().manual_seed(100 * step + sample)
                x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
                yield x.chunk(tp.size())[tp.rank()]

    def forward_backward(self, step) -> torch.Tensor:
        """The loss of all samples of this rank, summed over microbatches."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        samples, total = list(self.microbatches(step)), 0.0
        for sample in samples[:-1]:
            with self.model.no_sync():
                total = total + self._one(sample, len(samples))
        total = total + self._one(samples[-1], len(samples))
        finalize_model_grads([self.model], pg_collection=self.groups)
        return total

    def _one(self, x, number):
        loss = (self.model(x) - 0.3).square().sum() / (SEQ * BATCH * HIDDEN * number)
        loss.backward()
        return loss.detach()

    def step(self):
        result = self.optimizer.step()
        self.model.start_param_sync(force_sync=True)
        return result

    def mine(self, name, tensor, param):
        """This rank's piece of a tensor of the full model."""
        group = self.groups.expt_tp if "local_experts" in name else self.groups.tp
        return shard_parameter(tensor, param, group.rank(), group.size())

    def worst(self, ours, full, is_reduced=False) -> float:
        """The largest difference between what this rank has and its pieces of the full model's.

        Of gradients that were reduced, with ZeRO-1, this rank has its shards only.
        """
        whole = {param: (0, param.numel()) for param in self.parameters().values()}
        if is_reduced and self.model.ddp_config.use_distributed_optimizer:
            whole = {shard.model_param: (shard.start, shard.end) for shard in self.optimizer.shards}
        found = [0.0]
        for name, param in self.parameters().items():
            start, end = whole.get(param, (0, 0))
            piece = self.mine(name, full[name], param)
            off = (ours[name] - piece).view(-1)[start:end].abs()
            found += off.max().view(1).tolist() if end > start else []
        return max(found)

    def weights(self):
        return {name: param.detach().clone() for name, param in self.parameters().items()}

    def gradients(self):
        return {name: param.main_grad.clone() for name, param in self.parameters().items()}


def train(training: Training, steps=range(STEPS)) -> list[dict]:
    """What every step gives: losses, raw gradients, norm, zeros, new weights."""
    record = [{"weights": training.weights()}]
    for step in steps:
        loss = training.forward_backward(step)
        gradients = training.gradients()
        success, norm, zeros = training.step()
        assert success
        record.append(
            {
                "loss": loss,
                "gradients": gradients,
                "norm": norm,
                "zeros": zeros,
                "weights": training.weights(),
            }
        )
    return record


def differences(training: Training, expected: list[dict]) -> dict[str, float]:
    """The largest difference of each kind to one process with all samples."""
    found = train(training, range(len(expected) - 1))
    worst = {"initial": training.worst(found[0]["weights"], expected[0]["weights"])}
    for ours, full in zip(found[1:], expected[1:], strict=True):
        loss = ours["loss"].clone()
        torch.distributed.all_reduce(loss)  # a mean over samples, of whose tokens each has a part
        now = {
            "loss": abs(loss / training.groups.dp.size() - full["loss"]).item(),
            "gradients": training.worst(ours["gradients"], full["gradients"], is_reduced=True),
            "norm": abs(ours["norm"] - full["norm"]),
            "zeros": abs(ours["zeros"] - full["zeros"]),
            "weights": training.worst(ours["weights"], full["weights"]),
        }
        worst = {what: max(value, worst.get(what, 0.0)) for what, value in {**worst, **now}.items()}
    return worst


def all_layouts(cases) -> None:
    expected = train(Training(one_process(), mark={}))
    # Clipping is in the game, and so is the count: an expert's first column, and its scale.
    assert expected[1]["norm"] > 0.6
    assert expected[1]["zeros"] == LAYERS * EXPERTS * (sum(SECTIONS) + 1)
    for name, options in cases:
        with layout(LAYOUTS[name]) as groups:
            training = Training(groups, **options)
            found = differences(training, expected)
            assert max(found.values()) < TOLERANCE, (name, options, found)
            num_buffers = 1 if groups.expt_dp is groups.dp_cp else 2
            assert len(training.model.all_buffers) == num_buffers


def test_parity_with_one_process():
    cases = [
        ("experts over pairs", PLAIN),
        ("experts over pairs", ALL),
        ("experts over all", AVERAGE | OVERLAP),
        ("experts over the tensor pair", ALL),
        ("pairs, each expert cut like a dense layer", ZERO1),
        ("each expert cut, nothing else", ALL),
        ("copies of experts, dense layers cut", OVERLAP),
    ]
    run_ranks(all_layouts, 4, cases)


def nothing_is_called_expert() -> None:
    kinds = {"dense": KINDS["dense"], "toy": KINDS["expert"]}
    with mock.patch.dict(KINDS, kinds, clear=True):
        all_layouts([("experts over the tensor pair", {**ALL, "mark": {"kind": "toy"}})])


def test_a_kind_that_the_package_never_heard_of():
    run_ranks(nothing_is_called_expert, 4)


# -- What breaks it --


def a_kind_with(**other_groups):
    return mock.patch.dict(KINDS, {"expert": dataclasses.replace(KINDS["expert"], **other_groups)})


def instead(place, function):
    return mock.patch(f"minimegatron.core.{place}", function)


BREAKS = {
    "reduced like dense ones": (
        "experts over pairs",
        "gradients",
        lambda: a_kind_with(reduce="dp_cp"),
    ),
    "norm of this rank's own experts": (
        "experts over pairs",
        "norm",
        lambda: a_kind_with(model="mp"),
    ),
    "cut over the dense layers' ranks": (
        "experts over the tensor pair",
        "initial",
        lambda: a_kind_with(tensor="tp"),
    ),
    "divided by the number of its own copies": (
        "experts over pairs",
        "gradients",
        lambda: instead(
            "distributed.distributed_data_parallel.gradient_scaling_factor",
            lambda config, ddp_config, num_ranks, group_size: 1.0 / group_size,
        ),
    ),
    "replicas by the dense layers' ranks": (
        "experts over the tensor pair",
        "norm",
        lambda: instead("optimizer.optimizer.tensor_group", lambda param, groups: groups.tp),
    ),
    "named by its place on the rank": (
        "experts over pairs",
        "loss",
        lambda: instead("transformer.module.PartOfModuleList.global_name", lambda self, name: name),
    ),
    "one section for all": (
        "each expert cut, nothing else",
        "loss",
        lambda: instead(
            "tensor_parallel.sharding.section_sizes", lambda param, length, *tp_size: [length]
        ),
    ),
}


def broken(name: str) -> dict[str, float]:
    place, _, breaking = BREAKS[name]
    with layout(LAYOUTS[place]) as groups, breaking():
        training = Training(groups)
        training.optimizer.first_checks.clear()  # they would refuse what this test wants to see
        return differences(training, train(Training(one_process(), mark={}), range(1)))


def all_broken() -> dict[str, dict[str, float]]:
    return {name: broken(name) for name in BREAKS}


def test_break_any_of_it_and_a_difference_shows():
    ranks = run_ranks(all_broken, 4)
    for name, (_, what, _) in BREAKS.items():
        found = {key: max(rank[name][key] for rank in ranks) for key in ranks[0][name]}
        assert found[what] > 1e-3, (name, found)
        if what == "norm":
            assert found["gradients"] < TOLERANCE, (name, found)


# -- Overflow, and a stage without experts --


def overflow_in_one_expert() -> None:
    for options in (PLAIN, ZERO1):
        with layout(LAYOUTS["experts over pairs"]) as groups:
            training = Training(groups, scaled=True, **options)
            training.forward_backward(0)
            before = training.weights()
            overflows = training.gradients().get(
                "stack.1.experts.local_experts.3.linear_fc1.weight"
            )
            assert (overflows is not None) == (groups.ep.rank() == 1)
            for name, param in training.parameters().items():
                if "stack.1.experts.local_experts.3" in name:
                    param.main_grad.fill_(torch.inf)
            assert training.step() == (False, None, None)
            assert all(torch.equal(before[name], w) for name, w in training.weights().items())


def test_an_overflow_in_one_expert_skips_the_step_on_all_ranks():
    run_ranks(overflow_in_one_expert, 4)


def stages() -> list[float]:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, expert_model_parallel_size=2
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    number = 3.0 + groups.ep.rank()
    norms = []
    for options in (PLAIN, ZERO1):
        module = torch.nn.ParameterDict({"dense": torch.nn.Parameter(torch.zeros(5))})
        if groups.pp.rank() == 1:
            module["expert"] = torch.nn.Parameter(torch.zeros(7))
            module["expert"].allreduce = False
        ddp_config = DistributedDataParallelConfig(**options)
        model = DistributedDataParallel(make_config(1), ddp_config, module, pg_collection=groups)
        config = OptimizerConfig(optimizer="sgd", lr=0.1, **options)
        optimizer = get_megatron_optimizer(config, [model], pg_collection=groups)
        module["dense"].main_grad.fill_(1.0 + groups.pp.rank())
        if "expert" in module:
            module["expert"].main_grad.fill_(number)
        norms.append(optimizer.step()[1])
    return norms


def test_a_stage_without_experts_takes_part_in_their_norm():
    expected = math.sqrt(5 * (1 + 4) + 7 * (9 + 16))
    assert [pytest.approx(expected, rel=1e-12)] * 2 == run_ranks(stages, 4)[0]


# -- Checkpoints --


def carry_on(folder: str, begin: int, places: list[tuple[str, dict]]) -> None:
    """A step in each place, from the checkpoint of the step before; the checkpoint after it."""
    expected = train(Training(one_process(), mark={}), range(begin + len(places)))
    for step, (name, options) in enumerate(places, begin):
        with layout(LAYOUTS.get(name, (1, 1, 1))) as groups:
            training = Training(groups, **options)
            model, optimizer = [training.model], training.optimizer
            if step:
                path = f"{folder}/{step}"
                saved = {*serialization.load_tensors_metadata(path)}
                for param in training.parameters().values():
                    param.detach().zero_()
                tensors = sharded_optimizer_state(model, optimizer, saved)
                serialization.load_tensors([*sharded_model_state(model), *tensors], path)
            found = train(training, [step])
            for ours, full in zip(found, expected[step:], strict=False):
                assert training.worst(ours["weights"], full["weights"]) < TOLERANCE, (step, name)
            tensors = sharded_optimizer_state(model, optimizer)
            tensors = [*sharded_model_state(model), *tensors]
            serialization.save_tensors(tensors, {}, f"{folder}/{step + 1}")


def test_checkpoints_from_one_layout_to_another(tmp_path):
    first = [("experts over pairs", ALL), ("experts over the tensor pair", PLAIN)]
    run_ranks(carry_on, 4, str(tmp_path), 0, first)
    run_ranks(carry_on, 1, str(tmp_path), 2, [("one process", ZERO1)])
    run_ranks(carry_on, 4, str(tmp_path), 3, [("each expert cut, nothing else", ALL)])
    names = {*ToyModel(one_process(), {}).state_dict()}
    for step in range(1, 5):
        saved = serialization.load_tensors_metadata(f"{tmp_path}/{step}")
        for kind in ("model.", "optimizer.state.momentum_buffer."):
            assert {key.removeprefix(kind) for key in saved if key.startswith(kind)} == names
        shape = saved["model.stack.1.experts.local_experts.3.linear_fc1.weight"].global_shape
        assert shape == (sum(SECTIONS), HIDDEN)
