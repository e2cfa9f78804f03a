"""Pretrain a Mamba-2 model, or a hybrid of it with attention.

It is `pretrain_gpt` but for the model: batches, loss and forward step are the same functions, and the
schedules ask no stage what it computes. Counterpart: `pretrain_mamba.py` at the top of Megatron-LM.
"""

from minimegatron.core.enums import ModelType
from minimegatron.core.models.mamba.mamba_layer_specs import get_mamba_stack_spec
from minimegatron.core.models.mamba.mamba_model import MambaModel
from minimegatron.pretrain_gpt import (
    forward_step,
    train_valid_test_datasets_provider,
)
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.global_vars import get_args
from minimegatron.training.gpt_evaluation import after_evaluation, write_sample
from minimegatron.training.training import pretrain


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> MambaModel:
    """Builds one chunk of the model. `pre_process`: it has the embedding; `post_process`: the loss."""
    args = get_args()
    return MambaModel(
        config=core_transformer_config_from_args(args),
        mamba_stack_spec=get_mamba_stack_spec(qk_layernorm=args.qk_layernorm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        hybrid_override_pattern=args.hybrid_override_pattern,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )


def main() -> None:
    """The whole run."""
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        process_non_loss_data_func=after_evaluation,
        args_defaults={"model_family": "mamba"},
        non_loss_data_func=write_sample,
    )


if __name__ == "__main__":
    main()
