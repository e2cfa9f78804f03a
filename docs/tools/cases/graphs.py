"""What the page on captured steps shows: calls, buffers, a result read too late, what is refused.

Called by: `problem_cases`; pages find it as `graphs`. Calls: the package's own wrapper, with the
graphs that stand for CUDA's on a CPU; the checks of its flags.
"""

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from cases.case_words import table
from minimegatron.core.full_cuda_graph import FullCudaGraphWrapper, destroy_full_cuda_graphs
from minimegatron.core.recorded_graph import HostReadError, RecordedGraphs
from minimegatron.training.arguments import parse_args

WARMUP, CALLS = 2, 5
"""Eager calls, and all calls, of the page's case."""
NUM_MICROBATCHES = 2

# -- A step of one weight --


class Call(NamedTuple):
    """One call of the schedule, as somebody outside sees it."""

    kind: str
    data: list[float]
    """The number that each microbatch has brought."""
    loss: float
    """The sum of its microbatches' losses, read at once."""
    gradient: float
    length: int
    """Of a list that the forward step grows."""
    result: list[torch.Tensor]
    """What the call returned."""
    place: int
    """Of the first microbatch's buffer: where its memory begins."""


class OneWeight:
    """A model of one weight w. The loss of a number x is (w x)², with w = 1."""

    def __init__(self) -> None:
        self.weight = torch.ones(1, requires_grad=True)
        self.main_grad = torch.zeros(1)
        self.list_that_grows: list[int] = []
        self.place = 0

    def schedule(self, *, data_iterator: Any, forward_only: bool, **_: Any) -> list[torch.Tensor]:
        """A schedule without a pipeline, as short as it can be."""
        losses = []
        for _ in range(NUM_MICROBATCHES):
            x = next(data_iterator[0] if isinstance(data_iterator, list) else data_iterator)["x"]
            self.place = self.place or x.data_ptr()
            self.list_that_grows.append(len(self.list_that_grows))
            loss = (self.weight * x).square().sum()
            if not forward_only:
                loss.backward()
                self.main_grad += self.weight.grad
                self.weight.grad = None
            losses.append(loss.detach())
        return losses


def numbers() -> Iterator[dict[str, torch.Tensor]]:
    """1, 2, 3, ... as microbatches."""
    for number in itertools.count(1):
        yield {"x": torch.tensor([float(number)])}


@contextlib.contextmanager
def _own_graphs() -> Iterator[None]:
    """Graphs belong to a process; a page leaves none behind."""
    destroy_full_cuda_graphs()
    try:
        yield
    finally:
        destroy_full_cuda_graphs()


def calls(
    is_captured: bool = True, num_warmups: int = WARMUP, num_calls: int = CALLS
) -> list[Call]:
    """Some steps of training, with the wrapper or without it."""
    model, source, found = OneWeight(), numbers(), []
    graphs = _Noting()
    with _own_graphs():
        wrapped = FullCudaGraphWrapper(model.schedule, num_warmups, graph_maker=graphs)
        run = wrapped if is_captured else model.schedule
        for number in range(num_calls):
            model.main_grad.zero_()
            graphs.events.clear()
            given = {"num_microbatches": NUM_MICROBATCHES, "seq_length": 1}
            result = run(model=model, data_iterator=source, forward_only=False, **given)
            first = NUM_MICROBATCHES * number + 1
            found.append(
                Call(
                    kind=", then ".join(graphs.events) or "eager",
                    data=[float(first + i) for i in range(NUM_MICROBATCHES)],
                    loss=float(sum(result)),
                    gradient=model.main_grad.item(),
                    length=len(model.list_that_grows),
                    result=result,
                    place=model.place,
                )
            )
    return found


class _Noting:
    """Makes recorded graphs, and notes what is done with them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def capture(self, function: Callable[[], None]) -> "_Noted":
        self.events.append("capture")
        return _Noted(RecordedGraphs().capture(function), self.events)


class _Noted(NamedTuple):
    graph: Any
    events: list[str]

    def replay(self) -> None:
        self.events.append("replay")
        self.graph.replay()


_captured = cache(calls)


def calls_table() -> str:
    """The page's first table: five calls."""
    rows = [
        [
            number,
            call.kind,
            " and ".join(f"{x:g}" for x in call.data),
            f"{call.loss:g}",
            f"{call.gradient:g}",
            call.length,
        ]
        for number, call in enumerate(_captured())
    ]
    return table(["call", "what runs", "x", "loss", "gradient", "entries of the list"], rows)


