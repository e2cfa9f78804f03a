"""How the conformance tests reach megatron-core without a GPU and without processes.

Read by: the tests beside it. They are skipped, with the reason, where it cannot be imported.
"""

import contextlib
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.benchmarks.peers import (
    PeerMissing,
    cuda_calls_on_cpu,
    experts_on_cpu,
    import_megatron,
)

__all__ = ["cuda_calls_on_cpu", "experts_on_cpu", "megatron_module", "record_groups", "wide"]


def megatron_module(name: str) -> ModuleType:
    """`megatron.core.<name>`; skips the module that asks if megatron-core is not there.

    What it would have compiled stays as written: the compiler alone takes a second to import, in
    every rank, and the results are the same.
    """
    try:
        with warnings.catch_warnings(), mock.patch.object(torch, "compile", _as_written):
            warnings.simplefilter("ignore")
            return import_megatron(name)
    except PeerMissing as reason:
        pytest.skip(str(reason), allow_module_level=True)


def _as_written(function=None, **_):
    """`torch.compile` as a decorator, with or without options, that changes nothing."""
    return function if function is not None else _as_written


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """What megatron-core takes in float32 whatever it is given, as scores of a router, in float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def record_groups(parallel_state: ModuleType, world_size: int, **sizes) -> dict[str, list]:
    """The rank lists of every group megatron-core would make, by its `group_desc`.

    Raises what `initialize_model_parallel` raises for sizes it refuses.
    """
    made: dict[str, list[list[int]]] = {}

    def create_group(ranks=None, group_desc=None, **_):
        made.setdefault(group_desc, []).append(list(ranks))
        return SimpleNamespace(ranks=ranks)

    before = dict(vars(parallel_state))
    distributed = {
        "is_initialized": lambda: True,
        "get_world_size": lambda *_: world_size,
        "get_rank": lambda *_: 0,
    }
    try:
        with (
            mock.patch.multiple(torch.distributed, **distributed),
            mock.patch.object(parallel_state, "create_group", create_group),
        ):
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    finally:
        vars(parallel_state).update(before)
    return made
