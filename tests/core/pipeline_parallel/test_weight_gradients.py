"""Training steps of GPT whose weight gradients come after backward equal the usual ones."""

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.weight_grad_store import is_owed
from minimegatron.core.utils import unwrap_model
from tests.fake_transport import FakeGroup
from tests.parity import (
    MICRO_BATCH,
    SEQ,
    Case,
    batches,
    build,
    forward_step_func,
    reference,
    run_cases,
    train_steps,
)
from tests.ranks import run_ranks

DELAY, DEFER = {"delay_wgrad": True}, {"defer_embedding": True}
OVERLAP = {"overlap_grad_reduce": True}
INTERLEAVED = {"pp": 2, "vp": 2, "G": 2, "batched": False}


def alone() -> ProcessGroupCollection:
    names = ("tp", "pp", "cp", "dp", "dp_cp", "mp", "embd", "pos_embd", "tp_cp", "tp_dp_cp")
    return ProcessGroupCollection(**{name: FakeGroup() for name in names})


def steps(case: Case, groups: ProcessGroupCollection) -> list[dict[str, torch.Tensor]]:
    """The gradients of each training step; nothing may be owed after it."""
    chunks, optimizer = build(case, groups)
    data, found = batches(case.M * case.dp)[groups.dp.rank() :: case.dp], []
    for _, gradients, _ in train_steps(case, chunks, optimizer, groups, data):
        found.append({name: grad for name, _, grad in gradients})
        assert not any(is_owed(param) for chunk in chunks for param in chunk.parameters())
        last = unwrap_model(chunks[-1])
        if case.defer_embedding and last.post_process:
            assert last.embedding_activation_buffer == last.grad_output_buffer == []
    return found


# -- Without a pipeline, in this process --


@pytest.mark.parametrize("llama", [False, True], ids=["tied", "untied"])
def test_deferring_without_a_pipeline_still_trains_the_output_layer(llama):
    """Was: a gradient of zero, and buffers that grew with every step."""
    for limit in (0, 1):
        usual = steps(Case(M=3, llama=llama), alone())
        later = steps(Case(M=3, llama=llama, deferral_limit=limit, **DEFER), alone())
        for expected, found in zip(usual, later, strict=True):
            for name, grad in expected.items():
                torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-10, msg=name)
                # One weight, one layer: then the order of the sums is the same too.
                assert not (llama and limit == 0) or torch.equal(found[name], grad), name


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("llama", [False, True], ids=["tied", "untied"])
def test_delay_changes_no_bit(llama, recompute):
    options = {"M": 2, "llama": llama, "recompute": recompute, "num_layers": 2}
    usual, later = steps(Case(**options), alone()), steps(Case(**options, **DELAY), alone())
    for expected, found in zip(usual, later, strict=True):
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_the_model_computes_what_a_backward_left_oldest_first():
    """`backward_dw` of the model, by hand: two microbatches are owed at a time."""
    usual = steps(Case(M=2, num_layers=2), alone())[0]
    (chunk,), _ = build(Case(M=2, num_layers=2, **DELAY), alone())
    model = unwrap_model(chunk)
    delayed = [p for p in model.parameters() if getattr(p, "skip_backward_post_hook", False)]
    assert len(delayed) == 2 * 4, "the four weights of each layer, not the output layer's"
    chunk.zero_grad_buffer()
    for batch in batches(2):
        output, loss_of = forward_step_func(iter([batch]), chunk)
        loss, num_tokens, _ = loss_of(output)
        (loss / num_tokens / 2).backward()
    assert all(is_owed(param) and not param.main_grad.any() for param in delayed)
    for _ in range(3):  # the third finds nothing
        model.backward_dw()
    chunk.finish_grad_sync()
    for name, param in model.named_parameters():
        assert torch.equal(param.main_grad, usual[name]), name


def run_step(chunks, case: Case, data: list, forward_step=forward_step_func) -> None:
    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=chunks,
        num_microbatches=case.M,
        seq_length=SEQ,
        micro_batch_size=MICRO_BATCH,
        pg_collection=alone(),
    )


