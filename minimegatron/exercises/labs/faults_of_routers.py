"""Known mistakes in how tokens choose experts, and in what keeps experts balanced, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_MOE = "core/transformer/moe/"

FAULTS_OF_ROUTERS = (
    Fault(
        "aux-per-token-local",
        _MOE + "router.py",
        "aux_loss * (activation.size(0) * self.tp_cp_group.size())",
        "aux_loss * activation.size(0)",
        "With the loss per token, a balancing loss is multiplied by this rank's tokens and divided by "
        "those of all ranks: the more ranks share a sequence, the less of it is in the gradients.",
    ),
    Fault(
        "aux-scale-not-over-M",
        _MOE + "moe_utils.py",
        "scale.double() * cp_size / num_microbatches",
        "scale.double() * cp_size",
        "Each microbatch adds the whole balancing loss: the more there are, the more of it is in the "
        "gradients of the router and of all that lies below.",
    ),
    Fault(
        "aux-scale-forgets-context-ranks",
        _MOE + "moe_utils.py",
        "scale.double() * cp_size / num_microbatches",
        "scale.double() / num_microbatches",
        "Gradients are averaged over context-parallel ranks, but each has only a share of the "
        "balancing loss: it is too weak by their number.",
    ),
    Fault(
        "seq-aux-ignores-batch",
        _MOE + "router.py",
        "counts, num_tokens, coeff) / bsz\n",
        "counts, num_tokens, coeff) / bsz ** (1 + self.config.calculate_per_token_loss)\n",
        "With the loss per token, the balancing loss of sequences is multiplied by the tokens of one "
        "sequence: the more sequences in a microbatch, the less of it is in the gradients.",
    ),
    Fault(
        "seq-aux-mixes-sequences",
        _MOE + "router.py",
        "            tensor.reshape(seq_length, -1) for tensor",
        "            tensor.reshape(bsz, seq_length, -1).transpose(0, 1).flatten(1) for tensor",
        "Tokens of all sequences in turn are taken for a sequence: what is balanced is no sequence. "
        "The router's gradient is that of another loss.",
    ),
    Fault(
        "aux-loss-discarded",
        _MOE + "router.py",
        "        return MoEAuxLossAutoScaler.apply(activation, aux_loss)\n",
        "        MoEAuxLossAutoScaler.apply(activation, aux_loss)\n        return activation\n",
        "The balancing loss hangs on a tensor that nobody uses. It is in the log, and has no gradient.",
    ),
    Fault(
        "aux-counts-local",
        _MOE + "moe_utils.py",
        "reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), reduce_group)",
        "routing_map.sum(dim=0) * reduce_group.size()",
        "Under sequence parallelism each rank balances its own part of the sequence. The gradient "
        "is that of another loss than one process has.",
    ),
    Fault(
        "aux-counted-in-recompute",
        _MOE + "router.py",
        "        return self.training and torch.is_grad_enabled()\n",
        "        return self.training\n",
        "A layer that is computed twice counts its tokens twice, and logs twice its losses.",
    ),
    Fault(
        "bias-counts-in-half",
        _MOE + "router.py",
        "counts = torch.zeros(config.num_moe_experts, dtype=torch.int64)",
        "counts = torch.zeros(config.num_moe_experts)",
        "In a bfloat16 model 257 tokens are counted as 256: a bias moves the wrong way, or not at all.",
    ),
    Fault(
        "expert-bias-in-half",
        _MOE + "router.py",
        "            self.expert_bias = moved.float() if bias.is_meta else bias.to(moved.device)\n",
        "            pass\n",
        "In a bfloat16 model a bias near 1 is too coarse to move by a thousandth: it stays for ever.",
    ),
    Fault(
        "bias-in-combine-weight",
        _MOE + "moe_utils.py",
        "    weights = scores.gather(1, chosen)\n",
        "    weights = preferred.gather(1, chosen)\n",
        "The bias that moves tokens also changes how much an expert's output counts.",
    ),
    Fault(
        "global-aux-current-tokens",
        _MOE + "router.py",
        " * (num_tokens * self.topk) / so_far.sum()\n",
        " * (num_tokens * self.topk) / counts.sum() / (self.num_counted + 1)\n",
        "What all microbatches have chosen so far is divided by the tokens of this one: after a long "
        "microbatch, a short one has a loss that is too large.",
    ),
    Fault(
        "global-aux-over-replicas",
        _MOE + "router.py",
        "        num_tokens *= self.tp_cp_group.size()\n",
        "        num_tokens *= self.tp_dp_cp_group.size()\n",
        "A microbatch's scores are divided by the tokens of all data-parallel ranks, and the gradients "
        "are averaged over them besides: more ranks make the loss weaker.",
    ),
)
