"""Where all ranks of a check wait for each other, apart from what a student's code calls.

Over shared memory, a rank that calls one thing while another calls something else is told so. A barrier
of the check would then count as a call that the student's code does not make; in a group of its own
it meets none of these calls. Megatron has no counterpart.
"""

import weakref

import torch.distributed as dist

_group_of: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""The default group -> the group of the same ranks in which they meet."""


def meet() -> None:
    """Returns when all ranks have come here. The first call makes the group: make it before others."""
    world = dist.group.WORLD
    if world not in _group_of:
        _group_of[world] = dist.new_group()
    dist.barrier(_group_of[world])