def is_equal_to_eager() -> str:
    """
    >>> is_equal_to_eager()
    'the same'
    """
    pairs = zip(_captured(), calls(is_captured=False), strict=True)
    same = all((a.loss, a.gradient) == (b.loss, b.gradient) for a, b in pairs)
    return "the same" if same else "not the same"


def entries_words(call: int) -> str:
    """
    >>> entries_words(-1)
    '6'
    """
    return str(_captured()[call].length)


# -- A result that is read later --


def late_table() -> str:
    """The loss of each call: read at once, and read when all calls are over."""
    rows = [
        [number, f"{now.loss:g}", f"{float(sum(then.result)):g}", f"{float(sum(now.result)):g}"]
        for number, (now, then) in enumerate(
            zip(_captured(), calls(is_captured=False), strict=True)
        )
    ]
    return table(
        ["call", "read at once", "read at the end, eager", "read at the end, captured"], rows
    )


def late_words(call: int) -> str:
    """
    >>> late_words(2)
    '181'
    """
    return f"{float(sum(_captured()[call].result)):g}"


# -- Buffers --


def rebound_table() -> str:
    """A graph that reads x: filled, and replaced by another tensor."""
    holder = {"x": torch.tensor([3.0])}
    out: list[torch.Tensor] = []
    graph = RecordedGraphs().capture(lambda: out.append(holder["x"].square()))
    place = holder["x"].data_ptr()
    rows = []
    for code, change in (
        ("nothing", lambda: None),
        ("`x.copy_(5)`", lambda: holder["x"].copy_(torch.tensor([5.0]))),
        ('`batch["x"] = 7`', lambda: holder.update(x=torch.tensor([7.0]))),
    ):
        change()
        graph.replay()
        same = "the same" if holder["x"].data_ptr() == place else "another"
        rows.append([code, f"{holder['x'].item():g}", same, f"{out[0].item():g}"])
    return table(["before the replay", "x", "its memory", "x² of the replay"], rows)


# -- What is forbidden --

X = torch.arange(4.0)
READERS = {
    "loss.item()": lambda: X.sum().item(),
    "if loss > 0": lambda: bool(X.sum() > 0),
    'print(f"{loss}")': lambda: print(f"{X.sum()}"),
    "loss.cpu()": lambda: X.cpu(),
    "x[x > 1]": lambda: X[X > 1],
    "torch.tensor(3.0, device=device)": lambda: torch.tensor(3.0, device=torch.device("cpu")),
    "get_rng_state()": lambda: torch.get_rng_state(),
}


def forbidden_table() -> str:
    """What a captured step must not do, and what is said then."""
    rows = []
    for code, reader in READERS.items():
        with contextlib.redirect_stdout(io.StringIO()):
            rows.append([f"`{code}`", f"asks for {_asked_for(reader)}"])
    return table(["in the step", "the message says"], rows)


def _asked_for(reader: Callable[[], Any]) -> str:
    try:
        RecordedGraphs().capture(reader)
    except HostReadError as error:
        return re.search(r"asks for (.+?) while the step", str(error))[1]
    raise ValueError("a capture lets it pass")


# -- What is refused --

GRAPH = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-2 "
    "--eval-iters 0 --padded-vocab-size 512 --cuda-graph-impl full_iteration"
)
QUIET = "--no-check-for-nan-in-loss-and-grad"
REFUSED = (
    "",
    "--check-for-spiky-loss",
    "--num-experts 4",
    "--recompute-granularity selective",
    "--fp16",
    "--rampup-batch-size 2 2 4",
    "--mtp-num-layers 1 --position-embedding-type rope",
    "--timing-log-level 1",
)


def refused_table() -> str:
    """Options that cannot be captured: why, and what to do instead."""
    rows = [_refused("")]
    for flags in REFUSED[1:]:
        rows.append(_refused(f"{flags} {QUIET} --attention-dropout 0"))
    rows.insert(1, _refused(QUIET))
    return table(["with", "refused, for it", "instead"], rows)


def _refused(flags: str) -> list[str]:
    try:
        parse_args(
            argv=f"{GRAPH} {flags}".split(), environ={}, args_defaults={"model_family": "gpt"}
        )
    except ValueError as error:
        found = re.fullmatch(r".*? with (.+?), which (.+?); (.+)", str(error))
        return [_in_code(part) for part in (found[1], found[2], found[3])]
    raise ValueError(f"{flags}: not refused")


def _in_code(words: str) -> str:
    """
    >>> _in_code("the scale of --fp16")
    'the scale of `--fp16`'
    """
    return re.sub(r"--[\w-]+(?: [\d.]+| selective)*", lambda flag: f"`{flag[0]}`", words)
