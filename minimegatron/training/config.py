"""What a training run is told: one frozen dataclass per concern.

Filled in by: `arguments.parse_args`, once. Read by: everything in `training`; changed by nobody. Each
field is also a command-line flag, under Megatron's name; `argument_utils` makes the one from the
other, and the string below a field is that flag's help. Counterpart: the dataclasses of
`megatron.training.training_config`, and the argument groups of `megatron.training.arguments`.

`derived()` marks what is not a flag: it follows from the flags and the launcher's environment.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


def flag(
    default: Any = None,
    *,
    name: str | None = None,
    required: bool = False,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    nargs: int | str | None = None,
) -> Any:
    """A field with a flag. `minimum` is allowed, `above` and `below` are not: open bounds.

    `name` replaces the flag's usual name, `--` and the field's name with dashes. A boolean that is
    True by default needs one, since its flag turns it off.
    """
    limits = {"minimum": minimum, "above": above, "below": below}
    return field(
        default=default,
        metadata={"name": name, "required": required, "nargs": nargs, **limits},
    )


def derived(default: Any = None) -> Any:
    """A field without a flag, worked out from the others before anything starts."""
    return field(default=default, metadata={"derived": True})


@dataclass(frozen=True)
class ModelConfig:
    """The transformer"""

    num_layers: int = flag(required=True, minimum=1)
    """Transformer layers in all, over all stages."""
    hidden_size: int = flag(required=True, minimum=1)
    """Width of the residual stream."""
    num_attention_heads: int = flag(required=True, minimum=1)
    """Query heads."""
    max_position_embeddings: int = flag(required=True, minimum=1)
    """Rows of the position table; no sequence may be longer."""
    ffn_hidden_size: int | None = flag(minimum=1)
    """Width of the MLP; by default 4 x hidden size, or 8/3 of it with --swiglu."""
    kv_channels: int | None = flag(minimum=1)
    """Width of one head; by default hidden size / heads."""
    group_query_attention: bool = flag(False)
    """Let several query heads share one key/value head; needs --num-query-groups."""
    num_query_groups: int = flag(1, minimum=1)
    """Key/value heads with --group-query-attention."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = flag("learned_absolute")
    """How the model knows positions."""
    rotary_base: int = flag(10000, minimum=1)
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(1.0, above=0.0)
    """Share of each head's width that is rotated."""
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm")
    """Normalisation before each sublayer."""
    norm_epsilon: float = flag(1e-5, above=0.0)
    """Added to the variance."""
    qk_layernorm: bool = flag(False)
    """Normalise queries and keys per head."""
    swiglu: bool = flag(False)
    """Gated MLP with SiLU instead of GELU."""
    openai_gelu: bool = flag(False)
    """GELU by its tanh approximation, which GPT-2 was trained with."""
    add_bias_linear: bool = flag(True, name="--disable-bias-linear")
    """Turn off the biases of the linear layers."""
    add_qkv_bias: bool = flag(False)
    """Keep the bias of the query/key/value projection with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = flag(False)
    """Give the output layer a weight of its own."""
    make_vocab_size_divisible_by: int = flag(128, minimum=1)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    padded_vocab_size: int | None = flag(minimum=1)
    """Rows of the embedding, padding included; by default worked out from the tokenizer."""
    hidden_dropout: float = flag(0.1, minimum=0.0, below=1.0)
    """Dropout probability of the residual stream."""
    attention_dropout: float = flag(0.1, minimum=0.0, below=1.0)
    """Dropout probability of the attention weights."""
    init_method_std: float = flag(0.02, above=0.0)
    """Standard deviation of the initial weights."""
    recompute_granularity: Literal["selective", "full"] | None = flag()
    """Recompute in backward: attention's core only, or whole layers."""
    recompute_method: Literal["uniform", "block"] | None = flag()
    """full: groups of layers, or the first layers of each chunk."""
    recompute_num_layers: int | None = flag(minimum=1)
    """full: layers per group, or how many."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are cut over ranks"""

    tensor_model_parallel_size: int = flag(1, minimum=1)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = flag(1, minimum=1)
    """Stages."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(minimum=1)
    """Interleave, with this many layers per chunk."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(minimum=1)
    """Interleave, with this many chunks per stage."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        name="--microbatch-group-size-per-virtual-pipeline-stage", minimum=1
    )
    """Interleaving: microbatches per turn of a chunk; by default as many as stages."""
    pipeline_schedule: str | None = flag()
    """Order of work by name, such as gpipe, 1f1b or breadth-first, or FILE.py:FUNCTION that registers
    one; by default Megatron's choice for these sizes (no Megatron flag)."""
    overlap_p2p_comm: bool | None = flag(name="--overlap-p2p-communication")
    """Send between stages while computing; on by default where chunks interleave, and only there."""
    deallocate_pipeline_outputs: bool = flag(False)
    """Free a stage's output once it is sent."""
    variable_seq_lengths: bool = flag(False)
    """Send the shape ahead of every message between stages."""
    decoder_first_pipeline_num_layers: int | None = flag(minimum=1)
    """Layers on the first stage, where it should hold another number than the rest."""
    decoder_last_pipeline_num_layers: int | None = flag(minimum=1)
    """Layers on the last stage, likewise."""
    account_for_embedding_in_pipeline_split: bool = flag(False)
    """Count the embedding as a layer when layers are divided over stages."""
    account_for_loss_in_pipeline_split: bool = flag(False)
    """Count the loss as a layer when layers are divided over stages."""
    pipeline_model_parallel_layout: str | None = flag()
    """Which stage holds which layer, such as "Et*3|(tt|)*29,m|L"."""
    sequence_parallel: bool = flag(False)
    """Split what lies between the tensor-parallel layers along the sequence."""
    delay_wgrad_compute: bool = flag(False)
    """Compute the layers' weight gradients after the backward of their microbatch, not in it."""
    defer_embedding_wgrad_compute: bool = flag(False)
    """Compute the output layer's weight gradients after the last backward."""
    wgrad_deferral_limit: int = flag(0, minimum=0)
    """How many microbatches --defer-embedding-wgrad-compute may put off; 0 for all."""
    use_tp_pp_dp_mapping: bool = flag(False)
    """Number the ranks of a pipeline before those of data parallelism."""
    virtual_pipeline_model_parallel_size: int | None = derived()
    """Chunks per stage; None without interleaving."""
    data_parallel_size: int = derived(1)
    """Copies of the model: world size / (tensor x pipeline)."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats"""

    bf16: bool = flag(False)
    """Weights and activations in bfloat16, with float32 main weights in the optimizer."""
    fp16: bool = flag(False)
    """Weights and activations in float16, likewise, with loss scaling."""
    loss_scale: float | None = flag(above=0.0)
    """fp16: a constant loss scale; by default a dynamic one."""
    initial_loss_scale: float = flag(2.0**32, above=0.0)
    """fp16: where the dynamic loss scale begins."""
    min_loss_scale: float = flag(1.0, above=0.0)
    """fp16: where it stops falling."""
    loss_scale_window: int = flag(1000, minimum=1)
    """fp16: good steps before it doubles."""
    hysteresis: int = flag(2, minimum=1)
    """fp16: bad steps before it halves."""
    accumulate_allreduce_grads_in_fp32: bool = flag(False)
    """Accumulate and reduce gradients in float32; always on with --bf16."""


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop"""

    micro_batch_size: int = flag(required=True, minimum=1)
    """Sequences per microbatch and model copy."""
    global_batch_size: int | None = flag(minimum=1)
    """Sequences per step, over all copies; by default one microbatch per copy."""
    rampup_batch_size: list[int] | None = flag(nargs=3)
    """Start the global batch size here, raise it by this much, until this many samples are used."""
    train_iters: int = flag(required=True, minimum=0)
    """Steps."""
    calculate_per_token_loss: bool = flag(False)
    """Divide by the number of tokens of the whole global batch, instead of each microbatch's."""
    exit_interval: int | None = flag(minimum=1)
    """Save and end when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = flag(above=0.0)
    """Save and end after this many minutes."""
    sample_tokens: int = flag(0, minimum=0)
    """Tokens of text to generate at each evaluation (no Megatron flag)."""


@dataclass(frozen=True)
class OptimizationConfig:
    """The optimizer"""

    optimizer: Literal["adam", "sgd"] = flag("adam")
    """Update rule; adam decouples its weight decay (AdamW)."""
    lr: float = flag(required=True, above=0.0)
    """Highest learning rate."""
    weight_decay: float = flag(0.01, minimum=0.0)
    """Weight decay of matrices; vectors have none."""
    adam_beta1: float = flag(0.9, minimum=0.0, below=1.0)
    """Decay of the first moment."""
    adam_beta2: float = flag(0.999, minimum=0.0, below=1.0)
    """Decay of the second moment."""
    adam_eps: float = flag(1e-8, above=0.0)
    """Added to the root of the second moment."""
    sgd_momentum: float = flag(0.9, minimum=0.0, below=1.0)
    """Momentum of sgd."""
    clip_grad: float = flag(1.0, minimum=0.0)
    """Largest global gradient norm; 0 for no clipping."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning rate and weight decay over time"""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear"
    )
    """Shape of the way down."""
    lr_decay_iters: int | None = flag(minimum=1)
    """Steps until the lowest learning rate; by default all."""
    lr_warmup_iters: int = flag(0, minimum=0)
    """Steps of linear warm-up."""
    lr_warmup_fraction: float | None = flag(minimum=0.0, below=1.0)
    """The same as a share of the decay steps."""
    lr_warmup_init: float = flag(0.0, minimum=0.0)
    """Learning rate that warm-up starts from."""
    min_lr: float = flag(0.0, minimum=0.0)
    """Lowest learning rate."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential"
    )
    """WSD: shape of its last phase."""
    lr_wsd_decay_iters: int | None = flag(minimum=1)
    """WSD: length of its last phase."""
    start_weight_decay: float | None = flag(minimum=0.0)
    """Weight decay at the beginning, where it grows."""
    end_weight_decay: float | None = flag(minimum=0.0)
    """Weight decay at the end."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant")
    """How weight decay grows."""
    override_opt_param_scheduler: bool = flag(False)
    """Where the checkpoint's schedule is another: go on with this one."""
    use_checkpoint_opt_param_scheduler: bool = flag(False)
    """Where the checkpoint's schedule is another: go on with the checkpoint's."""


