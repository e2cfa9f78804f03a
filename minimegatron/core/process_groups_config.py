"""The process groups of one model, as one argument.

Counterpart: `megatron.core.process_groups_config`.
"""

import copyreg
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.group_checks import check_fields, check_required
from minimegatron.core.utils import get_attr_wrapped_model

# A text from here tells `copy` to take the object itself: the copy of a model shares its groups.
copyreg.pickle(dist.ProcessGroup, lambda group: "a process group, which cannot be pickled")


@dataclass(init=False, repr=False, eq=False)
class ProcessGroupCollection:
    """This rank's process groups by short name.

    Give only those that matter: `ProcessGroupCollection(tp=a, pp=b)`. A field that was not given
    does not exist (`hasattr` is False, reading it raises AttributeError); None means that this rank
    is in no such group, as a middle stage is in no embedding group.
    """

    # Beside the fields, the communicator of the pipeline: see `p2p_communication.communicator_of`.
    __slots__ = ("__dict__", "__weakref__", "p2p")

    tp: dist.ProcessGroup
    """Ranks that share each layer."""
    pp: dist.ProcessGroup
    """Stages of one pipeline, first stage first."""
    mp: dist.ProcessGroup
    """Tensor and pipeline: one copy of the model."""
    embd: dist.ProcessGroup | None
    """Stages that hold the word embedding."""
    pos_embd: dist.ProcessGroup | None
    """Stages that hold the position embedding."""
    cp: dist.ProcessGroup
    """Ranks that share each sequence."""
    tp_cp: dist.ProcessGroup
    """Tensor and context: ranks of a stage with the same samples."""
    dp: dist.ProcessGroup
    """Ranks with the same weights and the same piece of other samples."""
    dp_cp: dist.ProcessGroup
    """Data and context: all ranks with the same weights."""
    tp_dp: dist.ProcessGroup
    """Tensor and data."""
    tp_dp_cp: dist.ProcessGroup
    """Tensor, data and context: all ranks of a stage."""
    ep: dist.ProcessGroup
    """Ranks that share the experts of a layer."""
    expt_tp: dist.ProcessGroup
    """Ranks that share each expert."""
    tp_ep: dist.ProcessGroup
    """Expert tensor and expert: one set of a layer's experts."""
    tp_ep_pp: dist.ProcessGroup
    """Expert tensor, expert and pipeline: one set of all experts."""
    expt_dp: dist.ProcessGroup
    """Ranks with the same experts."""

    def __init__(self, **groups: dist.ProcessGroup | None):
        check_fields(groups, [entry.name for entry in fields(self)])
        vars(self).update(groups)

    def __getattr__(self, name: str) -> dist.ProcessGroup:
        # Reached only for names that were not set.
        raise AttributeError(
            f"this ProcessGroupCollection has no {name!r}, only {self}; give it {name}=..."
        )

    def __repr__(self) -> str:
        given = [
            f"{name}({'None' if group is None else group.size()})"
            for name, group in vars(self).items()
        ]
        return f"ProcessGroupCollection({', '.join(given) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Iterable[str] | None = None
    ) -> "ProcessGroupCollection":
        """The groups `parallel_state.initialize_model_parallel` made: all, or those required.

        Raises RuntimeError before `initialize_model_parallel`, ValueError for an unknown name.
        """
        known = [entry.name for entry in fields(cls)]
        names = known if required_pgs is None else list(required_pgs)
        check_required(parallel_state.is_initialized(), names, known)
        found = {name: parallel_state.get_group(name, check_initialized=False) for name in names}
        return cls(**found)


def groups_of(
    model: Any, pg_collection: ProcessGroupCollection | None = None
) -> ProcessGroupCollection:
    """`pg_collection`; None for the groups that `model`, wrapped or not, was built with.

    These are its attribute `pg_collection`. Where that is missing, or has none but groups of
    `parallel_state`, the answer is all groups of `parallel_state`.
    """
    if pg_collection is not None:
        return pg_collection
    own = None
    with suppress(RuntimeError):  # no layer of the model has it
        own = get_attr_wrapped_model(model, "pg_collection", allow_none=False)
    if own is not None and not parallel_state.is_initialized():
        return own
    world = ProcessGroupCollection.use_mpu_process_groups()
    is_of_world = own is None or all(getattr(world, name) is one for name, one in vars(own).items())
    return world if is_of_world else own


def stage_of(pp_group: dist.ProcessGroup | None = None) -> int:
    """Our place in a pipeline; of `parallel_state`'s, for which None stands, what was set by hand.

    Layers are placed by it. Modules that send over a group ask the group itself.
    """
    worlds = parallel_state.get_group("pp", check_initialized=False)
    is_worlds = pp_group is None or pp_group is worlds
    return parallel_state.get_pipeline_model_parallel_rank() if is_worlds else pp_group.rank()


def num_stages_of(pp_group: dist.ProcessGroup) -> int:
    """The places of a pipeline; of `parallel_state`'s, as many as were set by hand."""
    is_worlds = pp_group is parallel_state.get_group("pp", check_initialized=False)
    return parallel_state.get_pipeline_model_parallel_world_size() if is_worlds else pp_group.size()
