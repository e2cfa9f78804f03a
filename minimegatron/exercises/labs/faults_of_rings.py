"""Known mistakes where ranks share each sequence, as patches.

Megatron has no counterpart. One more stands in `faults`: "context-ranks-forgotten", the factor c of a
loss function that returns two values.
"""

from minimegatron.exercises.labs.fault import Fault

_RING = "core/transformer/context_parallel.py"

FAULTS_OF_RINGS = (
    Fault(
        "tokens-summed-over-dp-only",
        "core/distributed/finalize_model_grads.py",
        "_divide_by_num_tokens(model, num_tokens, pp_group, pg_collection.dp_cp)\n",
        "_divide_by_num_tokens(model, num_tokens, pp_group, pg_collection.dp)\n",
        "Gradients are summed over the ranks that share a sequence, but divided by the tokens of one "
        "of them: about c times too large, and with uneven masks different on each rank.",
    ),
    Fault(
        "context-ranks-read-other-samples",
        "training/data_iterators.py",
        "data_parallel_rank=parallel_state.get_data_parallel_rank(),\n",
        "data_parallel_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),\n",
        "Each rank of a context group reads a sample of its own, so the parts that attend to each "
        "other are of different texts. The loss falls nevertheless.",
    ),
    Fault(
        "labels-split-contiguously",
        "core/transformer/zigzag.py",
        "        else take_part(tensor, 2",
        '        else tensor.chunk(cp_group.size(), 1)[cp_group.rank()] if name == "labels"\n'
        "        else take_part(tensor, 2",
        "Tokens are dealt out in a zig-zag and their labels in a row, so most tokens learn to predict "
        "the next token of another place.",
    ),
    Fault(
        "rope-restarts-on-each-rank",
        "core/models/gpt/gpt_model.py",
        "        return angles if self.cp_group is None else "
        "zigzag.take_part(angles, 0, self.cp_group)\n",
        "        return angles[: len(angles) // self.config.context_parallel_size]\n",
        "Every rank counts its positions from 0, so tokens at other places of the sequence seem to "
        "stand beside each other. The loss is wrong.",
    ),
    Fault(
        "ring-takes-the-wrong-half",
        _RING,
        "        return Block(WHOLE, slice(length // 2), False)\n",
        "        return Block(WHOLE, slice(length // 2, None), False)\n",
        "From a rank before it, a rank takes the piece that lies after its own tokens: they see the "
        "future. The loss is wrong: once the model has learned to look there, it is too good.",
    ),
    Fault(
        "ring-merges-without-weights",
        _RING,
        "    return output * weight + other * other_weight, both\n",
        "    return output + other, both\n",
        "Each block's output is normalized by itself, and their sum is not an average any more. The "
        "weights come from both lse.",
    ),
    Fault(
        "ring-backward-with-partial-lse",
        _RING,
        "    probabilities = _probabilities(scores, lse)\n    grad_output",
        "    probabilities = _probabilities(scores, scores.logsumexp(dim=-1))\n    grad_output",
        "Backward takes each block's own softmax, whose probabilities add up to 1 in every block. "
        "They should be 1 in all blocks of a token together. The loss is right, gradients are not.",
    ),
    Fault(
        "ring-gradients-stop-early",
        _RING,
        "        return grad_query.to(query.dtype), *grads_hop.wait()\n",
        "        grads_hop.wait()\n        return grad_query.to(query.dtype), *grad_pair\n",
        "The gradients of keys and values are one hop short of home: each rank takes those of its "
        "neighbour's tokens for its own.",
    ),
    Fault(
        "masked-nan-multiplied-by-zero",
        _RING,
        '    return lse.masked_fill(lse == float("-inf"), 0.0)\n',
        "    return lse\n",
        "A token that may look nowhere in a block gets -inf - -inf = NaN. The loss mask multiplies it "
        "by 0, which is NaN still, and then all weights are.",
    ),
    Fault(
        "mask-of-own-columns",
        _RING,
        "columns = positions_of_rank(count, source, ranks, mask.device)",
        "columns = positions_of_rank(count, self.group.rank(), ranks, mask.device)",
        "The mask is read at the places of this rank's keys, though those of another are here.",
    ),
    Fault(
        "ring-drops-others-in-backward",
        _RING,
        "        with repeats_from(ctx.rng_state):\n            grads =",
        "        with repeats_from(None):\n            grads =",
        "Backward draws dropout anew, so it differentiates an attention that forward never computed; "
        "the random numbers after it are others too.",
    ),
    Fault(
        "hop-not-overlapped",
        _RING,
        "            payload=payload,\n        )\n",
        "            payload=payload,\n        )\n        self._handle.wait()\n",
        "Each hop is waited for as soon as it has started. All numbers stay right, and nothing travels "
        "while a block is computed.",
    ),
    Fault(
        "gathered-keys-in-rank-order",
        _RING,
        "    in_order = _order(ranks * key.size(-2), ranks, key.device).argsort()\n",
        "    in_order = torch.arange(ranks * key.size(-2), device=key.device)\n",
        "Gathered keys stand as the ranks have them, and the causal mask takes them for the order of "
        "the sequence.",
    ),
    Fault(
        "tokens-for-heads-in-rank-order",
        _RING,
        "    return tokens.index_select(0, _order(len(tokens), ranks, tensor.device).argsort())\n",
        "    return tokens\n",
        "The all-to-all gives each rank all tokens, the first rank's first. Causal attention takes "
        "that for the order of the sequence.",
    ),
)
