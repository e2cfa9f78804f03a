"""One frame around a step: every hook of the config, through written and planned runners alike."""

import functools
import time
import weakref
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from tests.core.pipeline_parallel.test_real_ranks import (
    BATCH,
    HIDDEN,
    SEQ,
    Stage,
    batches,
    forward_step_func,
    reference,
)
from tests.ranks import has_shared_memory, run_ranks


def make_config(p: int, v: int | None = None, **options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=p * (v or 1),
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        batch_p2p_comm=v is None,
        **options,
    )


def run_step(function: Any, chunks: list, M: int, step: Any = forward_step_func, **options) -> list:
    data = batches(M, (SEQ,))
    return function(
        forward_step_func=step,
        data_iterator=[iter(data) for _ in chunks],
        model=chunks,
        num_microbatches=M,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        **options,
    )


# -- Every hook, written and planned --


class Log:
    """Hooks that write down when they are called."""

    def __init__(self):
        self.lines: list[str] = []

    def hook(self, name: str, result: Any = None) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            self.lines.append(name)
            return arguments[0] if result is None and arguments else result

        return called

    def held(self, name: str) -> Any:
        @contextmanager
        def hold():
            self.lines.append(f"{name} begins")
            yield
            self.lines.append(f"{name} ends")

        return hold

    # -- As timers --

    def start(self, call: Any) -> None:
        if call.name in ("forward-compute", "backward-compute", "loss-func"):
            self.lines.append(f"{call.name} {call.attributes}")

    def stop(self, call: Any) -> None:
        pass


class Output(Stage):
    """The last stage, with an output layer as `defer_embedding_wgrad_compute` looks for it."""

    post_process = True

    def __init__(self, stage: int, config: Any, log: Log):
        super().__init__(stage, config)
        self.output_layer = self.linear
        self.embedding_activation_buffer = _Watched("activation buffer", log)
        self.grad_output_buffer = _Watched("gradient buffer", log)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        return self.linear.weight


class _Watched(list):
    def __init__(self, name: str, log: Log):
        super().__init__()
        self.name, self.log = name, log

    def clear(self) -> None:
        self.log.lines.append(f"{self.name} cleared")

    def __len__(self) -> int:  # asked when it is drained
        self.log.lines.append(f"{self.name} looked at")
        return 0


def hooks_called(function: Any, p: int, v: int | None, M: int, case: tuple) -> list[str]:
    """What one step of this rank calls, in order."""
    overlap, sync_in_schedule, num_partial, forward_only, val_step = case
    log, rank, several = Log(), parallel_state.get_pipeline_model_parallel_rank(), v is not None
    config = make_config(
        p,
        v,
        overlap_p2p_comm=overlap and several,
        defer_embedding_wgrad_compute=True,
        num_microbatches_with_partial_activation_checkpoints=num_partial,
        calculate_per_token_loss=True,
        microbatch_group_size_per_vp_stage=(p + 1 if p + 1 == M else p) if several else None,
    )
    chunk_ids = range(v or 1)
    config.timers = log
    config.grad_scale_func = log.hook("grad scale")
    config.aux_loss_scale_funcs = (log.hook("first aux loss"), log.hook("second aux loss"))
    config.finalize_model_grads_func = log.hook("finalize")
    no_sync = [log.held(f"no sync {chunk}") for chunk in chunk_ids]
    param_sync = [log.hook(f"param sync {chunk}") for chunk in chunk_ids]
    grad_sync = [log.hook(f"grad sync {chunk}") for chunk in chunk_ids]
    config.no_sync_func = no_sync if several else no_sync[0]
    config.param_sync_func = param_sync if several else param_sync[0]
    if sync_in_schedule:
        config.grad_sync_func = grad_sync if several else grad_sync[0]
    stages = [chunk * p + rank for chunk in chunk_ids]
    last = p * (v or 1) - 1
    chunks = [Output(s, config, log) if s == last else Stage(s, config) for s in stages]
    for chunk in chunks:
        chunk.set_is_first_microbatch = log.hook("first microbatch")

    def step(data_iterator, model, recomputes=None):
        log.lines.append(f"user's step, recompute {recomputes}")
        output, _ = forward_step_func(data_iterator, model)
        return output, lambda out: (out.square().sum(), torch.tensor(out.numel()), {"loss": 1})

    first_val_step = val_step if forward_only else None
    run_step(function, chunks, M, step, forward_only=forward_only, first_val_step=first_val_step)
    return log.lines


