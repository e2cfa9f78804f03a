"""Memory: published totals, and the planner's peaks in bytes."""

from fractions import Fraction

import pytest

from minimegatron.planner.memory import (
    activation_bytes_per_layer,
    message_bytes,
    model_state_bytes,
    num_layer_parameters,
    peak_activation_bytes,
)
from minimegatron.planner.plan import plan


def test_activation_rows_of_the_paper():
    """Korthikanti et al. 2022, table 2, in units of sbh."""
    s, b, h, a, t = 2048, 4, 12288, 96, 8

    def units(**options):
        return Fraction(activation_bytes_per_layer(s, b, h, a, **options), s * b * h)

    scores = Fraction(5 * a * s, h)
    assert scores == 80
    assert units(recompute="none") == 34 + scores
    assert units(recompute="none", tensor_parallel_size=t) == 10 + Fraction(24 + scores, t)
    assert units(recompute="none", tensor_parallel_size=t, sequence_parallel=True) == Fraction(
        34 + scores, t
    )
    assert units(recompute="selective", tensor_parallel_size=t) == 13
    assert units(tensor_parallel_size=t, sequence_parallel=True) == Fraction(34, t)
    assert units(recompute="full", tensor_parallel_size=t) == 2
    # Context parallelism: 1/c of the tokens, and scores of those against all tokens.
    assert units(recompute="none", context_parallel_size=2) == Fraction(34 + scores, 2)
    with pytest.raises(ValueError, match="recompute is 'some'; use none, selective or full"):
        units(recompute="some")


def test_parameters_of_known_models():
    # GPT-2 small: 12 layers, embeddings of 50257 and 1024 positions, a final norm.
    h = 768
    total = 12 * num_layer_parameters(h) + (50257 + 1024) * h + 2 * h
    assert total == 124_439_808
    # Llama 2 7B: 32 layers, RMSNorm, SwiGLU 11008, no biases, untied 32000 tokens.
    h = 4096
    layer = num_layer_parameters(
        h, 11008, 32, gated_linear_unit=True, add_bias_linear=False, norm_has_bias=False
    )
    assert 32 * layer + 2 * 32000 * h + h == 6_738_415_616
    # Llama 3 8B: 8 query groups, 14336, 128256 tokens.
    layer = num_layer_parameters(
        h, 14336, 32, 8, gated_linear_unit=True, add_bias_linear=False, norm_has_bias=False
    )
    assert 32 * layer + 2 * 128256 * h + h == 8_030_261_248


@pytest.mark.parametrize(
    ("weights", "gradients", "plain", "fixed", "sharded"),
    [(4, 4, 16, 8, 8), (2, 4, 18, 6, 12), (2, 2, 20, 4, 16)],
)
def test_optimizer_table(weights, gradients, plain, fixed, sharded):
    n = 1000
    assert model_state_bytes(n, weights, gradients).total == plain * n
    for d in (1, 4, 7):
        state = model_state_bytes(n, weights, gradients, d, use_distributed_optimizer=True)
        assert state.total == fixed * n + Fraction(sharded * n, d)


def test_peaks_in_bytes_per_chunk():
    step = plan("interleaved", 2, 2, vpp=2)
    # Rank 0 holds both microbatches of both its chunks at its peak.
    assert step.peak_in_flight(0) == 4
    assert peak_activation_bytes(step, 0, [10, 1000, 20, 1000]) == 2 * 10 + 2 * 20
    assert peak_activation_bytes(plan("1f1b", 4, 8), 1, 7) == 3 * 7
    assert peak_activation_bytes(plan("gpipe", 4, 8), 1, 7) == 8 * 7
    assert peak_activation_bytes(plan("1f1b", 4, 8, forward_only=True), 1, 7) == 0
    with pytest.raises(ValueError, match="2 activation sizes for 4 virtual stages"):
        peak_activation_bytes(step, 0, [1, 2])


def test_messages_get_smaller_with_sequence_and_context_parallelism():
    full = message_bytes(1024, 2, 512)
    assert full == 1024 * 2 * 512 * 2
    assert message_bytes(1024, 2, 512, tensor_parallel_size=4) == full
    assert message_bytes(1024, 2, 512, 4, 2, sequence_parallel=True) == full // 8
    assert message_bytes(1024, 2, 512, bytes_per_element=4) == 2 * full
