"""One configuration for a step: hooks of all chunks count, and what flags say is checked once."""

import copy

import pytest
import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import HOOKS, config_of_run
from minimegatron.training.arguments import core_transformer_config_from_args, parse_args
from minimegatron.training.tiny_gpt import TinyGPT
from tests.ranks import run_ranks

SIZES = ["--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4"]


class Chunk(torch.nn.Module):
    def __init__(self, **hooks):
        super().__init__()
        self.config = ModelParallelConfig(**hooks)


def first(*_):
    """A hook."""


def second(*_):
    """Another."""


def test_one_chunk_has_its_own():
    chunk = Chunk(log_funcs=(first,))
    assert config_of_run([chunk]) is chunk.config


def test_what_another_chunk_enters_counts():
    """Was: the hooks of the first chunk were those of all, and a later chunk's were never called."""
    for name in HOOKS:
        chunks = [Chunk(), Chunk(**{name: (second,)})]
        assert getattr(config_of_run(chunks), name) == (second,)
        assert getattr(chunks[0].config, name) == (), "the chunk's own is changed"
        both = [Chunk(**{name: (first,)}), Chunk(**{name: (second, first)})]
        assert getattr(config_of_run(both), name) == (first, second)


def test_without_another_hook_it_is_the_firsts_own():
    chunks = [Chunk(log_funcs=(first,)), Chunk(log_funcs=(first,)), Chunk()]
    assert config_of_run(chunks) is chunks[0].config


def steps_with_a_hook_of_the_last_chunk() -> list[int]:
    gpt, called = TinyGPT(pp=2, vp=2, num_layers=4), []
    config = gpt.chunks[1].config = copy.copy(gpt.config)
    config.before_step_funcs = (lambda models: called.append(len(models)),)
    gpt.step(4, get_forward_backward_func())
    return called


@pytest.mark.processes
def test_a_step_calls_the_hooks_of_its_last_chunk():
    assert run_ranks(steps_with_a_hook_of_the_last_chunk, 2) == [[2], [2]]


def args_of(*flags: str):
    return parse_args(
        argv=[
            *SIZES,
            "--seq-length",
            "8",
            "--max-position-embeddings",
            "8",
            "--lr",
            "1",
            "--train-iters",
            "1",
            *flags,
        ]
    )


def test_each_chunk_has_a_copy_of_one(monkeypatch):
    args = args_of("--micro-batch-size", "1", "--ffn-hidden-size", "20")  # which checks one too
    checked, check = [], TransformerConfig.__post_init__
    monkeypatch.setattr(
        TransformerConfig, "__post_init__", lambda self: (checked.append(1), check(self))
    )
    one, other = core_transformer_config_from_args(args), core_transformer_config_from_args(args)
    assert one == other and one is not other
    assert len(checked) <= 1
    one.num_layers = 7  # a program's own business
    assert core_transformer_config_from_args(args).num_layers == other.num_layers == 4


def test_other_arguments_make_another():
    one, other = (
        core_transformer_config_from_args(args_of("--micro-batch-size", "1", *more))
        for more in ((), ("--ffn-hidden-size", "24"))
    )
    assert (one.ffn_hidden_size, other.ffn_hidden_size) == (64, 24)