CASES = [
    (overlap, sync, num_partial, False, None)
    for overlap, sync, num_partial in product((False, True), (False, True), (None, 1))
] + [(False, True, 2, True, val_step) for val_step in (None, True, False)]


def compare_runners(p: int, v: int | None) -> tuple[int, list[str]]:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
    )
    compared, problems = 0, []
    name = "no-pipelining" if p == 1 else "1f1b" if v is None else "interleaved"
    for M, case in product((p, p + 1, 2 * p), CASES):
        written = hooks_called(get_forward_backward_func(), p, v, M, case)
        planned = hooks_called(get_planned_forward_backward_func(name), p, v, M, case)
        compared += len(written)
        assert any("user's step" in line for line in written)
        if written != planned:
            at = next(
                i
                for i in range(max(len(written), len(planned)))
                if written[i : i + 1] != planned[i : i + 1]
            )
            problems.append(
                f"{name} p={p} v={v} M={M} {case}, call {at}: written {written[at - 2 : at + 3]}, "
                f"planned {planned[at - 2 : at + 3]}"
            )
    return compared, problems


@pytest.mark.parametrize(("p", "v"), [(1, None), (2, None), (3, None), (2, 2), (2, 3), (3, 2)])
def test_every_hook_is_called_alike_by_written_and_planned_runners(p, v):
    for compared, problems in run_ranks(compare_runners, p, p, v, timeout=120):
        assert problems == []
        assert compared > 500


# -- The faults of the frame --


def scaled_gradients(v: int) -> list[str]:
    """fp16's loss scale reaches the stage's chunks through the first one's config, as in `train`."""
    p, M, scale = 2, 4, 1024.0
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
    )
    rank, problems = parallel_state.get_pipeline_model_parallel_rank(), []
    for function in (get_forward_backward_func(), get_planned_forward_backward_func("interleaved")):
        chunks = [Stage(chunk * p + rank, make_config(p, v)) for chunk in range(v)]
        chunks[0].config.grad_scale_func = lambda loss: loss * scale
        run_step(function, chunks, M)
        _, wanted = reference(p * v, M, (SEQ,))
        for chunk_id, chunk in enumerate(chunks):
            for name, param in chunk.named_parameters():
                expected = scale * wanted[chunk_id * p + rank, name]
                if not torch.allclose(param.grad, expected, rtol=1e-10):
                    problems.append(f"chunk {chunk_id} {name}")
    return problems


def test_the_loss_scale_reaches_every_chunk():
    """fp16 with interleaving: the loss was not scaled, and every gradient was divided all the same."""
    assert run_ranks(scaled_gradients, 2, 2) == [[], []]


def launches_of(p: int, d: int, is_planned: bool) -> tuple[int, list[str]]:
    """Plain 1F1B with overlap, and the schedule choosing the moment."""
    M = 4
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=p)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    config = make_config(p)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp = DistributedDataParallel(config, ddp_config, Stage(rank, config))
    launched: list[int] = []

    def launch(params):
        launched.append(len(list(params)))
        ddp.start_grad_sync(params)

    config.grad_sync_func, config.no_sync_func = launch, ddp.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    function = (
        get_planned_forward_backward_func("1f1b") if is_planned else (get_forward_backward_func())
    )
    problems = []
    for _ in range(2):
        ddp.zero_grad_buffer()
        run_step(function, [ddp], M)
        _, wanted = reference(p, M, (SEQ,))
        for name, param in ddp.module.named_parameters():
            if not torch.allclose(param.main_grad, wanted[rank, name], atol=1e-12):
                problems.append(name)
    return len(launched), problems


@pytest.mark.parametrize("is_planned", [False, True], ids=["written", "planned"])
def test_gradients_are_launched_once_where_the_schedule_sets_the_moment(is_planned):
    results = run_ranks(launches_of, 4, 2, 2, is_planned)
    assert [problems for _, problems in results] == [[]] * 4
    # Two steps. Stage 0 lets its last backward launch them.
    assert [launched for launched, _ in results] == [0, 0, 2, 2]


def evaluate_planned() -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    called, config = [], make_config(2)
    config.grad_sync_func = lambda params: called.append("grad sync")
    config.finalize_model_grads_func = lambda *unused, **named: called.append("finalize")
    stage = Stage(parallel_state.get_pipeline_model_parallel_rank(), config)
    with torch.no_grad():
        run_step(get_planned_forward_backward_func("1f1b"), [stage], 3, forward_only=True)
    return called


def test_a_planned_forward_only_step_launches_no_gradients():
    assert run_ranks(evaluate_planned, 2) == [[], []]


