"""Why nobody moves: the cause of a hang, from what is known of every rank.

A pure function of the records; torch-free. Megatron has no counterpart.

A rank that waits, waits for certain others: the peer of its message, or the members of the group
that have not entered its collective. Follow these arrows, and one of two things comes:

* a rank that waits for nobody: it has ended, or is stopped, or busy with something else. Everything
  before it waits for that one rank.
* a rank that was there already: a circle. Nobody in it can move, whatever the others do.

Before that come faults that explain more than where the arrows end: two ranks whose collectives do
not fit together, stages that run different steps, a message to the wrong peer, a swallowed exception.

>>> from minimegatron.doctor.records import OpenCall, RankRecord
>>> def sends_to(peer):
...     return OpenCall("p2p-wait", doing="sending", payload="activation", peer=peer, number=0)
>>> found = diagnose([RankRecord(0, 2, calls=(sends_to(1),)), RankRecord(1, 2, calls=(sends_to(0),))])
>>> found.kind, found.cycle
('cycle', (0, 1))
>>> print(found.cause)
Ranks 0 and 1 wait for each other in a circle, so none of them can go on.
"""

from collections.abc import Iterable
from dataclasses import replace

from minimegatron.doctor import advice
from minimegatron.doctor.causes import FINDERS
from minimegatron.doctor.findings import Diagnosis
from minimegatron.doctor.records import RankRecord
from minimegatron.doctor.wait_graph import WaitGraph


def diagnose(records: Iterable[RankRecord]) -> Diagnosis:
    """Finds the cause of a hang. The records should be of one moment, and of all ranks.

    Where no rank waits for another, the answer is `findings.NOBODY`: no hang, as far as one can see.
    """
    by_rank = {record.rank: record for record in sorted(records, key=lambda record: record.rank)}
    graph = WaitGraph(by_rank)
    found = next(filter(None, (find(graph) for find in FINDERS)))
    return replace(found, text=advice.render(found, by_rank))
