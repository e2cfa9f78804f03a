"""What a training run is told: one frozen dataclass per concern.

`arguments.parse_args` fills it in once; nothing changes it afterwards. Each field is also a
command-line flag, under Megatron's name; `argument_utils` makes the one from the other, and the
string below a field is that flag's help. Counterpart: the dataclasses of
`megatron.training.training_config`, and the argument groups of `megatron.training.arguments`.

Written here are the fields that no configuration of `core` has. What one of those has is written
there, with what its flag needs (see `core.knobs`); `section` adds it here.
"""

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.knobs import THE_SAME, derived, knob
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training import older_arguments
from minimegatron.training.train_state import TrainState

SECTIONS: dict[str, type] = {}
"""Every concern, in the order `--help` shows them."""


def section(name: str) -> Callable[[type], type]:
    """Class decorator: a frozen dataclass of core's fields of this section, then of the class's own."""

    def make(config: type) -> type:
        annotations: dict[str, Any] = {}
        for core in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
            for field in dataclasses.fields(core):
                about = field.metadata.get("knob")
                if about is not None and about.section == name:
                    dest = about.dest or field.name
                    default = field.default if about.given is THE_SAME else about.given
                    default = None if about.required else default
                    annotations[dest] = typing.get_type_hints(core)[field.name]
                    metadata = {"knob": about, "core": (core, field.name)}
                    setattr(config, dest, dataclasses.field(default=default, metadata=metadata))
        config.__annotations__ = annotations | config.__annotations__
        SECTIONS[name] = dataclass(frozen=True)(config)
        return SECTIONS[name]

    return make