@dataclass(frozen=True)
class GradientConfig:
    """Gradients over data-parallel ranks"""

    DDP_impl: Literal["local", "torch"] = flag("local")
    """Megatron's contiguous buffers, or torch's DistributedDataParallel."""
    overlap_grad_reduce: bool = flag(False)
    """Reduce each bucket while backward goes on."""
    ddp_bucket_size: int | None = flag(minimum=1)
    """Parameters per bucket."""
    ddp_average_in_collective: bool = flag(False)
    """Let the collective divide by the number of copies."""
    use_distributed_optimizer: bool = flag(False)
    """Shard the optimizer's state over data-parallel ranks (ZeRO-1)."""
    overlap_param_gather: bool = flag(False)
    """ZeRO-1: gather updated parameters while the next forward goes on."""
    check_for_nan_in_loss_and_grad: bool = flag(True, name="--no-check-for-nan-in-loss-and-grad")
    """Go on with NaN or Inf in a loss or gradient; with a dynamic loss scale that is so anyway."""
    check_for_spiky_loss: bool = flag(False)
    """Print a line when a microbatch's loss is ten times the largest of the first hundred."""
    log_num_zeros_in_grad: bool = flag(False)
    """Count and log the zeros of the gradient."""


@dataclass(frozen=True)
class ValidationConfig:
    """Evaluation"""

    eval_iters: int = flag(100, minimum=0)
    """Global batches per evaluation; 0 for none."""
    eval_interval: int | None = flag(1000, minimum=1)
    """Steps between evaluations during training."""


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    data_path: list[str] | None = flag(nargs="*")
    """Prefixes of indexed datasets (without .bin and .idx), each after a weight or all without; by
    default the Python standard library's own source text."""
    data_cache_path: str | None = flag()
    """Folder for the finished order of samples, to begin the next run faster."""
    split: str = flag("949,50,1")
    """Shares of training, validation and test data."""
    seq_length: int = flag(required=True, minimum=1)
    """Tokens per sequence."""
    tokenizer_type: Literal["ByteLevelTokenizer", "BPETokenizer"] = flag("ByteLevelTokenizer")
    """How text becomes tokens."""
    tokenizer_file: str | None = flag()
    """BPETokenizer: its tokenizer.json."""
    dataloader_type: Literal["single", "cyclic"] = flag("single")
    """One pass in the dataset's own order, or reshuffled epochs."""
    num_workers: int = flag(0, minimum=0)
    """Loader processes; 0 loads in the training process."""
    eod_mask_loss: bool = flag(False)
    """Do not count the loss where the input is an end-of-document token."""


