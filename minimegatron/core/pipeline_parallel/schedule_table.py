"""The order of work on one stage, as arithmetic: who is forwarded when, and what arrives after it.

`loops.one_f_one_b` writes its one line of this out once more, because a reader needs it there; a test
holds both to one number. Counterpart: the functions of the same names in
`megatron.core.pipeline_parallel.schedules`, and the index helpers nested there inside
`forward_backward_pipelining_with_interleaving`.

Letters: p stages, r this stage, v chunks per stage, M microbatches, G microbatches per group. With
interleaving, a stage does M * v forwards and M * v backwards. Each is known by its *virtual
microbatch id* k = 0 .. M*v - 1, its place in that order.
"""

from typing import NamedTuple

from minimegatron.core.pipeline_parallel.interleaving_checks import check_interleaving


class RankMicrobatches(NamedTuple):
    """How many of a stage's forwards belong to which phase. Counts virtual microbatches."""

    total: int
    are_all_in_warmup: bool
    num_warmup: int
    num_remaining: int


def get_num_warmup_microbatches(pp_size: int, pp_rank: int, num_microbatches: int) -> int:
    """Warm-up forwards of plain 1F1B: one per stage that follows.

    One more forward comes before the first backward, if a microbatch is left for it.

    >>> [get_num_warmup_microbatches(4, rank, 8) for rank in range(4)]
    [3, 2, 1, 0]
    >>> [get_num_warmup_microbatches(4, rank, 2) for rank in range(4)]  # fewer microbatches than p
    [2, 2, 1, 0]
    """
    return min(pp_size - pp_rank - 1, num_microbatches)


