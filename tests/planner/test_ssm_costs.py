"""Hybrid models in the planner: times by kind, parameters and bytes of real layers, growth with s."""

import pytest
import torch

from minimegatron.__main__ import main
from minimegatron.core.orders.placement import V
from minimegatron.core.ssm.mamba_config import sizes_of_mamba
from minimegatron.core.ssm.ops.ssd_combined import mamba_chunk_scan_combined, mamba_recurrence
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.planner.simulator import Costs
from minimegatron.planner.ssm_costs import (
    mamba_state_bytes,
    named_layers,
    num_mamba_parameters,
    scan_elements,
)
from tests.core.ssm.test_hybrid_layers import model
from tests.core.ssm.test_mamba_mixer import SIZES

TIMES = {"embedding": (0, 0), "loss": (0, 0), "M": (3, 6), "*": (1, 2), "-": (2, 4)}


def test_a_stage_takes_what_its_letters_take():
    layout = PipelineParallelLayerLayout.from_str("Ett|ttL", 2)
    costs = Costs.from_layout(named_layers(layout, "M*--"), TIMES)
    assert (costs.forward, costs.backward) == ([4, 4], [8, 8])


def test_letters_come_in_the_order_of_the_model():
    layout = PipelineParallelLayerLayout("Et|t|tt|L", 2, V(2))
    assert named_layers(layout, "M*-M") == [
        [["embedding", "M"], ["loss"]],
        [["*"], ["-", "M"]],
    ]


def test_another_number_of_letters_is_refused():
    layout = PipelineParallelLayerLayout.from_str("Et|ttL", 2)
    with pytest.raises(ValueError, match="'M\\*' has 2 letters but num_layers is 3"):
        named_layers(layout, "M*")


def test_the_command_takes_letters(capsys):
    words = "plan --pp 2 --microbatches 2 --layout Et|tL --hybrid-override-pattern M* --format csv"
    layers = ["--layer-time", "M=4:8", "--layer-time", "*=1:2"]
    assert main([*words.replace(" --format csv", "").split(), *layers]) == 0
    with_letters = capsys.readouterr().out
    assert main(["plan", "--pp", "2", "--microbatches", "2", "--imbalance", "4,1"]) == 0
    assert capsys.readouterr().out.split("\n")[-4:] == with_letters.split("\n")[-4:]
    assert (
        main(["plan", "--pp", "2", "--microbatches", "2", "--hybrid-override-pattern", "M*"]) != 0
    )
    assert "add --layout" in capsys.readouterr().err
    begins_with_mlp = "plan --pp 2 --microbatches 2 --layout Et|tL --hybrid-override-pattern -M"
    with pytest.raises(SystemExit, match="2"):
        main(begins_with_mlp.split())
    assert "given as --hybrid-override-pattern=-" in capsys.readouterr().err
    assert main(begins_with_mlp.replace(" -M", "=-M").split()) == 0


@pytest.mark.parametrize("options", [{}, {"normalization": "RMSNorm", "mamba_num_heads": 4}])
def test_parameters_are_those_of_a_real_layer(options):
    layer = model("MMMM", **options).decoder.layers[0]
    sizes = sizes_of_mamba(TransformerConfig(**SIZES | options))
    planned = num_mamba_parameters(16, sizes, norm_has_bias="normalization" not in options)
    assert planned == sum(param.numel() for param in layer.parameters())


def test_the_state_is_as_large_as_a_real_one():
    sizes = sizes_of_mamba(TransformerConfig(**SIZES))
    for length in (2, 16):
        _, state = scan(mamba_recurrence, length)
        assert mamba_state_bytes(2, sizes) == state.numel() * state.element_size()
    assert mamba_state_bytes(2, sizes, tensor_parallel_size=2) == state.numel() * 2


def scan(function, length: int, **options):
    """Of the small mixer's sizes, for two sequences; in float32."""
    n, P, G, N = sizes_of_mamba(TransformerConfig(**SIZES))
    draw = torch.randn
    leaves = [draw(2, length, n, P), draw(2, length, n), -torch.rand(n)]
    leaves += [draw(2, length, G, N), draw(2, length, G, N)]
    for leaf in leaves:
        leaf.requires_grad_()
    return function(*leaves, **options, return_final_states=True)


def kept(function, length: int, **options) -> int:
    """Bytes of all storages that autograd keeps for backward."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = scan(function, length, **options)
    assert alive
    return sum(storages.values())


def test_what_a_scan_keeps_grows_with_the_sequence_not_with_its_square():
    sizes = sizes_of_mamba(TransformerConfig(**SIZES))
    in_chunks = [kept(mamba_chunk_scan_combined, s, chunk_size=32) for s in (128, 256)]
    assert in_chunks[1] < 2.1 * in_chunks[0]
    for s, found in zip((128, 256), in_chunks, strict=True):
        assert found > 4 * scan_elements(s, 2, sizes, 32)
    by_token = kept(mamba_recurrence, 128)
    assert by_token > 4 * scan_elements(128, 2, sizes, None)
