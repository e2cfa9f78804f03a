"""Known mistakes about which ranks an expert's parameters belong to, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

FAULTS_OF_EXPERT_LAYERS = (
    Fault(
        "expert-grads-over-edp",
        "core/distributed/distributed_data_parallel.py",
        "gradient_scaling_factor(self.config, self.ddp_config, num_ranks, group.size())",
        "gradient_scaling_factor(self.config, self.ddp_config, group.size(), group.size())",
        "An expert's gradient is divided by the number of its copies. It has already seen the tokens "
        "of all the ranks that share the experts: it is too large by their number.",
    ),
    Fault(
        "experts-in-dense-buffer",
        "core/parameter.py",
        'reduce="expt_dp"',
        'reduce="dp_cp"',
        "Experts are summed over the ranks that have the same dense parameters. Those have other "
        "experts: the gradients of different experts are added up.",
    ),
    Fault(
        "expert-mark-by-ep-only",
        "core/parameter_marks.py",
        "        and config.expert_tensor_parallel_size == config.tensor_model_parallel_size\n",
        "",
        "An expert that is cut where dense layers are whole loses its mark, and counts as a dense "
        "parameter: gradients of different pieces would be summed. The wrapper of the model looks for "
        "experts without a mark, and raises an error.",
    ),
    Fault(
        "expert-norm-by-tp-rank",
        "core/optimizer/optimizer.py",
        "        group = tensor_group(param, self.pg_collection)\n",
        "        group = self.pg_collection.tp\n",
        "Parameters that ranks hold whole are counted on the first tensor-parallel rank. The other "
        "ranks have other experts, whose biases are then not in the norm: clipping is too weak.",
    ),
    Fault(
        "expert-bias-summed-over-tp",
        "core/tensor_parallel/layers.py",
        "            self.bias.sequence_parallel = config.sequence_parallel and not is_expert\n",
        "            self.bias.sequence_parallel = config.sequence_parallel\n",
        "An expert's bias says that each tensor-parallel rank has a part of its gradient. Code that "
        "sums such parts over tensor-parallel ranks adds the biases of different experts.",
    ),
    Fault(
        "expert-key-local",
        "core/transformer/moe/experts.py",
        "PartOfModuleList(experts, first)",
        "PartOfModuleList(experts)",
        "Each rank counts its experts from 0. They begin alike on all ranks, so the loss is wrong from "
        "the first step on; and in a checkpoint those of one rank take the place of all others'.",
    ),
)