@section("model")
class ModelConfig:
    """The transformer"""

    max_position_embeddings: int = knob(
        required=True, minimum=1, compared=("position_embedding_type", "rope")
    )
    """Rows of the position table; no sequence may be longer."""
    group_query_attention: bool = knob(False, compared=True)
    """Let several query heads share one key/value head; needs --num-query-groups."""
    position_embedding_type: Literal["learned_absolute", "rope", "relative", "none"] = knob(
        "learned_absolute", compared=True
    )
    """How the model knows positions; relative is T5's alone."""
    rotary_base: int = knob(
        10000, minimum=1, compared=("position_embedding_type", "learned_absolute")
    )
    """Base of the rotary frequencies."""
    rotary_percent: float = knob(
        1.0, above=0.0, compared=("position_embedding_type", "learned_absolute")
    )
    """Share of each head's width that is rotated."""
    openai_gelu: bool = knob(False, compared=True)
    """GELU by its tanh approximation, which GPT-2 was trained with."""
    untie_embeddings_and_output_weights: bool = knob(False, compared=True)
    """Give the output layer a weight of its own."""
    make_vocab_size_divisible_by: int = knob(128, minimum=1)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size; but a checkpoint's
    own padding stays where it can."""
    padded_vocab_size: int | None = knob(minimum=1)
    """Rows of the embedding, padding included; by default the checkpoint's, else worked out from the
    tokenizer."""
    unpadded_vocab_size: int = derived(0)
    """Tokens: those of the tokenizer; all rows where --padded-vocab-size says how many there are."""
    model_family: Literal["gpt", "bert", "t5", "mamba"] | None = derived()
    """What the program trains, if it says so: `args_defaults={"model_family": ...}`."""


@section("bert")
class BertConfig:
    """BERT and T5: masked text"""

    bert_binary_head: bool = knob(True, name="--bert-no-binary-head", compared=True)
    """Do not predict whether two pieces of text are in their order."""
    vocab_file: str | None = knob()
    """A WordPiece vocabulary, one piece a line; by default one made of the built-in text."""
    mask_prob: float = knob(0.15, above=0.0, below=1.0)
    """Share of the tokens to predict."""
    short_seq_prob: float = knob(0.1, minimum=0.0, below=1.0)
    """Share of samples that are shorter than they could be."""


@section("t5")
class T5Config:
    """T5: two stacks"""

    encoder_num_layers: int | None = knob(minimum=1, compared=True)
    """Layers of the encoder; by default --num-layers."""
    decoder_num_layers: int | None = knob(minimum=1, compared=True)
    """Layers of the decoder; by default --num-layers."""
    encoder_seq_length: int | None = knob(minimum=1)
    """Tokens that the encoder reads; by default --seq-length."""
    decoder_seq_length: int | None = knob(minimum=1)
    """Tokens that the decoder writes; by default --seq-length."""
    relative_attention_num_buckets: int = knob(32, minimum=4, compared=True)
    """Relative positions: rows of the table, each for a distance or for several."""
    relative_attention_max_distance: int = knob(128, minimum=1, compared=True)
    """Relative positions: all that is farther is one distance."""
    vocab_extra_ids: int = knob(0, minimum=0)
    """Tokens that stand for a piece of text that was taken out."""
    pipeline_model_parallel_split_rank: int | None = knob(minimum=1)
    """The first pipeline rank of the decoder; stages before it have the encoder."""


@section("mamba")
class MambaArguments:
    """Mamba"""

    hybrid_override_pattern: str | None = knob(compared=True)
    """A letter for each layer: M state space, * attention, - MLP; by default M for all. Write = before
    a pattern that begins with -."""


@section("parallel")
class ParallelConfig:
    """How the model and the batch are cut over ranks"""

    num_layers_per_virtual_pipeline_stage: int | None = knob(minimum=1)
    """Interleave, with this many layers per chunk."""
    num_virtual_stages_per_pipeline_rank: int | None = knob(minimum=1)
    """Interleave, with this many chunks per stage."""
    use_tp_pp_dp_mapping: bool = knob(False)
    """Number the ranks of a pipeline before those of data parallelism."""
    data_parallel_size: int = derived(1)
    """Copies of the model: world size / (tensor x context x pipeline)."""


@section("moe")
class MoEArguments:
    """Mixture of experts"""


@section("precision")
class PrecisionConfig:
    """Number formats"""


@section("training")
class TrainingConfig:
    """The training loop"""

    micro_batch_size: int = knob(required=True, minimum=1)
    """Sequences per microbatch and model copy."""
    global_batch_size: int | None = knob(minimum=1)
    """Sequences per step, over all copies; by default one microbatch per copy."""
    rampup_batch_size: list[int] | None = knob(nargs=3)
    """Start the global batch size here, raise it by this much, until this many samples are used."""
    train_iters: int | None = knob(minimum=0)
    """Steps; needed, unless --train-samples is given."""
    train_samples: int | None = knob(minimum=1)
    """In place of the steps: as many whole steps as there are in so many samples."""
    exit_interval: int | None = knob(minimum=1)
    """Save and end when the iteration is a multiple of this."""
    exit_duration_in_mins: float | None = knob(above=0.0)
    """Save and end after this many minutes."""
    empty_unused_memory_level: Literal[0, 1, 2] = knob(0)
    """GPU: give memory that no tensor uses back, 1 before each update, 2 also after it; slow."""
    cuda_graph_impl: str = knob("none")
    """full_iteration: capture a step, without the optimizer, as one CUDA graph, and replay it. A CPU
    records it and repeats its operations."""
    enable_cuda_graph: bool = knob(False)
    """The same, with --cuda-graph-scope full_iteration."""
    cuda_graph_scope: str | None = knob()
    """What is captured: full_iteration, a whole step."""
    cuda_graph_warmup_steps: int = knob(3, minimum=0)
    """Steps that run before one is captured; of training, and of evaluation."""
    sample_tokens: int = knob(0, minimum=0)
    """Tokens of text to generate at each evaluation (no Megatron flag)."""


@section("optimization")
class OptimizationConfig:
    """The optimizer"""


@section("scheduler")
class SchedulerConfig:
    """Learning rate and weight decay over time"""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = knob(
        "linear"
    )
    """Shape of the way down."""
    lr_decay_iters: int | None = knob(minimum=1)
    """Steps until the lowest learning rate; by default all."""
    lr_warmup_iters: int = knob(0, minimum=0)
    """Steps of linear warm-up."""
    lr_warmup_fraction: float | None = knob(minimum=0.0, below=1.0)
    """The same as a share of the decay steps."""
    lr_warmup_init: float = knob(0.0, minimum=0.0)
    """Learning rate that warm-up starts from."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = knob(
        "exponential"
    )
    """WSD: shape of its last phase."""
    lr_wsd_decay_iters: int | None = knob(minimum=1)
    """WSD: length of its last phase."""
    start_weight_decay: float | None = knob(minimum=0.0)
    """Weight decay at the beginning, where it grows."""
    end_weight_decay: float | None = knob(minimum=0.0)
    """Weight decay at the end."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = knob("constant")
    """How weight decay grows."""
    override_opt_param_scheduler: bool = knob(False)
    """Where the checkpoint's schedule is another: go on with this one."""
    use_checkpoint_opt_param_scheduler: bool = knob(False)
    """Where the checkpoint's schedule is another: go on with the checkpoint's."""