def inputs_alive(is_planned: bool, v: int | None) -> list[int]:
    """How many of the inputs that have arrived are there in each forward."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=v
    )
    rank, config = parallel_state.get_pipeline_model_parallel_rank(), make_config(2, v)
    chunks = [Stage(chunk * 2 + rank, config) for chunk in range(v or 1)]
    name = "1f1b" if v is None else "interleaved"
    function = (
        get_planned_forward_backward_func(name) if is_planned else get_forward_backward_func()
    )
    seen: list[weakref.ref] = []
    alive: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        found = forward_step_func(data_iterator, model)
        if model.input_tensor is not None:
            seen.append(weakref.ref(model.input_tensor))
        alive.append(sum(input_() is not None for input_ in seen))
        return found

    run_step(function, chunks, 8, step)
    return alive


@pytest.mark.parametrize("v", [None, 2])
def test_a_planned_step_holds_no_more_inputs_than_a_written_one(v):
    """Was: the losses of the step, and with them every input of the last stage."""
    written, planned = (run_ranks(inputs_alive, 2, planned, v) for planned in (False, True))
    assert written == planned
    assert max(written[1]) <= (1 if v is None else 4)


def note(called: list[str], name: str, params: Any) -> None:
    called.append(name)


def hooks_in_both_forms(v: int | None) -> list[list[str]]:
    """The hooks of one training step: each as one function, and as a list."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=v
    )
    rank, found = parallel_state.get_pipeline_model_parallel_rank(), []
    for is_list in (False, True):
        called: list[str] = []
        config = make_config(2, v)
        for name in ("grad_sync_func", "param_sync_func"):
            hook = functools.partial(note, called, name)
            setattr(config, name, [hook] * (v or 1) if is_list else hook)
        chunks = [Stage(chunk * 2 + rank, config) for chunk in range(v or 1)]
        run_step(get_forward_backward_func(), chunks, 4)
        found.append(called)
    return found


@pytest.mark.parametrize("v", [None, 2])
def test_hooks_may_be_one_function_or_a_list(v):
    for one, several in run_ranks(hooks_in_both_forms, 2, v):
        assert one == several
        assert v is None or "param_sync_func" in one


# -- Two of everything --


def two_of_everything() -> list[str]:
    """Two models, two communicators and two initialisations in one process, their steps in turn."""
    problems = []
    for p, v in ((2, None), (4, None), (2, 2), (2, None)):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
        )
        rank = parallel_state.get_pipeline_model_parallel_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        models = []
        for _ in range(2):
            config = make_config(p, v)
            chunks = [Stage(chunk * p + rank, config) for chunk in range(v or 1)]
            models.append((chunks, P2PCommunicator(group, config)))
        for _ in range(2):
            for (chunks, p2p), M in zip(models, (4, 6), strict=True):
                for chunk in chunks:
                    chunk.zero_grad()
                run_step(get_forward_backward_func(), chunks, M, p2p_communicator=p2p)
                with torch.no_grad():
                    run_step(
                        get_forward_backward_func(),
                        chunks,
                        M,
                        forward_only=True,
                        p2p_communicator=p2p,
                    )
                _, wanted = reference(p * (v or 1), M, (SEQ,))
                problems += [
                    f"p={p} v={v} M={M}: chunk {chunk_id} {name}"
                    for chunk_id, chunk in enumerate(chunks)
                    for name, param in chunk.named_parameters()
                    if not torch.allclose(param.grad, wanted[chunk_id * p + rank, name], atol=1e-12)
                ]
        parallel_state.destroy_model_parallel()
    dist.barrier()
    return problems


def test_two_models_two_communicators_two_initialisations():
    assert run_ranks(two_of_everything, 4) == [[]] * 4


