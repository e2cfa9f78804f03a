"""What a program that trains in steps asks of a group over shared memory, beyond `torch.distributed`.

A step that fails leaves messages behind. A group whose steps are begun, ended and abandoned does not
take them for those of the next step, and who waits for a rank that has given up is told at once.

Megatron has no counterpart.
"""

import torch
import torch.distributed as dist

from minimegatron.backend.channels import LENT, Connection, PendingReceive
from minimegatron.backend.incoming import PARTS, is_in_step, next_part, next_step
from minimegatron.backend.mesh import Mesh, lane_of

_TAGS_PER_STEP, _MAX_STEPS, _MAX_OWN_TAGS = 8, 1 << 24, 1 << 30


class StepMethods:
    """Methods of a group; `mesh` is None where its ranks share no memory, and nothing can be told."""

    mesh: Mesh | None
    _num_lanes = 0
    epoch = 0
    """The step that the group is in, or the time between two: see `epochs`."""

    def begin_step(self, forward_only: bool = False) -> None:
        """All ranks begin a step: what a failed one left behind is not taken for it.

        Waits for nobody. `forward_only`: ranks may belong to copies of a model that begin such a step
        at another time, or never.
        """
        self.epoch = (next_part if forward_only else next_step)(self.epoch)
        for connection in self._connections():
            connection.begin_step(self.epoch)

    def end_step(self) -> None:
        """The step has ended well on this rank. What it has launched may still be waited for."""
        if is_in_step(self.epoch):
            self.epoch += 1
            for connection in self._connections():
                connection.end_step()

    def abandon(self, reason: str) -> None:
        """Ends a step that failed on this rank, and tells the others. Never waits."""
        if is_in_step(self.epoch):
            self.epoch += 1
            for connection in self._connections():
                connection.abandon(reason)

    def _connections(self) -> list[Connection]:
        return list(self.mesh.to.values()) if self.mesh is not None else []

    # -- Messages --

    @property
    def keeps_messages(self) -> bool:
        """Whether what was sent is safe without its sender. Over gloo, it must leave first."""
        return self.mesh is not None

    def tag_in_step(self, tag: int) -> int:
        """For gloo: a message that a failed step has left behind meets no receive of the next one."""
        if tag >= _TAGS_PER_STEP:  # larger tags are a program's own, and know no steps
            return tag % _MAX_OWN_TAGS + _MAX_STEPS * _TAGS_PER_STEP
        return tag + self.epoch // PARTS % _MAX_STEPS * _TAGS_PER_STEP

    def receive_lent(
        self, tensor: torch.Tensor, peer: int, tag: int = 0
    ) -> dist.Work | PendingReceive:
        """As `recv`; the sender's memory may become the tensor's, until nobody has the tensor.

        What it returns has `wait` and no more.
        """
        if self.mesh is None:
            return self.recv([tensor], peer, tag)
        return self.mesh.to[peer].expect(tensor, LENT, lane_of(tag))

    # -- Collectives that belong to no step --

    def new_lane(self) -> int:
        """For `all_gather_of_no_step`. Every rank asks for its lanes in one order."""
        self._num_lanes += 1
        return self._num_lanes - 1

    def all_gather_of_no_step(
        self, output: torch.Tensor, input: torch.Tensor, lane: int, async_op: bool = True
    ) -> dist.Work:
        """Concatenates all inputs in `output`, a contiguous tensor; a failed step does not end it.

        Its handle may be waited for again after a wait that failed. Of two such calls with one `lane`,
        from 0, the first on one rank is paired with the first on another, be it a step later.
        """
        mesh, call = self._way("all_gather", input)
        if mesh is None:
            work = self.all_gather_single(output, input)
        else:
            places = list(output.detach().view(self.size(), *input.shape))
            work = mesh.all_gather_of_no_step(places, input, lane, call).giving([output])
        if not async_op:
            work.wait()
        return work