@section("gradients")
class GradientConfig:
    """Gradients over data-parallel ranks"""

    DDP_impl: Literal["local", "torch"] = knob("local")
    """Megatron's contiguous buffers, or torch's DistributedDataParallel."""
    check_for_spiky_loss: bool = knob(False)
    """Print a line when a microbatch's loss is ten times the largest of the first hundred."""


RERUN_MODES = Literal["disabled", "validate_results", "report_determinism_stats", "report_stats"]
ERROR_TYPES = Literal["correct_result", "transient_error", "persistent_error"]


@section("rerun")
class RerunConfig:
    """Steps that are run again"""

    rerun_mode: RERUN_MODES = knob("disabled")
    """What a NaN, an Inf or a spiky loss leads to. disabled: an error at once. validate_results: the
    step is run again, to tell a fault of the machine from others. The other two are the same: each step
    runs twice, and differences are printed."""
    error_injection_rate: int = knob(0, minimum=0)
    """Pretend that one of so many results is bad; 0 for none."""
    error_injection_type: ERROR_TYPES = knob("transient_error")
    """What it shall turn out to be."""
    result_rejected_tracker_filename: str | None = knob()
    """Append a line for each rejected result to this file. At the next start, iterations that failed
    twice on one rank are skipped."""
    iterations_to_skip: list[int] | None = knob(nargs="+")
    """Read the data of these iterations and do not train on them; 1 is the first."""


@section("validation")
class ValidationConfig:
    """Evaluation"""

    eval_iters: int = knob(100, minimum=0)
    """Global batches per evaluation; 0 for none."""
    eval_interval: int | None = knob(1000, minimum=1)
    """Steps between evaluations during training."""


@section("data")
class DataConfig:
    """Data"""

    data_path: list[str] | None = knob(nargs="*")
    """Prefixes of indexed datasets (without .bin and .idx), each after a weight or all without; by
    default the Python standard library's own source text."""
    data_cache_path: str | None = knob()
    """Folder for the finished order of samples, to begin the next run faster."""
    split: str = knob("949,50,1")
    """Shares of training, validation and test data."""
    seq_length: int = knob(required=True, minimum=1)
    """Tokens per sequence."""
    tokenizer_type: Literal[
        "ByteLevelTokenizer",
        "BPETokenizer",
        "NullTokenizer",
        "BertWordPieceLowerCase",
        "BertWordPieceCase",
    ] = knob("ByteLevelTokenizer", compared=("finetune", True))
    """How text becomes tokens. NullTokenizer reads no text: give tokens by --data-path."""
    vocab_size: int | None = knob(minimum=1)
    """NullTokenizer: tokens, without the one that ends a document."""
    tokenizer_file: str | None = knob()
    """BPETokenizer: its tokenizer.json."""
    dataloader_type: Literal["single", "cyclic"] = knob("single")
    """One pass in the dataset's own order, or reshuffled epochs."""
    num_workers: int = knob(0, minimum=0)
    """Loader processes; 0 loads in the training process."""
    eod_mask_loss: bool = knob(False)
    """Do not count the loss where the input is an end-of-document token."""


@section("rng")
class RNGConfig:
    """Random numbers"""

    data_parallel_random_init: bool = knob(False)
    """Different dropout on each copy of the model."""


@section("logger")
class LoggerConfig:
    """Logs"""

    log_interval: int = knob(100, minimum=1)
    """Steps between log lines."""
    tensorboard_dir: str | None = knob()
    """Folder for TensorBoard to read: what the log lines say, as curves."""
    log_params_norm: bool = knob(False)
    """Show the 2-norm of all weights in each log line."""
    timing_log_level: Literal[0, 1, 2] = knob(0)
    """0 times steps, 1 the parts of a step, 2 every forward, backward and message."""
    log_straggler: bool = knob(False)
    """Show, below each log line, how long forwards take on each stage, and the slowest rank."""
    straggler_minmax_count: int = knob(1, minimum=1)
    """How many of the slowest ranks, and of the fastest, --log-straggler names."""
    disable_straggler_on_startup: bool = knob(False)
    """With --log-straggler, time nothing until the program calls stimer.configure(enabled=True)."""


