"""Further tokens: losses written out by hand, what is rolled, what the log says, what is refused."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.orders.orders import register_order, unregister
from minimegatron.core.orders.placement import V
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    get_tensor_shapes,
)
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer import mtp_loss, multi_token_prediction
from minimegatron.core.transformer.layer_placement import ranks_with_word_embedding
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.moe.moe_logging import balance_of_layers, describe_balance
from minimegatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    get_mtp_layer_offset,
    get_mtp_num_layers_to_build,
    get_mtp_ranks,
    mtp_on_this_rank,
    roll_tensor,
)
from minimegatron.core.transformer.zigzag import take_part
from tests.core.models.gpt_support import (
    BATCH,
    CASES,
    RECOMPUTE,
    SEQUENCE,
    VOCABULARY,
    Case,
    sample,
)
from tests.fake_transport import FakeGroup
from tests.groups import pretend_groups

TIED, LLAMA, QWEN, *_ = CASES.values()
GROUPS = SimpleNamespace(
    **dict.fromkeys(("tp", "cp", "pp", "dp_cp", "embd", "pos_embd"), FakeGroup())
)
NUM_MICROBATCHES = 3


@pytest.fixture(autouse=True)
def _empty_tracker(monkeypatch):
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))


def build(case: Case, num_depths: int, **options: Any):
    config = case.make_config(mtp_num_layers=num_depths, mtp_loss_scaling_factor=0.3, **options)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    return case.build(config, GROUPS, mtp_block_spec=get_gpt_mtp_block_spec(config, spec))


def microbatches(masked: str = "uneven") -> list[dict[str, torch.Tensor]]:
    """Token ids, labels and mask; masks differ, and one token in the middle does not count."""
    found = []
    for number in range(NUM_MICROBATCHES):
        generator = torch.Generator().manual_seed(number)
        text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        mask = torch.ones(BATCH, SEQUENCE, dtype=torch.float64)
        mask[:, SEQUENCE - 2 * number :] = 0.0
        mask[0, 2] = 0.0
        if masked == "all of one" and number == 1:
            mask.zero_()
        found.append({"ids": text[:, :-1], "labels": text[:, 1:], "mask": mask})
    return found


def loss_func(mask, output):
    return (output * mask).sum(), mask.sum().int(), {"loss": (output * mask).sum().detach()}


def forward_step(iterator, model):
    batch = next(iterator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    more = {"labels": batch["labels"], "loss_mask": batch["mask"]}
    return model(batch["ids"], positions, None, **more), partial(loss_func, batch["mask"])


def step(model, batches, forward_only: bool = False, forward_step=forward_step) -> dict:
    """Gradients of one step by the schedule."""
    model.zero_grad()
    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        pg_collection=GROUPS,
    )
    return {name: param.grad for name, param in model.named_parameters()}


# -- Written out by hand --


def shifted(tensor: torch.Tensor, places: int) -> torch.Tensor:
    return F.pad(tensor[:, places:], (0, places))


def by_hand(model, batch) -> list[torch.Tensor]:
    """Loss of each token, [b, s], at each depth from 0."""
    ids, positions = batch["ids"], torch.arange(SEQUENCE).expand(BATCH, -1)
    angles = None if model.rotary_pos_emb is None else model.rotary_pos_emb(SEQUENCE)
    states = model.decoder(model.embedding(ids, positions), None, rotary_pos_emb=angles)
    weight = model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight if weight is None else weight
    found = []
    for depth in range(1 + len(model.mtp.layers)):
        if depth:
            layer = model.mtp.layers[depth - 1]
            tokens = model.embedding(shifted(ids, depth), shifted(positions, depth))
            both = torch.cat([layer.enorm(tokens), layer.hnorm(states)], dim=-1)
            states, _ = layer.transformer_layer(
                F.linear(both, layer.eh_proj.weight), None, rotary_pos_emb=angles
            )
            states = layer.final_layernorm(states)
        logits = F.linear(states, weight).permute(1, 2, 0)  # [b, v, s]
        found.append(F.cross_entropy(logits, shifted(batch["labels"], depth), reduction="none"))
    return found


def objective(model, batches, per_token: bool) -> torch.Tensor:
    """The whole step's loss, without autoscaler."""
    f, num_depths = model.config.mtp_loss_scaling_factor, model.config.mtp_num_layers
    total = 0.0
    for batch in batches:
        masks = [shifted(batch["mask"], depth) for depth in range(1 + num_depths)]
        means = [
            (mask * losses).sum() / max(mask.sum().item(), 1)
            for mask, losses in zip(masks, by_hand(model, batch), strict=True)
        ]
        of_batch = means[0] + f / num_depths * sum(means[1:])
        total = total + of_batch * (masks[0].sum() if per_token else 1 / len(batches))
    return total


