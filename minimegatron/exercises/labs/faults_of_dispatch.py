"""Known mistakes on the way of tokens to their experts and back, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_MOE = "core/transformer/moe/"

FAULTS_OF_DISPATCH = (
    Fault(
        "probs-gradient-dropped",
        _MOE + "token_dispatcher.py",
        "return exchange(hidden_states), exchange(probs)\n",
        "return exchange(hidden_states), exchange(probs.detach())\n",
        "Tokens are weighed as they should be, but no gradient comes back to the router: it learns "
        "from the balancing loss alone.",
    ),
    Fault(
        "gather-backward-slices",
        _MOE + "token_dispatcher.py",
        "return gather(hidden_states, group=group), probs\n",
        "return gather(hidden_states, False, group), probs\n",
        "Each rank keeps its own experts' gradient of its tokens, and throws away those of all other "
        "ranks' experts.",
    ),
    Fault(
        "unsorted-local-experts",
        _MOE + "token_dispatcher.py",
        "        if not self.is_sorted:\n            order = self.sort_input",
        "        if False:\n            order = self.sort_input",
        "Tokens stay in the order of their source, so an expert gets some that chose its neighbour. "
        "The loss is wrong, and would fall all the same.",
    ),
    Fault(
        "a2a-backward-same-splits",
        "core/tensor_parallel/uneven_rows.py",
        "ctx.splits = group, (input_split_sizes, output_split_sizes)\n",
        "ctx.splits = group, (output_split_sizes, input_split_sizes)\n",
        "The backward sends back as many gradients as tokens were sent, not as many as came. That "
        "raises a ValueError here; with equal splits nobody notices.",
    ),
    Fault(
        "empty-expert-skipped",
        _MOE + "experts.py",
        "zip(self.local_experts, tokens, probs, strict=True)\n",
        "zip(self.local_experts, tokens, probs, strict=True)\n            if len(mine[0])\n",
        "An expert that no token chose is not run, so its parameters get no gradient. Their bucket "
        "waits for one; at the step's end it raises a RuntimeError.",
    ),
)
