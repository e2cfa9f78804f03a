"""Known mistakes in orders of work, their messages and their placement, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_ORDERS = "core/orders/"

FAULTS_OF_ORDERS = (
    Fault(
        "received-as-early-as-possible",
        _ORDERS + "lowering.py",
        "        placed += _at_their_sends(receives, part.starts)\n",
        "        placed += _before_their_use(receives)\n",
        "On a wire without tags two ranks no longer agree on the order of their messages: a gradient "
        "is taken for an activation, or both wait for ever.",
    ),
    Fault(
        "handed-over-with-its-graph",
        _ORDERS + "planned_schedule.py",
        "            leaf = made.detach()\n",
        "            leaf = made\n",
        "Two neighbouring stages are on one rank. The backward of the second runs on into the first, "
        "whose own backward then finds its graph gone.",
    ),
    Fault(
        "handed-over-to-the-next-rank",
        _ORDERS + "placement.py",
        'V = Rule("v", lambda rank, chunk, p, v: 2 * p - 1 - rank if chunk else rank, 2)',
        'V = Rule("v", lambda rank, chunk, p, v: p + rank if chunk else rank, 2)',
        "The model is folded as a loop, not as a V: loss and gradients are right, but the last stage "
        "is on the last rank, and messages go where none should be needed.",
    ),
    Fault(
        "data-in-the-order-of-the-loader",
        _ORDERS + "planned_schedule.py",
        "                    _data_in_order(iterator, _forwards_of(step, chunk_id)),\n",
        "                    iterator,\n",
        "The first stage forwards its microbatches in another order than the last stage compares them "
        "in: each loss is computed with another microbatch's labels.",
    ),
    Fault(
        "reports-in-the-order-of-work",
        _ORDERS + "planned_schedule.py",
        "        return _in_order_of_microbatches(frame.forward_data_store, step)\n",
        "        return frame.forward_data_store\n",
        "The losses come back in the order in which the last stage has computed them.",
    ),
    Fault(
        "asked-for-sizes-too-early",
        _ORDERS + "planned_schedule.py",
        "    return TAGGED if has_tags and not sends_shapes(config) else UNTAGGED\n",
        "    return TAGGED if has_tags else UNTAGGED\n",
        "With lengths that vary, a receive waits for the sizes of a tensor that its sender can make "
        "only after this rank has gone on.",
    ),
    Fault(
        "tied-copies-of-one-rank-not-summed",
        "core/distributed/finalize_model_grads.py",
        "        total = sum(grads[1:], start=grads[0])\n",
        "        total = grads[0]\n",
        "Where the model begins and ends on one rank, its two copies of the tied embedding become "
        "different.",
    ),
)
