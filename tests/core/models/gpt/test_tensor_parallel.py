"""GPTs cut over 2 and 4 ranks equal the whole one in every loss and gradient, in float64."""

import itertools
from typing import Any

import pytest
import torch

from minimegatron.core import collectives, parallel_state
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.layers import drain_embedding_wgrad_compute
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.tensor_parallel.sharding import gather_parameter, is_cut, shard_parameter
from minimegatron.core.transformer.module import Float16Module
from tests.core.models.gpt_support import (
    CASES,
    RECOMPUTE,
    Case,
    run_whole,
    sample,
    token_weights,
)
from tests.groups import PretendGroup
from tests.played_ranks import play
from tests.ranks import run_ranks

LIMIT = 1e-10


def sum_partial_gradients(model: torch.nn.Module, group: Any) -> None:
    """What `finalize_model_grads` does for parameters that are whole but see a part."""
    for param in model.parameters():
        if getattr(param, "sequence_parallel", False):
            collectives.all_reduce(param.grad, group)


def backward(model: torch.nn.Module, losses: torch.Tensor) -> None:
    (losses * token_weights()).sum().backward()
    if model.config.defer_embedding_wgrad_compute:
        tied = model.share_embeddings_and_output_weights
        drain_embedding_wgrad_compute(
            model.config,
            model.embedding_activation_buffer,
            model.grad_output_buffer,
            model.shared_embedding_or_output_weight() if tied else model.output_layer.weight,
            model.tp_group,
        )


def compare(case: Case, pg: ProcessGroupCollection, expected: tuple, **options: Any) -> float:
    """The largest difference, over losses, gradients and initial weights, from the whole model."""
    size = pg.tp.size()
    config = case.make_config(tensor_model_parallel_size=size, **options)
    model = case.build(config, pg)
    losses = model(**sample())
    backward(model, losses)
    sum_partial_gradients(model, pg.tp)
    whole_losses, whole_grads = expected
    worst = (losses - whole_losses).abs().max().item()
    for name, param in model.named_parameters():
        full = gather_parameter(param.grad, param, pg.tp)
        assert full.shape == whole_grads[name].shape, name
        worst = max(worst, (full - whole_grads[name]).abs().max().item())
    return worst


def recompute_modes(size: int) -> dict[str, dict]:
    """All on two ranks; on four, those that differ in what they run."""
    fewer = ("none", "selective", "uniform 2")
    return RECOMPUTE if size == 2 else {mode: RECOMPUTE[mode] for mode in fewer}


def check_every_case(size: int) -> dict[str, float]:
    """All kinds of GPT x sequence parallelism x recompute, on `size` ranks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    errors = {}
    for name, case in CASES.items():
        expected = run_whole(case)
        for sequence_parallel, (mode, recompute) in itertools.product(
            (False, True), recompute_modes(size).items()
        ):
            options = {"sequence_parallel": sequence_parallel, **recompute}
            errors[f"{name}; sp={sequence_parallel}; recompute={mode}"] = compare(
                case, pg, expected, **options
            )
        for sequence_parallel in (False, True):
            errors[f"{name}; sp={sequence_parallel}; deferred"] = compare(
                case,
                pg,
                expected,
                sequence_parallel=sequence_parallel,
                defer_embedding_wgrad_compute=True,
            )
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_losses_and_gradients(size):
    for rank, errors in enumerate(run_ranks(check_every_case, size, size, timeout=240)):
        assert len(errors) == len(CASES) * (2 * len(recompute_modes(size)) + 2)
        for case, error in errors.items():
            assert error <= LIMIT, f"{case} on rank {rank} of {size}: off by {error}"


def check_everything_else() -> dict[str, Any]:
    """Two ranks: logits, shapes, dropout, 16-bit, bad lengths, and that the flag is needed."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    rank = pg.tp.rank()
    found: dict[str, Any] = {}
    gpt2, llama, qwen = list(CASES.values())[:3]

    # -- Logits, cut and whole --
    batch = {**sample(), "labels": None}
    whole = llama.build(llama.make_config())(**batch)
    cut = llama.build(llama.make_config(tensor_model_parallel_size=2), pg)(**batch)
    found["cut logits"] = (cut - whole.chunk(2, dim=-1)[rank]).abs().max().item()
    gathered = llama.build(
        llama.make_config(tensor_model_parallel_size=2), pg, parallel_output=False
    )(**batch)
    found["whole logits"] = (gathered - whole).abs().max().item()

    # -- Head norms are partial without sequence parallelism too --
    config = qwen.make_config(tensor_model_parallel_size=2)
    model = qwen.build(config, pg)
    backward(model, model(**sample()))
    name = "decoder.layers.1.self_attention.q_layernorm.weight"
    true_grad = run_whole(qwen)[1][name]
    partial = dict(model.named_parameters())[name].grad
    found["unsummed head norm"] = ((partial - true_grad).norm() / true_grad.norm()).item()

    # -- A pipeline's middle stage, with and without sequence parallelism --
    for sequence_parallel in (False, True):
        config = gpt2.make_config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
        stage = gpt2.build(config, pg, post_process=False)
        found[f"stage shape sp={sequence_parallel}"] = tuple(stage(**sample()).shape)

    # -- A sequence that cannot be cut --
    config = gpt2.make_config(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="does not divide its length 7"):
        gpt2.build(config, pg)(**sample(sequence=7))

    # -- float32, and bf16 --
    whole32 = llama.build(llama.make_config(params_dtype=torch.float32))(**sample())
    config = llama.make_config(tensor_model_parallel_size=2, params_dtype=torch.float32)
    losses = llama.build(config, pg)(**sample())
    found["float32"] = ((losses - whole32).abs() / whole32).max().item()
    config = llama.make_config(tensor_model_parallel_size=2, params_dtype=torch.bfloat16, bf16=True)
    losses = Float16Module(config, llama.build(config, pg))(**sample())
    found["bf16"] = (losses.double() - run_whole(llama)[0]).abs().max().item()
    return found


