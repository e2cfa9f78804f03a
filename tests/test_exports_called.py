"""Each name that a package of `core` or `training` offers is called: it works, or refuses in words.

One process, with process groups of one rank. What a name does is tested elsewhere; here, that what one
imports from the package is the thing itself.
"""

import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron import pretrain_gpt, training
from minimegatron.core import (
    dist_checkpointing,
    mpu,
    tensor_parallel,
)
from minimegatron.core.distributed import DistributedDataParallelConfig
from minimegatron.core.models.bert import BertModel
from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.models.gpt import GPTModel
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.mamba import MambaModel
from minimegatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from minimegatron.core.models.T5 import T5Model
from minimegatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from minimegatron.core.optimizer import (
    DynamicGradScaler,
    OptimizerConfig,
    get_megatron_optimizer,
)
from minimegatron.core.transformer import ModuleSpec, TransformerConfig
from minimegatron.core.transformer.module import Float16Module
from tests.groups import PretendGroup
from tests.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tools"))
rosetta_names = importlib.import_module("rosetta.rosetta_names")

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 4 --seq-length 4 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0.1 --eval-iters 0"
)
Call = Callable[[Any], Any]
X = torch.ones(4, 4)
TOKENS = torch.zeros(1, 4, dtype=torch.long)


def config() -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)


def gpt() -> GPTModel:
    return GPTModel(config(), get_gpt_layer_local_spec(), 32, 4)


def other_model(name: str) -> torch.nn.Module:
    """BERT, T5 or Mamba, of one layer (T5: of one in each stack)."""
    if name == "BertModel":
        return BertModel(config(), 2, bert_layer_local_spec, 32, 4)
    if name == "T5Model":
        specs = (encoder_model_with_local_spec(), decoder_model_with_local_spec())
        return T5Model(config(), config(), *specs, 32, 4)
    sizes = {"mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_state_dim": 4}
    return MambaModel(dataclasses.replace(config(), **sizes), mamba_stack_spec, 32, 4)


def ddp(name: str = "DistributedDataParallel", zero1: bool = False, bf16: bool = False):
    kind = getattr(importlib.import_module("minimegatron.core.distributed"), name)
    options = DistributedDataParallelConfig(use_distributed_optimizer=zero1)
    model = Float16Module(dataclasses.replace(config(), bf16=True), gpt()) if bf16 else gpt()
    return kind(config(), options, model)


def linear(kind: Any) -> Any:
    options = {"config": config(), "init_method": torch.nn.init.zeros_, "bias": True}
    if kind.__name__ == "RowParallelLinear":
        options |= {"input_is_parallel": True, "skip_bias_add": False}
    return kind(4, 4, **options)(X)


def tensor() -> Any:
    return dist_checkpointing.ShardedTensor.from_rank_offsets("x", torch.ones(2))


def saved(folder: str) -> str:
    """A folder with a checkpoint of one tensor, `x`, and one plain number."""
    dist_checkpointing.save({"x": tensor(), "number": 3}, folder)
    return folder


def optimizer_of(kind: Any) -> Any:
    """A bare optimizer of one parameter."""
    return kind([torch.nn.Parameter(X.clone())], lr=0.1)


def made(kind: Any) -> None:
    """Raises unless `get_megatron_optimizer` makes one: it knows what the constructors are given."""
    zero1, bf16 = kind.__name__ == "DistributedOptimizer", kind.__name__.startswith("Float16")
    settings = OptimizerConfig(lr=0.1, bf16=bf16, use_distributed_optimizer=zero1)
    optimizer = get_megatron_optimizer(settings, [ddp(zero1=zero1, bf16=bf16)])
    if not isinstance(optimizer, kind):
        raise ValueError(f"{type(optimizer).__name__} was made, not {kind.__name__}")


CORE: dict[str, Call] = {
    "DistributedDataParallel": lambda kind: ddp().zero_grad_buffer(),
    "ModelParallelConfig": lambda kind: kind(),
    "Timers": lambda kind: kind(0, "max")("step").start(),
    "mpu": lambda module: module.get_tensor_model_parallel_world_size(),
    "parallel_state": lambda module: module.get_pipeline_model_parallel_rank(),
    "tensor_parallel": lambda module: module.get_cuda_rng_tracker(),
    "utils": lambda module: module.divide(4, 2),
}

