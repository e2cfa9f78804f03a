"""Ranks that share a sequence: what they send, compute and hold, beside what real layers do."""

from fractions import Fraction

import pytest
import torch

import minimegatron
from minimegatron.core import parallel_state
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.activation_config import COMM_TYPES
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.zigzag import positions_of_rank
from minimegatron.planner.context_costs import (
    SentBytes,
    context_parallel_bytes,
    pairs_of_tokens,
    ring_buffer_bytes,
)
from minimegatron.planner.memory import activation_bytes_per_layer
from minimegatron.tracing.activation_meter import ActivationMeter
from tests.figures import figure
from tests.ranks import run_ranks

s, b, h, a, g = 64, 2, 128, 8, 4
SIZES = (s, b, a, g, h // a)


# -- Formulas --


def test_rows_of_the_table():
    """In units of u, the keys and values of one rank."""
    for c in (2, 4, 8):
        u = Fraction(2 * s * b * g * (h // a), c) * 2
        sent = {way: context_parallel_bytes(way, *SIZES, c) for way in COMM_TYPES}
        assert sent["p2p"] == ((c - 1) * u, (2 * c - 1) * u)
        assert sent["all_gather"] == ((c - 1) * u, 2 * (c - 1) * u)
        # a = 2g here: queries and output have twice as many heads as keys and values.
        assert sent["a2a"] == (3 * u * Fraction(c - 1, c),) * 2
        assert context_parallel_bytes("a2a", s, b, a, a, h // a, c).total == Fraction(
            2 * 4 * s * b * h * (c - 1) * 2, c * c
        )
        half = [context_parallel_bytes(way, *SIZES, c, 2).total * 2 for way in COMM_TYPES]
        assert half == [sent[way].total for way in COMM_TYPES]
        assert ring_buffer_bytes(s, b, g, h // a, c) == (2 * u, 4 * u)
    # Few groups of keys make rings and gathers cheap, and leave half of an all-to-all.
    few, many = (
        [context_parallel_bytes(x, s, b, 8, y, 8, 4).total for x in COMM_TYPES] for y in (1, 8)
    )
    assert [Fraction(m, f) for m, f in zip(many, few, strict=True)] == [8, 8, Fraction(16, 9)]


def test_a_rank_alone_sends_nothing():
    for way in COMM_TYPES:
        assert context_parallel_bytes(way, *SIZES, 1) == SentBytes(0, 0)
    assert ring_buffer_bytes(s, b, g, h // a, 1) == SentBytes(0, 0)
    with pytest.raises(ValueError, match="'ring' is unknown; use one of p2p, all_gather, a2a"):
        context_parallel_bytes("ring", *SIZES, 2)


@pytest.mark.parametrize("c", [1, 2, 4])
def test_pairs_of_tokens_are_those_that_a_rank_sees(c):
    counted = [int((positions_of_rank(32, rank, c) + 1).sum()) for rank in range(c)]
    assert pairs_of_tokens(32, c) == counted
    assert sum(pairs_of_tokens(32, c, contiguous=True)) == sum(counted) == 32 * 33 // 2


def test_pairs_of_two_splits():
    assert pairs_of_tokens(32, 4) == [132] * 4
    assert pairs_of_tokens(32, 4, contiguous=True) == [36, 100, 164, 228]
    with pytest.raises(ValueError, match="12 does not divide into 8 equal chunks for 4"):
        pairs_of_tokens(12, 4)


# -- Real layers --


def layer_of(c: int, way: str) -> torch.nn.Module:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=h,
        num_attention_heads=a,
        num_query_groups=g,
        context_parallel_size=c,
        cp_comm_type=way,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    (spec,) = get_gpt_decoder_layer_specs(config)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=pg).to(torch.bfloat16)


def sent_by(events: list) -> int:
    """Bytes that a rank sends to others by the collectives of a recording."""
    total = 0
    for event in events:
        told, size = event.attributes, event.attributes.get("group_size", 1)
        if "bytes_sent" in told:
            total += told["bytes_sent"]
        elif event.name == "all-gather":
            total += told["bytes"] * (size - 1)
        elif event.name == "reduce-scatter":
            total += told["bytes"] * (size - 1) // size
    return total


def measure(sizes: list[int]) -> dict[tuple[int, str], tuple[int, int, int]]:
    """In a rank, for each (c, way): bytes kept for backward, sent forward, sent backward."""
    found = {}
    for c in sizes:
        parallel_state.initialize_model_parallel(context_parallel_size=c)
        for way in COMM_TYPES if c > 1 else COMM_TYPES[:1]:
            layer = layer_of(c, way)
            x = torch.randn(s // c, b, h, dtype=torch.bfloat16, requires_grad=True)
            with ActivationMeter(layer) as meter, minimegatron.trace(gather=False) as forward:
                output, _ = layer(x * 1, attention_mask=None)
            kept = meter.now
            with minimegatron.trace(gather=False) as backward:
                output.sum().backward()
            sent = [sent_by(run.ranks[0].events) for run in (forward, backward)]
            found[c, way] = (kept, *sent)
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def measured():
    return run_ranks(measure, 4, [1, 2, 4])


def test_real_layers_send_what_the_formulas_say(measured):
    for of_rank in measured:
        for (c, way), (_, *sent) in of_rank.items():
            assert tuple(sent) == context_parallel_bytes(way, *SIZES, c), (c, way)


def test_what_a_layer_keeps_falls_as_the_number_of_ranks(measured):
    """Within 2 %, as the formula does. a2a keeps, beside it, the order of all tokens."""
    for of_rank in measured:
        whole = of_rank[1, "p2p"][0]
        for (c, way), (kept, *_) in of_rank.items():
            planned = activation_bytes_per_layer(s, b, h, a, context_parallel_size=c)
            assert planned * c == activation_bytes_per_layer(s, b, h, a)
            assert kept * c == pytest.approx(whole, rel=0.02), (c, way)
            assert way == "a2a" or kept * c == whole
    figure(
        "bytes that a layer keeps, times c: "
        + ", ".join(f"{way} {c}: {c * kept}" for (c, way), (kept, *_) in measured[0].items())
    )