@pytest.mark.parametrize("per_token", [False, True], ids=("means", "per token"))
@pytest.mark.parametrize("num_depths", [1, 2, 3])
@pytest.mark.parametrize("case", [TIED, LLAMA, QWEN], ids=("tied", "llama", "qwen"))
def test_gradients_are_those_of_the_sum_of_losses(case, num_depths, per_token):
    model = build(case, num_depths, calculate_per_token_loss=per_token)
    batches = microbatches("all of one" if num_depths == 2 else "uneven")
    found = step(model, batches)
    model.zero_grad()
    objective(model, batches, per_token).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None and found[name].isfinite().all(), name
        torch.testing.assert_close(found[name], param.grad, rtol=1e-9, atol=1e-12, msg=name)
    assert found["mtp.layers.0.eh_proj.weight"].abs().max() > 1e-4


@pytest.mark.parametrize("per_token", [False, True], ids=("means", "per token"))
def test_s16_small_weights_are_weights(per_token):
    """All weights 2**-12 times as large: the means stay, the sums become as much smaller."""
    model = build(LLAMA, 2, calculate_per_token_loss=per_token)
    found, factor = [], 2.0**-12
    for batches in (microbatches(), microbatches()):
        for batch in batches:
            batch["mask"] *= factor if found else 1.0
        gradients = step(model, batches, forward_step=weighted_step)
        found.append({name: grad.clone() for name, grad in gradients.items()})
    for name, grad in found[0].items():
        grad *= factor if per_token else 1.0
        torch.testing.assert_close(found[1][name], grad, rtol=1e-9, atol=1e-15, msg=name)


def weighted_step(iterator, model):
    batch = next(iterator)
    mask, positions = batch["mask"], torch.arange(SEQUENCE).expand(BATCH, -1)
    output = model(batch["ids"], positions, None, labels=batch["labels"], loss_mask=mask)
    return output, lambda output: ((output * mask).sum(), mask.sum(), {})


def test_a_mask_of_nothing_and_no_mask():
    model = build(LLAMA, 2)
    batches = microbatches()[:1]
    batches[0]["mask"] = torch.zeros_like(batches[0]["mask"])
    assert all(not grad.any() for grad in step(model, batches).values())
    # One token that counts, the first: at no further depth does one.
    batches[0]["mask"][1, 0] = 1.0
    found = step(model, batches)
    assert found["decoder.layers.0.mlp.linear_fc1.weight"].any()
    assert not found["mtp.layers.1.eh_proj.weight"].any()
    assert all(grad.isfinite().all() for grad in found.values())
    # No mask: all tokens count, but for those that the sequence does not have.
    ones = [dict(batches[0], mask=torch.ones(BATCH, SEQUENCE, dtype=torch.float64))]
    wanted = step(model, ones)

    def without_mask(iterator, model):
        batch = next(iterator)
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        output = model(batch["ids"], positions, None, labels=batch["labels"])
        return output, partial(loss_func, batch["mask"])

    found = step(model, ones, forward_step=without_mask)
    for name, grad in wanted.items():
        assert torch.equal(found[name], grad), name


