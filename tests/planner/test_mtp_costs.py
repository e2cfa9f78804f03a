"""Further tokens in the planner: times of stages, what they hold, and messages that grow."""

from fractions import Fraction

import pytest
import torch

from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.orders.placement import V
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.planner.actions import ACTIVATION, SEND
from minimegatron.planner.memory import message_bytes, num_layer_parameters
from minimegatron.planner.mtp_costs import (
    layer_times,
    lengths_behind,
    message_factors,
    num_mtp_parameters,
    parameters_of_stages,
    stages_of_layout,
    vocabulary_matrices,
)
from minimegatron.planner.plan import Plan, plan, plan_config_from_json, plan_config_to_json
from minimegatron.planner.plan_check import check
from minimegatron.planner.simulator import Costs, simulate
from tests.core.transformer.moe.test_moe_layer import groups

E, T, M, L = "embedding", "decoder", "mtp", "loss"
STANDALONE = [[E, T], [T], [M, M], [], [L]]


# -- Time --


def test_a_depth_is_a_layer_and_a_projection_and_the_loss_comes_once_more():
    times = layer_times((12, 24), loss=(3, 6), num_depths=2)
    assert times == {E: (0, 0), T: (12, 24), M: (14, 28), L: (9, 18)}
    costs = Costs.from_layout([[stage] for stage in STANDALONE], times)
    assert (costs.forward, costs.backward) == ([12, 12, 28, 0, 9], [24, 24, 56, 0, 18])
    assert layer_times((1, 2))[M] == (Fraction(7, 6), Fraction(7, 3))
    assert layer_times((1, 2))[L] == (0, 0)


# -- What a stage holds --


def test_parameters_of_a_depth():
    h = 64
    layer = num_layer_parameters(h)
    assert num_mtp_parameters(2, layer, h) == 2 * (layer + 2 * h * h + 3 * 2 * h)
    assert num_mtp_parameters(1, layer, h, norm_has_bias=False) == layer + 2 * h * h + 3 * h
    assert num_mtp_parameters(0, layer, h) == 0


@pytest.mark.parametrize(
    ("stages", "tied", "untied"),
    [
        ([[E, T, M, L]], [1], [2]),
        ([[E, T], [T, L]], [1, 1], [1, 1]),
        ([[E, T], [T, M, L]], [1, 1], [1, 2]),
        ([[E, T], [T, M], [L]], [1, 1, 1], [1, 1, 1]),
        (STANDALONE, [1, 0, 1, 0, 1], [1, 0, 1, 0, 1]),
    ],
)
def test_copies_of_the_vocabulary(stages, tied, untied):
    assert vocabulary_matrices(stages, is_tied=True) == tied
    assert vocabulary_matrices(stages, is_tied=False) == untied


def test_the_last_norm_is_behind_the_last_layer_if_further_tokens_start_there():
    plain = parameters_of_stages([[E, T], [T], [L]], 1000, 10, 50)
    assert plain == [1500, 1000, 520]
    further = parameters_of_stages([[E, T], [T], [M, L]], 1000, 10, 50, num_positions=7)
    assert further == [1570, 1020, 500 + 1000 + 200 + 60]


# -- Messages --


def test_messages_behind_a_stage_of_its_own_are_longer():
    assert lengths_behind(STANDALONE) == [1, 1, 3, 3, 3]
    assert message_factors(STANDALONE) == (1, 1, 3, 3, 3)
    assert message_factors([[E, T], [T, M, L]]) is message_factors([[E, T, L]]) is None
    one = message_bytes(2048, 1, 1024, context_parallel_size=2)
    assert message_bytes(2048, 1, 1024, context_parallel_size=2, num_further_tokens=2) == 3 * one


def sizes_by_link(step: Plan) -> dict[tuple[int, int], set[int]]:
    """(stage, the one behind) -> the sizes of what travels between them, both ways and at both ends."""
    found: dict[tuple[int, int], set[int]] = {}
    for rank, actions in enumerate(step.ranks):
        for action in actions:
            for message in action.messages:
                stage = step.config.placement.stage_of(rank, message.chunk)
                goes_on = (message.direction == SEND) == (message.payload == ACTIVATION)
                link = (stage, stage + 1) if goes_on else (stage - 1, stage)
                found.setdefault(link, set()).add(message.num_bytes)
    return found


