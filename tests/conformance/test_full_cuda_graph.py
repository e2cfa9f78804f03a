"""Static buffers and the order of calls: the same as megatron-core's own, whose GPU is patched away."""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.core import full_cuda_graph as ours
from tests.conformance.megatron import megatron_module

theirs = megatron_module("full_cuda_graph")

EMPTY_LIKE = torch.empty_like


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """What megatron-core asks of CUDA is there, and does nothing."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, device=None: EMPTY_LIKE(tensor))
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(theirs, "get_all_rng_states", dict)
    buffers = {"training": [], "validation": []}
    monkeypatch.setattr(theirs.StaticBufferLoader, "static_buffers", buffers)
    for name, value in (("curr_iteration", 0), ("cuda_graph", None), ("result", None)):
        fresh = {"training": value, "validation": value}
        monkeypatch.setattr(theirs.FullCudaGraphWrapper, name, fresh)
    ours.destroy_full_cuda_graphs()
    yield
    ours.destroy_full_cuda_graphs()


def nested(value: float) -> dict[str, Any]:
    return {
        "x": torch.full((2,), value, requires_grad=True),
        "list": [torch.full((1,), value), 3, None],
        "deep": {"y": torch.tensor(value), "name": "text"},
    }


def plain(value: Any) -> Any:
    """With lists in place of tensors, to be compared."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_copies_and_clones():
    source = nested(1.0) | {"pair": (torch.ones(1), 2)}
    found, expected = (module.copy_tensors_in_struct(source) for module in (ours, theirs))
    assert plain(found) == plain(expected) == plain(source)
    assert not found["x"].requires_grad and not expected["x"].requires_grad
    targets = [module.copy_tensors_in_struct(nested(1.0)) for module in (ours, theirs)]
    places = [target["x"].data_ptr() for target in targets]
    with torch.no_grad():
        for module, target in zip((ours, theirs), targets, strict=True):
            module.clone_tensors_in_struct(target, nested(7.0) | {"new": 5})
    assert plain(targets[0]) == plain(targets[1])
    assert [target["x"].data_ptr() for target in targets] == places
    for module in (ours, theirs):
        with pytest.raises(Exception, match="tuple"):
            module.clone_tensors_in_struct({"x": (1,)}, {"x": (torch.ones(1),)})


def numbers(first: float, as_tuple: bool = False, also: tuple[str, ...] = ()) -> Any:
    while True:
        batch = {name: torch.full((2,), first) for name in ("x", *also)} | {"none": None}
        yield (batch, "index") if as_tuple else batch
        first += 1.0


READS = {
    "one chunk": (lambda: numbers(0.0), "chunk"),
    "a list of one": (lambda: [numbers(0.0, as_tuple=True)], ["chunk"]),
    "nothing to read": (lambda: [None], ["chunk"]),
    "three chunks": (lambda: [numbers(0.0), None, numbers(0.0, also=("y",))], ["a", "b", "c"]),
}


@pytest.mark.parametrize("iterators, model", READS.values(), ids=READS)
def test_what_is_read(iterators, model):
    found = []
    for module in (ours, theirs):
        wrapper = module.FullCudaGraphWrapper(None)
        calls = [
            [None if one is None else list(one) for one in wrapper.data_read(*given, 2)]
            for training in (True, False, True)
            for given in [(iterators(), model, training)]
        ]
        # In two calls of a stage, a microbatch has the same memory, and all chunks share it.
        places = [[b["x"].data_ptr() for one in call if one for b in one] for call in calls]
        patterns = [[place[0].index(p) for p in place[1]] for place in [(places[0], places[2])]]
        found.append((plain(calls), patterns, [len(set(row)) for row in places]))
    assert found[0] == found[1]


class Noted:
    """Schedule and graph of one of both modules; `events` in their order."""

    def __init__(self):
        self.events: list[str] = []

    def schedule(self, **kwargs: Any) -> list:
        self.events.append("run")
        return [[batch["x"] for batch in kwargs["data_iterator"][0]]]

    def replay(self) -> None:
        self.events.append("replay")

    @contextlib.contextmanager
    def graph(self, *_: Any, **__: Any):
        self.events.append("capture")
        yield
        self.events.append("captured")

    def capture(self, function: Any) -> "Noted":
        with self.graph():
            function()
        return self


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_eager_calls_captures_and_replays(warmup):
    mine, its = Noted(), Noted()
    wrappers = (
        ours.FullCudaGraphWrapper(mine.schedule, warmup, graph_maker=mine),
        theirs.FullCudaGraphWrapper(its.schedule, warmup),
    )
    sources = [numbers(0.0), numbers(0.0)]
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", lambda: its),
        mock.patch.object(torch.cuda, "graph", its.graph),
    ):
        results: list[list[Any]] = [[], []]
        for number in range(2 * warmup + 5):
            for wrapper, source, kept in zip(wrappers, sources, results, strict=True):
                kept.append(
                    wrapper(
                        model=["chunk"],
                        data_iterator=[source],
                        num_microbatches=2,
                        seq_length=8,
                        forward_only=number % 2 == 1,
                    )
                )
            assert plain(results[0]) == plain(results[1])
    assert mine.events == its.events and mine.events.count("capture") == 2
    counts = [wrapper.curr_iter(stage) for wrapper in wrappers for stage in ours.STAGES]
    assert counts[:2] == counts[2:]
    ids = [[id(one) for one in kept] for kept in results]
    assert [ids[0].index(one) for one in ids[0]] == [ids[1].index(one) for one in ids[1]]


def test_a_call_without_names_is_refused_by_both():
    for module, error in ((ours, TypeError), (theirs, AssertionError)):
        wrapper = module.FullCudaGraphWrapper(None)
        with pytest.raises(error):
            wrapper("model")
        with pytest.raises(error):
            wrapper(model=None, num_microbatches=1)
