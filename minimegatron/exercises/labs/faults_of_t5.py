"""Known mistakes in T5, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_T5 = (
    Fault(
        "encoder-gradient-not-added",
        "core/pipeline_parallel/steps.py",
        "    for handed_on, grad_from_behind in zip(outputs[1:], grads[1:], strict=False):\n"
        "        user_results.add_gradient(handed_on, grad_from_behind)\n",
        "",
        "A decoder stage sends back its own gradient of the encoder's output, without what the stages "
        "after it sent. So the encoder learns from one decoder stage only. With one decoder stage "
        "nothing is wrong.",
    ),
    Fault(
        "encoder-gradient-added-to-decoder",
        "core/pipeline_parallel/steps.py",
        "zip(outputs[1:], grads[1:], strict=False)",
        "zip(inputs, grads[1:], strict=False)",
        "The gradient of the encoder's output that came from the next stage is added to that of the "
        "stage's first input. On the first decoder stage this is the encoder's output; on later ones "
        "it is the decoder's own state. Where the two have different lengths, the addition raises an "
        "error.",
    ),
    Fault(
        "position-embedding-of-one-stack",
        "core/models/T5/stack_split.py",
        "    return ranks_with_word_embedding_of_t5(split, False, pp_ranks) if is_learned else ",
        "    return pp_ranks[:1] if is_learned else ",
        "Each stack trains its copy of the positions with a gradient of its own: the copies are equal "
        "at first, and drift apart.",
    ),
    Fault(
        "position-copies-without-own-bucket",
        "core/distributed/param_and_grad_buffer.py",
        'getattr(param, "shared_embedding", False) or hasattr(param, "shared")\n',
        'getattr(param, "shared_embedding", False)\n',
        "With ZeRO-1 the copies of the positions lie in buckets with other weights, so a data-parallel "
        "rank has other elements of them on each stage, and sums these.",
    ),
    Fault(
        "cross-attention-on-decoder-states",
        "core/transformer/cross_attention.py",
        "        context_mask,\n        context,\n",
        "        context_mask,\n        hidden_states,\n",
        "Cross attention looks at the decoder's own states: the answer never sees the question, and a "
        "token sees all that comes after it. The mask has the question's length: if the answer's is "
        "another one, attention raises an error. If both are of one length, nothing fails.",
    ),
    Fault(
        "cross-attention-global-tp-group",
        "core/transformer/cross_attention.py",
        '            "tp_group": tp_group,\n        }\n',
        "        }\n",
        "Two projections of cross attention use the tensor-parallel group of the whole program. A "
        "model with groups of its own sums over the wrong ranks, or finds none. So it is in "
        "Megatron-Core 0.16.1.",
    ),
)