@pytest.mark.parametrize(
    ("name", "p", "vpp", "options"),
    [
        ("1f1b", 4, None, {}),
        ("1f1b", 4, None, {"batch_p2p_comm": False}),
        ("1f1b", 4, None, {"wire": "untagged"}),
        ("gpipe", 4, None, {"wire": "tagged"}),
        ("interleaved", 2, 2, {}),
        ("interleaved", 2, 2, {"wire": "tagged"}),
        ("interleaved", 2, 2, {"forward_only": True, "overlap_p2p_comm": True}),
    ],
)
def test_both_ends_of_every_link_know_its_size(name, p, vpp, options):
    factors = (1, 1, 3, 3)
    step = plan(name, p, 4, vpp, message_bytes=10, message_factors=factors, **options)
    links = sizes_by_link(step)
    assert links == {(stage, stage + 1): {10 * factors[stage]} for stage in range(3)}
    assert check(step) == []
    data = plan_config_to_json(step.config)
    assert plan_config_from_json(data) == step.config
    ordinary = plan(name, p, 4, vpp, message_bytes=10, **options)
    assert "message_factors" not in plan_config_to_json(ordinary.config)
    assert 3 * step.bytes_sent() == 5 * ordinary.bytes_sent()
    # A longer message takes longer.
    costs = Costs(1, 2, bandwidth=10)
    assert simulate(step, costs).makespan > simulate(ordinary, costs).makespan


def test_sizes_for_other_stages_are_refused():
    for factors in ((1, 1), (1, 0, 1, 1)):
        with pytest.raises(ValueError, match="are for 4 virtual stages; give one of 1 or more"):
            plan("1f1b", 4, 4, message_factors=factors)


def test_stages_of_a_layout_are_in_model_order():
    layout = PipelineParallelLayerLayout("Et|t|tm|L", 2, V(2))
    names = [[layer.name for layer in stage] for stage in stages_of_layout(layout)]
    assert names == [[E, T], [T], [T, M], [L]]


# -- Beside real stages --

h, VOCAB = 32, 48


def parameters_of_model(pp: int, layout: str | None, is_tied: bool, **options) -> list[int]:
    """Of each stage of a real model, built without other ranks."""
    found = []
    for rank in range(pp):
        config = TransformerConfig(
            num_layers=4,
            hidden_size=h,
            num_attention_heads=4,
            pipeline_model_parallel_size=pp,
            pipeline_model_parallel_layout=layout,
            pipeline_dtype=torch.float32,
            **options,
        )
        where = {"vp_stage": None, "pp_rank": rank}
        spec = get_gpt_decoder_block_spec(config, **where)
        model = GPTModel(
            config,
            spec,
            VOCAB,
            16,
            pre_process=rank == 0,
            post_process=rank == pp - 1,
            share_embeddings_and_output_weights=is_tied,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, **where),
            pg_collection=groups(pp=(rank, pp)),
        )
        found.append(sum(param.numel() for param in model.parameters()))
    return found


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("stages", "layout", "options"),
    [
        ([[E, *[T] * 4, M, M, L]], None, {"mtp_num_layers": 2}),
        ([[E, T, T], [T, T, M, L]], None, {"mtp_num_layers": 1}),
        ([[E, T, T], [T, T, L]], None, {}),
        ([[E, T, T], [T, T], [M, M], [L]], "Ett|tt|mm|L", {"mtp_num_layers": 2}),
        (
            [[E, T, T], [T, T, M], [L]],
            "Ett|ttm|L",
            {"mtp_num_layers": 1, "normalization": "RMSNorm"},
        ),
    ],
)
def test_parameters_are_those_of_real_stages(stages, layout, options, is_tied):
    has_bias = options.get("normalization") != "RMSNorm"
    layer = num_layer_parameters(h, norm_has_bias=has_bias)
    planned = parameters_of_stages(stages, layer, h, VOCAB, is_tied, norm_has_bias=has_bias)
    assert planned == parameters_of_model(len(stages), layout, is_tied, **options)
