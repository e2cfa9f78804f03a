"""Where a run departs from its plan, or from another run, is found and said."""

from dataclasses import replace

import pytest

from minimegatron.planner.actions import ACTIVATION, BACKWARD, COMMUNICATE, FORWARD
from minimegatron.planner.plan import plan
from minimegatron.tracing.compare import compare_with_plan, first_divergences, wrong_messages
from minimegatron.tracing.diff import diff_report, divergences
from minimegatron.tracing.step import Step
from minimegatron.tracing.step_report import step_report


def changed(step: Step, rank: int, number: int, **fields) -> Step:
    """The step with another `number`-th action on one rank."""
    copy = Step(step.stages, step.number)
    index = copy.action_indices[rank][number]
    event = copy.events[rank][index]
    copy.events[rank][index] = replace(event, action=event.action._replace(**fields))
    return copy


def test_both_recordings_follow_their_plans(plain, interleaved):
    for step in (plain.step(0), plain.step(1), interleaved.step(0)):
        assert compare_with_plan(step) == [] and wrong_messages(step) == []
        assert any("followed exactly" in line for line in step_report(step))


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"microbatch": 7},
            "expected forward of microbatch 0, chunk 0 .*found forward of microb.* 7",
        ),
        ({"chunk": 1}, "found forward of microbatch 0, chunk 1"),
        ({"phase": "steady"}, r"expected .*\(warmup\), found .*\(steady\)"),
        ({"kind": BACKWARD}, "found backward of microbatch 0"),
    ],
)
def test_a_wrong_action_is_found(plain, fields, words):
    step = plain.step(0)
    number = next(i for i, action in enumerate(step.actions(1)) if action.kind == FORWARD)
    (divergence,) = compare_with_plan(changed(step, 1, number, **fields))
    assert (divergence.rank, divergence.index) == (1, number)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(str(divergence))


def test_a_wrong_message_is_found(plain):
    step = plain.step(0)
    number = next(i for i, a in enumerate(step.actions(1)) if a.call == "recv_forward")
    (message,) = step.actions(1)[number].messages
    for fields in ({"peer": 2}, {"num_bytes": 1}, {"microbatch": 3}, {"payload": "gradient"}):
        other = changed(step, 1, number, messages=(message._replace(**fields),))
        (divergence,) = compare_with_plan(other)
        assert divergence.index == number


def test_crossed_and_lost_messages_are_found(plain):
    step = plain.step(0)
    copy = Step(step.stages, 0)
    message = next(m for m in copy.transfers if m.payload == ACTIVATION and m.sender == 1)
    message.received_unit = (2, 0)
    (problem,) = wrong_messages(copy)
    assert problem == (
        "the activation of microbatch 0, chunk 0 from rank 1 to rank 2 was used for microbatch 2, "
        "chunk 0"
    )
    message.received_unit = None
    assert wrong_messages(copy)[0].endswith("from rank 1 to rank 2 was never received")


def test_missing_and_extra_actions_are_divergences():
    ranks = plan("1f1b", 2, 2).ranks
    shorter = [ranks[0], ranks[1][:-1]]
    (divergence,) = first_divergences(ranks, shorter)
    assert divergence.rank == 1 and "found nothing more" in str(divergence)
    (divergence,) = first_divergences(shorter, ranks)
    assert "expected nothing more" in str(divergence)
    with pytest.raises(ValueError, match="2 stages cannot be compared with 3"):
        first_divergences(ranks, plan("1f1b", 3, 2).ranks)


def test_two_steps_of_one_run_do_the_same(plain):
    first, second = plain.step(0), plain.step(1)
    assert divergences(first, second) == []
    text = "\n".join(diff_report(first, second))
    assert "actions: the same, all" in text and "(p - 1)/(M + p - 1) = 33.3 %" in text
    assert "gaps that changed most" in text
    other = changed(second, 2, 1, microbatch=9)
    text = "\n".join(diff_report(first, other))
    assert "rank 2, action 1" in text and "found forward of microbatch 9" in text


def test_gaps_and_work_fill_the_step(plain, interleaved):
    for step in (plain.step(0), interleaved.step(0)):
        for rank in range(len(step.stages)):
            gaps = step.gaps(rank)
            idle = sum(gap.length for gap in gaps)
            assert idle + step.busy(rank) == pytest.approx(step.makespan)
            assert all(gap.waiting + gap.transfer <= gap.length + 1e-6 for gap in gaps)
        assert 0 <= step.bubble_over_total < 1
        ratio = step.bubble_over_total / (1 - step.bubble_over_total)
        assert step.bubble_over_ideal == pytest.approx(ratio)


def test_gaps_blame_the_maker_of_the_message(plain):
    step = plain.step(1)
    gap = next(g for g in step.gaps(0) if g.before is not None and g.length > 20e3)
    action = step.events[0][gap.before].action
    maker = step.event(gap.waits_for).action
    assert action.kind == maker.kind == BACKWARD and gap.waits_for[0] == 1
    assert maker.microbatch == action.microbatch
    assert not any(a.kind == COMMUNICATE for a in (action, maker))