def test_evaluation_and_sampling_do_without():
    model, batch = build(TIED, 2), microbatches()[0]
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    ids, more = batch["ids"], {"labels": batch["labels"], "loss_mask": batch["mask"]}
    wanted = by_hand(model, batch)[0]
    with mock.patch.object(model.mtp, "forward", side_effect=AssertionError), torch.no_grad():
        assert torch.allclose(model(ids, positions, None, **more), wanted, rtol=0, atol=1e-12)
        logits = model(ids, positions, None)
    # Logits with gradients, such as reinforcement learning wants, are those of the next token too.
    torch.testing.assert_close(model(ids, positions, None), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", RECOMPUTE)
def test_recompute_and_dropout_change_nothing(how):
    found = []
    for options in ({}, RECOMPUTE[how]):
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(3, tp_rank=0)
        model = build(TIED, 2, hidden_dropout=0.2, attention_dropout=0.1, **options)
        with mock.patch.object(
            multi_token_prediction, "checkpoint", wraps=multi_token_prediction.checkpoint
        ) as checkpointed:
            found.append(step(model, microbatches()[:1]))
    calls = {"none": 0, "selective": 0}
    assert checkpointed.call_count == calls.get(how, 2)
    for name, grad in found[0].items():
        assert torch.equal(found[1][name], grad), name


def test_a_layer_alone_recomputes_as_the_config_says():
    options = {"recompute_granularity": "full", "recompute_method": "uniform"}
    model, batch = build(LLAMA, 2, recompute_num_layers=1, **options), microbatches()[0]
    states = torch.randn(SEQUENCE, BATCH, model.config.hidden_size, dtype=torch.float64)
    inputs = {"input_ids": batch["ids"], "position_ids": None, "hidden_states": states}
    inputs |= {"attention_mask": None, "rotary_pos_emb": model.rotary_pos_emb(SEQUENCE)}
    inputs |= {"embedding": model.embedding}
    *_, last = model.mtp(**inputs).chunk(3)
    with mock.patch.object(multi_token_prediction, "checkpoint") as checkpointed:
        checkpointed.side_effect = lambda function, _, *arguments: function(*arguments)
        for layer in model.mtp.layers:
            found, inputs["input_ids"], _ = layer(**inputs)
            inputs["hidden_states"] = found
    assert torch.equal(found, last) and checkpointed.call_count == 2


# -- Chunks in one process --

CUTS = {
    "no layout": (3, None),
    "beside the last layer": (3, "Et|t|tmmL"),
    "between layers and loss": (3, "Et|ttmm|L"),
    "on a stage of its own": (4, "Ett|t|mm|L"),
    "every stage one thing": (4, "E|ttt|mm|L"),
    "beside the embedding": (2, "Etttmm|L"),
}


def chunks_of(case: Case, p: int, layout: str | None):
    found = []
    for rank in range(p):
        config = case.make_config(
            mtp_num_layers=2,
            mtp_loss_scaling_factor=0.3,
            pipeline_model_parallel_size=p,
            pipeline_model_parallel_layout=layout,
        )
        place = {"vp_stage": None, "pp_rank": rank}
        spec = get_gpt_decoder_block_spec(config, **place)
        found.append(
            GPTModel(
                config,
                spec,
                VOCABULARY,
                SEQUENCE,
                pre_process=rank == 0,
                post_process=rank == p - 1,
                share_embeddings_and_output_weights=case.tied,
                position_embedding_type="rope",
                rotary_percent=case.rotary_percent,
                mtp_block_spec=get_gpt_mtp_block_spec(config, spec, **place),
                pg_collection=pretend_groups(pp_rank=rank, pp_size=p),
            )
        )
    return found


@pytest.mark.parametrize("case", [LLAMA, replace(LLAMA, tied=True)], ids=("untied", "tied"))
@pytest.mark.parametrize("cut", CUTS)
def test_any_cut_is_the_same_model(cut, case):
    p, layout = CUTS[cut]
    chunks, whole = chunks_of(case, p, layout), build(case, 2)

    # -- The same weights; each copy of the embedding is marked --
    expected, found = dict(whole.named_parameters()), {}
    for chunk in chunks:
        for name, param in named_global_parameters(chunk):
            assert torch.equal(param, expected[name]), name
            if name in found:
                assert name == "embedding.word_embeddings.weight"
            is_copied = name == "embedding.word_embeddings.weight"
            is_copied &= case.tied or cut != "beside the embedding" or not chunk.pre_process
            if is_copied:
                assert param.shared_embedding and param.shared == (name in found)
            else:
                assert not getattr(param, "shared", False)
            found[name] = param
    assert found.keys() == expected.keys()
    if layout is not None:
        texts = layout.split("|")
        for chunk, text in zip(chunks, texts, strict=True):
            last_t = "t" in text and "t" not in "".join(texts[texts.index(text) + 1 :])
            assert (chunk.decoder.final_layernorm is not None) == last_t, text
            assert (chunk.mtp is not None) == ("m" in text)
            has_weight = "L" in text and not (case.tied and "m" in text)
            assert (chunk.post_process and chunk.output_layer.weight is not None) == has_weight

    # -- The same losses and gradients --
    more = sample() | {"loss_mask": microbatches()[1]["mask"]}
    wanted = whole(**more)
    (wanted * more["loss_mask"]).sum().backward()
    outputs, inputs = [], []
    for chunk in chunks:
        received = outputs[-1].detach().requires_grad_() if outputs else None
        inputs.append(received)
        chunk.set_input_tensor([received])
        outputs.append(chunk(**more))
        assert outputs[-1]._base is None
    assert torch.allclose(outputs[-1], wanted, rtol=0, atol=1e-12)
    (outputs.pop() * more["loss_mask"]).sum().backward()
    while outputs:
        torch.autograd.backward(outputs.pop(), inputs.pop().grad)
    grads = {}
    for chunk in chunks:
        for name, param in named_global_parameters(chunk):
            grads[name] = grads.get(name, 0.0) + param.grad
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=0, atol=1e-11, msg=name)


