"""The recipe of distillation: two stages compute what one does, and the wide message must be told."""

import sys
from pathlib import Path

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.transformer.module_state import named_global_parameters
from tests.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "recipes"))
from distillation import Pair, both_widths, step


def distill(stages: int, adjust=both_widths) -> tuple[list, dict]:
    """In a rank: losses, and gradients by their names in the whole models; None where there is none."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    pair = Pair(torch.float64)
    return step(pair, adjust=adjust), {n: w.grad for n, w in named_global_parameters(pair)}


def test_two_stages_compute_what_one_does():
    first, last = run_ranks(distill, 2, 2)
    (alone,) = run_ranks(distill, 1, 1)
    torch.testing.assert_close((last[0], first[1] | last[1]), alone, rtol=1e-10, atol=1e-14)
    norms = {name: 0.0 if grad is None else grad.norm() for name, grad in alone[1].items()}
    assert len(norms) > 60 and all((n > 1e-6) == k.startswith("student.") for k, n in norms.items())


def test_without_the_function_the_wide_message_is_refused():
    with pytest.raises(Exception, match=r"receives \(16, 4, 16\).*adjust_tensor_shapes_fn"):
        run_ranks(distill, 2, 2, None)
