"""BERT against megatron-core: the same weights and batch give the same losses and gradients.

With padding, token types, both losses of the program; tied and not. Where the two differ, the last test
says by how much.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core import parallel_state
from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.models.bert.bert_model import BertModel
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module, wide
from tests.conformance.test_gpt_model import SHARED_FIELDS
from tests.core.models.gpt_support import Case as Gpt
from tests.figures import figure
from tests.ranks import run_ranks

their_state = megatron_module("parallel_state")
their_model = megatron_module("models.bert.bert_model")
their_specs = megatron_module("models.bert.bert_layer_specs")
their_random = megatron_module("tensor_parallel.random")
their_config = megatron_module("transformer.transformer_config")
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, SEQUENCE = 64, 8
LENGTHS = torch.tensor([8, 5, 3])
"""Of the batch's samples; what follows is padding."""


@dataclass(frozen=True)
class Case:
    """One kind of BERT."""

    config: dict[str, Any] = field(default_factory=dict)
    tied: bool = True
    types: int = 2
    has_binary_head: bool = True
    dtype: torch.dtype = torch.float64

    def model_options(self) -> dict[str, Any]:
        return {
            "num_tokentypes": self.types,
            "vocab_size": VOCABULARY,
            "max_sequence_length": SEQUENCE,
            "share_embeddings_and_output_weights": self.tied,
            "add_binary_head": self.has_binary_head,
        }


CASES = {
    "as the program's": Case(),
    "untied": Case(tied=False),
    "no binary head, no types": Case(types=0, has_binary_head=False),
    "untied, no binary head, RMSNorm": Case(
        {"normalization": "RMSNorm"}, tied=False, has_binary_head=False
    ),
    "in float32": Case(dtype=torch.float32),
}


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), SEQUENCE)
    padding_mask = (torch.arange(SEQUENCE) < LENGTHS[:, None]).long()
    hidden = torch.rand(shape, generator=generator).lt(0.4).logical_and(padding_mask.bool())
    hidden[:, 1] = True
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    return {
        "tokens": torch.randint(VOCABULARY, shape, generator=generator),
        "types": torch.randint(2, shape, generator=generator),
        "padding_mask": padding_mask,
        "labels": labels.masked_fill(~hidden, -1),
        "loss_mask": hidden,
        "is_random": torch.tensor([0, 1, 1]),
    }


def losses_of(model: torch.nn.Module, case: Case) -> torch.Tensor:
    """The losses of both heads, as `pretrain_bert` takes them; [2], or [1] without a binary head."""
    data = batch()
    types = data["types"] if case.types else None
    losses, order = model(data["tokens"], data["padding_mask"], types, lm_labels=data["labels"])
    found = [(losses * data["loss_mask"]).sum() / data["loss_mask"].sum()]
    if case.has_binary_head:
        found.append(F.cross_entropy(order.view(-1, 2), data["is_random"], ignore_index=-1))
    return torch.stack(found)


def both(case: Case, size: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours, and theirs with its weights."""
    config = Gpt(case.config).make_config(tensor_model_parallel_size=size, params_dtype=case.dtype)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ours = BertModel(
        config,
        transformer_layer_spec=bert_layer_local_spec,
        pg_collection=groups,
        **case.model_options(),
    )
    theirs = build_theirs(case, config)
    theirs.load_state_dict({**theirs.state_dict(), **ours.state_dict()})
    return ours, theirs


def build_theirs(case: Case, config: TransformerConfig) -> torch.nn.Module:
    options = {name: getattr(config, name) for name in SHARED_FIELDS}
    fusions = ("bias_dropout", "bias_activation", "masked_softmax", "gradient_accumulation")
    options |= {f"{name}_fusion": False for name in fusions}
    return their_model.BertModel(
        their_config.TransformerConfig(use_cpu_initialization=True, **options),
        transformer_layer_spec=their_specs.bert_layer_local_spec,
        **case.model_options(),
    ).to(case.dtype)


@contextlib.contextmanager
def groups_of_both(size: int):
    # Their tracker keeps states of CUDA generators; there is no dropout here to need them.
    tracker = their_random.get_cuda_rng_tracker()
    with cuda_calls_on_cpu(), mock.patch.object(tracker, "fork", contextlib.nullcontext):
        their_state.initialize_model_parallel(tensor_model_parallel_size=size)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        yield


def compare(size: int) -> dict[str, dict[str, float]]:
    """The largest difference of losses and of each gradient, relative to the largest number."""
    found = {}
    with groups_of_both(size):
        for name, case in CASES.items():
            with wide() if case.dtype == torch.float64 else contextlib.nullcontext():
                models = both(case, size)
                losses = [losses_of(model, case) for model in models]
                for each in losses:
                    each.sum().backward()
            found[name] = {"losses": relative(*losses)}
            params = dict(models[1].named_parameters())
            for key, param in models[0].named_parameters():
                found[name][key] = relative(param.grad, params.pop(key).grad)
            assert not params, f"ours lacks {list(params)}"
    return found


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    # A bias of keys has no gradient but round-off.
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-2)).item()


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


# -- What is known to differ --


def rows_of_padding(size: int) -> list[torch.Tensor]:
    """Logits of both, and what theirs gives to a row that may look nowhere."""
    with groups_of_both(size):
        data, (ours, theirs) = batch(), both(CASES["as the program's"], size)
        inputs = data["tokens"], data["padding_mask"], data["types"]
        logits = [model(*inputs)[0].detach() for model in (ours, theirs)]
        attention = theirs.encoder.layers[0].self_attention.core_attention
        heads, width = 8, 4
        qkv = torch.randn(3, SEQUENCE, len(LENGTHS), heads, width, dtype=torch.float64)
        mask = theirs.bert_extended_attention_mask(data["padding_mask"])
        context = attention(*qkv, mask).detach()
        mean = qkv[2].mean(dim=0).flatten(1)
        mine = ours.encoder.layers[0].self_attention.core_attention
        nothing = mine(*qkv, ours.bert_extended_attention_mask(data["padding_mask"])).detach()
    return [*logits, context[-1, 1:], mean[1:], nothing[-1, 1:]]


def test_padding_looks_at_nothing_here_and_at_all_in_megatron():
    """Megatron adds -10000, so a row without anything to look at takes the mean of all values.

    Here such a row is 0. No token looks at padding, so tokens have the same logits.
    """
    ((ours, theirs, context, mean, nothing),) = run_ranks(rows_of_padding, 1, 1)
    is_token = batch()["padding_mask"].bool()
    difference = (ours - theirs).abs()
    assert difference[is_token].max() < 1e-5
    assert difference[~is_token].max() > 1e-2
    assert torch.allclose(context, mean) and torch.equal(nothing, torch.zeros_like(nothing))
