"""Known mistakes in combined 1F1B, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_PP = "core/pipeline_parallel/"
_NODES = "core/models/gpt/fine_grained_callables.py"
_PLAN = "core/models/common/model_chunk_schedule_plan.py"

FAULTS_OF_COMBINED = (
    Fault(
        "combined-without-extra-warmup",
        _PP + "schedule_table.py",
        "num_warmup += 1 if overlap_moe_expert_parallel_comm else 0",
        "num_warmup += 0",
        "Without one more warm-up forward the last stage pairs a forward with its own backward, which "
        "needs the loss of the forward beside it. There is none yet: taking it raises StopIteration.",
    ),
    Fault(
        "chunk-zero-is-false",
        _PP + "combined_1f1b.py",
        "    if b is not None:\n        backward_step_helper_postprocess(b)\n",
        "    if b_chunk_id:\n        backward_step_helper_postprocess(b)\n",
        "A chunk's number is taken for a yes or no: after a backward of chunk 0 nothing is counted, "
        "and its gradients are launched at the end of the step.",
    ),
    Fault(
        "residual-gradient-lost",
        _NODES,
        "node.layer_state.residual = node.detach(hidden_states)",
        "node.layer_state.residual = hidden_states.detach()",
        "What skips the experts is cut off from its graph, and its gradient is added nowhere: every "
        "layer trains without the short way.",
    ),
    Fault(
        "shared-expert-gradient-lost",
        _NODES,
        "node.layer_state.shared_expert_output = node.detach(shared_expert_output)",
        "node.layer_state.shared_expert_output = shared_expert_output.detach()",
        "The shared expert's output is cut off from its graph: its weights never move.",
    ),
    Fault(
        "free-saved-input",
        _NODES,
        "is_sorted = num_sources > 1 and (num_local_experts or 1) > 1",
        "is_sorted = num_sources > 1",
        "A rank with one expert does not sort: the expert has saved the very tensor that came, and its "
        "backward finds that memory given back.",
    ),
    Fault(
        "free-input-of-one-rank",
        _NODES,
        "is_sorted = num_sources > 1 and (num_local_experts or 1) > 1",
        "is_sorted = (num_local_experts or 1) > 1",
        "With one rank nothing is sorted either: what the experts save are views of what is freed. "
        "Reading them ends the process.",
    ),
    Fault(
        "final-norm-outside-plan",
        _NODES,
        "        if model.decoder.final_layernorm is not None:\n",
        "        if False:\n",
        "The layers run as nodes and the block that holds them does not, so nobody applies its final "
        "norm: the loss is wrong.",
    ),
    Fault(
        "loss-in-half",
        _NODES,
        "        return float16_to_fp32(output) if is_half else output\n",
        "        return output\n",
        "The wrapper that gives float32 to callers is passed by: a loss is computed from logits in "
        "bfloat16.",
    ),
    Fault(
        "combined-loss-from-globals",
        _PP + "combined_1f1b.py",
        "                forward_data_store,\n                cp_group_size,\n",
        "                forward_data_store,\n                1,\n",
        "The caller's own groups do not reach the loss: a mean over two context ranks counts half.",
    ),
    Fault(
        "wgrad-not-beside-the-all-to-all",
        _PLAN,
        "        b.mlp.backward_dw()\n",
        "",
        "Delayed weight gradients wait for the end of the step, where they hide no all-to-all.",
    ),
    Fault(
        "plan-kept",
        _PP + "combined_1f1b.py",
        "    output_tensor.schedule_plan = output_tensor.loss_input = None\n",
        "",
        "An output that somebody keeps keeps its plan, and with it every node of the microbatch.",
    ),
    Fault(
        "a2a-not-overlapped",
        _PP + "schedule_node.py",
        "    return tuple(zip(*map(exchange.start, tensors), strict=True))\n",
        "    started = [exchange.start(tensor) for tensor in tensors]\n"
        "    [handle.wait() for _, handle in started]\n"
        "    return tuple(zip(*started, strict=True))\n",
        "Each all-to-all is waited for as soon as it has started. All numbers stay right, and nothing "
        "is hidden.",
    ),
    Fault(
        "exchange-of-another-forward",
        _PP + "schedule_node.py",
        "        exchange, handles = self.exchange.reversed(), []\n",
        "        exchange, handles = self.get_exchange().reversed(), []\n",
        "A backward asks the dispatcher how many tokens went where, when it is in another forward "
        "already. The numbers do not fit, which raises a ValueError.",
    ),
    Fault(
        "dropout-of-all-ranks-alike",
        _NODES,
        "        with dropout_rng(self.layer.config, self.layer.training):\n",
        "        if True:\n",
        "Nodes do not enter the random stream that a whole block enters: with sequence parallelism all "
        "ranks drop the same places of their parts.",
    ),
    Fault(
        "tied-weight-has-two-gradients",
        _NODES,
        "        if is_tied and model.pre_process and model.post_process:\n",
        "        if False:\n",
        "The tied weight gets a gradient from the output layer, and much later one from the embedding. "
        "Its bucket may have been launched between the two.",
    ),
)
