"""Gradients of experts: which ranks to sum over, what to divide by, and one norm for everything.

Started by: you, and `minimegatron exercises check`. A layer's experts are divided over ranks, so the
ranks that hold the same expert are not those that hold the same attention. Write what happens to both
kinds of gradient between backward and the optimizer. The check gives each of 4 ranks what backward
would have left there, and compares with one process that has all tokens.

`groups` has this rank's groups. Dense layers are cut t ways (tensor), experts etp ways:

    ranks that ...                           of dense parameters    of an expert's
    share each of them                       groups.tp              groups.expt_tp
    have the same values                     groups.dp_cp           groups.expt_dp
    together hold one copy of all of them    groups.mp              groups.tp_ep_pp

Of a parameter you may ask:

    param.main_grad              its gradient on this rank, a piece of a larger buffer; change it in
                                 place
    param.tensor_model_parallel  True if the ranks that share it hold different pieces of it; else each
                                 of them holds all of it
    param.allreduce              what your first function has set

    group.size(), group.rank()
    all_reduce(tensor, group)    sums `tensor` over the group, in place; on every rank of it
"""

import math  # noqa: F401
from collections.abc import Sequence

import torch

from minimegatron.core.collectives import all_reduce  # noqa: F401
from minimegatron.core.process_groups_config import ProcessGroupCollection


def set_allreduce(
    param: torch.nn.Parameter, is_expert: bool, tp_size: int, ep_size: int, expert_tp_size: int
) -> None:
    """Sets `param.allreduce`: False if the parameter needs the right column of groups, else True.

    It needs it if some rank stands in one of its two columns and not in the other.

    Args:
        is_expert: whether it belongs to an expert.
        tp_size: t, ranks that share a dense layer.
        ep_size: e, ranks that the experts of a layer are divided over.
        expert_tp_size: etp, ranks that share an expert.
    """
    raise NotImplementedError("Write set_allreduce: when do the two columns hold different ranks?")


def sum_over_tensor_ranks(
    params: Sequence[torch.nn.Parameter], groups: ProcessGroupCollection
) -> None:
    """First: completes the gradients that are one term of a sum on each tensor-parallel rank.

    Each of the t ranks of `groups.tp` has a part of the sequence (sequence parallelism). A dense
    parameter that is cut has seen all of it, because the layer gathers its input. One that is not cut
    (a norm, the router, a bias) has seen this rank's part only. An expert's parameter has seen every
    token that came to the expert, from whichever rank. An expert that is cut as dense layers are, and
    needs no groups of its own, has cut parameters only (such an expert has no biases).
    """
    raise NotImplementedError("Write sum_over_tensor_ranks: which gradients are terms of a sum?")


def reduce_gradients(params: Sequence[torch.nn.Parameter], groups: ProcessGroupCollection) -> None:
    """Then: makes every gradient that of the mean of all losses.

    There are as many losses as `groups.dp_cp` has ranks; each is one of them. The gradient of an
    expert on this rank holds, already added up, what all tokens contribute that came here.
    """
    raise NotImplementedError("Write reduce_gradients: sum over ranks, and divide")


def get_grad_norm(params: Sequence[torch.nn.Parameter], groups: ProcessGroupCollection) -> float:
    """The 2-norm of the whole model's gradient, each element once; the same number on every rank.

    A stage of a pipeline may have no experts.
    """
    raise NotImplementedError("Write get_grad_norm: two sums of squares over ranks, and one root")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
