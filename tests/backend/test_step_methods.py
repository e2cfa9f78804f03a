"""What a group over shared memory does for a program that trains in steps (`step_methods`)."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import minimegatron.backend
from minimegatron.backend import WireError
from minimegatron.backend.group import MAX_BYTES
from minimegatron.backend.slots import LARGE, MOST_LARGE_LENT
from tests.ranks import has_shared_memory, run_ranks

NAME = f"cpu:{minimegatron.backend.NAME}"
pytestmark = pytest.mark.skipif(
    not has_shared_memory(), reason="gloo alone: nothing is told, and nothing dropped"
)


def new_group(seconds: float = 20):
    return dist.new_group(backend=NAME, timeout=timedelta(seconds=seconds))


def ones(size: int = 3) -> torch.Tensor:
    return torch.ones(size)


# -- A step that fails --


def steps_after_a_failed_one() -> list[float]:
    """Rank 0 fails in the middle of a step, after other messages than its peer expects."""
    group, rank, found = new_group(), dist.get_rank(), []
    for _ in range(3):
        group.begin_step()
        dist.all_reduce(ones(), group=group)
        if rank == 0:
            dist.send(torch.full((3,), 7.0), 1, group=group, tag=5)  # nobody will take it
            dist.all_reduce(ones(5), group=group, async_op=True)
        else:
            with pytest.raises(
                WireError, match="rank 0 of the group has given up this step: planted"
            ):
                dist.recv(ones(), 0, group=group, tag=6)
        group.abandon("planted")
        group.begin_step()
        total = ones()
        dist.all_reduce(total, group=group)
        found.append(total[0].item())
        if rank == 0:
            dist.send(torch.full((3,), 8.0), 1, group=group, tag=5)
        else:
            told = ones()
            dist.recv(told, 0, group=group, tag=5)
            assert told[0] == 8.0
        group.end_step()
    return found


def test_what_a_failed_step_leaves_is_not_taken_for_the_next():
    assert run_ranks(steps_after_a_failed_one, 2) == [[2.0] * 3] * 2


def many_failed_steps() -> tuple[int, int]:
    """Of each, a message of 256 KiB stays unread."""
    group, rank = new_group(), dist.get_rank()
    connection = group.mesh.to[1 - rank]
    for _ in range(20):
        group.begin_step()
        dist.isend(ones(1 << 16), 1 - rank, group=group, tag=1)
        group.abandon("planted")
        group.begin_step()
        dist.all_reduce(ones(), group=group)
        group.end_step()
    num_bytes = sum(len(s.piece) for slots in connection._slots.values() for s in slots.slots)
    return num_bytes, sum(map(len, connection._incoming.messages.values()))


def test_failed_steps_do_not_fill_the_memory():
    for num_bytes, num_unread in run_ranks(many_failed_steps, 2):
        assert num_bytes <= 4 << 18 and num_unread <= 1


def gloo_after_a_failed_step() -> str:
    """Rank 0 has begun one large collective more when the step fails."""
    group, large = new_group(5), ones(MAX_BYTES // 4 + 1)
    group.begin_step()
    dist.all_reduce(large, group=group)
    if dist.get_rank() == 0:
        dist.all_reduce(large.clone(), group=group, async_op=True)
    group.abandon("planted")
    group.begin_step()
    dist.all_reduce(ones(), group=group)
    with pytest.raises(WireError) as caught:
        dist.all_reduce(large, group=group)
    return str(caught.value)


def test_large_tensors_after_a_failed_step_are_not_paired_with_its_own():
    said = run_ranks(gloo_after_a_failed_step, 2)
    assert "rank 1 of the group has begun 2 collectives over gloo, and this rank 3" in said[0]
    assert "rank 0 of the group has begun 3 collectives over gloo, and this rank 2" in said[1]
    assert all("make the group anew" in words for words in said)


def fail_before_a_barrier(failing: int) -> list[str]:
    """What each rank hears of a rank that fails; then all meet in the next step."""
    group, rank, heard = new_group(), dist.get_rank(), []
    for is_planted in (True, False):
        group.begin_step()
        try:
            if is_planted and rank == failing:
                raise WireError("planted")
            dist.barrier(group)
            group.end_step()
        except WireError as error:
            heard.append(str(error))
            group.abandon(str(error))
    return heard


@pytest.mark.parametrize("failing", range(3))
def test_whoever_waits_at_a_barrier_is_told_of_a_rank_that_fails(failing):
    for rank, heard in enumerate(run_ranks(fail_before_a_barrier, 3, failing)):
        assert len(heard) == 1 and heard[0].endswith("planted"), (rank, heard)


def evaluations_of_one_copy() -> float:
    """Ranks 0 and 1 evaluate more often than rank 2, and a failed evaluation leaves messages."""
    group, rank = new_group(), dist.get_rank()
    group.begin_step()
    dist.all_reduce(ones(), group=group)
    group.end_step()
    for _ in range(2 if rank < 2 else 1):
        group.begin_step(forward_only=True)
        if rank == 0:
            dist.isend(ones(), 1, group=group)
        group.abandon("planted")
    group.begin_step()
    total = ones()
    dist.all_reduce(total, group=group)
    if rank == 0:
        dist.send(torch.full((3,), 4.0), 1, group=group)
    if rank == 1:
        dist.recv(total, 0, group=group)
    group.end_step()
    return total[0].item()


def test_a_training_step_brings_all_ranks_together():
    assert run_ranks(evaluations_of_one_copy, 3) == [3.0, 4.0, 3.0]


# -- What belongs to no step --


def gathers_over_a_failed_step() -> list[float]:
    """A gathering that a step has begun is finished after that step has failed."""
    group, rank = new_group(), dist.get_rank()
    output = torch.empty(2)
    group.begin_step()
    if rank == 0:
        work = group.all_gather_of_no_step(output, torch.tensor([1.0]), 0)
        with pytest.raises(WireError, match="given up this step"):
            work.wait()
    group.abandon("planted")
    dist.barrier()
    group.begin_step()
    if rank == 1:
        work = group.all_gather_of_no_step(output, torch.tensor([2.0]), 0)
    work.wait()
    dist.all_reduce(ones(), group=group)
    group.end_step()
    return output.tolist()


def lanes_of_two_groups() -> list[int]:
    first, second = new_group(), new_group()
    return [first.new_lane(), first.new_lane(), second.new_lane()]


def test_each_group_counts_its_lanes():
    assert run_ranks(lanes_of_two_groups, 2) == [[0, 1, 0]] * 2


def test_a_gathering_of_no_step_outlives_a_failed_one():
    assert run_ranks(gathers_over_a_failed_step, 2) == [[1.0, 2.0]] * 2


# -- Messages --


def wait_for_the_receiver() -> str:
    """Rank 0 sends; rank 1 takes it after rank 0 has waited for that in vain."""
    group, rank, said = new_group(), dist.get_rank(), ""
    group.set_timeout(timedelta(seconds=1))
    if rank == 0:
        work = dist.isend(torch.full((3,), 4.0), 1, group=group)
        assert work.wait()  # the message lies in shared memory
        with pytest.raises(WireError) as caught:
            work.wait_until_taken()
        said = str(caught.value)
    dist.barrier()
    tensor = ones()
    if rank == 1:
        dist.recv(tensor, 0, group=group)
        assert tensor.tolist() == [4.0] * 3
    else:
        work.wait_until_taken()
    return said


def test_a_sender_may_wait_until_its_message_is_taken():
    assert run_ranks(wait_for_the_receiver, 2) == [
        "rank 1 of the group has not taken a message within 1 s",
        "",
    ]


def lend_messages() -> tuple[list[list[float]], dict[int, int]]:
    """A message becomes the tensor's memory, and is the sender's again when the tensor is gone."""
    group, rank, tags = new_group(), dist.get_rank(), (2, 3)
    found = []
    for number in range(4):
        tensors = [torch.full((4,), 10.0 * tag + number) for tag in tags]
        if rank == 0:
            for tensor, tag in zip(tensors, tags, strict=True):
                dist.send(tensor, 1, group=group, tag=tag)
        else:
            before = [tensor.data_ptr() for tensor in tensors]
            for tensor, tag in zip(tensors, tags, strict=True):
                group.receive_lent(tensor.zero_(), 0, tag).wait()
            found.append([tensor.unique().item() for tensor in tensors])
            assert not {tensor.data_ptr() for tensor in tensors} & set(before)
            del tensor
        del tensors
    dist.barrier(group)
    slots = group.mesh.to[1 - rank]._slots
    return found, {tag: len(slots[tag].slots) for tag in tags if tag in slots}


def test_a_message_of_each_tag_may_be_lent():
    (_, num_slots), (found, none) = run_ranks(lend_messages, 2)
    assert found == [[20.0 + number, 30.0 + number] for number in range(4)]
    assert num_slots.keys() == {2, 3} and max(num_slots.values()) <= 4 and none == {}


def see_what_is_lent(num_messages: int, length: int) -> list[bool]:
    """Whether each of these messages with one tag, all in use, is the sender's memory."""
    group, rank, is_lent, kept = new_group(), dist.get_rank(), [], []
    for number in range(num_messages):
        tensor = torch.full((length,), float(number))
        if rank == 0:
            dist.send(tensor, 1, group=group, tag=2)
        else:
            before = tensor.data_ptr()
            group.receive_lent(tensor, 0, 2).wait()
            is_lent.append(tensor.data_ptr() != before)
            kept.append(tensor)
    assert [tensor[0].item() for tensor in kept] == [float(number) for number in range(len(kept))]
    return is_lent


