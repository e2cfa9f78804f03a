"""A GPT in nodes: one process, groups of one, the all-to-alls go to oneself.

Combined steps give the ordinary ones' losses and gradients bit for bit; each node runs once forward and
once backward, in the order that hides communication; and nothing is kept.
"""

import gc
import inspect
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from unittest import mock

import pytest
import torch

from minimegatron.core import parallel_state, tracing
from minimegatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from minimegatron.core.models.gpt.fine_grained_callables import (
    build_transformer_layer_callables,
    should_free_input,
)
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.pipeline_parallel.combined_1f1b import (
    combined_1f1b_schedule_for_no_pipelining,
    combined_forward_backward_step,
)
from minimegatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer.module import Float16Module
from minimegatron.core.transformer.moe.token_dispatcher import TokenExchange
from tests.core.models.gpt_support import BATCH, CASES, SEQUENCE, VOCABULARY, Case
from tests.fake_transport import FakeGroup

UNTIED = Case()
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
NO_BIAS = {"add_bias_linear": False}
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}


def groups(**others) -> ProcessGroupCollection:
    names = [entry.name for entry in fields(ProcessGroupCollection)]
    return ProcessGroupCollection(**{**{name: FakeGroup() for name in names}, **others})


def build(combined: bool, kind: Case = UNTIED, **options) -> GPTModel:
    """A model; all models of the same options have the same weights."""
    config = kind.make_config(**options)
    spec = get_gpt_decoder_block_spec(config)
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        share_embeddings_and_output_weights=kind.tied,
        position_embedding_type=kind.positions,
        rotary_percent=kind.rotary_percent,
        pg_collection=groups(),
    )
    # A configuration refuses it for one rank of experts, which has nothing to hide.
    config.overlap_moe_expert_parallel_comm = combined
    return model


def loss_func(output, non_loss_data=False):
    return output.sum(), torch.tensor(output.numel()), {"loss": output.detach().sum()}


def forward_step(data_iterator, model, return_schedule_plan=False, has_labels=True):
    tokens, labels = next(data_iterator)
    run = model.build_schedule_plan if return_schedule_plan else model
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    return run(tokens, positions, None, labels=labels if has_labels else None), loss_func


def batches(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator) for _ in range(number)
    ]


def run_step(model, M=3, step_func=forward_step, data=None, pg_collection=None, **arguments):
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(11, tp_rank=0)
    return forward_backward_no_pipelining(
        forward_step_func=step_func,
        data_iterator=iter(data or batches(M)),
        model=model,
        num_microbatches=M,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        pg_collection=pg_collection or groups(),
        **arguments,
    )


def results_of(model, *args, **kwargs) -> dict[str, torch.Tensor]:
    """The losses by microbatch, and every gradient."""
    reports = run_step(model, *args, **kwargs)
    found = {f"loss {i}": report["loss"] for i, report in enumerate(reports)}
    return found | {name: param.grad for name, param in model.named_parameters()}


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    off = [
        name
        for name, tensor in wanted.items()
        if found[name] is None or not torch.equal(found[name], tensor)
    ]
    assert off == []


class Handle:
    """Notes when it is waited for, and by which node."""

    def __init__(self, handle, seen, node):
        self.handle, self.seen, self.node = handle, seen, node

    def wait(self):
        self.seen.append(("wait", *self.node))
        self.handle.wait()


class Watch:
    """`seen`: (direction, node, layer from 0, microbatch) of each node that begins, and each wait."""

    def __init__(self):
        self.seen: list[tuple] = []

    def start(self, call):
        if call.name == "layer-node":
            about = call.attributes
            node = (about["direction"], about["node"], about["layer"] - 1, about["microbatch"])
            self.seen.append(node)

    def stop(self, call):
        pass


@contextmanager
def watched():
    """Yields what a `Watch` sees."""
    watch, start = Watch(), TokenExchange.start

    def start_and_note(exchange, tensor):
        output, handle = start(exchange, tensor)
        return output, Handle(handle, watch.seen, watch.seen[-1])

    tracing.add_observer(watch)
    try:
        with mock.patch.object(TokenExchange, "start", start_and_note):
            yield watch.seen
    finally:
        tracing.remove_observer(watch)


# -- The same numbers --

