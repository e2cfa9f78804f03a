"""What a parameter knows: its kind, its cut, and the ranks that share it or have a copy of it.

Megatron keeps the same facts as attributes of parameters; there each user of them asks whether a
parameter is an expert's.

A layer sets attributes of its parameters, under Megatron's names:

    tensor_model_parallel, partition_dim,    how it is cut over its tensor group;
    partition_stride, partition_sizes        see `core.tensor_parallel.sharding`
    allreduce                                False for an expert's parameter
    sequence_parallel                        whole, and each tensor rank has a term of its gradient
    average_gradients_across_tp_domain       whole, and each tensor rank has all of its gradient, but
                                             perhaps in other bits: the mean is taken
    shared_embedding                         a copy of the word embedding
    shared                                   a weight with copies; True on all but the first stage's

They are noted where the parameter is: one that takes its place gets them too (`parameter_marks`).

Whoever needs a group asks for the group of the parameter. The answer depends on its kind:

                                             dense      expert
    tensor   ranks that share it             tp         expt_tp
    reduce   ranks that have the same of it  dp_cp      expt_dp
    model    ranks that have all of them     mp         tp_ep_pp

Gradients of all kinds are multiplied by the same number, 1 / (size of dp_cp): as many ranks compute a
loss. Where expt_dp has fewer ranks, each of its experts has seen the tokens of several ranks of dp_cp,
and has added up their gradients itself.
"""

from dataclasses import dataclass
from typing import Any

from minimegatron.core import util_checks


@dataclass(frozen=True)
class ParameterKind:
    """Names of groups in a `ProcessGroupCollection`."""

    tensor: str
    """Ranks that share one parameter: each has a piece, or all have the whole."""
    reduce: str
    """Ranks that have the same values: gradients are summed over them, ZeRO-1 divides them."""
    model: str
    """Ranks that together have every parameter of the kind: norms are summed over them."""


KINDS = {
    "dense": ParameterKind(tensor="tp", reduce="dp_cp", model="mp"),
    "expert": ParameterKind(tensor="expt_tp", reduce="expt_dp", model="tp_ep_pp"),
}
"""A further kind is added here, on every rank; its parameters have the attribute `kind`, its name."""


def kind_of(param: Any) -> ParameterKind:
    """Raises ValueError for a `param.kind` that is not in `KINDS`."""
    name = getattr(param, "kind", "dense" if getattr(param, "allreduce", True) else "expert")
    return KINDS.get(name) or util_checks.refuse_kind(name, KINDS)


def tensor_group(param: Any, pg_collection: Any) -> Any:
    """The ranks that `param` is cut over."""
    return getattr(pg_collection, kind_of(param).tensor)


def reduce_group(param: Any, pg_collection: Any) -> Any:
    """The ranks that `param`'s gradient is summed over."""
    return getattr(pg_collection, kind_of(param).reduce)