def test_of_one_tag_one_message_at_a_time_is_lent():
    assert run_ranks(see_what_is_lent, 2, 2, 4) == [[], [True, False]]


def test_of_large_messages_a_few_are_lent_at_a_time():
    most = MOST_LARGE_LENT
    lent = run_ranks(see_what_is_lent, 2, most + 2, LARGE // 4)
    assert lent == [[], [True] * most + [False] * 2]


def messages_over_gloo_inside() -> list[float]:
    """A failed step leaves a message with a small tag, and one with a tag of the program's own."""
    group, rank, found = new_group(), dist.get_rank(), []
    assert group.mesh is None
    group.begin_step()
    if rank == 0:
        kept = [dist.isend(torch.full((3,), 6.0 + tag), 1, group=group, tag=tag) for tag in (1, 9)]
    group.abandon("planted")
    group.begin_step()
    if rank == 0:
        dist.send(torch.full((3,), 8.0), 1, group=group, tag=1)
        dist.send(torch.full((3,), 5.0), 1, group=group, tag=2)
        kept[1].wait()
    else:
        for source, tag in ((0, 1), (None, 2), (0, 9)):
            tensor = ones()
            dist.recv(tensor, source, group=group, tag=tag)
            found.append(tensor[0].item())
    group.end_step()
    return found


def test_over_gloo_a_message_of_a_failed_step_is_not_taken_for_the_next():
    found = run_ranks(messages_over_gloo_inside, 2, shared_memory=False)
    assert found == [[], [8.0, 5.0, 15.0]]


# -- A part of a group --


def split_in_halves() -> list[float]:
    group, rank = new_group(), dist.get_rank()
    half = group.split_group([0, 2] if rank % 2 == 0 else [1, 3])
    tensor = torch.full((2,), float(rank))
    half.allreduce([tensor]).wait()
    nobody = group.split_group([1 - rank % 2])
    assert nobody is None or nobody.size() == 1
    return [half.rank(), half.size(), tensor[0].item()]


def test_a_group_may_be_split():
    assert run_ranks(split_in_halves, 4) == [[0, 2, 2.0], [0, 2, 4.0], [1, 2, 2.0], [1, 2, 4.0]]


# -- A rank that leaves --


def leave_with_messages_under_way() -> float:
    """Rank 0 sends more than a socket holds, and leaves the group before rank 1 reads any of it."""
    group, rank, number = new_group(), dist.get_rank(), 900
    tensor = ones(4)
    if rank == 0:
        for value in range(number):
            dist.isend(tensor.fill_(value), 1, group=group)  # it waits for nobody
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 1:
        for value in range(number):
            dist.recv(tensor, 0, group=group)
            assert tensor[0] == value
        with pytest.raises(WireError, match="rank 0 of the group has ended, or has left the group"):
            dist.recv(tensor, 0, group=group)
    return tensor[0].item()


def test_what_was_sent_arrives_after_its_sender_has_left():
    assert run_ranks(leave_with_messages_under_way, 2)[1] == 899.0