def step_after_another_pipeline_has_left() -> bool:
    """Ranks 1 and 3 destroy their groups; then ranks 0 and 2, their data-parallel peers, do a step."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = make_config(2)
    chunk = Stage(stage, config)
    p2p = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    leaves_first = parallel_state.get_data_parallel_rank() == 1
    for step in range(2):
        if step == 1 and not leaves_first:
            dist.barrier()
        chunk.zero_grad()
        run_step(get_forward_backward_func(), [chunk], 4, p2p_communicator=p2p)
    parallel_state.destroy_model_parallel()
    if leaves_first:
        dist.barrier()
    _, wanted = reference(2, 4, (SEQ,))
    return all(
        torch.allclose(param.grad, wanted[stage, name], atol=1e-12)
        for name, param in chunk.named_parameters()
    )


def test_a_pipeline_goes_on_when_another_has_left():
    assert run_ranks(step_after_another_pipeline_has_left, 4) == [True] * 4


# -- A communicator whose group is not the collection's --


def fails_over_another_group() -> tuple[str, bool]:
    """Stage 1 fails a step. What both say of it, and whether the next step's gradients are right."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = make_config(2)
    chunk, said = Stage(stage, config), ""
    p2p = P2PCommunicator(dist.new_group(), config)

    def fails(iterator: Any, model: Any) -> Any:
        if stage == 1:
            raise ValueError("planted")
        return forward_step_func(iterator, model)

    try:
        run_step(get_forward_backward_func(), [chunk], 4, fails, p2p_communicator=p2p)
    except (ValueError, ConnectionError) as error:
        said = str(error)
    chunk.zero_grad()
    run_step(get_forward_backward_func(), [chunk], 4, p2p_communicator=p2p)
    _, wanted = reference(2, 4, (SEQ,))
    gradients = {name: param.grad for name, param in chunk.named_parameters()}
    is_right = all(
        torch.allclose(grad, wanted[stage, name], atol=1e-12) for name, grad in gradients.items()
    )
    return said, is_right


@pytest.mark.skipif(not has_shared_memory(), reason="over gloo alone, nobody is told")
def test_a_step_fails_over_a_group_that_the_communicator_alone_has():
    (told, right), (said, also_right) = run_ranks(fails_over_another_group, 2)
    assert "rank 1 of the group has given up this step: ValueError: planted" in told
    assert (said, right, also_right) == ("planted", True, True)


# -- Forward-only steps do not run away --


def run_ahead(M: int, is_planned: bool) -> int:
    """How far stage 0 is ahead of a slow stage 1, at most, in forward-only microbatches."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    rank, config = parallel_state.get_pipeline_model_parallel_rank(), make_config(2)
    store, most = dist.distributed_c10d._get_default_store(), [0]

    def step(data_iterator, model):
        done = store.add(f"forwards {rank}", 1)
        if rank == 1:
            time.sleep(0.01)
            most[0] = max(most[0], store.add("forwards 0", 0) - done)
        return forward_step_func(data_iterator, model)

    function = get_forward_backward_func()
    if is_planned:
        function = get_planned_forward_backward_func("1f1b")
    with torch.no_grad():
        run_step(function, [Stage(rank, config)], M, step, forward_only=True)
    return most[0]


@pytest.mark.parametrize("is_planned", [False, True], ids=["written", "planned"])
def test_a_forward_only_step_does_not_run_far_ahead(is_planned):
    """Four messages may lie unreceived; one more forward is under way or waits for its turn."""
    assert run_ranks(run_ahead, 2, 40, is_planned)[1] <= 4 + 2


def wrong_shapes() -> list[str]:
    """What stage 0 of two says of data [b, s, h], by schedule; stage 1 would read it as [s, b, h]."""
    parallel_state.initialize_model_parallel(1, 2)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    said = []
    for name, v in ((None, None), (None, 2), ("gpipe", None)):
        config = make_config(2, v, pipeline_schedule=name)
        chunks = [Stage(chunk * 2 + rank, config) for chunk in range(v or 1)]
        for wrong in (False, True):
            data = [torch.ones(SEQ, BATCH, HIDDEN).double() for _ in range(2)]
            data = [batch.transpose(0, 1).contiguous() for batch in data] if wrong else data
            try:
                with torch.no_grad():
                    get_forward_backward_func(2, v, name)(
                        forward_step_func=forward_step_func,
                        data_iterator=[iter(data) for _ in chunks],
                        model=chunks,
                        num_microbatches=2,
                        seq_length=SEQ,
                        micro_batch_size=BATCH,
                        forward_only=True,
                    )
            except (ValueError, RuntimeError, OSError) as error:
                said.append(str(error))
            else:
                said.append("nothing")
    return said


@pytest.mark.processes
@pytest.mark.skipif(not has_shared_memory(), reason="over gloo alone, nobody is told")
def test_t5_an_evaluation_does_not_read_an_output_in_another_shape():
    first, second = run_ranks(wrong_shapes, 2)
    own = f"has shape {(BATCH, SEQ, HIDDEN)}, but the next stage receives {(SEQ, BATCH, HIDDEN)}"
    assert first[::2] == second[::2] == ["nothing"] * 3
    assert all(own in text for text in first[1::2]), first
    assert all(own in text for text in second[1::2]), "the reason is told to the stage that waits"