DIST_CHECKPOINTING: dict[str, Call] = {
    "LocalNonpersistentObject": lambda kind: kind(1),
    "ShardedTensor": lambda kind: kind.from_rank_offsets("x", X),
    "check_is_distributed_checkpoint": lambda f: in_folder(lambda folder: f(saved(folder))),
    "load": lambda f: in_folder(lambda folder: f({"x": tensor()}, saved(folder))),
    "load_common_state_dict": lambda f: in_folder(lambda folder: f(saved(folder))),
    "load_plain_tensors": lambda f: in_folder(lambda folder: f(saved(folder))),
    "load_tensors": lambda f: in_folder(lambda folder: f([tensor()], saved(folder))),
    "load_tensors_metadata": lambda f: in_folder(lambda folder: f(saved(folder))),
    "save": lambda f: in_folder(lambda folder: f({"x": tensor()}, folder)),
    "save_tensors": lambda f: in_folder(lambda folder: f([tensor()], {}, folder)),
}

DISTRIBUTED: dict[str, Call] = {
    "DistributedDataParallel": lambda kind: ddp().zero_grad_buffer(),
    "DistributedDataParallelConfig": lambda kind: kind(),
    "TorchDistributedDataParallel": lambda kind: ddp("TorchDistributedDataParallel"),
    "finalize_model_grads": lambda f: f([ddp()]),
}

MODELS: dict[str, Call] = {
    "LanguageModelEmbedding": lambda kind: kind(config(), 32, 4)(TOKENS, TOKENS),
    "RotaryEmbedding": lambda kind: kind(4)(3),
    "apply_rotary_pos_emb": lambda f: f(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 4)),
    "GPTModel": lambda kind: gpt()(
        input_ids=TOKENS,
        position_ids=torch.arange(4)[None],
        attention_mask=None,
        packed_seq_params=None,
    ),
    "BertModel": lambda kind: other_model(kind.__name__)(TOKENS, TOKENS + 1, TOKENS),
    "MambaModel": lambda kind: other_model(kind.__name__)(TOKENS, TOKENS, None),
    "T5Model": lambda kind: other_model(kind.__name__)(TOKENS, TOKENS, None, None, None),
}

OPTIMIZER: dict[str, Call] = {
    "Adam": optimizer_of,
    "AdamOptimizerConfig": lambda kind: kind(lr=0.1),
    "ChainedOptimizer": lambda kind: kind([]),  # refuses: see REFUSALS
    "ConstantGradScaler": lambda kind: kind(2.0).scale,
    "DistributedOptimizer": made,
    "DynamicGradScaler": lambda kind: kind(2.0, 1.0, 2.0, 0.5, 1, 1).scale,
    "FP32Optimizer": made,
    "Float16OptimizerWithFloat16Params": made,
    "MegatronGradScaler": lambda kind: issubclass(DynamicGradScaler, kind),
    "MegatronModule": lambda kind: kind(config()),
    "MegatronOptimizer": made,
    "OptimizerConfig": lambda kind: kind(lr=0.1),
    "ParamShard": lambda kind: kind("x", torch.nn.Parameter(X), X, 0, 16),
    "SGD": optimizer_of,
    "SGDOptimizerConfig": lambda kind: kind(lr=0.1),
}

TENSOR_PARALLEL: dict[str, Call] = {
    "CheckpointFunction": lambda kind: tensor_parallel.checkpoint(torch.sin, False, X),
    "ColumnParallelLinear": linear,
    "CudaRNGStatesTracker": lambda kind: kind().add("a", 1),
    "RowParallelLinear": linear,
    "VocabParallelEmbedding": lambda kind: kind(
        8, 4, init_method=torch.nn.init.zeros_, config=config()
    ),
    "all_to_all": lambda f: f(PretendGroup(), X),
    "broadcast_data": lambda f: f(["x"], {"x": X.long()}, torch.int64),
    "checkpoint": lambda f: f(torch.sin, False, X),
    "copy_tensor_model_parallel_attributes": lambda f: f(X.clone(), X),
    "drain_embedding_wgrad_compute": lambda f: f(
        config(), [], [], torch.nn.Parameter(X), mpu.get_tensor_model_parallel_group()
    ),
    "gather_parameter": lambda f: f(X, X, mpu.get_tensor_model_parallel_group()),
    "gather_split_1d_tensor": lambda f: f(X.flatten()),
    "get_cuda_rng_tracker": lambda f: f().get_states(),
    "get_data_parallel_rng_tracker_name": lambda f: f(),
    "linear_with_grad_accumulation_and_async_allreduce": lambda f: f(
        X,
        X,
        None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
    ),
    "model_parallel_cuda_manual_seed": lambda f: f(1, force_reset_rng=True),
    "param_is_not_tensor_parallel_duplicate": lambda f: f(torch.nn.Parameter(X)),
    "set_defaults_if_not_set_tensor_model_parallel_attributes": lambda f: f(X.clone()),
    "set_tensor_model_parallel_attributes": lambda f: f(X.clone(), True, 0, 1),
    "shard_parameter": lambda f: f(X, X, 0, 1),
    "split_tensor_along_last_dim": lambda f: f(X, 2),
    "split_tensor_into_1d_equal_chunks": lambda f: f(X),
    "unshard_parameter": lambda f: f([X], X),
    "vocab_parallel_cross_entropy": lambda f: f(X[None], torch.zeros(1, 4, dtype=torch.long)),
}
for region in (
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
):
    TENSOR_PARALLEL[region] = lambda f: f(X)

