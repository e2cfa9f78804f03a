"""Mamba against megatron-core, as far as it runs without a GPU: which layer is what, on which stage.

Megatron's mixer calls kernels for GPUs and refuses to be built without them; what it computes is
compared with transformers' instead (`tests/convert/test_convert_families.py`).
"""

import contextlib
import importlib
from unittest import mock

import pytest
import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from minimegatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.conformance.megatron import megatron_module
from tests.groups import PretendGroup

theirs = megatron_module("ssm.mamba_hybrid_layer_allocation")
their_block = megatron_module("ssm.mamba_block")
their_config = megatron_module("transformer.transformer_config")
their_groups = megatron_module("process_groups_config")
pytestmark = pytest.mark.filterwarnings("ignore")

PATTERN = "MM*-M-*MMMM-"


@pytest.mark.parametrize("pattern", ["M", "*", "-", PATTERN, None])
def test_same_letters(pattern):
    number = len(pattern or PATTERN)
    wanted = theirs.allocate_layers(number, 0.0, 0.0, pattern)
    assert allocate_layers(number, override_pattern=pattern) == wanted


@pytest.mark.parametrize("pattern", ["MM", "MX*", ""])
def test_both_refuse(pattern):
    for allocate in (allocate_layers, theirs.allocate_layers):
        ratios = (0.0, 0.0) if allocate is theirs.allocate_layers else ()
        with pytest.raises(ValueError):
            allocate(3, *ratios, override_pattern=pattern)


def test_a_letter_of_theirs_is_left_out_here():
    assert theirs.allocate_layers(2, 0.0, 0.0, "ME") == ["M", "E"]
    with pytest.raises(
        ValueError, match="'E', stands for experts in other releases, which is left out"
    ):
        allocate_layers(2, override_pattern="ME")


# -- Stages --


class Layer(MegatronModule):
    """Stands for any layer, and says which letter built it."""

    letter = ""

    def __init__(self, config, **_):
        super().__init__(config)


KINDS = {letter: type(f"Layer{n}", (Layer,), {"letter": letter}) for n, letter in enumerate("M*-")}
SPECS = {
    "mamba_layer": KINDS["M"],
    "attention_layer": KINDS["*"],
    "mlp_layer": KINDS["-"],
}
SPLITS = {
    "even": {},
    "few at first": {"num_layers_in_first_pipeline_stage": 2},
    "few at last": {"num_layers_in_last_pipeline_stage": 4},
    "both": {
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 3,
    },
}


def letters_of(stage: int, stages: int, split: dict) -> tuple[str, str]:
    """What stage has, here and there."""
    options = {
        "num_layers": len(PATTERN),
        "hidden_size": 8,
        "num_attention_heads": 2,
        "pipeline_model_parallel_size": stages,
        "pipeline_dtype": torch.float32,
        **split,
    }
    pattern = {"hybrid_override_pattern": PATTERN, "post_process": False}
    line, one = PretendGroup(stage, stages), PretendGroup()
    ours = MambaStack(
        TransformerConfig(**options),
        MambaStackSubmodules(**SPECS),
        pg_collection=ProcessGroupCollection(pp=line, tp=one, cp=one),
        **pattern,
    )
    with mock.patch.object(
        their_block, "get_fp8_context", lambda *_, **__: contextlib.nullcontext()
    ):
        other = their_block.MambaStack(
            their_config.TransformerConfig(**options),
            their_block.MambaStackSubmodules(**SPECS),
            pg_collection=their_groups.ProcessGroupCollection(pp=line, tp=one, cp=one),
            **pattern,
        )
    ours, other = ("".join(layer.letter for layer in stack.layers) for stack in (ours, other))
    return ours, other


CUTS = [("even", n) for n in (1, 2, 3, 4)]
CUTS += [("few at first", 2), ("few at last", 3), ("both", 3), ("both", 4)]


@pytest.mark.parametrize(("split", "stages"), CUTS)
def test_same_layers_on_each_stage(stages, split):
    found = [letters_of(stage, stages, SPLITS[split]) for stage in range(stages)]
    assert [ours for ours, _ in found] == [other for _, other in found]
    assert "".join(ours for ours, _ in found) == PATTERN


# -- What is known to differ --


def test_their_mixer_needs_kernels_for_a_gpu():
    """Without triton its module cannot be imported; with it, the class asks for mamba_ssm."""
    with pytest.raises(ImportError, match="triton|MambaSSM is not installed"):
        mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
        mixer.MambaMixer(None, None, d_model=8, pg_collection=object())


def test_virtual_stages_are_ours_alone():
    stack = their_block.MambaStack.__new__(their_block.MambaStack)
    torch.nn.Module.__init__(stack)
    stack.config = mock.Mock(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(AssertionError, match="does not currently support"):
        stack._select_layers_for_pipeline_parallel(list(PATTERN))