def test_everything_else():
    first, second = run_ranks(check_everything_else, 2)
    for found in (first, second):
        assert found["cut logits"] < 1e-12 and found["whole logits"] < 1e-12
        assert found["unsummed head norm"] > 0.1
        assert found["stage shape sp=False"] == (8, 3, 32)
        assert found["stage shape sp=True"] == (4, 3, 32)
        assert found["float32"] < 1e-5
        assert found["bf16"] < 0.2
    assert first["bf16"] == second["bf16"]


def dropped(case: Case, pg: ProcessGroupCollection, **options: Any) -> dict[str, Any]:
    """Losses, gradients, the first layer's output and the random state it began with."""
    config = case.make_config(tensor_model_parallel_size=2, **options)
    torch.manual_seed(77)
    model_parallel_cuda_manual_seed(77)
    model = case.build(config, pg)
    seen, states = [], []
    first = model.decoder.layers[0]
    first.register_forward_hook(lambda *args: seen.append(args[2][0].detach()))
    first.register_forward_pre_hook(lambda *args: states.append(torch.get_rng_state()))
    losses = model(**sample())
    backward(model, losses)
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"losses": losses.detach(), "layer": seen[0], "state": states[0], "grads": grads}


def check_dropout() -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    case = next(iter(CASES.values()))
    found: dict[str, Any] = {}
    for sequence_parallel in (False, True):
        for dropout in ("hidden_dropout", "attention_dropout"):
            options = {dropout: 0.4, "sequence_parallel": sequence_parallel}
            usual = dropped(case, pg, **options)
            found[f"{dropout} sp={sequence_parallel}"] = usual
            # Recompute must see the same masks on every rank, forked or not.
            for recompute in RECOMPUTE.values():
                again = dropped(case, pg, **options, **recompute)
                assert torch.equal(usual["losses"], again["losses"])
                for name, grad in usual["grads"].items():
                    assert torch.equal(grad, again["grads"][name]), (options, recompute, name)
    # Whole parameters of the two ranks stay equal under dropout.
    model = case.build(case.make_config(tensor_model_parallel_size=2), pg)
    found["cut"] = {name: is_cut(param, 2) for name, param in model.named_parameters()}
    return found


def test_dropout():
    first, second = run_ranks(check_dropout, 2, timeout=120)
    for key in ("hidden_dropout sp=False", "attention_dropout sp=False"):
        # Activations between layers are the same on both ranks, dropped alike, summed alike.
        assert torch.equal(first[key]["layer"], second[key]["layer"]), key
        for name, cut in first["cut"].items():
            if not cut:
                assert torch.equal(first[key]["grads"][name], second[key]["grads"][name]), name
    for key, found in first.items():
        if key != "cut":
            assert torch.equal(found["losses"], second[key]["losses"]), key
            # Under sequence parallelism ranks hold other tokens, and draw from their own streams.
            same_stream = torch.equal(found["state"], second[key]["state"])
            assert same_stream == key.endswith("sp=False"), key


def test_dropout_masks_differ_where_ranks_hold_different_things():
    """The embedding's dropout: equal masks on equal tokens, other masks on other tokens."""
    for sequence_parallel in (False, True):
        outputs = run_ranks(masked_embedding, 2, sequence_parallel)
        same = torch.equal(*outputs)
        assert same != sequence_parallel