def count_rank_microbatches(
    pp_size: int,
    pp_rank: int,
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    is_interleaved: bool = True,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
) -> RankMicrobatches:
    """The arithmetic of Megatron's `get_pp_rank_microbatches`, with the stage as an argument.

    Interleaving warms up 2(p - r - 1) + (v - 1)G forwards; (v - 1)G of them fill earlier chunks.
    Where one exchange moves activations and gradients together, the 2 is needed: with 1 all stages
    wait for ever. With overlapped messages it hides the time of the messages there and back.

    >>> [count_rank_microbatches(4, rank, 8, 2, 4).num_warmup for rank in range(4)]
    [10, 8, 6, 4]
    >>> count_rank_microbatches(2, 0, 4, 2, 2, forward_only=True)
    RankMicrobatches(total=8, are_all_in_warmup=True, num_warmup=8, num_remaining=0)
    """
    total = num_microbatches * num_model_chunks
    num_warmup = pp_size - pp_rank - 1
    if is_interleaved:
        num_warmup = 2 * (pp_size - pp_rank - 1)
        num_warmup += (num_model_chunks - 1) * microbatch_group_size_per_vp_stage
        num_warmup += 1 if overlap_moe_expert_parallel_comm else 0
    if forward_only or pp_size == 1:
        num_warmup = total if forward_only else 0
    are_all_in_warmup = num_warmup >= total
    num_warmup = min(num_warmup, total)
    return RankMicrobatches(total, are_all_in_warmup, num_warmup, total - num_warmup)


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Row k is (microbatch_id, model_chunk_id) of virtual microbatch k: the order of all forwards.

    A group of G microbatches visits chunk 0, then chunk 1, ...; then comes the next group.

    >>> get_schedule_table(5, 2, 3)
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    """
    table = []
    for first in range(0, num_microbatches, microbatch_group_size_per_vp_stage):
        group = range(first, min(first + microbatch_group_size_per_vp_stage, num_microbatches))
        table += [(microbatch, chunk) for chunk in range(num_model_chunks) for microbatch in group]
    return table


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: list[tuple[int, int]]
) -> list[int]:
    """One stage's whole step as signed chunk numbers: +c a forward of chunk c - 1, -c its backward.

    >>> convert_schedule_table_to_order(5, 2, get_schedule_table(5, 2, 3))
    [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    order = forwards[:num_warmup_microbatches]
    for i in range(num_warmup_microbatches, len(forwards)):
        order += [forwards[i], backwards[i - num_warmup_microbatches]]
    return order + backwards[len(forwards) - num_warmup_microbatches :]


class Arrival(NamedTuple):
    """What one stage receives in the exchange that follows its k-th forward or backward."""

    expected: bool
    model_chunk_id: int


class InterleavedOrder:
    """All index arithmetic of one stage under interleaved 1F1B. Chunk c is virtual stage c*p + r.

    `forward=True` asks about the k-th forward, `forward=False` about the k-th backward. Backwards
    run the same table with the chunks reversed: the last chunk's gradients exist first.
    """

    def __init__(
        self,
        pp_size: int,
        pp_rank: int,
        num_microbatches: int,
        num_model_chunks: int,
        microbatch_group_size_per_vp_stage: int,
        forward_only: bool = False,
        overlap_moe_expert_parallel_comm: bool = False,
    ):
        check_interleaving(pp_size, num_microbatches, microbatch_group_size_per_vp_stage)
        self.pp_size, self.pp_rank = pp_size, pp_rank
        self.num_microbatches, self.num_model_chunks = num_microbatches, num_model_chunks
        self.group_size, self.forward_only = microbatch_group_size_per_vp_stage, forward_only
        self.is_combined = overlap_moe_expert_parallel_comm and not forward_only
        self.table = get_schedule_table(
            num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage
        )
        self.counts = count_rank_microbatches(
            pp_size,
            pp_rank,
            num_microbatches,
            num_model_chunks,
            microbatch_group_size_per_vp_stage,
            forward_only=forward_only,
            overlap_moe_expert_parallel_comm=overlap_moe_expert_parallel_comm,
        )

    def microbatch_id(self, k: int) -> int:
        """The microbatch of the k-th forward, which is also that of the k-th backward."""
        return self.table[k][0]

    def model_chunk_id(self, k: int, forward: bool) -> int:
        """The chunk that the k-th forward (or backward) runs."""
        chunk = self.table[k][1]
        return chunk if forward else self.num_model_chunks - 1 - chunk

    def is_first_microbatch_for_model_chunk(self, k: int) -> bool:
        """True where the k-th forward is its chunk's first."""
        return self.table[k][0] == 0

    def is_last_microbatch_for_model_chunk(self, k: int) -> bool:
        """True where the k-th backward is its chunk's last: its gradients are then complete."""
        return self.table[k][0] == self.num_microbatches - 1

    def is_first_virtual_stage(self, model_chunk_id: int) -> bool:
        """True for the chunk that starts from data instead of a message."""
        return self.pp_rank == 0 and model_chunk_id == 0

    def is_last_virtual_stage(self, model_chunk_id: int) -> bool:
        """True for the chunk that ends in the loss instead of a message."""
        return self.pp_rank == self.pp_size - 1 and model_chunk_id == self.num_model_chunks - 1

    def arrival_after(self, k: int, forward: bool) -> Arrival:
        """What to receive in the exchange after this stage's k-th forward (or backward).

        Usually it is the input of number k + 1. The stage that leads the ring (stage 0 for
        forwards, the last one for backwards) is the exception. What arrives there has gone once
        around: its neighbour is p - 1 steps later, and what it sends enters the next chunk (for
        backwards, the previous one), or is nothing if its chunk was the last. For p = 3, forwards:

            stage 0   f0   f1   f2   f3      after f2 arrives what stage 2's f0 has made
            stage 1        f0   f1   f2      after f0, the input of f1
            stage 2             f0   f1      f0 has gone through chunk 0 of all: chunk 1 is next

        >>> order = InterleavedOrder(pp_size=2, pp_rank=0, num_microbatches=2, num_model_chunks=2,
        ...                          microbatch_group_size_per_vp_stage=2)
        >>> [tuple(order.arrival_after(k, forward=True)) for k in range(4)]
        [(False, 1), (True, 1), (True, 1), (False, 2)]
        """
        leads = self.pp_rank == (0 if forward else self.pp_size - 1)
        if not leads:
            if k + 1 == self.counts.total:
                return Arrival(False, self.model_chunk_id(k, forward))
            return Arrival(True, self.model_chunk_id(k + 1, forward))
        step = 1 if forward else -1
        sender_k = k - (self.pp_size - 1)
        if sender_k < 0:
            return Arrival(False, self.model_chunk_id(k + 1, forward) + step)
        sender_chunk = self.model_chunk_id(sender_k, forward)
        ends = sender_chunk == (self.num_model_chunks - 1 if forward else 0)
        return Arrival(not ends, sender_chunk + step)
