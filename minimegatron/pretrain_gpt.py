"""Pretrain a GPT: the file a learner copies and edits.

It calls `pretrain` once, and is then called back through the functions that `main` hands over.
Counterpart: `pretrain_gpt.py` at the top of Megatron-LM.

The functions come in this order: the model, the data, one microbatch, the run.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron.core import parallel_state
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.core.datasets.stdlib_corpus import STDLIB, StdlibGPTDataset
from minimegatron.core.datasets.utils import get_blend_from_list
from minimegatron.core.enums import ModelType
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.core.transformer import multi_token_prediction as mtp
from minimegatron.core.transformer.layer_placement import ranks_with_word_embedding
from minimegatron.core.utils import get_attr_wrapped_model, or_one
from minimegatron.training import gpt_evaluation
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.global_vars import get_args, get_timers, get_tokenizer
from minimegatron.training.result_checks import check_loss
from minimegatron.training.training import pretrain
from minimegatron.training.utils import (
    GPT_BATCH_KEYS,
    GPT_FIELDS,
    BatchKeys,
    batch_keys,
    check_loss_mask,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)

stimer = StragglerDetector()


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    """Builds one chunk of the model. `pre_process`: it has the embedding; `post_process`: the loss."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    where = {"vp_stage": vp_stage, "pp_rank": parallel_state.get_pipeline_model_parallel_rank()}
    layer_specs = get_gpt_decoder_block_spec(config, **where)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_specs,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer_specs, **where),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Of one pipeline's ranks, those that hold the word embedding, or a copy of it."""
    args = get_args()
    return ranks_with_word_embedding(args, not args.untie_embeddings_and_output_weights, pp_ranks)


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int], vp_stage: int | None = None
) -> list[Any]:
    """Train, validation and test datasets, for a chunk that needs them."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=get_tokenizer(),
        blend=get_blend_from_list(args.data_path) or ([STDLIB], None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    dataset_class = StdlibGPTDataset if args.data_path is None else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset_class, train_val_test_num_samples, partial(has_data, vp_stage), config
    ).build()


def has_data(vp_stage: int | None) -> bool:
    """True for the chunk that takes in tokens, and for one that compares with labels or predicts
    further tokens."""
    return bool(batch_keys(vp_stage, keys_of_chunks()))


def keys_of_chunks() -> BatchKeys:
    """Which chunk needs what of a batch."""
    args = get_args()
    has_more = args.mtp_num_layers is not None
    more = [(partial(mtp.mtp_on_this_rank, args), ("tokens", "position_ids"))] if has_more else []
    return (*GPT_BATCH_KEYS, *more)


def get_batch(
    data_iterator: Iterator | None, vp_stage: int | None = None
) -> tuple[torch.Tensor | None, ...]:
    """tokens, labels, loss_mask, attention_mask, position_ids; [b, s/c], None where not needed."""
    size = get_args().unpadded_vocab_size
    batch = get_batch_on_this_tp_rank(data_iterator, vp_stage, keys_of_chunks(), vocab_size=size)
    batch = get_batch_on_this_cp_rank(batch, parallel_state.get_context_parallel_group())
    return tuple(batch[name] for name in GPT_FIELDS)


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: torch.nn.Module | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one microbatch, on the last stage.

    Args:
        loss_mask: float32 [b, s/c], 0 for tokens that do not count, 1 or another weight for others.
        output_tensor: what the model returned: the loss of each token, float32 [b, s/c].
        model: the chunk that computed them; a bad loss is reported with its microbatch.

    Returns the summed loss, the number of tokens (float32; of weights it is their sum, where Megatron
    cuts their fractions off), and what is logged: both, as a pair. The schedule
    divides one by the other; see `forward_step_calc_loss`. Where ranks that share sequences have
    different numbers of tokens that count, `--calculate-per-token-loss` gives each token equal weight.
    """
    check_loss_mask(loss_mask, output_tensor)
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().detach()
    check_loss(loss.detach() / or_one(num_tokens), model)
    reporting_loss = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": reporting_loss}


def forward_step(
    data_iterator: Iterator | None, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Callable]:
    """One microbatch through one chunk. The schedule calls it, and later the function it returns.

    On a chunk that embeds nothing the tokens are None: its input came from the stage before, by
    `set_input_tensor`. On a chunk without output layer the result goes to the next stage, and the
    loss function is not called.

    With `return_schedule_plan`, `model` comes without wrappers, and its forward in nodes is returned
    in place of the output: see `combined_1f1b`.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()

    if return_schedule_plan:
        plan = model.build_schedule_plan(
            tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask
        )
        return plan, partial(loss_func, loss_mask, model=model)
    with stimer:
        output_tensor = model(
            tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask
        )
    return output_tensor, partial(loss_func, loss_mask, model=model)


def main() -> None:
    """The whole run."""
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
        process_non_loss_data_func=gpt_evaluation.after_evaluation,
        args_defaults={"model_family": "gpt"},
        non_loss_data_func=gpt_evaluation.write_sample,
    )


if __name__ == "__main__":
    main()
