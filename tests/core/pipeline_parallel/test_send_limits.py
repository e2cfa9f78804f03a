"""How many messages may lie unreceived: what the schedules allow is what their plans need."""

from minimegatron.core.pipeline_parallel.send_limits import (
    FORWARD_ONLY_SEND_LIMIT,
    SEND_LIMIT,
    get_interleaved_send_limits,
)
from minimegatron.planner.plan import plan
from minimegatron.planner.unreceived import count_unreceived


def interleaved_plans(overlap: bool):
    for p in (2, 3, 4, 6):
        for v in (1, 2, 3):
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
                            batch_p2p_comm=False,
                        )
                        yield step, get_interleaved_send_limits(p, M, v, G, forward_only)


def test_overlapped_channels_have_the_room_that_their_plan_needs():
    compared = larger = 0
    for step, limits in interleaved_plans(overlap=True):
        least = FORWARD_ONLY_SEND_LIMIT if step.config.forward_only else SEND_LIMIT
        for rank, peaks in enumerate(count_unreceived(step)):
            for channel, peak in peaks.items():
                limit = limits[rank].get(channel, least)
                compared += 1
                # Cool-down receives in its exchanges, which the limits leave out of account.
                larger += limit > max(peak, least)
                assert limit >= peak, (step.config, rank, channel)
    assert compared > 2000
    assert larger < 0.02 * compared


def test_without_overlap_the_smallest_limit_is_enough():
    for step, _ in interleaved_plans(overlap=False):
        assert all(k <= SEND_LIMIT for of_rank in count_unreceived(step) for k in of_rank.values())
    for p in (2, 3, 4, 8):
        for M in (1, 2, p, 4 * p):
            for name in ("1f1b", "gpipe"):
                for forward_only in (False, True):
                    peaks = count_unreceived(plan(name, p, M, forward_only=forward_only))
                    assert all(k <= SEND_LIMIT for of_rank in peaks for k in of_rank.values())


def test_channels_of_one_direction_are_counted_apart():
    first, last = get_interleaved_send_limits(2, 8, 2, 8, False)
    assert first == {("gradient", 1): 7}
    assert last == {("activation", 0): 7}