class FailedHere(Exception):
    """Planted."""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_nothing_owed_to_the_next(where):
    """A step that raises in its second microbatch, then one that does not."""
    case = Case(M=3, num_layers=2, **DELAY, **DEFER)
    outputs = []

    def fails(gradient):
        raise FailedHere

    def forward_step(data_iterator, model, recompute=None):
        output, loss_of = forward_step_func(data_iterator, model, recompute)
        if len(outputs) == 2 and where == "forward":
            raise FailedHere
        if len(outputs) == 2:
            outputs[-1].register_hook(fails)
        return output, loss_of

    gradients = []
    for fail in (False, True):
        (chunk,), _ = build(case, alone())
        chunk.config.finalize_model_grads_func = None
        model = unwrap_model(chunk)
        if fail:
            first = model.decoder.layers[0]
            hook = first.register_forward_hook(lambda *args: outputs.append(args[2][0]))
            with pytest.raises(FailedHere):
                run_step([chunk], case, batches(3), forward_step)
            hook.remove()
            assert is_owed(model.shared_embedding_or_output_weight())
            chunk.buffers[0].reset()  # not `zero_grad_buffer`, which forgets too
        run_step([chunk], case, batches(3))
        gradients.append([param.main_grad.clone() for param in chunk.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    usual = steps(Case(M=3, num_layers=2), alone())[0].values()
    for found, expected in zip(gradients[1], usual, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# -- Over real ranks --

SAME_BITS = [
    Case(pp=2, M=3),
    Case(pp=2, M=3, llama=True, **OVERLAP),
    Case(**INTERLEAVED, M=4),
    Case(tp=2, M=2, sp=True, recompute="full", llama=True),
    Case(tp=2, M=2),
    Case(dp=2, M=2, dist_opt=True, **OVERLAP),
]
"""With and without delay, on the same ranks."""

LATER = [
    Case(pp=2, M=3, **DEFER),
    Case(pp=2, M=3, deferral_limit=2, llama=True, **OVERLAP, **DEFER, **DELAY),
    Case(**INTERLEAVED, M=4, **OVERLAP, **DEFER, **DELAY),
    Case(**INTERLEAVED, M=4, overlap=True, llama=True, dist_opt=True, **OVERLAP, **DEFER),
    Case(tp=2, M=2, sp=True, **DEFER, **DELAY),
    Case(dp=2, M=2, **OVERLAP, **DEFER),
    Case(dp=2, M=2, llama=True, **OVERLAP, **DEFER),
    Case(dp=2, M=2, dist_opt=True, **OVERLAP, **DEFER),
    Case(dp=2, M=2, dist_opt=True, llama=True, overlap_param_gather=True, **OVERLAP, **DEFER),
]
"""Against one process; the same over two data-parallel ranks of a pipeline below."""

ON_FOUR = [
    Case(pp=2, dp=2, M=2, dist_opt=True, **OVERLAP, **DEFER, **DELAY),
    Case(**INTERLEAVED, dp=2, M=2, **OVERLAP, **DEFER),
]


def with_and_without_delay(cases: list[Case]) -> list[str]:
    differing = []
    for case in cases:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(case.tp, case.pp, case.vp)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        later = Case(**{**case.__dict__, **DELAY})
        for expected, found in zip(steps(case, groups), steps(later, groups), strict=True):
            differing += [
                f"{case}: {name}"
                for name, grad in expected.items()
                if not torch.equal(found[name], grad)
            ]
    return differing


def test_delay_changes_no_bit_over_real_ranks():
    assert run_ranks(with_and_without_delay, 2, SAME_BITS, timeout=120) == [[], []]


@pytest.mark.parametrize("cases", [LATER, ON_FOUR], ids=["two ranks", "four ranks"])
def test_deferred_gradients_with_overlap(cases, tmp_path):
    """Was refused with overlap, a TypeError under torch 2.13 without."""
    work = [(case, reference(case.serial(), tmp_path)) for case in cases]
    for rank in run_ranks(run_cases, cases[0].world, work, timeout=120):
        assert [problem for *_, problems in rank for problem in problems] == []