TRANSFORMER: dict[str, Call] = {
    "MegatronModule": lambda kind: kind(config()),
    "ModuleSpec": lambda kind: kind(torch.nn.Linear),
    "TransformerConfig": lambda kind: kind(num_layers=1, hidden_size=8, num_attention_heads=2),
    "TransformerLayer": lambda kind: kind(config(), get_gpt_layer_local_spec().submodules)(
        torch.ones(4, 1, 8), None
    ),
    "TransformerLayerSubmodules": lambda kind: kind(),
    "build_module": lambda f: f(ModuleSpec(torch.nn.Linear), 2, 2),
}

TRAINING: dict[str, Call] = {
    "build_tokenizer": lambda f: f(training.get_args()),
    "get_model": lambda f: f(pretrain_gpt.model_provider),
    "initialize_megatron": lambda f: f.__name__,  # `call_all` has called it
    "pretrain": lambda f: f.__name__,  # whole runs are tested in tests/training
    "print_rank_0": lambda f: f("said by rank 0"),
    "print_rank_last": lambda f: f("said by the last rank"),
}
for getter in (
    "get_adlr_autoresume",
    "get_args",
    "get_one_logger",
    "get_tensorboard_writer",
    "get_timers",
    "get_tokenizer",
    "get_train_valid_test_num_samples",
    "get_wandb_writer",
    "is_last_rank",
):
    TRAINING[getter] = lambda f: f()

CALLS = {
    "core": CORE,
    "core.dist_checkpointing": DIST_CHECKPOINTING,
    "core.distributed": DISTRIBUTED,
    "core.models.common.embeddings": MODELS,
    "core.models.T5": MODELS,
    "core.models.bert": MODELS,
    "core.models.gpt": MODELS,
    "core.models.mamba": MODELS,
    "core.optimizer": OPTIMIZER,
    "core.pipeline_parallel": {"get_forward_backward_func": lambda f: f(pp_size=2, vp_size=None)},
    "core.tensor_parallel": TENSOR_PARALLEL,
    "core.transformer": TRANSFORMER,
    "training": TRAINING,
    "training.tokenizer": TRAINING,
}
"""Package, without `minimegatron.` -> how each of its names is called."""

REFUSALS = {"core.optimizer.ChainedOptimizer": "ChainedOptimizer of 0 optimizers"}
"""The beginnings of their sentences."""


def in_folder(call: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return call(folder)


def offered() -> list[tuple[str, str]]:
    """Package, without `minimegatron.`, and name."""
    return [(e.package.removeprefix("minimegatron."), e.name) for e in rosetta_names.exports()]


def call_all() -> dict[str, str]:
    """Name in its package -> what it answered: "" or the sentence of its refusal."""
    sys.argv = ["test", *FLAGS.split()]
    training.initialize_megatron()
    answers = {}
    for package, name in offered():
        found = getattr(importlib.import_module(f"minimegatron.{package}"), name)
        try:
            CALLS[package][name](found)
            answers[f"{package}.{name}"] = ""
        except (ValueError, RuntimeError) as refusal:
            answers[f"{package}.{name}"] = str(refusal)
        except Exception as error:
            raise AssertionError(f"{package}.{name}: {error!r}") from error
    return answers


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    return run_ranks(call_all, 1, timeout=60)[0]


def test_each_name_is_called(answers):
    assert len(answers) == len(offered()) > 80
    refusals = {name: words for name, words in answers.items() if words}
    assert set(refusals) == set(REFUSALS), "\n".join(map(str, refusals.items()))
    assert all(words.startswith(REFUSALS[name]) for name, words in refusals.items())


def test_the_lists_have_no_other_names():
    known = set(offered())
    for package, calls in CALLS.items():
        if calls not in (MODELS, TRAINING):  # shared by two packages
            assert not [name for name in calls if (package, name) not in known]
