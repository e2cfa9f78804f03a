"""Dropout streams agree and differ as they must; recompute sees the same numbers again."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from minimegatron.core import parallel_state
from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.groups import PretendGroup
from tests.ranks import run_ranks


def seed_everything(seed: int, tp_rank: int = 0) -> None:
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, tp_rank=tp_rank)


def draws(seed: int, tp_rank: int) -> dict[str, torch.Tensor]:
    seed_everything(seed, tp_rank)
    tracker = get_cuda_rng_tracker()
    found = {"default": torch.rand(8)}
    with tracker.fork():
        found["model"] = torch.rand(8)
    found["default again"] = torch.rand(8)
    with tracker.fork():
        found["model again"] = torch.rand(8)
    with tracker.fork(get_data_parallel_rng_tracker_name()):
        found["data"] = torch.rand(8)
    return found


def test_default_stream_is_equal_over_ranks_and_model_parallel_stream_differs():
    first, second = draws(1, tp_rank=0), draws(1, tp_rank=1)
    for name in ("default", "default again", "data"):
        assert torch.equal(first[name], second[name]), name
    for name in ("model", "model again"):
        assert not torch.equal(first[name], second[name]), name
    everything = torch.stack(list(first.values())).flatten()
    # "data" restarts the default stream; all other draws are new numbers.
    assert everything.unique().numel() == everything.numel() - 8


def test_seeds_of_stages_differ_and_repeat():
    assert torch.equal(draws(1, 0)["model again"], draws(1, 0)["model again"])
    stages = [draws(1 + 100 * stage, 0) for stage in range(3)]
    for name in ("default", "model"):
        assert torch.stack([stage[name] for stage in stages]).unique().numel() == 24


def test_fork_leaves_the_default_stream_alone_even_if_its_body_raises():
    seed_everything(3)
    expected = torch.rand(4)
    seed_everything(3)
    with pytest.raises(KeyError), get_cuda_rng_tracker().fork():
        torch.rand(100)
        raise KeyError
    assert torch.equal(torch.rand(4), expected)


def test_torch_s_default_generator_is_the_caller_s_to_seed():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(3, tp_rank=0)
    assert torch.equal(torch.rand(4), expected)


def test_a_fork_within_a_fork_goes_on_with_its_stream():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    saved = tracker.get_states()
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    before = torch.get_rng_state()
    with tracker.fork("a"):
        found["a"].append(torch.rand(4))
        with tracker.fork("b"):
            found["b"].append(torch.rand(4))
            with tracker.fork("a"):
                found["a"].append(torch.rand(4))
                with tracker.fork("a"):
                    found["a"].append(torch.rand(4))
            found["b"].append(torch.rand(4))
        found["a"].append(torch.rand(4))
    assert torch.equal(torch.get_rng_state(), before)
    after = tracker.get_states()
    tracker.set_states(saved)
    for name, draws_of_it in found.items():
        with tracker.fork(name):
            for draw in draws_of_it:
                assert torch.equal(draw, torch.rand(4)), name
        assert torch.equal(tracker.get_states()[name], after[name]), name


def test_states_are_saved_and_restored():
    seed_everything(3)
    tracker = get_cuda_rng_tracker()
    saved = tracker.get_states()
    with tracker.fork():
        expected = torch.rand(4)
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(torch.rand(4), expected)
    tracker.set_states(saved)  # the draws have not changed what was saved
    with tracker.fork():
        assert torch.equal(torch.rand(4), expected)


def test_misuse_is_explained():
    tracker = CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    with pytest.raises(ValueError, match="call model_parallel_cuda_manual_seed"), tracker.fork():
        pass
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="seed 1 is in use"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="'a' exists already"):
        tracker.add("a", 2)


def noisy(x: torch.Tensor, weight: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from both streams, nothing to be said for it otherwise."""
    y = F.dropout(x @ weight, 0.5)
    with get_cuda_rng_tracker().fork():
        z = F.dropout(y.tanh(), 0.5)
    return y * scale, z


def run_noisy(
    recompute: bool, tp_rank: int, group=None, within_fork: bool = False
) -> list[torch.Tensor]:
    seed_everything(9, tp_rank)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 6, generator=generator, requires_grad=True)
    weight = torch.randn(6, 6, generator=generator, requires_grad=True)
    distribute = group is not None and group.size() > 1
    for _ in range(2):
        with get_cuda_rng_tracker().fork() if within_fork else contextlib.nullcontext():
            torch.rand(1)  # within a fork, its stream is then ahead of what the tracker holds
            if recompute:
                y, z = checkpoint(noisy, distribute, x, weight, 3.0, tp_group=group)
            else:
                y, z = noisy(x, weight, 3.0)
        after = torch.rand(4)
        (y.sin() + z).sum().backward()
    return [y.detach(), z.detach(), after, torch.rand(4), x.grad, weight.grad]


