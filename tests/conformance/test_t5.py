"""T5 against megatron-core: the same weights and batch give the same losses and gradients.

On one stage, since Megatron of today has no other.

With padding in both sequences, which have different lengths; head tied and not. The last tests say what
is known to differ.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.models.common.embeddings.relative_pos_embedding import (
    RelativePositionEmbedding,
)
from minimegatron.core.models.T5.t5_model import T5Model
from minimegatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests.conformance.megatron import megatron_module, wide
from tests.conformance.test_bert import groups_of_both, relative
from tests.conformance.test_gpt_model import SHARED_FIELDS
from tests.core.models.gpt_support import Case as Gpt
from tests.figures import figure
from tests.groups import PretendGroup
from tests.ranks import run_ranks

their_model = megatron_module("models.T5.t5_model")
their_positions = megatron_module("models.common.embeddings.relative_pos_embedding")
their_spec = megatron_module("models.T5.t5_spec")
their_groups = megatron_module("process_groups_config")
their_config = megatron_module("transformer.transformer_config")
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, S_ENC, S_DEC = 64, 10, 7
ENCODER_LENGTHS, DECODER_LENGTHS = torch.tensor([10, 6, 3]), torch.tensor([4, 7, 5])
LLAMA = {"normalization": "RMSNorm", "add_bias_linear": False}
LLAMA |= {"gated_linear_unit": True, "activation_func": F.silu}


@dataclass(frozen=True)
class Case:
    """One kind of T5."""

    config: dict[str, Any] = field(default_factory=dict)
    tied: bool = True
    positions: str = "learned_absolute"
    dtype: torch.dtype = torch.float64

    def model_options(self) -> dict[str, Any]:
        return {
            "vocab_size": VOCABULARY,
            "max_sequence_length": S_ENC,
            "share_embeddings_and_output_weights": self.tied,
            "position_embedding_type": self.positions,
        }


CASES = {
    "tied, whose head has a bias": Case(),
    "untied, whose head has none": Case(tied=False),
    "rope, RMSNorm, SwiGLU, no biases": Case(LLAMA, tied=False, positions="rope"),
    "in float32": Case(dtype=torch.float32),
}


def batch() -> dict[str, torch.Tensor]:
    """Masks are [b, 1, q, k], True where not to look; the decoder's is causal too."""
    generator = torch.Generator().manual_seed(3)
    number = len(ENCODER_LENGTHS)
    text = torch.randint(VOCABULARY, (number, S_ENC), generator=generator)
    answer = torch.randint(VOCABULARY, (number, S_DEC + 1), generator=generator)
    is_text = torch.arange(S_ENC) < ENCODER_LENGTHS[:, None]
    is_answer = torch.arange(S_DEC) < DECODER_LENGTHS[:, None]

    def both(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return ~(queries[:, None, :, None] & keys[:, None, None, :])

    later = torch.ones(S_DEC, S_DEC, dtype=torch.bool).triu(1)
    return {
        "encoder_input_ids": text,
        "decoder_input_ids": answer[:, :-1],
        "encoder_attn_mask": both(is_text, is_text),
        "decoder_attn_mask": both(is_answer, is_answer) | later,
        "encoder_decoder_attn_mask": both(is_answer, is_text),
        "lm_labels": answer[:, 1:].contiguous(),
        "loss_mask": is_answer,
    }


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    data = batch()
    loss_mask = data.pop("loss_mask")
    losses = model(**data)
    return (losses * loss_mask).sum() / loss_mask.sum()


def both(case: Case, size: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours, and theirs with its weights."""
    config = Gpt(case.config).make_config(
        tensor_model_parallel_size=size, params_dtype=case.dtype, num_layers=2
    )
    ours = T5Model(
        config,
        config,
        encoder_model_with_local_spec(),
        decoder_model_with_local_spec(),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **case.model_options(),
    )
    theirs = build_theirs(case, config)
    theirs.load_state_dict({**theirs.state_dict(), **ours.state_dict()})
    return ours, theirs


def build_theirs(case: Case, config: Any, in_blocks: bool = False, **more: Any) -> torch.nn.Module:
    """`in_blocks`: by the specs that their program takes, a list of layers for each stack."""
    options = {name: getattr(config, name) for name in SHARED_FIELDS}
    fusions = ("bias_dropout", "bias_activation", "masked_softmax", "gradient_accumulation")
    options |= {f"{name}_fusion": False for name in fusions}
    specs = their_spec.encoder_model_with_local_spec(), their_spec.decoder_model_with_local_spec()
    if in_blocks:
        specs = (
            their_spec.get_t5_encoder_with_local_block_spec(config.num_layers),
            their_spec.get_t5_decoder_with_local_block_spec(config.num_layers),
        )
    theirs = their_config.TransformerConfig(use_cpu_initialization=True, **options)
    return their_model.T5Model(
        theirs,
        theirs,
        *specs,
        **case.model_options(),
        **more,
    ).to(case.dtype)


def compare(size: int) -> dict[str, dict[str, float]]:
    """The largest difference of the loss and of each gradient, relative to the largest number."""
    found = {}
    with groups_of_both(size):
        for name, case in CASES.items():
            with wide() if case.dtype == torch.float64 else contextlib.nullcontext():
                models = both(case, size)
                losses = [loss_of(model) for model in models]
                for each in losses:
                    each.backward()
            found[name] = {"loss": relative(*losses)}
            params = dict(models[1].named_parameters())
            for key, param in models[0].named_parameters():
                found[name][key] = relative(param.grad, params.pop(key).grad)
            assert not params, f"ours lacks {list(params)}"
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_same_losses_and_gradients(size):
    worst = {}
    for cases in run_ranks(compare, size, size):
        for case, found in cases.items():
            kind, limit = ("float32", 1e-5) if "float32" in case else ("float64", 1e-11)
            name = max(found, key=found.get)
            assert found[name] < limit, f"{case}: {name} differs by {found[name]}"
            worst[kind] = max(worst.get(kind, 0.0), found[name])
    figure(f"t = {size}, worst relative difference: {worst}")


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("lengths", [(40, 40), (3, 50), (50, 3)])
def test_same_distances(bidirectional, lengths):
    sizes = (torch.nn.init.normal_, 4, 8, 20)
    theirs = their_positions.RelativePositionEmbedding(bidirectional, *sizes)
    ours = RelativePositionEmbedding(bidirectional, *sizes, tp_group=PretendGroup())
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(*lengths), theirs(*lengths))


# -- What is known to differ --


def gaps() -> dict[str, Any]:
    """What their T5 does with stages, with relative positions, and at the ends of its stacks."""
    config = Gpt().make_config(num_layers=2)
    found: dict[str, Any] = {"layers of stages": []}
    with groups_of_both(1):
        for stage in range(2):
            line, one = PretendGroup(stage, 2), PretendGroup()
            groups = their_groups.ProcessGroupCollection(pp=line, tp=one, cp=one)
            ends = {"pre_process": stage == 0, "post_process": stage == 1}
            model = build_theirs(Case(), config, True, **ends, pg_collection=groups)
            found["layers of stages"].append([len(model.encoder.layers), len(model.decoder.layers)])
        model = build_theirs(Case(), config, in_blocks=True)
        found["final norms"] = [
            name for name, _ in model.named_parameters() if "final_layernorm" in name
        ]
        relative_positions = build_theirs(Case(positions="relative"), config)
        inputs = {name: value for name, value in batch().items() if name != "loss_mask"}
        try:
            relative_positions(**inputs)
        except AssertionError as error:
            found["refused"] = str(error)
    return found


def test_what_their_t5_does_not_have():
    (found,) = run_ranks(gaps, 1)
    # Every stage would build both whole stacks: nothing is cut. Their program refuses p > 1.
    assert found["layers of stages"] == [[2, 2], [2, 2]]
    # Without Transformer Engine, the lists of layers that their program takes end without a norm.
    assert found["final norms"] == []
    assert "Attention bias is not supported" in found["refused"]