def test_which_ranks():
    config = LLAMA.make_config(
        mtp_num_layers=2,
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout="Ett|t|mm|L",
    )
    ranks = [5, 6, 7, 8]
    assert get_mtp_ranks(ranks, config) == [7]
    assert ranks_with_word_embedding(config, True, ranks) == [5, 7, 8]
    assert ranks_with_word_embedding(config, False, ranks) == [5, 7]
    assert [get_mtp_num_layers_to_build(config, None, rank) for rank in range(4)] == [0, 0, 2, 0]
    for rank, (is_here, before) in enumerate([(False, 0), (False, 0), (True, 0), (False, 2)]):
        with mock.patch.object(multi_token_prediction, "pipeline_rank", lambda *_: rank):  # noqa: B023
            assert mtp_on_this_rank(config) == is_here
            assert get_mtp_layer_offset(config) == before
    interleaved = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = LLAMA.make_config(num_layers=4, mtp_num_layers=1, **interleaved)
    with mock.patch.object(multi_token_prediction, "pipeline_rank", lambda *_: 1):
        assert mtp_on_this_rank(config)
        found = [mtp_on_this_rank(config, ignore_virtual=False, vp_stage=v) for v in range(2)]
        assert found == [False, True]
    none = LLAMA.make_config(num_layers=4, **interleaved)
    assert get_mtp_ranks([0, 1], none) == [] and not none.mtp_standalone
    # Where the model begins and ends on one rank.
    register_order("mtp-v", placement=V)(test_which_ranks)
    try:
        folded = LLAMA.make_config(
            num_layers=4, mtp_num_layers=1, pipeline_schedule="mtp-v", **interleaved
        )
        assert get_mtp_ranks([3, 4], folded) == [3]
        assert ranks_with_word_embedding(folded, True, [3, 4]) == [3]
    finally:
        unregister("mtp-v")


def test_messages_tell_their_shape_behind_a_stage_of_its_own():
    stages = {"pipeline_model_parallel_size": 3, "mtp_num_layers": 1}
    options = {"seq_length": 8, "micro_batch_size": 3, "decoder_seq_length": None}
    for layout, shapes in (("Et|t|tmL", [(8, 3, 32)]), ("Et|ttm|L", [()])):
        config = LLAMA.make_config(pipeline_model_parallel_layout=layout, **stages)
        assert config.mtp_standalone == (shapes == [()])
        groups = {"tp_group": FakeGroup(), "cp_group": FakeGroup()}
        assert get_tensor_shapes(config=config, **options, **groups) == shapes
        # A configuration made of this one, with another layout, has that one's.
        again = replace(config, pipeline_model_parallel_layout="Et|t|tmL")
        assert not again.mtp_standalone and not again.variable_seq_lengths


# -- One token further --