@pytest.mark.parametrize("within_fork", [False, True])
def test_recompute_repeats_dropout_and_disturbs_nothing_after_it(within_fork):
    runs = [run_noisy(recompute, 0, within_fork=within_fork) for recompute in (False, True)]
    for usual, again in zip(*runs, strict=True):
        assert torch.equal(usual, again)


def distributed_recompute() -> list[bool]:
    group = dist.group.WORLD
    usual, again = run_noisy(False, group.rank()), run_noisy(True, group.rank(), group)
    return [torch.equal(a, b) for a, b in zip(usual, again, strict=True)]


def test_recompute_with_inputs_kept_in_pieces():
    for rank, equal in enumerate(run_ranks(distributed_recompute, 2)):
        assert all(equal), f"rank {rank}: {equal}"


def test_recompute_keeps_only_inputs():
    """The forward pass holds one tensor per checkpoint, not those between."""
    kept = []

    def deep(x):
        for _ in range(5):
            x = (x * 2).sin()
        return x

    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        checkpoint(deep, False, x)
    assert kept == [1000]


def test_recompute_happens_under_the_same_autocast():
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4, requires_grad=True)
    grads = []
    for recompute in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(torch.matmul, False, x, weight) if recompute else x @ weight
        assert y.dtype == torch.bfloat16
        grads.append(torch.autograd.grad(y.float().sum(), (x, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_pretended_group_is_enough_for_pieces_of_one():
    x = torch.randn(5, requires_grad=True)
    y = checkpoint(torch.sin, True, x, tp_group=PretendGroup())
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("as_what", ["function", "module", "method"])
def test_a2_parameters_get_gradients_where_no_input_requires_one(as_what):
    """Was: nothing led autograd back into the function, and they got none, without a word."""
    layer = torch.nn.Linear(4, 4, bias=False)
    x = torch.randn(3, 4)
    function = {"function": lambda x: layer(x), "module": layer, "method": layer.forward}[as_what]
    y = checkpoint(function, False, x)
    assert y.requires_grad and x.grad is None
    y.sin().sum().backward()
    expected = torch.autograd.grad(layer(x).sin().sum(), layer.weight)[0]
    assert torch.equal(layer.weight.grad, expected)


def test_a2_what_is_all_frozen_is_not_run_again():
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    trained, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    assert not checkpoint(frozen, False, x).requires_grad
    again = checkpoint(lambda x: trained(frozen(x)), False, x, modules=[frozen])
    assert again.grad_fn.name() == "AddmmBackward0", "neither reads the other's parameters"
    with torch.no_grad():
        assert not checkpoint(trained, False, x).requires_grad
    # A function of which nothing is known runs again for nothing, and its backward finds nothing.
    y = checkpoint(lambda x: frozen(x), False, x)
    (y * 2).sum().backward()
    assert frozen.weight.grad is None


# -- T3: a generator that not all tensor-parallel ranks draw from --


def dropout_of_two_ranks(sequence_parallel: bool, training: bool, own_generator: bool) -> list:
    """Of two updates: what was said; between them rank 0 alone makes a second iterator over data."""
    seed_everything(7, dist.get_rank())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        hidden_dropout=0.3,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=8)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    model.train(training)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    data, said = torch.arange(8).repeat(2, 1), []
    seed_everything(8, dist.get_rank())
    for step in range(2):
        if dist.get_rank() == 0 and step == 1:
            iter(DataLoader(data, generator=torch.Generator() if own_generator else None))
        model.zero_grad_buffer()
        model(data, data, None, labels=data).sum().backward()
        finalize_model_grads([model])
        try:
            optimizer.step()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    norm = model.module.decoder.final_layernorm.weight.main_grad
    return [said, norm.tolist()]


def dropout_with_data_on_one_rank() -> list:
    parallel_state.initialize_model_parallel(2, 1)
    cases = ((False, True, False), (False, True, True), (True, True, False), (False, False, False))
    return [dropout_of_two_ranks(*case) for case in cases]


@pytest.mark.processes
def test_t3_a_loader_on_one_tensor_rank_does_not_part_dropout():
    first, second = run_ranks(dropout_with_data_on_one_rank, 2)
    assert first[0][1] != second[0][1], "they dropped other activations"
    for said, _ in (first[0], second[0]):
        assert said[0] == "nothing" and "generator=torch.Generator()" in said[1]
    for ours, theirs in zip(first[1:], second[1:], strict=True):
        assert ours == theirs and ours[0] == ["nothing"] * 2


def test_t8_an_argument_that_the_function_changes_is_refused():
    """Was: backward ran it on what the first run had left there, and gradients were others."""
    layer = torch.nn.Linear(4, 4)

    def shifts(x, shift):
        x += shift
        return layer(x)

    with pytest.raises(
        RuntimeError, match="tensor argument 0, counted from 0, was changed in place"
    ):
        checkpoint(shifts, False, torch.ones(3, 4), torch.ones(4))
    whole = torch.ones(2, 3, 4)
    checkpoint(layer, False, whole[0]).sum().backward()  # a view that nobody changes
