"""A whole step, all forwards and backwards, as one graph that is captured once and replayed.

A step of a small model queues thousands of kernels, and the program takes longer to queue them than
the GPU to run them. A captured step is queued by one call. `FullCudaGraphWrapper` stands around a
schedule and takes its arguments; the optimizer stays outside. Counterpart:
`megatron.core.full_cuda_graph`, under the same names.

A graph reads and writes the memory that it saw, and nothing else. So each microbatch has buffers that
stay where they are (`StaticBufferLoader`), and the results of each replay stand where those of the
last one stood: read them, or clone them, before the next call.

What makes a graph is a `GraphMaker`. On a GPU it is torch's; where there is none, `recorded_graph`.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from minimegatron.core.recorded_graph import RecordedGraphs
from minimegatron.core.utils import barrier, device_is_asynchronous, get_device

logger = logging.getLogger(__name__)

STAGES = ("training", "validation")
"""Of a run, not of a pipeline: steps with backwards, and without. Each has its own graph."""

NEEDED = ("model", "data_iterator", "num_microbatches", "seq_length", "forward_only")
SIZES = ("num_microbatches", "seq_length", "micro_batch_size", "decoder_seq_length")
"""Arguments that a captured step has taken in as numbers."""


class Graph(Protocol):
    """Work that can be repeated; torch's `CUDAGraph` is one."""

    def replay(self) -> Any:
        """Does the work that was captured, on what its memory holds now."""


class GraphMaker(Protocol):
    """Makes a graph of what a function does."""

    def capture(self, function: Callable[[], None]) -> Graph:
        """Runs `function` once. It changes nothing that counts: that is left to the first replay."""


