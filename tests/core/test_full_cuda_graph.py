"""`FullCudaGraphWrapper` and its buffers, with a scripted graph maker and with the one for the CPU."""

from collections import Counter
from functools import partial

import pytest
import torch

from minimegatron.core.full_cuda_graph import (
    FullCudaGraphWrapper,
    StaticBufferLoader,
    clone_tensors_in_struct,
    copy_tensors_in_struct,
    destroy_full_cuda_graphs,
)
from minimegatron.core.recorded_graph import HostReadError, RecordedGraphs
from minimegatron.core.utils import Recording

STAGES = ("training", "validation")


@pytest.fixture(autouse=True)
def no_graphs():
    """Counts and graphs belong to the class."""
    destroy_full_cuda_graphs()
    yield
    destroy_full_cuda_graphs()


class Script:
    """A schedule, and a maker of graphs; both note when they are called."""

    def __init__(self):
        self.events: list[str] = []

    def schedule(self, **kwargs) -> list:
        self.events.append("run")
        iterators = kwargs["data_iterator"]
        return [None if read is None else list(read) for read in iterators]

    def capture(self, function) -> "Script":
        self.events.append("capture")
        function()
        self.events.append("captured")
        return self

    def replay(self) -> None:
        self.events.append("replay")


def batches(start: float = 0.0):
    """Endless microbatches {"x": [2]}, each with other numbers."""
    while True:
        yield {"x": torch.full((2,), start), "none": None, "name": "text"}
        start += 1.0


def arguments(iterator, model="chunk", num_microbatches=2, forward_only=False, **others) -> dict:
    return {
        "forward_step_func": None,
        "model": model,
        "data_iterator": iterator,
        "num_microbatches": num_microbatches,
        "seq_length": 8,
        "forward_only": forward_only,
        **others,
    }


# -- Structures --


def test_a_copy_is_of_every_tensor_and_of_nothing_else():
    weight, other = torch.ones(2, requires_grad=True), object()
    made = copy_tensors_in_struct({"list": [weight, 3], "pair": (weight * 2, None), "other": other})
    assert made["other"] is other and made["list"][1] == 3 and made["pair"][1] is None
    for tensor, value in ((made["list"][0], 1.0), (made["pair"][0], 2.0)):
        assert tensor.tolist() == [value] * 2 and not tensor.requires_grad
        assert tensor.data_ptr() != weight.data_ptr()
    assert isinstance(made["pair"], tuple)


def test_a_clone_fills_the_tensors_that_are_there():
    target = {"list": [torch.zeros(2), 1], "deep": {"x": torch.zeros(1)}, "none": 5}
    places = [target["list"][0].data_ptr(), target["deep"]["x"].data_ptr()]
    clone_tensors_in_struct(
        target, {"list": [torch.ones(2), 2], "deep": {"x": torch.tensor([7.0])}, "none": None}
    )
    assert [target["list"][0].data_ptr(), target["deep"]["x"].data_ptr()] == places
    assert target["list"][0].tolist() == [1.0, 1.0] and target["deep"]["x"].tolist() == [7.0]
    assert target["list"][1] == 2 and target["none"] is None


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        ({"x": (1,)}, {"x": (torch.ones(1), 2)}, "a tuple of 2 .* make it a list or a dict"),
        (torch.zeros(4), torch.ones(1), r"\[1\] torch.float32, but .* \[4\] torch.float32"),
        (torch.zeros(1), torch.ones(1).long(), "torch.int64, but .* reset_cuda_graph"),
        (3, 3, "a int is no microbatch"),
    ],
    ids=["tuple", "shape", "dtype", "number"],
)
def test_what_no_buffer_can_take_is_refused(target, source, words):
    with pytest.raises(ValueError, match=words):
        clone_tensors_in_struct(target, source)


# -- Buffers --


def test_buffers_stay_where_they_are_and_have_the_new_numbers():
    load, source = StaticBufferLoader(), batches()
    first = [load(next(source), "training", number) for number in range(2)]
    places = [buffer["x"].data_ptr() for buffer in first]
    again = [StaticBufferLoader()((next(source), "rest"), "training", i) for i in range(2)]
    assert [a is b for a, b in zip(first, again, strict=True)] == [True, True]
    assert [buffer["x"].data_ptr() for buffer in again] == places
    assert [buffer["x"].tolist() for buffer in again] == [[2.0, 2.0], [3.0, 3.0]]
    assert again[0]["none"] is None and again[0]["name"] == "text"
    assert load(next(source), "validation", 0)["x"].data_ptr() not in places