def test_rolled():
    tensor = torch.arange(1, 7).view(2, 3)
    rolled, total = roll_tensor(tensor)
    assert rolled.tolist() == [[2, 3, 0], [5, 6, 0]] and total == 16
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert roll_tensor(tensor, dims=0)[0].tolist() == [[4, 5, 6], [0, 0, 0]]
    assert roll_tensor(torch.tensor([[True, True]]))[0].tolist() == [[True, False]]
    with pytest.raises(ValueError, match="shifts by 2; only -1"):
        roll_tensor(tensor, shifts=2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rolled_over_ranks_that_share_sequences(num_ranks):
    """Twice, because the second roll's borders are those of the first's result."""
    whole = torch.arange(1, 4 * num_ranks * 2 + 1).view(2, -1)
    groups = [FakeGroup(rank, num_ranks) for rank in range(num_ranks)]
    parts = [take_part(whole, 1, group) for group in groups]
    for _ in range(2):
        whole, _ = roll_tensor(whole)
        sent = {}

        def look(output, tensor, group, sent=sent):
            sent[group.rank()] = tensor

        def gather(output, tensor, group, sent=sent):
            output.copy_(torch.cat([sent[rank] for rank in range(group.size())]))

        rolled = []
        for do in (look, gather):
            with mock.patch.object(multi_token_prediction, "all_gather", do):
                rolled = [roll_tensor(p, cp_group=g) for p, g in zip(parts, groups, strict=True)]
        parts = [part for part, _ in rolled]
        for (part, total), group in zip(rolled, groups, strict=True):
            assert torch.equal(part, take_part(whole, 1, group))
            assert total == part.sum()


# -- The log --


def losses_by_hand(model, batches) -> list[float]:
    """Each depth's mean over microbatches of its mean loss."""
    found = []
    for depth in range(1, 1 + len(model.mtp.layers)):
        means = []
        for batch in batches:
            mask = shifted(batch["mask"], depth)
            means.append(((mask * by_hand(model, batch)[depth]).sum() / mask.sum()).item())
        found.append(sum(means) / len(means))
    return found


def test_a_line_of_the_log_has_the_mean_of_its_steps():
    model, batches = build(LLAMA, 2), microbatches()
    config = model.config
    config.finalize_model_grads_func = lambda models, *_, **__: [
        func(models, GROUPS) for func in config.after_grads_funcs
    ]
    describe = partial(mtp_loss.describe_further_tokens, [model], GROUPS)
    assert describe() == {}
    steps = [losses_by_hand(model, batches)]
    step(model, batches)
    with torch.no_grad():
        model.mtp.layers[0].eh_proj.weight.mul_(3.0)
    # An evaluation and a step that fails half-way count for nothing.
    model.eval()
    step(model, batches[:1], forward_only=True)
    model.train()
    step(model, batches[:1], forward_only=True)
    with pytest.raises(ArithmeticError):
        step(model, batches, forward_step=_fails)
    steps.append(losses_by_hand(model, batches[:2]))
    step(model, batches[:2])
    wanted = [sum(losses) / 2 for losses in zip(*steps, strict=True)]
    assert describe() == {
        "mtp_1 loss": pytest.approx(wanted[0], rel=1e-12),
        "mtp_2 loss": pytest.approx(wanted[1], rel=1e-12),
    }
    assert describe() == {}


def _fails(iterator, model):
    forward_step(iterator, model)
    raise ArithmeticError


def test_the_tracker_of_a_loop_of_ones_own():
    model, batches = build(LLAMA, 2), microbatches()
    step(model, batches)
    wanted = losses_by_hand(model, batches)
    with torch.no_grad():  # an evaluation between a step and its line
        step(model, batches[:1], forward_only=True)
    written, kept = {}, {"lm loss": 1.0}
    writer = SimpleNamespace(add_scalar=lambda name, loss, at: written.update({name: (loss, at)}))
    for _ in range(2):
        MTPLossLoggingHelper.track_mtp_metrics(1 / len(batches), 7, writer, None, kept)
    assert kept == {
        "lm loss": 1.0,
        "mtp_1 loss": pytest.approx(wanted[0]),
        "mtp_2 loss": pytest.approx(wanted[1]),
    }
    assert written["mtp_1 loss"] == (0.0, 7)  # after the first time the tracker is empty
    MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(2.0), None, 2)
    assert not MTPLossLoggingHelper.tracker["values"].any()
    # Over ranks: a sum over one group, then a mean over the other.
    both = FakeGroup(0, 2)
    MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(2.0), 0, 2, both, both)
    with mock.patch.object(mtp_loss, "all_reduce", lambda values, group: values.mul_(3.0)):
        MTPLossLoggingHelper.reduce_loss_in_tracker()
    assert MTPLossLoggingHelper.tracker["values"].tolist() == [2.0 * 3 * 3 / 2, 0.0]


def test_hooks_are_entered_once():
    config = LLAMA.make_config(mtp_num_layers=1, calculate_per_token_loss=True)
    hooks = ("aux_loss_scale_funcs", "before_step_funcs", "after_grads_funcs", "log_funcs")
    assert [len(getattr(config, name)) for name in hooks] == [1, 1, 1, 1]
    assert config.aux_loss_scale_funcs == (mtp_loss.scale_mtp_as_sum,)
    other = replace(config, calculate_per_token_loss=False, log_funcs=(*config.log_funcs, print))
    assert other.aux_loss_scale_funcs == (mtp_loss.scale_mtp_as_mean,)
    assert other.log_funcs == (print, mtp_loss.describe_further_tokens)
    without = replace(other, mtp_num_layers=None)
    assert [getattr(without, name) for name in hooks] == [(), (), (), (print,)]
    scale = torch.full((1,), 1024.0)
    mtp_loss.scale_mtp_as_mean(scale, 3, 2)
    assert MTPLossAutoScaler.main_loss_backward_scale.item() == 1024.0 * 2 / 3
    mtp_loss.scale_mtp_as_sum(scale, 3, 2)
    assert MTPLossAutoScaler.main_loss_backward_scale.item() == 1024.0