class CudaGraphs:
    """Graphs of this process's GPU. With `use_single_mempool` all of them share their memory."""

    def __init__(self, use_single_mempool: bool = False):
        self._pool = torch.cuda.graph_pool_handle() if use_single_mempool else None

    def capture(self, function: Callable[[], None]) -> Graph:
        """Captures on a stream of its own. Raises what torch raises for a call that would wait."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(torch.cuda.default_generators[get_device().index])
        torch.cuda.synchronize()
        # Other threads, such as NCCL's watchdog, may go on with calls that a capture forbids.
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.Stream(),
            capture_error_mode="thread_local",
        ):
            function()
        torch.cuda.synchronize()
        return graph


# -- Static buffers --


def copy_tensors_in_struct(src: Any) -> Any:
    """`src` with each tensor replaced by a copy on this rank's device, without its autograd graph.

    It looks into tuples, lists and dicts, which are new; anything else is handed on as it is.
    """
    if isinstance(src, tuple | list):
        return type(src)([copy_tensors_in_struct(item) for item in src])
    if isinstance(src, dict):
        return {key: copy_tensors_in_struct(item) for key, item in src.items()}
    if isinstance(src, torch.Tensor):
        return src.detach().to(get_device(), copy=True)
    return src


def clone_tensors_in_struct(tgt: Any, src: Any) -> None:
    """Fills the tensors in `tgt` with the numbers of those in `src`; both are built alike.

    Other values are replaced. Raises ValueError for a tuple, whose items cannot be, for a tensor of
    another shape or dtype, and where `src` itself is none of tensor, list and dict.
    """
    if isinstance(src, tuple):
        raise ValueError(
            f"a tuple of {len(src)} cannot be copied into a static buffer, since its items cannot be "
            "replaced; make it a list or a dict in the dataset"
        )
    if isinstance(src, torch.Tensor):
        if (tgt.shape, tgt.dtype) != (src.shape, src.dtype):
            raise ValueError(
                f"the data is {list(src.shape)} {src.dtype}, but its static buffer "
                f"{list(tgt.shape)} {tgt.dtype}, which a graph may read; give every step the same "
                "sizes, or call reset_cuda_graph() before other ones"
            )
        tgt.copy_(src, non_blocking=True)
    elif isinstance(src, list | dict):
        for key, item in enumerate(src) if isinstance(src, list) else src.items():
            if isinstance(item, tuple | list | dict | torch.Tensor):
                clone_tensors_in_struct(tgt[key], item)
            else:
                tgt[key] = item
    else:
        raise ValueError(f"a {type(src).__name__} is no microbatch; give a tensor, list or dict")


class StaticBufferLoader:
    """Copies microbatches to memory that stays where it is. All loaders of a process share it."""

    static_buffers: ClassVar[dict[str, list[dict[str, Any]]]] = {name: [] for name in STAGES}

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if device_is_asynchronous() else None

    def __call__(self, inputs: Any, stage: str, microbatch: int) -> dict[str, Any]:
        """The buffers of microbatch number `microbatch`, with the numbers of `inputs`.

        `inputs` is a dict, or a tuple that begins with one. The first time its tensors are cloned,
        and later filled; keys that are new by then are added. A key that is missing keeps its old
        numbers: the chunks of a rank may read different ones. Raises ValueError, which names the stage
        and the microbatch, for what the buffers cannot hold.
        """
        if isinstance(inputs, tuple) and inputs and isinstance(inputs[0], dict):
            inputs = inputs[0]
        buffers = self.static_buffers[stage]
        if not isinstance(inputs, dict) or microbatch > len(buffers):
            raise ValueError(
                f"microbatch {microbatch} of {stage} is a {type(inputs).__name__}, after "
                f"{len(buffers)} before it; give dicts, in order"
            )
        with self._own_stream():
            if microbatch == len(buffers):
                buffers.append(copy_tensors_in_struct(inputs))
            else:
                self._fill(buffers[microbatch], inputs, f"microbatch {microbatch} of {stage}")
        return buffers[microbatch]

    def _fill(self, buffer: dict[str, Any], inputs: dict[str, Any], where: str) -> None:
        for key, value in inputs.items():
            if key not in buffer:
                buffer[key] = copy_tensors_in_struct(value)
        try:
            clone_tensors_in_struct(buffer, inputs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On a GPU the copies run beside other work; but the last replay may still read the buffers."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)


# -- The step --


class FullCudaGraphWrapper:
    """A schedule whose calls are eager at first, then captured once, then replayed.

    Args:
        forward_backward_func: as `get_forward_backward_func` returns it.
        cuda_graph_warmup_steps: eager calls of each stage before its capture.
        use_single_mempool: both graphs share their memory, so results of a training step are gone
            after the next evaluation.
        graph_maker: None for what this rank's device has.
        check_inputs: called with each microbatch as it is read, because a captured step looks at none.

    Counts, graphs, results and buffers belong to the class: the wrapper of `evaluate` and that of
    `train` go on with the same ones.
    """

    curr_iteration: ClassVar[dict[str, int]] = dict.fromkeys(STAGES, 0)
    cuda_graph: ClassVar[dict[str, Graph | None]] = dict.fromkeys(STAGES)
    result: ClassVar[dict[str, Any]] = dict.fromkeys(STAGES)
    captured_call: ClassVar[dict[str, dict[str, Any]]] = {name: {} for name in STAGES}
    """The sizes of the call that was captured, and the chunks of its model, by their `id`."""

    def __init__(
        self,
        forward_backward_func: Callable,
        cuda_graph_warmup_steps: int = 1,
        use_single_mempool: bool = False,
        *,
        graph_maker: GraphMaker | None = None,
        check_inputs: Callable[[Any], None] | None = None,
    ):
        self.forward_backward_func = forward_backward_func
        self.cuda_graph_warmup_steps = cuda_graph_warmup_steps
        self.static_loader = StaticBufferLoader()
        if graph_maker is None:
            on_gpu = device_is_asynchronous()
            graph_maker = CudaGraphs(use_single_mempool) if on_gpu else RecordedGraphs()
        self._graph_maker, self._check_inputs = graph_maker, check_inputs

    def data_read(
        self, data_iterator: Any, model: Any, training: bool, num_microbatches: int
    ) -> list[Iterator | None]:
        """Reads all microbatches into static buffers: an iterator over these for each chunk.

        A chunk without an iterator has None here too. A microbatch has one set of buffers, which its
        chunks share. Raises ValueError where chunks and iterators are not as many.
        """
        stage = STAGES[0] if training else STAGES[1]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        num_chunks = len(model) if isinstance(model, list) else 1
        if len(iterators) != num_chunks:
            raise ValueError(
                f"{num_chunks} chunks of the model have {len(iterators)} data iterators; give a list "
                "with one for each, None to a chunk that reads nothing"
            )
        return [
            None
            if iterator is None
            else iter([self._read(iterator, stage, i) for i in range(num_microbatches)])
            for iterator in iterators
        ]

    def _read(self, iterator: Iterator, stage: str, microbatch: int) -> dict[str, Any]:
        inputs = next(iterator)
        if self._check_inputs is not None:
            self._check_inputs(inputs)
        return self.static_loader(inputs, stage, microbatch)

    def __call__(self, *unnamed: Any, **kwargs: Any) -> Any:
        """As the schedule; after the capture the same result objects every time, with new numbers.

        A call with `collect_non_loss_data` is the schedule's own, and counts as none.

        Raises:
            TypeError: for positional arguments, and for needed ones that are missing.
            ValueError: a captured step is to have other sizes, data of another form, or another model.
        """
        missing = [name for name in NEEDED if name not in kwargs]
        if unnamed or missing:
            raise TypeError(
                f"{len(unnamed)} arguments are given by position, and {', '.join(missing) or 'none'} "
                "of the needed ones is missing; give each by its name"
            )
        if kwargs.get("collect_non_loss_data"):
            return self.forward_backward_func(**kwargs)
        here = FullCudaGraphWrapper
        stage = STAGES[kwargs["forward_only"]]
        call = _call_of(kwargs)
        if here.cuda_graph[stage] is not None:
            _refuse_another_call(stage, here.captured_call[stage], call)
        kwargs["data_iterator"] = self.data_read(
            kwargs["data_iterator"],
            kwargs["model"],
            not kwargs["forward_only"],
            kwargs["num_microbatches"],
        )
        run = partial(self._run, stage, kwargs)
        is_due = self.curr_iter(stage) >= self.cuda_graph_warmup_steps
        if here.cuda_graph[stage] is None and is_due:
            self._capture(stage, run)
            here.captured_call[stage] = call
        if here.cuda_graph[stage] is None:
            run()
        else:
            here.cuda_graph[stage].replay()
        self.next_iter(stage)
        return here.result[stage]

    def _run(self, stage: str, kwargs: dict[str, Any]) -> None:
        FullCudaGraphWrapper.result[stage] = self.forward_backward_func(**kwargs)

    def _capture(self, stage: str, run: Callable[[], None]) -> None:
        _wait_for_all_ranks()
        FullCudaGraphWrapper.cuda_graph[stage] = self._graph_maker.capture(run)
        _wait_for_all_ranks()
        logger.info("captured a graph of %s", stage)

    def curr_iter(self, stage: str) -> int:
        """Calls of this stage so far, since the last `reset_cuda_graph`."""
        return FullCudaGraphWrapper.curr_iteration[stage]

    def next_iter(self, stage: str) -> None:
        """Counts a call."""
        FullCudaGraphWrapper.curr_iteration[stage] += 1

    def reset_cuda_graph(self, stage: str | None = None) -> None:
        """Forgets a stage's graph, results, buffers and count, so that it warms up anew; None: both.

        Before steps of other sizes. Results that somebody still has keep their memory.
        """
        for name in STAGES if stage is None else (stage,):
            _forget(name)


def destroy_full_cuda_graphs() -> None:
    """Forgets all graphs of this process, so that another run may begin in it."""
    for name in STAGES:
        _forget(name)


def _forget(stage: str) -> None:
    here = FullCudaGraphWrapper
    here.cuda_graph[stage] = here.result[stage] = None
    here.captured_call[stage], here.curr_iteration[stage] = {}, 0
    StaticBufferLoader.static_buffers[stage].clear()


def _wait_for_all_ranks() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        barrier()


def _call_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a captured step has taken in: sizes, chunks, and which chunks read data."""
    model, iterators = kwargs["model"], kwargs["data_iterator"]
    chunks = model if isinstance(model, list) else [model]
    iterators = iterators if isinstance(iterators, list) else [iterators]
    return {
        **{name: kwargs.get(name) for name in SIZES},
        "model": [id(chunk) for chunk in chunks],
        "data_iterator": [iterator is not None for iterator in iterators],
    }


def _refuse_another_call(stage: str, captured: dict[str, Any], call: dict[str, Any]) -> None:
    for name, value in call.items():
        if value != captured[name]:
            what = f"{name} {value}, but {captured[name]}"
            what = what if name in SIZES else f"another {name} than"
            raise ValueError(
                f"this call of {stage} has {what} when it was captured, and a graph repeats what it "
                f"was; call reset_cuda_graph({stage!r}) first, and it warms up and captures anew"
            )