def test_keys_may_come_and_sizes_stay():
    load = StaticBufferLoader()
    buffer = load({"x": torch.zeros(1)}, "training", 0)
    load({"x": torch.ones(1), "y": torch.ones(2)}, "training", 0)
    assert buffer["x"].tolist() == [1.0] and buffer["y"].tolist() == [1.0, 1.0]
    assert load({"x": torch.zeros(1)}, "training", 0)["y"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"microbatch 0 of training: the data is \[3\]"):
        load({"x": torch.ones(3), "y": torch.ones(2)}, "training", 0)


@pytest.mark.parametrize("inputs", [torch.ones(1), [], {"x": 1}], ids=["tensor", "list", "gap"])
def test_only_dicts_in_order_are_microbatches(inputs):
    with pytest.raises(ValueError, match="microbatch 3 of validation is a .*give dicts, in order"):
        StaticBufferLoader()(inputs, "validation", 3)


# -- The order of calls --

EAGER, FIRST, LATER = ["run"], ["capture", "run", "captured", "replay"], ["replay"]


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_eager_calls_then_a_capture_that_is_replayed_at_once_then_replays(warmup):
    script = Script()
    wrapped = FullCudaGraphWrapper(script.schedule, warmup, graph_maker=script)
    for _ in range(warmup + 3):
        wrapped(**arguments(batches()))
    assert script.events == EAGER * warmup + FIRST + LATER * 2
    assert wrapped.curr_iter("training") == warmup + 3 and wrapped.curr_iter("validation") == 0


def test_a_stage_has_its_own_count_graph_and_buffers():
    script = Script()
    train = FullCudaGraphWrapper(script.schedule, 1, graph_maker=script)
    evaluate = FullCudaGraphWrapper(script.schedule, 1, graph_maker=script)
    for _ in range(2):
        train(**arguments(batches()))
    script.events.clear()
    found = [evaluate(**arguments(batches(9.0), forward_only=True)) for _ in range(2)]
    assert script.events == EAGER + FIRST
    assert found[-1][0][0]["x"].tolist() == [9.0, 9.0]
    script.events.clear()
    # Another wrapper of the same process goes on with the same graph.
    FullCudaGraphWrapper(script.schedule, 1, graph_maker=script)(**arguments(batches()))
    assert script.events == LATER
    assert FullCudaGraphWrapper.curr_iteration == {"training": 3, "validation": 2}


def test_replays_return_the_same_objects():
    script = Script()
    wrapped = FullCudaGraphWrapper(script.schedule, 0, graph_maker=script)
    source = batches()
    first = wrapped(**arguments(source))
    assert wrapped(**arguments(source)) is first
    assert [batch["x"].tolist() for batch in first[0]] == [[2.0, 2.0], [3.0, 3.0]]


def test_chunks_share_the_buffers_of_a_microbatch_and_may_read_nothing():
    script = Script()
    wrapped = FullCudaGraphWrapper(script.schedule, 5, graph_maker=script)
    model, iterators = ["a", "b", "c"], [batches(), None, batches()]
    first, nothing, last = wrapped(**arguments(iterators, model))
    assert nothing is None and len(first) == 2
    assert all(a is b for a, b in zip(first, last, strict=True))
    assert wrapped(**arguments(None)) == [None]
    assert len(StaticBufferLoader.static_buffers["training"]) == 2
    with pytest.raises(ValueError, match="3 chunks of the model have 1 data iterators"):
        wrapped(**arguments([batches()], model))


def test_microbatches_are_checked_as_they_are_read():
    script, seen = Script(), []
    wrapped = FullCudaGraphWrapper(
        script.schedule, 0, graph_maker=script, check_inputs=lambda inputs: seen.append(inputs["x"])
    )
    for _ in range(2):
        wrapped(**arguments(batches()))
    assert len(seen) == 4


# -- What a call must be --


def test_arguments_have_names():
    wrapped = FullCudaGraphWrapper(Script().schedule)
    with pytest.raises(
        TypeError, match="1 arguments are given by position, and model, data_iterat"
    ):
        wrapped("model")
    given = arguments(batches())
    del given["seq_length"]
    with pytest.raises(TypeError, match="0 arguments .* and seq_length of the needed ones"):
        wrapped(**given)