@dataclass(frozen=True)
class RNGConfig:
    """Random numbers"""

    seed: int = flag(1234, minimum=1)
    """Seed of weights, data order and dropout."""
    data_parallel_random_init: bool = flag(False)
    """Different dropout on each copy of the model."""


@dataclass(frozen=True)
class LoggerConfig:
    """Logs"""

    log_interval: int = flag(100, minimum=1)
    """Steps between log lines."""
    tensorboard_dir: str | None = flag()
    """Folder for TensorBoard to read: what the log lines say, as curves."""
    timing_log_level: Literal[0, 1, 2] = flag(0)
    """0 times steps, 1 the parts of a step, 2 every forward, backward and message."""


@dataclass(frozen=True)
class TracingConfig:
    """Seeing it (no Megatron flags)"""

    trace: str | None = flag()
    """Folder to record every call of the chain in; look at it with `minimegatron trace`."""
    trace_first_step: int = flag(0, minimum=0)
    """First training step to record, counted from 0."""
    trace_num_steps: int | None = flag(minimum=1)
    """Training steps to record; by default all, and evaluation too."""
    pace_forward_ms: float | None = flag(minimum=0.0)
    """Pad each forward of a chunk to this many milliseconds, to see the schedule by itself."""
    pace_backward_ms: float | None = flag(minimum=0.0)
    """The same for each backward; give both."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints"""

    save: str | None = flag()
    """Folder to save checkpoints in."""
    load: str | None = flag()
    """Folder to load the latest checkpoint from; may be empty yet if it is also --save."""
    save_interval: int | None = flag(minimum=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int | None = flag(minimum=1)
    """Complete checkpoints to keep in --save; by default all (no Megatron flag)."""
    no_save_optim: bool = flag(False)
    """Leave the optimizer's state out."""
    no_save_rng: bool = flag(False)
    """Leave the random numbers out."""
    no_load_optim: bool = flag(False)
    """Take no optimizer state and no schedule from the checkpoint."""
    no_load_rng: bool = flag(False)
    """Take no random numbers from the checkpoint."""
    finetune: bool = flag(False)
    """Take the weights only, and begin at iteration 0."""


@dataclass(frozen=True)
class DistributedInitConfig:
    """Processes"""

    distributed_backend: Literal["nccl", "gloo"] | None = flag()
    """By default nccl where each process has a GPU to itself, else gloo."""
    distributed_timeout_minutes: int = flag(10, minimum=1)
    """Longest wait for another rank."""
    hang_timeout: float | None = flag(above=0.0)
    """Seconds without a call on any rank until the hang doctor says which rank waits for what, and ends
    the job. Longer than any pause: building data, saving (no Megatron flag)."""
    rank: int = derived(0)
    """This process, of all."""
    world_size: int = derived(1)
    """How many there are."""
    local_rank: int = derived(0)
    """This process, of those on this machine."""
    local_world_size: int = derived(1)
    """How many there are on this machine."""


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "training": TrainingConfig,
    "optimization": OptimizationConfig,
    "scheduler": SchedulerConfig,
    "gradients": GradientConfig,
    "validation": ValidationConfig,
    "data": DataConfig,
    "rng": RNGConfig,
    "logger": LoggerConfig,
    "tracing": TracingConfig,
    "checkpoint": CheckpointConfig,
    "distributed": DistributedInitConfig,
}
"""Every concern, in the order `--help` shows them."""


@dataclass(frozen=True)
class Arguments:
    """All concerns of one run, and what the user's `extra_args_provider` added.

    `args.parallel.tensor_model_parallel_size` says where a value belongs. Megatron's users write
    `args.tensor_model_parallel_size`; that finds the same field, since no name occurs twice.
    """

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    training: TrainingConfig
    optimization: OptimizationConfig
    scheduler: SchedulerConfig
    gradients: GradientConfig
    validation: ValidationConfig
    data: DataConfig
    rng: RNGConfig
    logger: LoggerConfig
    tracing: TracingConfig
    checkpoint: CheckpointConfig
    distributed: DistributedInitConfig
    extra: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """Reached only for names that are no section. Raises AttributeError for unknown ones."""
        if name.startswith("__"):
            raise AttributeError(name)
        for section, config in SECTIONS.items():
            if name in config.__dataclass_fields__:
                return getattr(self.__dict__[section], name)
        if name in self.__dict__["extra"]:
            return self.__dict__["extra"][name]
        raise AttributeError(f"no argument is called {name!r}")
