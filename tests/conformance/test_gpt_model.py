"""Against megatron-core: the same weights give the same logits, losses and gradients."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.core.models.gpt_support import CASES, SEQUENCE, VOCABULARY, Case, sample
from tests.ranks import run_ranks

their_state = megatron_module("parallel_state")
their_model = megatron_module("models.gpt.gpt_model")
their_specs = megatron_module("models.gpt.gpt_layer_specs")
their_random = megatron_module("tensor_parallel.random")
their_config = megatron_module("transformer.transformer_config")
pytestmark = pytest.mark.filterwarnings("ignore")

SHARED_FIELDS = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "activation_func",
    "qk_layernorm",
    "hidden_dropout",
    "attention_dropout",
    "params_dtype",
    "sequence_parallel",
    "tensor_model_parallel_size",
]

# Theirs takes rotary angles and the cross-entropy in float32; all else here is float64.
EXACT, ROTARY, LOSS = 1e-11, 1e-4, 1e-5


def build_theirs(case: Case, config: Any) -> torch.nn.Module:
    options = {name: getattr(config, name) for name in SHARED_FIELDS}
    fusions = ("bias_dropout", "bias_activation", "masked_softmax", "gradient_accumulation")
    options |= {f"{name}_fusion": False for name in fusions}
    theirs = their_config.TransformerConfig(use_cpu_initialization=True, **options)
    spec = their_specs.get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    return their_model.GPTModel(
        theirs,
        spec,
        VOCABULARY,
        SEQUENCE,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.positions,
        rotary_percent=case.rotary_percent,
    ).double()


def differences(ours: GPTModel, theirs: torch.nn.Module) -> dict[str, float]:
    """The largest difference in logits, losses, and each gradient of the logits."""
    theirs.load_state_dict({**theirs.state_dict(), **ours.state_dict()})
    batch = sample()
    causal = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    found = {}
    losses = ours(**batch), theirs(**{**batch, "attention_mask": causal})
    found["losses"] = (losses[0] - losses[1]).abs().max().item()
    del batch["labels"]
    logits = ours(**batch), theirs(**{**batch, "attention_mask": causal})
    found["logits"] = (logits[0] - logits[1]).abs().max().item()
    for output in logits:
        output.sin().sum().backward()
    their_params = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        found[name] = (param.grad - their_params.pop(name).grad).abs().max().item()
    assert not their_params, f"ours lacks {list(their_params)}"
    return found


def compare(size: int) -> dict[str, dict[str, float]]:
    """Every kind of GPT; without sequence parallelism, which their torch norms do not support."""
    # Their tracker keeps states of CUDA generators; there is no dropout here to need them.
    tracker = their_random.get_cuda_rng_tracker()
    with cuda_calls_on_cpu(), mock.patch.object(tracker, "fork", contextlib.nullcontext):
        their_state.initialize_model_parallel(tensor_model_parallel_size=size)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        pg = ProcessGroupCollection.use_mpu_process_groups()
        found = {}
        for name, case in CASES.items():
            config = case.make_config(tensor_model_parallel_size=size)
            found[name] = differences(case.build(config, pg), build_theirs(case, config))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_same_model(size):
    for rank, cases in enumerate(run_ranks(compare, size, size)):
        for case, found in cases.items():
            for name, difference in found.items():
                limit = ROTARY if "rope" in case else EXACT
                limit = LOSS if name == "losses" else limit
                assert difference < limit, f"{case}: {name} on rank {rank} of {size}: {difference}"
