"""The training loop, and what a user's program asks it for.

Counterpart: `megatron.training`. The names are looked up on first use: most load torch.
"""

from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "get_adlr_autoresume": "minimegatron.training.curves:get_adlr_autoresume",
        "get_args": "minimegatron.training.global_vars:get_args",
        "get_model": "minimegatron.training.model_setup:get_model",
        "get_one_logger": "minimegatron.training.curves:get_one_logger",
        "get_tensorboard_writer": "minimegatron.training.curves:get_tensorboard_writer",
        "get_timers": "minimegatron.training.global_vars:get_timers",
        "get_tokenizer": "minimegatron.training.global_vars:get_tokenizer",
        "get_train_valid_test_num_samples": (
            "minimegatron.training.data_iterators:get_train_valid_test_num_samples"
        ),
        "get_wandb_writer": "minimegatron.training.curves:get_wandb_writer",
        "initialize_megatron": "minimegatron.training.initialize:initialize_megatron",
        "is_last_rank": "minimegatron.training.utils:is_last_rank",
        "pretrain": "minimegatron.training.training:pretrain",
        "print_rank_0": "minimegatron.training.utils:print_rank_0",
        "print_rank_last": "minimegatron.training.utils:print_rank_last",
    },
)