OPTIONS = {
    "plain": {},
    "dropout": DROPOUT,
    "delayed": {"delay_wgrad_compute": True},
    "deferred": {"defer_embedding_wgrad_compute": True},
    "recompute": {"recompute_granularity": "selective", **DROPOUT},
}
EXPERT_OPTIONS = {
    "plain": {},
    "dropout and jitter": {**DROPOUT, "moe_input_jitter_eps": 0.01},
    "delayed": {"delay_wgrad_compute": True},
    "dense and experts": {"moe_layer_freq": 2},
    "experts, then dense": {"moe_layer_freq": [1, 1, 0], "delay_wgrad_compute": True},
    "shared": {**SHARED, **NO_BIAS, **DROPOUT},
    "shared, delayed": {**SHARED, **NO_BIAS, "delay_wgrad_compute": True},
    "losses": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
    "recompute": {"recompute_granularity": "selective"},
    "capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "top 1": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
    "empty experts": {"num_moe_experts": 64},
    "one layer": {"num_layers": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", list(CASES.values())[:3], ids=list(CASES)[:3])
def test_dense_layers(kind, options):
    assert_same(results_of(build(True, kind, **options)), results_of(build(False, kind, **options)))


@pytest.mark.parametrize("options", EXPERT_OPTIONS.values(), ids=EXPERT_OPTIONS)
@pytest.mark.parametrize("tied", [True, False])
def test_layers_of_experts(options, tied):
    options = {**EXPERTS, **options}
    kind = Case(tied=tied)
    assert_same(results_of(build(True, kind, **options)), results_of(build(False, kind, **options)))


FROZEN = {
    "all but experts": lambda name: ".experts." not in name,
    "the embedding and a layer": lambda name: "embedding" in name or "layers.0." in name,
    "experts": lambda name: ".experts." in name,
    "everything": lambda name: True,
}


@pytest.mark.parametrize("what", FROZEN)
def test_a_model_that_is_partly_frozen(what):
    """What needs no gradient is not sent back: not a token's, if everything before it is frozen."""
    results = []
    for combined in (True, False):
        model = build(combined, **EXPERTS)
        for name, param in model.named_parameters():
            param.requires_grad_(not FROZEN[what](name))
        results.append(results_of(model))
    found, wanted = results
    assert {name for name in found if found[name] is None} == {
        name for name in wanted if wanted[name] is None
    }
    assert_same(*({n: t for n, t in result.items() if t is not None} for result in results))


@pytest.mark.parametrize("M", [1, 2, 5])
def test_any_number_of_microbatches(M):
    assert_same(results_of(build(True, **EXPERTS), M), results_of(build(False, **EXPERTS), M))


def test_dropout_of_a_sequence_in_parts_has_its_own_stream():
    def run(combined):
        model = build(combined, **EXPERTS, **DROPOUT)
        # As with sequence parallelism, where ranks drop by streams of their own; one rank has one.
        model.config.sequence_parallel = True
        return results_of(model)

    assert_same(run(True), run(False))


def test_evaluation_between_steps_takes_the_ordinary_way():
    model, other = build(True, **EXPERTS), build(False, **EXPERTS)
    with watched() as seen, torch.no_grad():
        reports = run_step(model, forward_only=True)
    assert seen == []
    found = results_of(model)
    assert_same(found, results_of(other))
    assert [report["loss"] for report in reports] == [found[f"loss {i}"] for i in range(3)]


def test_half_precision_ends_in_float32():
    """Its wrapper's forward does not run; without labels the model returns what its layers made."""

    def run(combined):
        model = build(combined, params_dtype=torch.bfloat16, bf16=True, **EXPERTS)
        dtypes = []

        def loss_func(logits):
            dtypes.append(logits.dtype)
            return logits.square().mean(), {"loss": logits.detach().sum()}

        def step_func(*args, **kwargs):
            return forward_step(*args, **kwargs, has_labels=False)[0], loss_func

        found = results_of(Float16Module(model.config, model), step_func=step_func)
        return dtypes, found

    (dtypes, found), (wanted_dtypes, wanted) = run(True), run(False)
    assert dtypes == wanted_dtypes == [torch.float32] * 3
    assert_same(found, wanted)


def test_the_loss_scale_and_the_caller_s_groups_count():
    """A mean over two context ranks is doubled; the groups are the caller's, and no global ones."""
    pg_collection = groups(cp=FakeGroup(0, 2))

    def run(combined):
        model = build(combined, **EXPERTS)
        model.config.grad_scale_func = lambda loss: loss * 8

        def step_func(*args, **kwargs):
            output, _ = forward_step(*args, **kwargs)
            return output, lambda output: (output.mean(), {"loss": output.detach().sum()})

        return results_of(model, step_func=step_func, pg_collection=pg_collection)

    assert_same(run(True), run(False))


def test_a_good_step_follows_a_failed_one():
    options = {**EXPERTS, "delay_wgrad_compute": True, "defer_embedding_wgrad_compute": True}
    model, other = build(True, **options), build(False, **options)
    num_calls = []

    def failing(*args, **kwargs):
        output, _ = forward_step(*args, **kwargs)

        def loss_func(output):
            num_calls.append(1)
            return 1 / (3 - len(num_calls)) * output.sum(), {}

        return output, loss_func

    with pytest.raises(ZeroDivisionError):
        run_step(model, step_func=failing)
    model.zero_grad()
    for router in (layer.mlp.router for layer in model.decoder.layers):
        router.forget_step()
    assert_same(results_of(model), results_of(other))


# -- Order --


def paired(f: int, b: int, delayed: bool, is_first: bool) -> list[tuple]:
    """Forward of layer f beside backward of layer b, with experts both."""
    return [
        ("backward", "add", b),
        ("backward", "combine", b),
        ("forward", "attention", f),
        ("forward", "dispatch", f),
        ("wait", "backward", "combine", b),
        ("backward", "mlp", b),
        ("backward", "dispatch", b),
        *[("backward-weight", "mlp", b)] * delayed,
        *[("wait", "forward", "dispatch", f)] * 2,
        ("forward", "mlp", f),
        ("forward", "combine", f),
        *[("wait", "backward", "dispatch", b)] * 2,
        ("backward", "attention", b),
        *[("backward-weight", "attention", b)] * (delayed and not is_first),
        ("wait", "forward", "combine", f),
        ("forward", "add", f),
        *[("backward-weight", "attention", b)] * (delayed and is_first),
    ]


@pytest.mark.parametrize("delayed", [False, True])
def test_each_all_to_all_is_under_way_while_the_other_microbatch_computes(delayed):
    model = build(True, **EXPERTS, delay_wgrad_compute=delayed)
    with watched() as seen:
        run_step(model)
    of_pairs = [event[:-1] for event in seen][len(lone("forward")) :]
    expected = []
    for _ in range(2):
        for f in range(3):
            expected += paired(f, 2 - f, delayed, is_first=f == 2)
    assert of_pairs[: len(expected)] == expected
    microbatches = [event[-1] for event in seen if event[0] == "forward"]
    assert microbatches == sorted(microbatches)


NODES = ["attention", "dispatch", "mlp", "combine", "add"]


def lone(direction: str, num_layers: int = 3) -> list[tuple]:
    """All layers of one microbatch that runs alone."""
    found = []
    layers = range(num_layers) if direction == "forward" else reversed(range(num_layers))
    for layer in layers:
        for node in NODES if direction == "forward" else NODES[::-1]:
            number = {"dispatch": 2, "combine": 1}.get(node, 0)
            found += [(direction, node, layer), *[("wait", direction, node, layer)] * number]
    return found


def test_each_node_runs_once_forward_and_once_backward_in_model_order():
    with watched() as seen:
        run_step(build(True, **EXPERTS, moe_layer_freq=[1, 0, 1]))
    nodes = [event for event in seen if event[0] != "wait"]
    assert Counter(Counter(nodes).values()) == {1: len(nodes)}
    for microbatch in range(3):
        for direction in ("forward", "backward"):
            mine = [e[1:3] for e in nodes if e[0] == direction and e[3] == microbatch]
            wanted = [(node, layer) for layer in (0, 1, 2) for node in NODES]
            wanted = [(n, layer) for n, layer in wanted if layer != 1 or n in ("attention", "mlp")]
            assert mine == (wanted if direction == "forward" else wanted[::-1])


def test_at_most_one_layer_more_than_the_model_has_is_open():
    with watched() as seen:
        run_step(build(True, **EXPERTS), 4)
    is_open, most = 0, 0
    for direction, node, *_ in seen:
        if node == "attention":
            is_open += 1 if direction == "forward" else -1
            most = max(most, is_open)
    assert is_open == 0 and most == 3 + 1


@pytest.mark.parametrize("num_f, num_b", [(3, 1), (1, 3), (2, 2), (3, 0), (0, 3)])
def test_chunks_of_unequal_length(num_f, num_b):
    """Two models; what is left of the longer one runs alone."""
    data = batches(2)
    models = [build(False, **EXPERTS, num_layers=n) if n else no_layers() for n in (num_f, num_b)]
    wanted = [forward_step(iter(data[i:]), models[i])[0] for i in range(2)]
    wanted[1].sum().backward()
    gradients = {name: param.grad for name, param in models[1].named_parameters()}
    models[1].zero_grad()
    plans = [forward_step(iter(data[i:]), models[i], True)[0] for i in range(2)]
    run = TransformerModelChunkSchedulePlan.run
    assert torch.equal(run(plans[1], None), wanted[1])
    with watched() as seen:
        output = run(plans[0], plans[1], torch.ones_like(wanted[1]))
    assert torch.equal(output, wanted[0])
    assert_same({name: param.grad for name, param in models[1].named_parameters()}, gradients)
    attention = [(e[0], e[2]) for e in seen if e[1] == "attention"]
    num_pairs = min(num_f, num_b)
    expected = []
    for i in range(num_pairs):
        expected += [("forward", i), ("backward", num_b - 1 - i)]
    expected += [("backward", num_b - 1 - i) for i in range(num_pairs, num_b)]
    assert attention == expected + [("forward", i) for i in range(num_pairs, num_f)]


def no_layers() -> GPTModel:
    model = build(False, **EXPERTS, num_layers=1)
    del model.decoder.layers[0]
    return model


def test_a_chunk_without_layers_hands_on_a_tensor_of_its_own():
    """Freed once it is sent, the input itself would be gone from under the stage before."""
    model = no_layers()
    model.pre_process = model.post_process = False
    model.decoder.pre_process, model.decoder.final_layernorm = False, None
    given = torch.randn(SEQUENCE, BATCH, 32, dtype=torch.float64, requires_grad=True)
    model.set_input_tensor(given)
    plan = model.build_schedule_plan(None, None, None)
    run = TransformerModelChunkSchedulePlan.run
    output = run(plan, None)
    assert torch.equal(output, given) and output.data_ptr() != given.data_ptr()
    run(None, plan, torch.ones_like(given))
    assert torch.equal(given.grad, torch.ones_like(given))


def test_hooks_stand_around_the_layers():
    calls = []
    model = build(False, **EXPERTS)
    run = TransformerModelChunkSchedulePlan.run
    plans = [forward_step(iter(batches(1)), model, True)[0] for _ in range(2)]
    output = run(plans[0], None)
    hooks = ("pre_forward", "pre_backward", "post_forward", "post_backward")

    def note(name, *arguments):
        calls.append((name, [tuple(x.shape) for x in arguments[:-1]], arguments[-1]))

    named = {name: partial(note, name) for name in hooks}
    run(plans[1], plans[0], torch.ones_like(output), **named)
    hidden = (SEQUENCE, BATCH, 32)
    assert calls == [
        ("pre_forward", [], None),
        ("pre_backward", [], None),
        ("post_forward", [hidden], None),
        ("post_backward", [hidden], None),
    ]


# -- Nothing is kept --


def test_plans_and_nodes_are_gone_after_their_backward():
    plans, inputs, alive = [], [], []

    def noting(data_iterator, model, return_schedule_plan):
        # Here begins the step of this forward and of the backward before it.
        alive.append([[ref() is not None for ref in refs] for refs in (plans, inputs)])
        plan, _ = forward_step(data_iterator, model, return_schedule_plan)
        plans.append(weakref.ref(plan))

        def noting_loss(output):
            inputs.append(weakref.ref(output))
            return loss_func(output)

        return plan, noting_loss

    gc.collect()
    gc.disable()  # what only a collection finds has been kept
    try:
        run_step(build(True, **EXPERTS), 4, step_func=noting)
        for number, found in enumerate(alive):
            assert found == [[False] * (number - 1) + [True] * min(number, 1)] * 2
        assert [ref() for ref in plans + inputs] == [None] * 8
    finally:
        gc.enable()


def test_an_output_that_is_kept_keeps_no_plan():
    model = build(True, **EXPERTS)

    def step(f_model, b_model, output):
        return combined_forward_backward_step(
            forward_step,
            iter(batches(1)),
            f_model,
            1,
            None,
            [],
            b_model,
            None,
            output,
            None,
            model.config,
            cp_group_size=1,
        )

    output, num_tokens, _ = step(model, None, None)
    assert num_tokens == BATCH * SEQUENCE and output.numel() == 1
    plan = weakref.ref(output.schedule_plan)
    step(None, model, output)
    assert plan() is None
    assert model.decoder.layers[0].mlp.router.weight.grad is not None


# -- What is asked, and refused --


def test_which_inputs_are_freed():
    config = Case().make_config(**EXPERTS)
    assert not any(should_free_input(name, False, config, 4) for name in ("attn", "mlp"))
    config.expert_model_parallel_size = 2
    for name, frees in {"attn": False, "moe_dispatch": True, "moe_combine": True}.items():
        assert should_free_input(name, True, config, 2) == frees
    # One expert saves what it gets. So do several, of one rank's tokens: nobody sorts those.
    assert should_free_input("mlp", True, config, 2)
    assert not should_free_input("mlp", True, config, 1)
    config.expert_model_parallel_size = 1
    assert not should_free_input("mlp", True, config, 4)


def test_a_layer_s_callables():
    model = build(False, **EXPERTS, moe_layer_freq=2)
    experts, dense = (build_transformer_layer_callables(x) for x in model.decoder.layers[:2])
    assert [f is None for f in experts[0]] == [False] * 5
    assert [f is None for f in dense[0]] == [False, True, False, True, True]
    assert experts[1].keys() == dense[1].keys() == {"attn", "mlp"}


def test_a_step_function_without_a_plan_is_told_what_to_return():
    def without(data_iterator, model, return_schedule_plan):
        return forward_step(data_iterator, model)

    with pytest.raises(TypeError, match=r"returned a Tensor; return \(model.build_schedule_plan"):
        run_step(build(True, **EXPERTS), step_func=without)


def test_a_plan_is_not_run_again():
    model = build(True, **EXPERTS)
    given = (forward_step, iter(batches(1)), model, 1, None, [], None, None, None, None)
    with pytest.raises(ValueError, match="checkpoint_activations_microbatch is True"):
        combined_forward_backward_step(*given, model.config, checkpoint_activations_microbatch=True)


def test_a4_megatron_s_arguments_run_a_step_for_a_frame_of_one_s_own(monkeypatch):
    """There nobody says how many ranks share a sequence: `parallel_state` is asked."""
    asked = []
    monkeypatch.setattr(
        parallel_state, "get_context_parallel_world_size", lambda: asked.append("c") or 1
    )
    held, model, other = [], build(True, **EXPERTS), build(False, **EXPERTS)

    @contextmanager
    def no_sync():
        held.append("held")
        yield
        held.append("let go")

    store, tokens = combined_1f1b_schedule_for_no_pipelining(
        forward_step,
        iter(batches(3)),
        model,
        3,
        None,
        None,
        [],
        model.config,
        False,
        None,
        False,
        no_sync,
        torch.tensor(7),
        bool,
    )
    found = {f"loss {i}": report["loss"] for i, report in enumerate(store)}
    found |= {name: param.grad for name, param in model.named_parameters()}
    assert_same(found, results_of(other))
    assert asked == ["c"] * 3  # of each microbatch; the other model's step was told
    assert held == ["held", "let go"] and tokens == 7 + 3 * BATCH * SEQUENCE


def test_a_plan_takes_the_arguments_of_the_model_s_forward():
    def names(function):
        return [name for name in inspect.signature(function).parameters if name != "self"]

    forward = names(GPTModel.forward)
    forward.remove("checkpoint_activations_microbatch")
    assert names(GPTModel.build_schedule_plan) == forward
    assert names(TransformerModelChunkSchedulePlan) == ["model", *forward]
    assert names(TransformerLayerSchedulePlan.run) == [
        "f_layer",
        "b_layer",
        "f_input",
        "b_grad",
        "is_last_layer_in_bwd",
    ]
