"""After the last backward: every gradient becomes what one process with the whole batch would have.

With a distributed optimizer, in this rank's shards. A step's frame calls it once, as
`config.finalize_model_grads_func`. Counterpart:
`megatron.core.distributed.finalize_model_grads`, under the same names.

Sum 1 may have begun during backward. The others wait until it is done, and add its results, element by
element. The division comes last, with one factor for all gradients.

    1. data parallel       sum over dp_cp        (experts: expt_dp; waits for what backward launched)
    2. tensor parallel     sum over tp, expt_tp  gradients of replicated parameters that are partial;
                                                 the mean for average_gradients_across_tp_domain
    3. word embedding      sum over embd         copies of it: first stage's, tied output layer's, ...
    4. position embedding  sum over pos_embd     copies of it, where two stacks have one each
    5. tokens              divide by their number, which only the last stage knows
    6. `after_grads_funcs` what a layer does once per step, such as the experts' biases
"""

import torch
import torch.distributed as dist

from minimegatron.core.collectives import all_reduce
from minimegatron.core.distributed import embedding_copies, step_checks
from minimegatron.core.distributed.data_parallel_base import get_main_grad
from minimegatron.core.distributed.token_division import _divide_by_num_tokens
from minimegatron.core.parameter import tensor_group
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.tracing import traced
from minimegatron.core.utils import config_of_run, unwrap_model
from minimegatron.exports import all_of

# Megatron has two functions of routers here. What a layer does once per step is in `after_grads_funcs`.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.transformer.moe.expert_bias")


def _is_partial_over_tp(name: str, param: torch.nn.Parameter) -> bool:
    """True for a parameter that every rank of its tensor group has, each with part of its gradient.

    With sequence parallelism each rank has seen part of the sequence. Norms of queries and keys
    see only this rank's heads, with or without it.
    """
    return getattr(param, "sequence_parallel", False) or any(
        norm in name.split(".") for norm in ("q_layernorm", "k_layernorm")
    )


@traced("non-tensor-parallel-grads-all-reduce")
def _allreduce_non_tensor_model_parallel_grads(
    model: list[torch.nn.Module],
    *,
    tp_group: dist.ProcessGroup | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Sums partial gradients of replicated parameters, in one message per tensor group and dtype.

    A sum, not a mean: each rank's part is a term of the gradient, not an estimate of it. A parameter
    with `average_gradients_across_tp_domain` gets the mean: each rank has computed all of its gradient,
    in other roundings. Give `pg_collection` where there are experts; `tp_group` is enough for dense
    parameters.
    """
    pg_collection = pg_collection or ProcessGroupCollection(tp=tp_group)
    messages: dict[tuple[dist.ProcessGroup, torch.dtype, bool], list[torch.Tensor]] = {}
    for chunk in model:
        for name, param in chunk.named_parameters():
            grad = get_main_grad(param)
            is_mean = getattr(param, "average_gradients_across_tp_domain", False)
            if grad is not None and (is_mean or _is_partial_over_tp(name, param)):
                key = (tensor_group(param, pg_collection), grad.dtype, is_mean)
                messages.setdefault(key, []).append(grad)
    for (group, _, is_mean), grads in messages.items():
        if group.size() > 1:
            together = torch.cat([grad.reshape(-1) for grad in grads])
            all_reduce(together, group)
            together /= group.size() if is_mean else 1
            for grad, part in zip(grads, together.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view(grad.shape))


@traced("embedding-grads-all-reduce")
def _allreduce_word_embedding_grads(
    model: list[torch.nn.Module],
    *,
    embd_group: dist.ProcessGroup | None,
    pp_group: dist.ProcessGroup,
) -> None:
    """Adds up the gradients of the word embedding's copies: as a lookup table and as output weights.

    Without a pipeline both went into one parameter already, and the group has one rank. A rank may
    have several copies, in several chunks. The group's ranks are those that have one: first stage, last
    stage if it is tied, the stage that predicts further tokens; or each has the whole model, whose
    embedding then counts. Raises RuntimeError on a rank of the group without a copy, and on one with a
    copy that is not in the group.
    """
    copies = [
        param
        for chunk in unwrap_model(list(model))
        for param in chunk.parameters()
        if getattr(param, "shared_embedding", False)
    ]
    num_ranks = 0 if embd_group is None else embd_group.size()
    if (copies and num_ranks == 0) or (num_ranks > 1 and not copies):
        copies = embedding_copies.copies_on_odd_rank(model, copies, pp_group)
    grads = [grad for copy in copies if (grad := get_main_grad(copy)) is not None]
    if grads:
        # Several copies: in another tensor. One: in its own, which is then copied to itself.
        total = sum(grads[1:], start=grads[0])
        if num_ranks > 1:
            all_reduce(total, embd_group)
        for grad in grads:
            grad.copy_(total)


@traced("position-embedding-grads-all-reduce")
def _allreduce_position_embedding_grads(
    model: list[torch.nn.Module], *, pos_emb_group: dist.ProcessGroup | None
) -> None:
    """The same for position embeddings that several stages hold, as an encoder-decoder's do."""
    if pos_emb_group is not None and pos_emb_group.size() > 1:
        embedding_copies.sum_position_embeddings(model, pos_emb_group)


@traced("finalize-model-grads")
def finalize_model_grads(
    model: list[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Turns what backward left in `main_grad` into the gradients the optimizer should see.

    Args:
        model: this stage's chunks, each in its data-parallel wrapper.
        num_tokens: with `calculate_per_token_loss`, the tokens this data-parallel rank's loss was
            summed over, of any dtype; its value matters on the last stage only. Left unchanged.
        pg_collection: needs tp, pp, embd, pos_embd, dp_cp, and expt_tp where there are experts;
            None for the model's.
        force_all_reduce: see `DistributedDataParallel.finish_grad_sync`.

    Raises RuntimeError the second time without `zero_grad_buffer` in between, and ValueError where the
    optimizer divides by a loss scale that no loss was multiplied by.
    """
    pg_collection = pg_collection or groups_of(model[0])
    embd_group, pp_group = pg_collection.embd, pg_collection.pp
    step_checks.refuse_unscaled_loss(model, pp_group)
    for chunk in model:
        chunk.note_final()
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    _allreduce_non_tensor_model_parallel_grads(model, pg_collection=pg_collection)
    _allreduce_word_embedding_grads(model, embd_group=embd_group, pp_group=pp_group)
    _allreduce_position_embedding_grads(model, pos_emb_group=pg_collection.pos_embd)
    if num_tokens is not None:
        _divide_by_num_tokens(model, num_tokens, pp_group, pg_collection.dp_cp)
    for step in config_of_run(model).after_grads_funcs:
        step(model, pg_collection)
