"""The fake's own rules, in programs of a few lines: what NCCL allows, and what it does not."""

import pytest
import torch

from minimegatron.core.pipeline_parallel.p2p_communication import (
    ACTIVATION,
    GRADIENT,
    TensorMessage,
)
from tests.fake_streams import PAIRS, TOGETHER
from tests.fake_transport import Deadlock, FakeTransport, Leftover, Network, Race


class Rank(FakeTransport):
    """Short words for a rank's program. Every tensor is one number wide."""

    def made(self, value) -> torch.Tensor:
        tensor = torch.empty(1)
        self.compute(f"{value} is made", writes={tensor: value})
        return tensor

    def send(self, tensor: torch.Tensor, peer: int, payload: str = ACTIVATION):
        return self.start(TensorMessage(True, tensor, peer, payload))

    def receive(self, peer: int, payload: str = ACTIVATION):
        return self.start(TensorMessage(False, torch.empty(1), peer, payload))

    def use(self, handle, value) -> None:
        handle.wait()
        self.compute(f"{value} is used", reads={handle.message.tensor: value})


def ranks(size: int) -> tuple[Network, list[Rank]]:
    network = Network(size)
    return network, [Rank(network, rank) for rank in range(size)]


def pair_of_exchanges(network: Network, a: Rank, b: Rank, batched: bool) -> None:
    """Both send first, and then receive."""
    for rank, peer in ((a, 1), (b, 0)):
        messages = [
            TensorMessage(True, rank.made(f"number {rank.rank}"), peer, ACTIVATION),
            TensorMessage(False, torch.empty(1), peer, ACTIVATION),
        ]
        handles = rank.start_batch(messages) if batched else list(map(rank.start, messages))
        handles[0].wait()
        rank.use(handles[1], f"number {peer}")


def test_a_batch_is_one_and_lone_messages_stand_in_line():
    network, (a, b) = ranks(2)
    pair_of_exchanges(network, a, b, batched=True)
    network.run()
    network, (a, b) = ranks(2)
    pair_of_exchanges(network, a, b, batched=False)
    with pytest.raises(Deadlock, match=r"rank 0 waits: send to rank 1.*rank 1 waits: send to"):
        network.run()


def test_wait_stops_the_stream_and_not_the_program():
    """Were rank 0's program to stop at its wait, ranks 1 and 2 would stop at their first uses."""
    network, (a, b, c) = ranks(3)
    first, second, ours, theirs = c.made(1), c.made(2), a.made("ours"), b.made("theirs")
    c.send(first, 0).wait()
    a.use(a.receive(2), 1)  # ranks 0 and 2 are connected from here on
    a.use(a.receive(2), 2)
    a.send(ours, 1).wait()
    from_a = b.receive(0)
    b.send(theirs, 2).wait()
    b.use(from_a, "ours")
    from_b = c.receive(1)
    c.send(second, 0).wait()
    c.use(from_b, "theirs")
    network.run()


def test_a_message_behind_a_wait_starts_after_it():
    """A post inherits what the compute stream waits for, so two ranks can wait in a circle."""
    network, (a, b) = ranks(2)
    for rank, peer in ((a, 1), (b, 0)):
        tensor = rank.made("anything")
        batch = [TensorMessage(False, torch.empty(1), peer, ACTIVATION)]
        rank.use(rank.start_batch(batch)[0], "anything")
        rank.start_batch([TensorMessage(True, tensor, peer, ACTIVATION)])[0].wait()
    with pytest.raises(Deadlock, match=r"rank 0 waits: receive from.*rank 1 waits: receive from"):
        network.run()


def test_a_pair_is_connected_by_both_at_their_first_message():
    """Without a wait anywhere: the programs themselves stand still, in a ring."""
    network, three = ranks(3)
    for rank in three:
        tensor = rank.made(rank.rank)
        rank.send(tensor, (rank.rank + 1) % 3)
        rank.use(rank.receive((rank.rank - 1) % 3), (rank.rank - 1) % 3)
    with pytest.raises(
        Deadlock, match=r"rank 0 waits: send to rank 1 .* ranks \[1\] have not come"
    ):
        network.run(PAIRS)


def test_lone_messages_over_one_communicator_stand_in_one_line():
    network, (a, b, c) = ranks(3)
    first, second = a.made("first"), a.made("second")
    for handle in (a.send(first, 1), a.send(second, 2)):
        handle.wait()
    got = c.receive(0)
    c.use(got, "second")
    c.send(c.made("third"), 1).wait()
    from_c = b.receive(2)
    b.use(from_c, "third")
    b.use(b.receive(0), "first")
    with pytest.raises(Deadlock, match="rank 0 waits: send to rank 1"):
        network.run(TOGETHER)


def test_messages_meet_by_their_places():
    network, (a, b) = ranks(2)
    gradient, activation = a.made("gradient"), a.made("activation")
    for handle in (a.send(gradient, 1, GRADIENT), a.send(activation, 1)):
        handle.wait()
    b.use(b.receive(0), "activation")
    b.use(b.receive(0, GRADIENT), "gradient")
    with pytest.raises(
        AssertionError, match="activation is used expected activation, got gradient"
    ):
        network.run()


@pytest.mark.parametrize("waits_first", [True, False])
def test_memory_may_be_written_after_the_wait_only(waits_first):
    network, (a, b) = ranks(2)
    tensor = a.made("first")
    handle = a.send(tensor, 1)
    if waits_first:
        handle.wait()
    a.compute("it is overwritten", writes={tensor: "second"})
    handle.wait()
    b.use(b.receive(0), "first")
    if waits_first:
        network.run()
        return
    with pytest.raises(
        Race, match="send to rank 1 .*it is overwritten|overwritten.*send to rank 1"
    ):
        network.run()


def test_memory_that_nobody_holds_may_be_written():
    network, (a, b) = ranks(2)
    tensor = a.made("first")
    handle = a.send(tensor.detach(), 1)
    del tensor
    a.compute("something else")
    handle.wait()
    b.use(b.receive(0), "first")
    with pytest.raises(Race, match="memory is freed"):
        network.run()


def test_what_is_left_over_is_named():
    network, (a, b) = ranks(2)
    tensor = a.made("first")
    a.send(tensor, 1)
    b.receive(0)
    with pytest.raises(Leftover, match="rank 1 never used what it got: receive from rank 0"):
        network.run()
    network, (a, b) = ranks(2)
    tensor = a.made("first")
    a.send(tensor, 1)
    a.send(tensor, 1)
    b.use(b.receive(0), "first")
    with pytest.raises(Leftover, match="rank 0 has left: send to rank 1"):
        network.run()


def test_empty_batches_and_tensors_elsewhere_are_refused():
    network, (a, _) = ranks(2)
    with pytest.raises(IndexError, match="empty batch"):
        a.start_batch([])
    network = Network(2, device="cuda")
    with pytest.raises(ValueError, match="a tensor on cpu, not on cuda"):
        Rank(network, 0).send(torch.empty(1), 1)