@section("tracing")
class TracingConfig:
    """Seeing it (no Megatron flags)"""

    trace: str | None = knob()
    """Folder to record every call of the chain in; look at it with `minimegatron trace`."""
    trace_first_step: int = knob(0, minimum=0)
    """First training step to record, counted from 0."""
    trace_num_steps: int | None = knob(minimum=1)
    """Training steps to record; by default all, and evaluation too."""
    trace_lines: int | None = knob(minimum=0)
    """Of this step, counted from 0, record which lines run too: `minimegatron trace unroll`."""
    pace_forward_ms: float | None = knob(minimum=0.0)
    """Pad each forward of a chunk to this many milliseconds, to see the schedule by itself."""
    pace_backward_ms: float | None = knob(minimum=0.0)
    """The same for each backward; give both."""
    pace_attention_ms: float | None = knob(minimum=0.0)
    """With these two, in combined 1F1B: of a layer's attention in a forward; twice in a backward."""
    pace_mlp_ms: float | None = knob(minimum=0.0)
    """The same of its experts, or of its dense half."""
    pace_all_to_all_ms: float | None = knob(minimum=0.0)
    """No all-to-all of tokens is over before; it comes on top of what computes, unless it is hidden."""
    pace_ring_block_ms: float | None = knob(minimum=0.0)
    """Of a block of attention, where ranks share a sequence, in a forward; twice in a backward."""
    pace_ring_hop_ms: float | None = knob(minimum=0.0)
    """No hop of keys and values is over before; what its block does not hide comes on top."""


@section("checkpoint")
class CheckpointConfig:
    """Checkpoints"""

    save: str | None = knob()
    """Folder to save checkpoints in."""
    load: str | None = knob()
    """Folder to load the latest checkpoint from; may be empty yet if it is also --save."""
    save_interval: int | None = knob(minimum=1)
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int | None = knob(minimum=1)
    """Complete checkpoints to keep in --save; by default all (no Megatron flag)."""
    no_save_optim: bool = knob(False)
    """Leave the optimizer's state out."""
    no_save_rng: bool = knob(False)
    """Leave the random numbers out."""
    no_load_optim: bool = knob(False)
    """Take no optimizer state and no schedule from the checkpoint."""
    no_load_rng: bool = knob(False)
    """Take no random numbers from the checkpoint."""
    finetune: bool = knob(False)
    """Take the weights only, and begin at iteration 0."""


@section("distributed")
class DistributedInitConfig:
    """Processes"""

    distributed_backend: Literal["nccl", "gloo"] | None = knob()
    """By default nccl where each process has a GPU to itself, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = knob("auto")
    """What the processes compute on. auto takes GPUs where each process has one to itself; cuda lets
    processes share one, over gloo (no Megatron flag)."""
    tf32: bool = knob(False)
    """On a GPU, multiply float32 matrices with 10 binary digits of their fractions instead of 23: many
    times faster, no longer equal to the CPU's results to 1e-5. Without effect on a CPU, and on
    bf16 and fp16 (no Megatron flag)."""
    distributed_timeout_minutes: int = knob(10, minimum=1)
    """Longest wait for another rank."""
    hang_timeout: float | None = knob(above=0.0)
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


@dataclass(frozen=True)
class Arguments:
    """All concerns of one run, and what the user's `extra_args_provider` added.

    `args.parallel.tensor_model_parallel_size` says where a value belongs. Megatron's users write
    `args.tensor_model_parallel_size`; that finds the same field, since no name occurs twice.
    """

    model: ModelConfig
    bert: BertConfig
    t5: T5Config
    mamba: MambaArguments
    parallel: ParallelConfig
    moe: MoEArguments
    precision: PrecisionConfig
    training: TrainingConfig
    optimization: OptimizationConfig
    scheduler: SchedulerConfig
    gradients: GradientConfig
    rerun: RerunConfig
    validation: ValidationConfig
    data: DataConfig
    rng: RNGConfig
    logger: LoggerConfig
    tracing: TracingConfig
    checkpoint: CheckpointConfig
    distributed: DistributedInitConfig
    extra: dict[str, Any]

    def __post_init__(self) -> None:
        # A step asks for many flags, many times: each name leads straight to its value.
        for section in SECTIONS:
            self.__dict__.update(vars(self.__dict__[section]))

    def __getattr__(self, name: str) -> Any:
        """Of `extra`, and values that Megatron has and we fix; AttributeError for another name."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.__dict__["extra"]:
            return self.__dict__["extra"][name]
        if name in older_arguments.VALUES:
            return older_arguments.VALUES[name]
        raise AttributeError(f"no argument is called {name!r}{_advice(name)}")


def _advice(name: str) -> str:
    """Where to find what Megatron keeps among its arguments, or what an older text calls so."""
    if name in TrainState.__dataclass_fields__:
        return f"; it changes during a run: get_train_state().{name}"
    return (
        f"; {older_arguments.OLDER_ARGUMENTS[name]}"
        if name in older_arguments.OLDER_ARGUMENTS
        else ""
    )