def test_collected_data_is_the_schedules_own():
    script = Script()
    wrapped = FullCudaGraphWrapper(script.schedule, 0, graph_maker=script)
    wrapped(**arguments([batches()], forward_only=True))
    script.events.clear()
    wrapped(**arguments([[1, 2]], forward_only=True, collect_non_loss_data=True))
    assert script.events == ["run"] and wrapped.curr_iter("validation") == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_microbatches": 3}, r"num_microbatches 3, but 2 .*reset_cuda_graph\('training'\)"),
        ({"seq_length": 16}, "seq_length 16, but 8"),
        ({"model": "another"}, "another model than"),
        ({"data_iterator": None}, "another data_iterator than"),
    ],
    ids=lambda given: "".join(given) if isinstance(given, dict) else None,
)
def test_a_captured_step_stays_as_it_is(changed, words):
    script = Script()
    wrapped = FullCudaGraphWrapper(script.schedule, 1, graph_maker=script)
    for _ in range(2):
        wrapped(**arguments(batches()))
    source = batches()
    with pytest.raises(ValueError, match=words):
        wrapped(**(arguments(source) | changed))
    assert next(source)["x"].tolist() == [0.0, 0.0]  # nothing was read
    wrapped.reset_cuda_graph("training")
    script.events.clear()
    for _ in range(3):
        wrapped(**(arguments(batches()) | changed))
    assert script.events == EAGER + FIRST + LATER


def test_a_reset_is_of_one_stage_or_of_both():
    script = Script()
    wrapped = FullCudaGraphWrapper(script.schedule, 0, graph_maker=script)
    for forward_only in (False, True):
        wrapped(**arguments(batches(), forward_only=forward_only))
    wrapped.reset_cuda_graph("validation")
    assert FullCudaGraphWrapper.cuda_graph == {"training": script, "validation": None}
    assert FullCudaGraphWrapper.curr_iteration == {"training": 1, "validation": 0}
    wrapped.reset_cuda_graph()
    assert FullCudaGraphWrapper.cuda_graph == FullCudaGraphWrapper.result == dict.fromkeys(STAGES)
    assert StaticBufferLoader.static_buffers == {"training": [], "validation": []}


# -- A step that computes --


class Step:
    """A linear model whose gradients are added to a buffer, as a step of training does."""

    def __init__(self):
        self.weight = torch.tensor([0.5, -1.0], requires_grad=True)
        self.main_grad = torch.zeros(2)
        self.calls: list[float] = []

    def schedule(self, **kwargs) -> list:
        reports = []
        for batch in kwargs["data_iterator"][0]:
            loss = (self.weight * batch["x"]).square().sum()
            if not kwargs["forward_only"]:
                loss.backward()
                self.main_grad.add_(self.weight.grad)
                self.weight.grad = None
            self.calls.append(len(self.calls))
            reports.append({"loss": loss.detach()})
        return reports

    def update(self) -> None:
        with torch.no_grad():
            self.weight -= 0.01 * self.main_grad
        self.main_grad.zero_()


def train(run, step: Step, num_steps: int = 5) -> list:
    """Losses and gradients of each step, and the weight at the end; to the bit."""
    source, found = batches(0.25), []
    for _ in range(num_steps):
        reports = run(**arguments(source))
        found.append([report["loss"].item() for report in reports] + step.main_grad.tolist())
        step.update()
        with torch.no_grad():
            reports = run(**arguments(batches(-1.0), forward_only=True))
        found.append([report["loss"].item() for report in reports])
    return [*found, step.weight.tolist()]


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_eager_and_replayed_steps_are_equal_to_the_bit(warmup):
    eager, captured = Step(), Step()
    run = FullCudaGraphWrapper(captured.schedule, warmup)

    def unread(**kwargs):
        return eager.schedule(**(kwargs | {"data_iterator": [_two(kwargs["data_iterator"])]}))

    assert train(run, captured) == train(unread, eager)
    # Python ran in the eager calls and in the capture, of either stage; then no more.
    assert len(captured.calls) == 2 * 2 * (warmup + 1) and len(eager.calls) == 2 * 2 * 5


def _two(iterator):
    return [next(iterator), next(iterator)]