def masked_embedding(sequence_parallel: bool) -> torch.Tensor:
    """True where the embedding's dropout kept, for this rank's tokens."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    case = next(iter(CASES.values()))
    config = case.make_config(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, hidden_dropout=0.5
    )
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    model = case.build(config, pg)
    batch = sample()
    return model.embedding(batch["input_ids"], batch["position_ids"]) != 0.0


def check_attention_streams() -> torch.Tensor:
    """The core attention's output on this rank, from equal inputs on both."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    case = next(iter(CASES.values()))
    config = case.make_config(tensor_model_parallel_size=2, attention_dropout=0.5)
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    core = case.build(config, pg).decoder.layers[0].self_attention.core_attention
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 8, 2, 4, 4, generator=generator)
    return core(q, k, v, None)


def test_attention_dropout_differs_between_ranks():
    first, second = run_ranks(check_attention_streams, 2)
    assert not torch.equal(first, second)


def test_shard_of_the_whole_gradient_is_the_rank_s_gradient():
    """`shard_parameter` agrees with what the layers compute (the other direction of `compare`)."""
    for errors in run_ranks(check_shards, 2):
        assert max(errors.values()) <= LIMIT


def check_shards() -> dict[str, float]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    case = list(CASES.values())[1]
    model = case.build(case.make_config(tensor_model_parallel_size=2), pg)
    backward(model, model(**sample()))
    whole = run_whole(case)[1]
    return {
        name: (param.grad - shard_parameter(whole[name], param, pg.tp.rank(), 2)).abs().max().item()
        for name, param in model.named_parameters()
    }


# -- Logits that are gathered: never where a loss is computed from them --

GPT2, LLAMA = list(CASES.values())[:2]


def with_further_token(case: Case, group: Any, **options: Any) -> Any:
    """The model on one of `group`'s ranks, `case` with one further token."""
    sizes = {"tensor_model_parallel_size": group.size(), "mtp_num_layers": 1}
    config = case.make_config(**sizes, sequence_parallel=group.size() > 1)
    block = get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec())
    pg = ProcessGroupCollection(tp=group, pp=PretendGroup(), cp=PretendGroup())
    return case.build(config, pg, mtp_block_spec=block, **options)


def losses_and_gradients(group: Any, case: Case, **options: Any) -> tuple[torch.Tensor, dict]:
    """Gradients that the ranks have to add up come as this rank's term."""
    model = with_further_token(case, group, **options)
    losses = model(**sample())
    backward(model, losses)
    return losses.detach(), {name: (p, p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=("tied", "untied"))
def test_a1_losses_with_parallel_output_false_are_those_of_one_rank(case):
    losses, whole = losses_and_gradients(PretendGroup(), case, parallel_output=False)
    ranks = play(2, lambda group: losses_and_gradients(group, case, parallel_output=False))
    for rank, (found, grads) in enumerate(ranks):
        assert (found - losses).abs().max() < LIMIT
        for name, (param, grad) in grads.items():
            if getattr(param, "sequence_parallel", False):
                grad = sum(other[name][1] for _, other in ranks)
            piece = shard_parameter(whole[name][1], param, rank, 2)
            assert (grad - piece).abs().max() < LIMIT, name


def all_forms_of_logits(group: Any) -> dict[str, torch.Tensor]:
    batch, found = {**sample(), "labels": None}, {}
    for parallel_output in (True, False):
        model = with_further_token(LLAMA, group, parallel_output=parallel_output).eval()
        for gather in (None, True, False):
            with torch.no_grad():
                found[f"{parallel_output} {gather}"] = model(**batch, runtime_gather_output=gather)
    return found


def test_f6_runtime_gather_output_decides_about_logits():
    whole = all_forms_of_logits(PretendGroup())["True None"]
    for rank, found in enumerate(play(2, all_forms_of_logits)):
        for form, logits in found.items():
            is_whole = form in ("False None", "False True", "True True")
            wanted = whole if is_whole else whole.chunk(2, dim=-1)[rank]
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12, msg=form)


def test_f6_runtime_gather_output_leaves_losses_alone():
    """By position too, as Megatron's `forward` has it."""
    model, batch = GPT2.build(GPT2.make_config()), sample()
    wanted = model(**batch)
    assert torch.equal(model(**batch, runtime_gather_output=True), wanted)
    tokens, places, mask, labels = batch.values()
    assert torch.equal(model(tokens, places, mask, None, labels, None, None, None, True), wanted)


def score_whole(group: Any, case: Case) -> None:
    model = with_further_token(case, group, parallel_output=False).eval()
    logits = model(**{**sample(), "labels": None})
    model.compute_language_model_loss(sample()["labels"], logits.transpose(0, 1))


def test_a1_a_loss_of_whole_logits_is_refused():
    words = "logits have 64 columns, but of a vocabulary of 64 each of 2 ranks scores 32; give this"
    with pytest.raises(ValueError, match=words):
        play(2, score_whole, GPT2)
