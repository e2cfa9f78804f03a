"""A language model of one's own, gated convolutions in place of attention: all that a run needs.

`docs/recipes/own_model.md` goes through it. It has the flags of `pretrain_gpt`.
"""

import torch.nn.functional as F

from minimegatron import pretrain_gpt
from minimegatron.core import tensor_parallel
from minimegatron.core.enums import ModelType
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.tensor_parallel.initial_weights import new_weight, weights_drawn_later
from minimegatron.core.transformer import layer_placement
from minimegatron.core.transformer.module import MegatronModule, PartOfModuleList
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.global_vars import get_args
from minimegatron.training.training import pretrain

WIDTH = 4
"""How many tokens a convolution sees."""


class GatedConvolution(MegatronModule):
    """x + down(silu(gate) * convolution(up)), [s, b, h] -> [s, b, h]; gate and up are made of x."""

    def __init__(self, config, tp_group):
        super().__init__(config)
        h, f, init = config.hidden_size, config.ffn_hidden_size, config.init_method
        new = {"config": config, "init_method": init, "tp_group": tp_group, "bias": True}
        self.gate_and_up = ColumnParallelLinear(h, 2 * f, stride=2, **new)
        self.down = RowParallelLinear(f, h, input_is_parallel=True, skip_bias_add=False, **new)
        shape = (f // tp_group.size(), 1, WIDTH)
        self.kernel = new_weight(shape, config.params_dtype, init, 0, tp_group)

    def forward(self, x):
        gate, up = self.gate_and_up(F.layer_norm(x, x.shape[-1:]))[0].chunk(2, dim=-1)
        up = F.pad(up.permute(1, 2, 0), (WIDTH - 1, 0))  # [b, f/t, WIDTH - 1 + s], zeros first
        mixed = F.conv1d(up, self.kernel, groups=self.kernel.size(0)).permute(2, 0, 1)
        return x + self.down(F.silu(gate) * mixed)[0]


class ConvolutionModel(MegatronModule):
    """One chunk of the model: its layers, on the first the embedding, on the last the loss."""

    def __init__(self, config, vocab_size, groups, pre_process, post_process, vp_stage):
        super().__init__(config)
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.tp_group, where = groups.tp, (config, vp_stage, groups.pp.rank())
        number, h = layer_placement.num_layers_of_chunk(*where), config.hidden_size
        new = {"config": config, "init_method": config.init_method, "tp_group": groups.tp}
        with weights_drawn_later():
            if pre_process:
                self.embedding = tensor_parallel.VocabParallelEmbedding(vocab_size, h, **new)
            layers = [GatedConvolution(config, groups.tp) for _ in range(number)]
            self.layers = PartOfModuleList(layers, layer_placement.num_layers_before_chunk(*where))
            if post_process:
                self.output_layer = ColumnParallelLinear(h, vocab_size, **new)
        self.initialize_weights(groups)

    def set_input_tensor(self, input_tensor):
        (self.input_tensor,) = input_tensor

    def forward(self, tokens, position_ids, attention_mask, labels=None, loss_mask=None):
        x = self.embedding(tokens).transpose(0, 1) if self.pre_process else self.input_tensor
        for layer in self.layers:
            x = layer(x)
        if not self.post_process:
            return x
        logits, labels = self.output_layer(x)[0], labels.t().contiguous()
        loss = tensor_parallel.vocab_parallel_cross_entropy(logits, labels, tp_group=self.tp_group)
        return loss.t().contiguous()


def model_provider(**where):
    args, groups = get_args(), ProcessGroupCollection.use_mpu_process_groups()
    config = core_transformer_config_from_args(args)
    return ConvolutionModel(config, args.padded_vocab_size, groups, **where)


if __name__ == "__main__":
    data = pretrain_gpt.train_valid_test_datasets_provider
    pretrain(data, model_provider, ModelType.encoder_or_decoder, pretrain_gpt.forward_step)