def test_the_log_of_the_balance_has_experts_of_further_layers():
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 0, 1]}
    config = LLAMA.make_config(mtp_num_layers=2, moe_aux_loss_coeff=0.1, **experts)
    spec = get_gpt_decoder_block_spec(config)
    groups = SimpleNamespace(
        **vars(GROUPS),
        **dict.fromkeys(("ep", "expt_tp", "tp_ep", "tp_cp", "tp_dp_cp"), FakeGroup()),
    )
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec),
        pg_collection=groups,
    )
    step(model, microbatches())
    layers = balance_of_layers([model], groups)
    assert [layer.layer_number for layer in layers] == [3, 4, 5]
    tokens = BATCH * SEQUENCE * NUM_MICROBATCHES * 2
    assert [sum(layer.tokens_per_expert) for layer in layers] == [tokens] * 3
    assert describe_balance([model], groups).keys() == {"load imbalance", "load balancing loss"}
    for layer in model.mtp.layers:
        assert layer.transformer_layer.mlp.router.weight.grad.abs().max() > 0


# -- What cannot be --

THREE = {"pipeline_model_parallel_size": 3}
EXPERTS = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "sequence_parallel": False}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_model_parallel_layout": "Et|t|tL", **THREE}, "m stands 0 times but .* is 1"),
        (
            {"mtp_num_layers": None, "pipeline_model_parallel_layout": "Et|t|tmL", **THREE},
            "m stands 1 time but .* is 0; remove 1 or set --mtp-num-layers 1",
        ),
        ({"pipeline_model_parallel_layout": "Et|t|tmmL", **THREE}, "m stands 2 times but .* is 1"),
        ({"pipeline_model_parallel_layout": "Et|tm|tL", **THREE}, "m stands before a t"),
        (
            {
                "mtp_num_layers": 2,
                "pipeline_model_parallel_layout": "Et|tm|tmL",
                **THREE,
            },
            "m stands before a t",
        ),
        (
            {
                "pipeline_model_parallel_layout": "Ett|tm||L",
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            "m is in chunk 0 of pipeline rank 1",
        ),
        ({"fp32_residual_connection": True}, "mtp_num_layers 1 with fp32_residual_connection"),
        (
            {
                **EXPERTS,
                "moe_token_dispatcher_type": "alltoall",
                "overlap_moe_expert_parallel_comm": True,
            },
            "mtp_num_layers 1 with overlap_moe_expert_parallel_comm",
        ),
        ({"mtp_num_layers": 0}, "mtp_num_layers"),
    ],
    ids=range(9),
)
def test_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LLAMA.make_config(**({"mtp_num_layers": 1} | options))


def test_refused_by_the_model():
    options = {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "num_layers": 2}
    config = TIED.make_config(**options)
    spec = get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec(), pp_rank=1)
    with pytest.raises(ValueError, match="copy of the learned positions"):
        groups = pretend_groups(pp_rank=1, pp_size=2)
        TIED.build(config, groups, pre_process=False, mtp_block_spec=spec)
    with pytest.raises(ValueError, match="2 layers for further tokens, but mtp_num_layers is 1"):
        LLAMA.build(
            LLAMA.make_config(mtp_num_layers=1),
            mtp_block_spec=replace(spec, layer_specs=spec.layer_specs * 2),
        )
    with pytest.raises(ValueError, match="builds 1 of these layers, but mtp_block_spec is missing"):
        LLAMA.build(LLAMA.make_config(mtp_num_layers=1))
    with pytest.raises(ValueError, match="builds 0 of these layers, but mtp_block_spec is given"):
        groups = pretend_groups(pp_rank=0, pp_size=2)
        TIED.build(config, groups, post_process=False, mtp_block_spec=spec)
    with pytest.raises(ValueError, match="its input_ids are None; give it the batch's tokens"):
        build(LLAMA, 1)(None, None, None, torch.zeros(SEQUENCE, BATCH, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="have no nodes"):
        build(LLAMA, 1).build_schedule_plan(**sample())
    with pytest.raises(ValueError, match="use_transformer_engine=False"):
        get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec(), True, pp_rank=1)
