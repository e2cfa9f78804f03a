"""Observers that write down which calls a rank makes, for notebooks to look at.

Megatron has no counterpart.
"""

from collections import Counter
from typing import Any

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import Call


class CallCounter:
    """How often each kind of communication is called, and with how many bytes."""

    def __init__(self, groups: ProcessGroupCollection):
        self._kinds = {id(groups.tp): "tp", id(groups.dp): "dp"}
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def start(self, call: Call) -> None:
        """Called by the package when a call begins."""
        if call.name == "p2p-start":
            kind = f"pp, {call.attributes['doing']}"
        elif call.attributes.get("group_size", 1) > 1:
            group = self._kinds.get(id(call.arguments["group"]), "embedding")
            kind = f"{group}, {call.name}"
        else:
            return
        self.calls[kind] += 1
        self.bytes[kind] += call.attributes["bytes"]

    def stop(self, call: Call) -> None:
        """And when it ends."""


class CollectiveNames:
    """The collectives called, in order: `seen`."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self, call: Call) -> None:
        """Called by the package when a call begins."""
        if "group_size" in call.attributes:
            self.seen.append(call.name)

    def stop(self, call: Call) -> None:
        """And when it ends."""


class Diary:
    """At the ends of some links: how large the gradient of `chunk` is, and whether weights moved.

    `lines` has (what, norm of the gradient, sum of what the weights have moved by).
    """

    LINKS = ("backward-compute", "finalize-model-grads", "optimizer")

    def __init__(self, chunk: Any):
        self.chunk = chunk
        self.lines: list[tuple[str, float, float]] = []
        self._weights = [param.detach().clone() for param in chunk.parameters()]

    def _note(self, what: str) -> None:
        (buffer,) = self.chunk.buffers
        params = zip(self.chunk.parameters(), self._weights, strict=True)
        moved = sum(float((param.detach() - old).abs().sum()) for param, old in params)
        self.lines.append((what, float(buffer.grad_data.norm()), moved))

    def start(self, call: Call) -> None:
        """Called by the package when a call begins."""
        if call.name in ("train-step", "forward-backward"):
            self._note(f"{call.name} begins")

    def stop(self, call: Call) -> None:
        """And when it ends."""
        if call.name in self.LINKS:
            self._note(f"{call.name} has ended")
