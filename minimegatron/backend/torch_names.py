"""By which names torch 2.9 to 2.15 calls the methods of a process group that is written in Python.

Megatron has no counterpart.

torch looks for a method in two places. `torch.distributed`, in Python, asks the group for an attribute.
C++, for functional collectives and for `DistributedDataParallel`, asks the group's type for a name, in
a class named `PyProcessGroup`. For a method that this class does not look up, C++ calls the backend
that the group has registered inside itself.

Five operations have two names. torch 2.9 to 2.12 know the older one alone. Since 2.13,
`torch.distributed` calls the newer one; C++ looks up the newer one, then the older one.

Each version passes the same arguments, from both places, but for what METHODS notes. A few callers,
such as RPC and the joined inputs of `DistributedDataParallel`, leave out `opts`.
"""

from types import FunctionType
from typing import TypeVar

AnyClass = TypeVar("AnyClass", bound=type)

METHODS: dict[str, tuple[str, ...]] = {
    # -- Called from Python, and looked up by C++, in each version --
    "allreduce": ("allreduce",),  # Joined inputs pass one tensor, not a list.
    "allreduce_coalesced": ("allreduce_coalesced",),
    "broadcast": ("broadcast",),
    "allgather": ("allgather",),
    "reduce_scatter": ("reduce_scatter",),
    "send": ("send",),  # At times with `tag` by keyword; so `recv`.
    "recv": ("recv",),
    "barrier": ("barrier",),  # From Python with `opts` by keyword.
    "abort": ("abort",),
    # -- Called from Python in each version; looked up by C++ since 2.14 --
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "alltoall": ("alltoall",),
    # -- Called from Python only --
    "allgather_coalesced": ("allgather_coalesced",),
    "shutdown": ("shutdown",),  # By `destroy_process_group`.
    "monitored_barrier": ("monitored_barrier",),  # Before 2.14, of gloo's groups only.
    "gather_single": ("gather_single",),  # Since 2.14.
    "set_timeout": ("set_timeout",),  # Since 2.14; before, torch sets that of the gloo inside.
    # -- The newer name, then the older one. Of the first two, C++ looks up the newer name since 2.14,
    #    and the older name in no version. --
    "all_gather_single": ("all_gather_single", "_allgather_base"),
    "reduce_scatter_single": ("reduce_scatter_single", "_reduce_scatter_base"),
    # Splits that the caller leaves out are [] from Python. Functional collectives write them out.
    "all_to_all_single": ("all_to_all_single", "alltoall_base"),
    "all_gather_single_coalesced": (  # From Python without `opts` before 2.12.
        "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
    ),
    "reduce_scatter_single_coalesced": (
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
    # -- Python's name, then C++'s. C++ looks up the last one in each version, the others since 2.14. --
    "recv_anysource": ("recv_anysource", "recvAnysource"),
    "_start_coalescing": ("_start_coalescing", "start_coalescing"),
    "_end_coalescing": ("_end_coalescing", "end_coalescing"),
    # From Python: (ranks, timeout=, opts=, group_name=, group_desc=), and device_types= since 2.13.
    # From C++: the same six, or five, by position. `dist.split_group` asks for an accelerator that can
    # split before it calls this; since 2.15, a backend inside that can split is enough.
    "split_group": ("split_group", "splitGroup"),
}
"""Our name of a method, and every name by which some torch calls it."""


def with_torch_names(cls: AnyClass) -> AnyClass:
    """Decorates a class: each method of METHODS that it has in Python gets all its names.

    A method that the class does not write stays torch's. Decorate a subclass anew where it writes such
    a method again. The names must be there before C++ first calls a group of this class: for each type,
    C++ remembers which names it has not found.
    """
    for method, names in METHODS.items():
        function = getattr(cls, method, None)
        if isinstance(function, FunctionType):
            for name in names:
                setattr(cls, name, function)
    return cls
