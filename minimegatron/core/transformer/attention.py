"""Self-attention: project to queries, keys and values, attend, project back.

Counterpart: `megatron.core.transformer.attention`.

Heads are what is cut: a heads of width d over t ranks. With grouped-query attention (Ainslie et al.
2023, https://arxiv.org/abs/2305.13245) g key/value heads serve a/g query heads each. The rows of the
one projection weight are laid out by group,

    [q .. q k v] [q .. q k v] ...      g groups of (a/g + 2) d rows,

so that cutting the rows evenly gives each rank whole groups.
"""

from functools import partial

from torch import Tensor

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel import recompute
from minimegatron.core.tensor_parallel.weight_grad_store import DelayedWgrad
from minimegatron.core.transformer.context_parallel_groups import options_of_core
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.layer_checks import check_head_norms
from minimegatron.core.transformer.layer_parts import SelfAttentionSubmodules
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.rope_utils import apply_rotary_pos_emb
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.exports import all_of

# Megatron has cross attention here too.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.transformer.cross_attention")


class SelfAttention(DelayedWgrad, MegatronModule):
    """Multi-head self-attention over [s, b, h].

    Args:
        layer_number: from 1, in the whole model.
        attn_mask_type: see `AttnMaskType`.
        cp_comm_type: how ranks that share a sequence attend; None for the config's, for this layer.
        pg_collection: tp and cp are used; None for `parallel_state`'s.

    Raises:
        ValueError: `config.qk_layernorm` asks for norms that `submodules` lacks, or the reverse; a
            core attention that takes no groups cannot reach the tokens of other ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        check_head_norms(config, submodules)
        self.layer_number = layer_number
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        # The config has checked that t divides both.
        self.num_query_groups_per_partition = config.num_query_groups // pg_collection.tp.size()
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        width, heads = config.kv_channels, config.num_attention_heads
        options = {"config": config, "tp_group": pg_collection.tp}
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (heads + 2 * config.num_query_groups) * width,
            init_method=config.init_method,
            bias=config.add_bias_linear or config.add_qkv_bias,
            **options,
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            **options_of_core(config, submodules.core_attention, cp_comm_type, pg_collection),
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )
        # Every rank has these weights whole but sees its own heads only, so their gradients are
        # terms of a sum over tensor-parallel ranks, with and without sequence parallelism.
        norm = {"eps": config.layernorm_epsilon, "gradient_is_partial": True}
        self.q_layernorm = build_module(submodules.q_layernorm, config, width, **norm)
        self.k_layernorm = build_module(submodules.k_layernorm, config, width, **norm)

    def get_query_key_value_tensors(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] -> q [s, b, a/t, d], k and v [s, b, g/t, d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        s, b = mixed.shape[:2]
        groups, width = self.num_query_groups_per_partition, self.config.kv_channels
        by_group = mixed.view(s, b, groups, self.heads_per_group + 2, width)
        query, key, value = by_group.split([self.heads_per_group, 1, 1], dim=3)
        query = query.reshape(s, b, groups * self.heads_per_group, width)
        key, value = key.squeeze(3), value.squeeze(3)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        checkpoint_core_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends over the whole sequence.

        Args:
            hidden_states: [s, b, h]; [s/t, b, h] with sequence parallelism; s/c for s everywhere with
                context parallelism.
            attention_mask: see `DotProductAttention`.
            rotary_pos_emb: angles [s, 1, 1, d'] of this rank's tokens, or None.
            checkpoint_core_attention: recompute the core in backward (selective recompute): without
                a fused kernel its [b, a/t, s, s] probabilities cost much memory and little time. A ring
                keeps none, and would send keys and values once more.

        Returns:
            (as `hidden_states`, bias to add).
        """
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        if rotary_pos_emb is not None:
            query = apply_rotary_pos_emb(query, rotary_pos_emb)
            key = apply_rotary_pos_emb(key, rotary_pos_emb)
        again = checkpoint_core_attention and self.training
        core = self.core_attention
        attend = partial(recompute.checkpoint, core, False) if again else core
        return self.linear_proj(attend(query, key, value, attention_mask))
