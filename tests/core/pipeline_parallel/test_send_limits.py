"""How many messages may lie unreceived: what the schedules allow is what their plans need."""

from minimegatron.core.orders.lowering import lowered_step
from minimegatron.core.orders.orders import PlanConfig
from minimegatron.core.orders.placement import LOOP, V
from minimegatron.core.orders.send_limits import (
    get_interleaved_send_limit,
    get_interleaved_send_limits,
    least_send_limit,
)
from minimegatron.core.orders.work import FORWARD_ONLY_SEND_LIMIT, SEND_LIMIT
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder
from minimegatron.planner.plan import plan
from minimegatron.planner.unreceived import count_unreceived
from tests.planner.known_orders import registered, work_of


def interleaved_plans(overlap: bool, batched: bool = False):
    """Each with the K that its schedule gives to each rank."""
    for p in (2, 3, 4, 6):
        for v in (1, 2, 3):
            if batched and p == 2 and v > 1:
                continue
            for G in (p, p + 1, 2 * p, 3 * p):
                for M in sorted({G, G + p, 2 * G, 2 * G + p}):
                    for forward_only in (False, True):
                        step = plan(
                            "interleaved",
                            p,
                            M,
                            vpp=v,
                            group_size=G,
                            forward_only=forward_only,
                            overlap_p2p_comm=overlap,
                            batch_p2p_comm=batched,
                        )
                        sizes = (M, v, G, forward_only)
                        orders = [InterleavedOrder(p, rank, *sizes) for rank in range(p)]
                        yield step, [get_interleaved_send_limit(one, overlap) for one in orders]


def test_overlapped_messages_have_the_room_that_their_plan_needs():
    compared = larger = 0
    for step, limits in interleaved_plans(overlap=True):
        least = least_send_limit(step.config.forward_only)
        for rank, (limit, peak) in enumerate(zip(limits, count_unreceived(step), strict=True)):
            compared += 1
            # Cool-down receives in its exchanges, which the limits leave out of account.
            larger += limit > max(peak, least)
            assert limit >= peak, (step.config, rank)
    assert compared > 1000
    assert larger < 0.02 * compared


def test_without_overlap_the_smallest_limit_is_enough():
    """No rank ever needs more room, so none stands still for want of it."""
    compared = 0
    for batched in (False, True):
        for step, limits in interleaved_plans(overlap=False, batched=batched):
            least = least_send_limit(step.config.forward_only)
            assert limits == [least] * step.config.pp_size
            assert max(count_unreceived(step)) <= SEND_LIMIT, step.config
            compared += 1
    assert compared > 500
    for p in (2, 3, 4, 8):
        for M in (1, 2, p, 4 * p):
            for name in ("1f1b", "gpipe"):
                for forward_only in (False, True):
                    peaks = count_unreceived(plan(name, p, M, forward_only=forward_only))
                    assert max(peaks) <= SEND_LIMIT, (name, p, M)


def test_combined_pairs_have_just_the_room_that_their_plan_needs():
    for p, M, v, G in ((2, 8, 2, 4), (2, 9, 3, 6), (3, 8, 2, 4), (4, 16, 2, 8)):
        step = plan("combined", p, M, v, G, overlap_p2p_comm=True, batch_p2p_comm=False)
        limits = get_interleaved_send_limits(p, M, v, G, False, is_combined=True)
        assert limits == count_unreceived(step), (p, M, v, G)


def test_a_forward_only_step_has_a_larger_least():
    assert (least_send_limit(False), least_send_limit(True)) == (2, 4)
    assert (SEND_LIMIT, FORWARD_ONLY_SEND_LIMIT) == (2, 4)
    evaluation = InterleavedOrder(4, 1, 8, 2, 4, True)
    assert get_interleaved_send_limit(evaluation, overlap=True) == FORWARD_ONLY_SEND_LIMIT


# -- What is counted together --


def limits_of(words: list[str], placement, pp_size: int, num_microbatches: int) -> list[int]:
    """The limits of orders that are written in the letters of `known_orders`."""
    with registered(lambda rank: list(work_of(words[rank.pp_rank])), placement) as name:
        config = PlanConfig(name, pp_size, num_microbatches, 2, placement=placement(pp_size, 2))
        limits = lowered_step(config).limits
        step = plan(name, pp_size, num_microbatches, 2 if placement is LOOP else None)
        assert count_unreceived(step) == limits
    return limits


def test_payloads_are_counted_apart():
    """Together, rank 0 would have 5 messages on their way to rank 1."""
    assert get_interleaved_send_limits(2, 8, 2, 4, False) == [3, 3]


def test_the_chunks_of_a_payload_are_counted_together():
    """Chunk by chunk, rank 1 would never have two messages on their way."""
    words = ["F1 F0 f0 f1 a1 A1 a0 A0", "F0 F1 f1 f0 a1 a0 A1 A0"]
    assert limits_of(words, LOOP, 2, 2) == [2, 2]


def test_peers_are_counted_apart():
    """On a V, rank 1 sends activations to both its neighbours: two at a time, one to each."""
    words = [
        "F0 F1 F2 f0 a0 f2 a2 f1 a1 A0 A2 A1",
        "F0 F2 f0 F1 f2 a0 A0 f1 a2 a1 A2 A1",
        "F0 f0 F2 F1 f2 f1 a0 A0 a2 A2 a1 A1",
    ]
    assert limits_of(words, V, 3, 3) == [2, 1, 1]
