"""Hybrid models: what a pattern's letters mean, on which stage, and which patterns are refused."""

import re

import pytest
import torch

from minimegatron.core.models.mamba.mamba_layer_specs import get_mamba_stack_spec
from minimegatron.core.models.mamba.mamba_model import MambaModel
from minimegatron.core.ssm.mamba_hybrid_layer_allocation import LEFT_OUT, allocate_layers
from minimegatron.core.ssm.mamba_layer import MambaLayer
from minimegatron.core.ssm.mlp_layer import AttentionLayer, MLPLayer
from minimegatron.core.tracing import observed_by
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.core.ssm.test_mamba_mixer import SIZES
from tests.core.transformer.moe.test_moe_layer import groups

KINDS = {MambaLayer: "M", AttentionLayer: "*", MLPLayer: "-"}


def model(pattern: str | None, rank: int = 0, p: int = 1, **options) -> MambaModel:
    """The chunk of one stage, alone."""
    config = TransformerConfig(
        **SIZES | {"num_layers": 4} | options,
        pipeline_model_parallel_size=p,
        pipeline_dtype=torch.float32,
    )
    return MambaModel(
        config,
        get_mamba_stack_spec(),
        vocab_size=32,
        max_sequence_length=8,
        pre_process=rank == 0,
        hybrid_override_pattern=pattern,
        post_process=rank == p - 1,
        pg_collection=groups(pp=(rank, p)),
    )


def letters_of(chunk: MambaModel) -> str:
    return "".join(KINDS[type(layer)] for layer in chunk.decoder.layers)


def test_a_letter_for_each_layer():
    assert letters_of(model("M*-M")) == "M*-M"
    assert letters_of(model(None)) == "MMMM"


def test_stages_share_the_pattern():
    first, second = (model("MM*-", rank, 2) for rank in (0, 1))
    assert (letters_of(first), letters_of(second)) == ("MM", "*-")
    assert [layer.layer_number for layer in second.decoder.layers] == [3, 4]
    assert first.decoder.final_layernorm is None and second.decoder.final_layernorm is not None
    uneven = {"num_layers_in_first_pipeline_stage": 1}
    assert [letters_of(model("M*--", rank, 2, **uneven)) for rank in (0, 1)] == ["M", "*--"]


def test_a_layer_has_one_half_and_the_names_are_megatrons():
    found = {}
    for name, _ in named_global_parameters(model("M*--")):
        if name.startswith("decoder.layers."):
            _, _, number, part = name.split(".", 3)
            found.setdefault(number, set()).add(part)
    weights = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias")
    weights += ("norm.weight", "out_proj.weight")
    norm = {"norm.weight", "norm.bias"}
    assert found["0"] == norm | {f"mixer.{weight}" for weight in weights}
    assert {part.partition(".")[0] for part in found["1"]} == {"input_layernorm", "self_attention"}
    assert {part.partition(".")[0] for part in found["2"]} == {"pre_mlp_layernorm", "mlp"}


def test_every_half_learns_and_hands_on_the_context():
    hybrid = model("M*-M")
    tokens = torch.arange(8)[None]
    hybrid(tokens, None, None, labels=tokens).mean().backward()
    without = [name for name, param in hybrid.named_parameters() if param.grad is None]
    assert without == []
    hidden, context = torch.randn(8, 1, 16), torch.randn(3)
    for layer in hybrid.decoder.layers:
        output, same = layer(hidden, None, context=context)
        assert output.shape == hidden.shape and same is context


def test_who_watches_sees_a_layer_of_any_kind():
    class Watcher:
        def __init__(self):
            self.seen = []

        def start(self, call):
            self.seen.append((call.name, call.attributes))

        def stop(self, call):
            self.seen.append(call.name)

    hybrid, tokens = model("M*-M"), torch.arange(8)[None]
    with observed_by(watcher := Watcher()):
        hybrid(tokens, None, None, labels=tokens)
    begun = [each[1] for each in watcher.seen if each[0] == "layer-forward"]
    assert begun == [{"layer": number} for number in (1, 2, 3, 4)]


# -- What is refused --


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M*-", "'M*-' has 3 letters but num_layers is 4; give a letter for each layer"),
        ("MMXM", "letter 3, 'X', is unknown; use M (Mamba), * (attention) and - (MLP)"),
        ("MM|MM", "letter 3, '|', stands for a border of stages in other releases"),
        *(
            (f"MMM{letter}", f"letter 4, {letter!r}, stands for {LEFT_OUT[letter]}")
            for letter in LEFT_OUT
        ),
    ],
)
def test_other_patterns_are_refused(pattern, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        allocate_layers(4, override_pattern=pattern)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_parallel_size": 2}, "handing its state from rank to rank is not done here"),
        ({"num_moe_experts": 2}, "num_moe_experts 2: a hybrid model has no experts here"),
        ({"mtp_num_layers": 1}, "mtp_num_layers 1: a hybrid model predicts no further tokens"),
        ({"mamba_head_dim": 5}, "32 features are not whole heads of mamba_head_dim 5"),
        ({"mamba_num_groups": 3}, "8 heads (2 x hidden_size 16 / mamba_head_dim 4) cannot be"),
        ({"mamba_num_heads": 3}, "mamba_num_heads 3 cannot be shared by mamba_num_groups 2"),
        ({"tensor_model_parallel_size": 4}, "mamba_num_groups 2 is not divisible by tensor"),
    ],
)
def test_other_sizes_are_refused(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        model("MMMM", **options)


def test_a6_attention_among_other_layers_refuses_masks_of_other_shapes():
    chunk, tokens = model("M*-M"), torch.zeros(8, 8, dtype=torch.long)
    chunk(tokens, None, None)
    with pytest.raises(ValueError, match=r"attention_mask is \[8, 8\]; give \[8 or 1, "):
        chunk(tokens, None, torch.zeros(8, 8, dtype=torch.bool))