def test_the_capture_itself_changes_nothing():
    step, batch = Step(), {"x": torch.ones(2)}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = []

    def work():
        batch["x"].mul_(2.0)
        found.extend(step.schedule(data_iterator=[[batch]], forward_only=False))
        found.append(torch.rand(2))

    graph = RecordedGraphs().capture(work)
    assert batch["x"].tolist() == [1.0, 1.0] and step.main_grad.tolist() == [0.0, 0.0]
    assert torch.equal(torch.get_rng_state(), state)
    assert found[0]["loss"].isnan() and found[1].isnan().all()
    graph.replay()
    assert batch["x"].tolist() == [2.0, 2.0] and step.main_grad.tolist() == [4.0, -8.0]
    first = found[1].clone()
    torch.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))
    graph.replay()
    assert not torch.equal(first, found[1])  # each replay draws its own numbers


def test_memory_that_a_tensor_no_longer_has_is_still_the_graphs():
    batch, results = torch.ones(2), []

    def work():
        out = batch * 3
        doubled = out * 2
        out.data = torch.empty(1)  # as the outputs of a pipeline's stages are freed
        results.append(doubled)

    graph = RecordedGraphs().capture(work)
    for value in (1.0, 5.0):
        batch.fill_(value)
        graph.replay()
        assert results[0].tolist() == [6.0 * value] * 2


def test_numbers_of_python_are_as_they_were_at_the_capture():
    total, lengths = torch.zeros(1), []

    def work():
        lengths.append(0)
        count = torch.tensor(0.0)
        count += len(lengths)
        total.add_(count)

    graph = RecordedGraphs().capture(work)
    for _ in range(3):
        graph.replay()
    assert total.tolist() == [3.0] and len(lengths) == 1


# -- What a capture forbids --


class Reads(torch.autograd.Function):
    """Its backward asks for a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


X = torch.arange(4.0)
READERS = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X.sum() > 0),
    "float": lambda: float(X[1]),
    "int": lambda: int(X[1]),
    "index": lambda: [1, 2][X[1].long()],
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "numpy": lambda: X.numpy(),
    "repr": lambda: repr(X),
    "format": lambda: f"{X.sum():.3f}",
    "print": lambda: print(X),
    "in": lambda: 1.0 in X,
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 1],
    "mask is set": lambda: X.clone().__setitem__(X > 1, torch.ones(2)),
    "select": lambda: X.masked_select(X > 1),
    "unique": lambda: torch.unique(X),
    "repeat": lambda: torch.repeat_interleave(X, X.long()),
    "from Python": lambda: torch.tensor([1.0], device=torch.device("cpu")),
    "random state": lambda: torch.get_rng_state(),
    "in backward": lambda: Reads.apply(X.clone().requires_grad_()).sum().backward(),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_read_is_found_and_named(reader):
    counts = torch.zeros(1)

    def work():
        counts.add_(1.0)
        reader()

    with pytest.raises(
        HostReadError, match=r"(<lambda>|backward), test_full_cuda_graph.py:\d+, asks"
    ):
        RecordedGraphs().capture(work)
    assert counts.tolist() == [0.0] and not Recording.is_on
    reader()  # afterwards it may


def test_what_reads_nothing_is_allowed():
    def work():
        assert Recording.is_on
        y = X.clone()
        y[0] = y[torch.tensor([1])].squeeze()
        y[y > 2] = 0.0
        y.masked_fill_(y == 2, 0.0).to(torch.float64).to(X.device).repeat_interleave(2)
        assert y.shape == (4,) and len(y) == 4 and y.dtype == X.dtype and y.is_cpu
        assert Counter(type(part) for part in y.split(2)) == {torch.Tensor: 2}

    RecordedGraphs().capture(work).replay()


def test_a_schedule_that_reads_is_captured_never():
    def schedule(**kwargs):
        return [batch["x"].sum().item() for batch in kwargs["data_iterator"][0]]

    wrapped, source = FullCudaGraphWrapper(schedule), batches()
    assert wrapped(**arguments(source)) == [0.0, 2.0]
    for _ in range(2):
        with pytest.raises(HostReadError, match=r"Tensor.item\(\) in .*test_full_cuda_graph"):
            wrapped(**arguments(source))
    assert wrapped.curr_iter("training") == 1
    assert FullCudaGraphWrapper.cuda_graph["training"] is None


def test_a_result_must_be_read_before_the_next_call():
    step = Step()
    run = partial(FullCudaGraphWrapper(step.schedule, 0), **arguments(None))
    source = batches(1.0)
    first = run(data_iterator=source)
    kept = [report["loss"].clone() for report in first]
    second = run(data_iterator=source)
    assert first is second
    assert [loss.item() for loss in kept] != [report["loss"].item() for report in first]
