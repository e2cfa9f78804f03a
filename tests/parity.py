"""Parity: a step of GPT, cut in any way over real ranks, against the same step in one process.

Used by tests/test_parity.py and by the mutation tests. The reference runs in the test's own process
with every group of size one, in float64, and is written to a file; every rank then compares its own
pieces with it: the loss of each microbatch, every raw gradient before the optimizer sees it, and the
weights after three steps, the later ones with moments from those before.
"""

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.backend import mesh
from minimegatron.core import collectives, parallel_state
from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.parameter import kind_of, reduce_group, tensor_group
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    get_forward_backward_func,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.tensor_parallel.sharding import shard_parameter
from minimegatron.core.transformer.layer_placement import ranks_with_word_embedding
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import (
    get_attr_wrapped_model,
    get_device,
    get_model_config,
    unwrap_model,
)
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from minimegatron.training.progress import broadcast_from_last_stage
from minimegatron.training.utils import get_batch_on_this_cp_rank
from tests.fake_transport import FakeGroup
from tests.parity_frozen import freeze

VOCAB, SEQ, MICRO_BATCH, HIDDEN, HEADS = 32, 8, 2, 32, 8
GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-10, 1e-9
IN_FLOAT32 = 1e-5 / GRADIENT_TOLERANCE
"""What differences in float32 are divided by; there they are relative to the largest number."""
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """One way of cutting one step. `llama`: untied, RoPE, RMSNorm, SwiGLU, grouped queries."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int | None = None
    G: int | None = None
    M: int = 4
    llama: bool = False
    batched: bool = True
    overlap: bool = False
    deallocate: bool = False
    sp: bool = False
    recompute: str | None = None
    dist_opt: bool = False
    overlap_grad_reduce: bool = False
    per_token: bool = False
    num_layers: int = 0
    num_partial: int | None = None
    """Microbatches in flight that keep their activations; the others recompute all."""
    overlap_param_gather: bool = False
    layout: str | None = None
    """A pipeline layout; `vp` and `num_layers` must say what it does."""
    delay_wgrad: bool = False
    defer_embedding: bool = False
    deferral_limit: int = 0
    loss_scale: float = 1.0
    """As with fp16: what the loss is multiplied by, and gradients are divided by. A power of two."""
    evaluates: bool = False
    """Before each training step and after the last, a forward-only one over the same microbatches."""
    evaluates_in: str | None = None
    """The same in a mode of its own, a key of `MODES`."""
    fails: bool = False
    """Before the second training step, one with other data that fails on the last rank."""
    weights: bool = False
    """Tokens that count have weights: some a fraction, some 0."""
    logits: str | None = None
    """The model is not given the labels; its logits come "sliced" or "gathered", and make the loss."""
    planned: bool = False
    """By the planned runner instead of the written schedule."""
    align_grad_reduce: bool = False
    """The schedule launches gradients (`grad_sync_func`), not backward."""
    align_param_gather: bool = False
    """The schedule gathers parameters (`param_sync_func`), not forward alone."""
    dtype: str = "float64"
    """Of weights, activations and messages."""
    experts: int | None = None
    """Experts per layer; those that follow matter only with them."""
    ep: int = 1
    etp: int = 1
    topk: int = 2
    dispatcher: str = "alltoall"
    balance: str = "none"
    """A key of `BALANCE`."""
    shared: bool = False
    """A shared expert with a gate beside the others; needs `llama`, which has no biases."""
    moe_freq: tuple[int, ...] = (1,)
    combined: bool = False
    """Combined 1F1B."""
    cp: int = 1
    comm: str = "p2p"
    """`cp_comm_type`; matters only with `cp`."""
    mtp: int | None = None
    """Further tokens to predict. Then positions are rotary, because all stages have those."""
    model: str = "gpt"
    """Or bert, t5, mamba: what tests/parity_MODEL.py has."""
    split: int | None = None
    """T5's first decoder stage. Then `num_layers` is that of each stack."""
    pattern: str | None = None
    """Mamba's layers; `num_layers` must be its length."""
    binary_head: bool = True
    """BERT predicts the order of two texts."""
    frozen: str | None = None
    """A key of `parity_frozen.TRAINED`."""

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        default = asdict(Case())
        return " ".join(f"{k}={v}" for k, v in asdict(self).items() if v != default[k]) or "serial"

    def serial(self) -> "Case":
        """The case that this one must equal: all of one global batch in one process."""
        layers = self.num_layers or self.pp * (self.vp or 1)
        names = (
            *("llama", "per_token", "dtype", "mtp", "model", "pattern"),
            *("binary_head", "frozen", "weights"),
            *("experts", "topk", "balance", "shared", "moe_freq"),
        )
        same = {name: getattr(self, name) for name in names}
        return Case(M=self.M * self.dp, num_layers=layers, **same)

    @property
    def cost(self) -> float:
        """For `covering_array`: the square root of about how much there is to compute on all ranks, so
        that few rows are long, and not many more are needed.
        """
        num_steps = 2 + bool(self.evaluates or self.evaluates_in) + self.fails
        num_chunks = self.M * (self.vp or 1) * (1.4 if self.recompute else 1.0)
        return (self.world * (5 + num_chunks * num_steps)) ** 0.5

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class ModelUnderTest:
    """What differs between families of models; all else of a case is the same code."""

    build_chunk: Callable[..., torch.nn.Module]
    """`(case, config, groups, first, last, vp_stage)`: the chunk, on the CPU."""
    batches: Callable[[int], list[dict[str, torch.Tensor]]]
    """`(number)`: the microbatches of the global batch, whose losses weigh differently."""
    step: Callable
    """The `forward_step_func`."""
    config_fields: Callable[["Case"], dict[str, Any]] = lambda case: {}
    """More fields of `TransformerConfig`."""
    is_tied: Callable[["Case"], bool] = lambda case: not case.llama
    get_embedding_ranks: Callable[["Case"], Callable | None] = lambda case: None
    """For `initialize_model_parallel`."""
    get_position_embedding_ranks: Callable[["Case"], Callable | None] = lambda case: None
    seq_length: int | None = None
    """None for `SEQ`."""
    decoder_seq_length: int | None = None


def model_of(case: "Case") -> ModelUnderTest:
    """Another family than GPT has a module of its own, with `MODEL`."""
    if case.model == "gpt":
        return GPT
    return importlib.import_module(f"tests.parity_{case.model}").MODEL


BALANCE = {
    "none": {"moe_router_load_balancing_type": "none"},
    "aux": {"moe_aux_loss_coeff": 0.5},
    "seq": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
    "two and z": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.2],
        "moe_z_loss_coeff": 0.1,
    },
    "bias": {
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
    "groups": {
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 1.5,
    },
}
"""Ways to balance, or to choose, that are the same in one process."""


def expert_options(case: Case) -> dict[str, Any]:
    """Fields of `TransformerConfig`."""
    if case.experts is None:
        return {}
    return {
        "num_moe_experts": case.experts,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "moe_ffn_hidden_size": 16,
        "moe_router_topk": case.topk,
        "moe_router_pre_softmax": case.topk == 1,
        "moe_token_dispatcher_type": case.dispatcher,
        "moe_shared_expert_intermediate_size": 16 if case.shared else None,
        "moe_shared_expert_gate": case.shared,
        "moe_layer_freq": list(case.moe_freq),
        "overlap_moe_expert_parallel_comm": case.combined,
        **BALANCE[case.balance],
    }


def transformer_config(case: Case) -> TransformerConfig:
    style: dict[str, Any] = {}
    if case.llama:
        style = {
            "num_query_groups": 4,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "ffn_hidden_size": 24,
        }
    if case.recompute == "full":
        style |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=case.num_layers or case.pp * (case.vp or 1),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=case.torch_dtype,
        pipeline_dtype=case.torch_dtype,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        cp_comm_type=case.comm,
        mtp_num_layers=case.mtp,
        mtp_loss_scaling_factor=0.5,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        pipeline_model_parallel_layout=case.layout,
        microbatch_group_size_per_vp_stage=case.G,
        sequence_parallel=case.sp,
        batch_p2p_comm=case.batched and not case.overlap,
        overlap_p2p_comm=case.overlap,
        deallocate_pipeline_outputs=case.deallocate,
        recompute_granularity=case.recompute,
        num_microbatches_with_partial_activation_checkpoints=case.num_partial,
        calculate_per_token_loss=case.per_token,
        delay_wgrad_compute=case.delay_wgrad,
        defer_embedding_wgrad_compute=case.defer_embedding,
        wgrad_deferral_limit=case.deferral_limit,
        init_method_std=0.1,
        **expert_options(case),
        **(style | model_of(case).config_fields(case)),
    )


def batches(num: int) -> list[dict[str, torch.Tensor]]:
    """The global batch's microbatches, with a different number of unmasked tokens in each."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for i in range(num):
        text = torch.randint(VOCAB, (MICRO_BATCH, SEQ + 1), generator=generator)
        mask = torch.ones(MICRO_BATCH, SEQ, dtype=torch.float64)
        mask[:, SEQ - 1 - i % 3 :] = 0.0
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "mask": mask}
        found.append({name: tensor.to(get_device()) for name, tensor in batch.items()})
    return found


def weighed(batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The same, where each token that counts has a weight; a token may have 0, a microbatch not. In
    every second microbatch all weights together are less than 1."""
    generator, found = torch.Generator().manual_seed(3), []
    for number, batch in enumerate(batches):
        name = "mask" if "mask" in batch else "loss_mask"
        mask = batch[name]
        which = torch.randint(4, mask.shape, generator=generator).to(mask.device)
        weights = torch.tensor((0.0, 0.3, 0.5, 1.25), dtype=mask.dtype, device=mask.device)[which]
        weights = weights if (mask * weights).any() else torch.ones_like(weights)
        found.append(batch | {name: mask * weights * (1.0 if number % 2 else 2.0**-8)})
    return found


def losses_of(logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
    """Of each token, [b, s], from logits [b, s, v] or this rank's [b, s, v/t]; any for labels < 0."""
    labels = labels.clamp(min=0)
    if logits.size(-1) == VOCAB:
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return vocab_parallel_cross_entropy(logits, labels, tp_group=group)


def asks_for_logits(model: torch.nn.Module) -> bool:
    """Whether the step is not to give labels; `build` says so."""
    return getattr(unwrap_model(model), "asks_for_logits", False)


def loss_func(mask, output):
    total, num_tokens = (output * mask).sum(), mask.sum()
    return total, num_tokens, {"loss": total.detach().clone(), "num_tokens": num_tokens}


def share_of_mean(mask, num_tokens, output):
    """With context parallelism: the rank's part of the mean over the microbatch's `num_tokens`."""
    total = (output * mask).sum()
    return total / num_tokens, {"loss": total.detach().clone(), "num_tokens": num_tokens}


def forward_step_func(
    data_iterator, model, checkpoint_activations_microbatch=None, return_schedule_plan=False
):
    batch = next(data_iterator)
    groups = get_attr_wrapped_model(model, "pg_collection")
    shares_mean = groups.cp.size() > 1 and not get_model_config(model).calculate_per_token_loss
    num_tokens = batch["mask"].sum()
    positions = torch.arange(SEQ, device=get_device()).expand(MICRO_BATCH, SEQ)
    batch = get_batch_on_this_cp_rank(batch | {"positions": positions}, groups.cp)
    run = partial(model, checkpoint_activations_microbatch=checkpoint_activations_microbatch)
    if return_schedule_plan:
        run = model.build_schedule_plan
    more = {"labels": batch["labels"], "loss_mask": batch["mask"]}
    if asks_for_logits(model):
        more = {}
    output = run(batch["tokens"], batch["positions"], None, **more)
    loss = partial(loss_func, batch["mask"])
    if shares_mean:
        loss = partial(share_of_mean, batch["mask"], num_tokens)
    return output, loss if more else partial(loss_of_logits, loss, batch["labels"], groups.tp)


def loss_of_logits(loss, labels, group, logits):
    return loss(losses_of(logits, labels, group))


def build_gpt(
    case: Case,
    config: TransformerConfig,
    groups: Any,
    first: bool,
    last: bool,
    vp_stage: int | None,
) -> GPTModel:
    where = {"vp_stage": vp_stage, "pp_rank": groups.pp.rank()}
    spec = get_gpt_decoder_block_spec(config, **where)
    return GPTModel(
        config,
        spec,
        VOCAB,
        SEQ,
        pre_process=first,
        post_process=last,
        parallel_output=case.logits != "gathered",
        share_embeddings_and_output_weights=not case.llama,
        position_embedding_type="rope" if case.llama or case.mtp else "learned_absolute",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, **where),
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def _ranks_with_copies(case: Case) -> Callable | None:
    if not case.mtp:
        return None
    return partial(ranks_with_word_embedding, transformer_config(case), not case.llama)


GPT = ModelUnderTest(build_gpt, batches, forward_step_func, get_embedding_ranks=_ranks_with_copies)


def build(case: Case, groups: ProcessGroupCollection) -> tuple[list, Any]:
    """This rank's chunks, wrapped, and their optimizer."""
    chunks = []
    for chunk_id in range(case.vp or 1):
        config = transformer_config(case)
        config_chunk = None if case.vp is None else chunk_id
        first = groups.pp.rank() == 0 and chunk_id == 0
        last = groups.pp.rank() == case.pp - 1 and chunk_id == (case.vp or 1) - 1
        model = model_of(case).build_chunk(case, config, groups, first, last, config_chunk)
        freeze(model, config, case.frozen)
        model.asks_for_logits = case.logits is not None
        model = model.to(get_device())
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=case.dist_opt,
            overlap_grad_reduce=case.overlap_grad_reduce,
            overlap_param_gather=case.overlap_param_gather,
            bucket_size=500,
        )
        chunks.append(
            DistributedDataParallel(
                config, ddp_config, model, disable_bucketing=chunk_id > 0, pg_collection=groups
            )
        )
    # A large eps: a key's bias has no gradient but round-off, which Adam would turn into a step.
    optimizer_config = OptimizerConfig(
        lr=0.05,
        adam_eps=1e-3,
        clip_grad=0.5,
        params_dtype=case.torch_dtype,
        use_distributed_optimizer=case.dist_opt,
        overlap_param_gather=case.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks, pg_collection=groups)
    # As in training: the first chunk's config is the one that schedules read.
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    if case.loss_scale != 1.0:
        config.grad_scale_func = lambda loss: loss * case.loss_scale
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync[0] if case.vp is None else no_sync
    if case.align_grad_reduce:
        launch = [chunk.start_grad_sync for chunk in chunks]
        config.grad_sync_func = launch[0] if case.vp is None else launch
    if case.align_param_gather:
        gather = [chunk.start_param_sync for chunk in chunks]
        config.param_sync_func = gather[0] if case.vp is None else gather
    return chunks, optimizer


def run_step(
    case: Case,
    groups: Any,
    chunks: list,
    iterators: list[Iterator],
    forward_only: bool,
    step_func: Callable | None = None,
) -> list[dict[str, torch.Tensor]]:
    """One step by the case's schedule; returns the reports of the last stage."""
    function = forward_backward_no_pipelining if case.pp == 1 else get_forward_backward_func()
    if case.planned:
        function = get_planned_forward_backward_func("1f1b" if case.vp is None else "interleaved")
    model = model_of(case)
    return function(
        forward_step_func=step_func or model.step,
        data_iterator=iterators,
        model=chunks,
        num_microbatches=case.M,
        seq_length=model.seq_length or SEQ,
        decoder_seq_length=model.decoder_seq_length,
        micro_batch_size=MICRO_BATCH,
        forward_only=forward_only,
        pg_collection=groups,
    )


class Planted(Exception):
    """What makes a step fail."""


def fail_a_step(case: Case, groups: Any, chunks: list) -> None:
    """A step of other data, which the last rank leaves in its last microbatch; the others are told."""
    data, step = global_batch(case, 2 * case.M)[case.M :], model_of(case).step
    last, num_calls = torch.distributed.get_world_size() - 1, case.M * len(chunks)
    numbers = iter(range(1, num_calls + 1))

    def fails(*arguments: Any, **more: Any) -> Any:
        found = step(*arguments, **more)
        if torch.distributed.get_rank() == last and next(numbers) == num_calls:
            raise Planted
        return found

    for chunk in chunks:
        chunk.zero_grad_buffer()
    try:
        run_step(case, groups, chunks, [iter(data) for _ in chunks], False, fails)
    except (Planted, ConnectionError):
        return
    raise AssertionError(f"{case}: the step did not fail")


MODES = {
    None: contextlib.nullcontext,
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
"""What an evaluation may run in."""


def global_batch(case: Case, num: int) -> list[dict[str, torch.Tensor]]:
    """`num` microbatches of the case's family, with weights or without."""
    batches = model_of(case).batches(num)
    return weighed(batches) if case.weights else batches


def lines_of_log(chunks: list, groups: Any) -> dict[str, float]:
    """What the model says for a line of the log; the same on every rank."""
    found: dict[str, float] = {}
    for describe in get_model_config(chunks[0]).log_funcs:
        found |= describe(chunks, groups)
    return found


def train_steps(
    case: Case,
    chunks: list,
    optimizer: Any,
    groups: Any,
    data: list,
    num_steps: int = NUM_STEPS,
    evaluated: list | None = None,
) -> Iterator:
    """Yields (losses, gradients by global name, gradient norm) of each step.

    `evaluated` gets the losses of each evaluation, the last one after the last step.
    """

    def run(forward_only: bool) -> list[float]:
        iterators = [iter(data) for _ in chunks]
        reports = run_step(case, groups, chunks, iterators, forward_only)
        if reports and case.cp > 1:
            whole = torch.stack([report["loss"] for report in reports])
            collectives.all_reduce(whole, groups.cp)
            return whole.tolist()
        return [report["loss"].item() for report in reports]

    def evaluate() -> None:
        if evaluated is not None and (case.evaluates or case.evaluates_in is not None):
            with MODES[case.evaluates_in]():
                evaluated.append(run(forward_only=True))

    for step in range(num_steps):
        evaluate()
        if case.fails and step == 1 and mesh.is_supported():
            fail_a_step(case, groups, chunks)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(forward_only=False)
        for chunk in chunks if case.loss_scale != 1.0 else []:
            for buffer in chunk.all_buffers:
                buffer.grad_data /= case.loss_scale
        gradients = [
            (name, param, param.main_grad.clone())
            for chunk in chunks
            for name, param in named_global_parameters(unwrap_model(chunk))
            if param.requires_grad
        ]
        success, norm, _ = optimizer.step()
        assert success
        yield losses, gradients, norm
    evaluate()


@cache
def reference(case: Case, folder: Path) -> str:
    """Runs the serial case here; returns the path of what it found."""
    path = folder / f"reference-{abs(hash(case))}.pt"
    names = [entry.name for entry in fields(ProcessGroupCollection)]
    groups = ProcessGroupCollection(**{name: FakeGroup() for name in names})
    chunks, optimizer = build(case, groups)
    found: dict[str, torch.Tensor] = {}
    data = global_batch(case, case.M)
    steps = train_steps(case, chunks, optimizer, groups, data)
    for step, (losses, gradients, norm) in enumerate(steps):
        for name, value in lines_of_log(chunks, groups).items():
            found[f"{name} in the log of step {step}"] = torch.tensor(value, dtype=torch.float64)
        found[f"losses of step {step}"] = torch.tensor(losses, dtype=torch.float64)
        found[f"norm of step {step}"] = torch.tensor(norm, dtype=torch.float64)
        found |= {f"step {step} gradient of {name}": grad for name, _, grad in gradients}
        for name, param in named_global_parameters(unwrap_model(chunks[0])):
            found[f"weight of {name} after {step + 1} steps"] = param.detach().clone()
    # Those of an evaluation after the last step; the serial case never evaluates in between.
    reports = run_step(case, groups, chunks, [iter(data) for _ in chunks], True)
    losses = [report["loss"].item() for report in reports]
    found[f"losses of step {NUM_STEPS}"] = torch.tensor(losses, dtype=torch.float64)
    save_reference(found, path)
    return os.fspath(path)


def save_reference(found: dict[str, torch.Tensor], path: Path) -> None:
    """One long tensor per dtype: to read a thousand small ones takes a fifth of the tests' time."""
    by_dtype: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    for name, tensor in found.items():
        by_dtype.setdefault(tensor.dtype, {})[name] = tensor.cpu()
    long = {
        dtype: torch.cat([tensor.flatten() for tensor in tensors.values()])
        for dtype, tensors in by_dtype.items()
    }
    shapes = {
        dtype: {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for dtype, tensors in by_dtype.items()
    }
    torch.save({"long": long, "shapes": shapes}, path)


def compare(
    case: Case, expected: dict[str, torch.Tensor], groups: Any, num_steps: int = NUM_STEPS
) -> tuple[int, float, list[str]]:
    """Runs `case` on this rank. Returns the number of tensors compared, the worst difference, and
    what went beyond its tolerance. The weights are compared after the last of two or more steps."""
    chunks, optimizer = build(case, groups)
    data = global_batch(case, case.M * case.dp)[groups.dp.rank() :: case.dp]
    problems, compared, worst, evaluated = [], 0, 0.0, []

    def check(what: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
        nonlocal compared, worst
        difference = (found - wanted.to(found.device)).abs().max().item()
        if case.dtype == "float32":
            difference /= IN_FLOAT32 * max(1.0, wanted.abs().max().item())
        compared, worst = compared + 1, max(worst, difference)
        if not difference <= tolerance:
            problems.append(f"{case}: {what} is off by {difference:.3g}")

    def check_numbers(what: str, found: Any, wanted: torch.Tensor, tolerance: float) -> None:
        check(what, torch.tensor(found, dtype=torch.float64), wanted, tolerance)

    def wanted_losses(step: int) -> torch.Tensor:
        return expected[f"losses of step {step}"][groups.dp.rank() :: case.dp]

    steps = train_steps(case, chunks, optimizer, groups, data, num_steps, evaluated)
    for step, (losses, gradients, norm) in enumerate(steps):
        tolerance = GRADIENT_TOLERANCE if step == 0 else WEIGHT_TOLERANCE
        if groups.pp.rank() == case.pp - 1:
            check_numbers("loss", losses, wanted_losses(step), tolerance)
        shown, of_log = lines_of_log(chunks, groups) | shown_losses(losses), f"log of step {step}"
        check_numbers("loss in the log", shown.pop("loss"), wanted_losses(step).mean(), tolerance)
        logged = {name: value for name, value in expected.items() if name.endswith(of_log)}
        if {f"{name} in the {of_log}" for name in shown} != logged.keys():
            problems.append(f"{case}: {of_log} has {[*shown]}, expected {[*logged]}")
            continue
        for name, value in shown.items():
            what = f"{name} in the {of_log}"
            check_numbers(what, value, logged[what], tolerance)
        for name, param, grad in gradients:
            # With a distributed optimizer a rank has whole gradients of its own shards only.
            if not case.dist_opt or reduce_group(param, groups).size() == 1:
                what = f"step {step} gradient of {name}"
                check(what, grad, piece_of(expected[what], param, groups), tolerance)
        check_numbers("norm", norm, expected[f"norm of step {step}"], tolerance)
    for step, losses in enumerate(evaluated if groups.pp.rank() == case.pp - 1 else []):
        name = f"loss of an evaluation after {step} steps"
        check_numbers(name, losses, wanted_losses(step), WEIGHT_TOLERANCE)
    for chunk in chunks if num_steps > 1 else []:
        chunk.start_param_sync(force_sync=True)
        for name, param in named_global_parameters(unwrap_model(chunk)):
            what = f"weight of {name} after {num_steps} steps"
            check(what, param.detach(), piece_of(expected[what], param, groups), WEIGHT_TOLERANCE)
    problems += copies_that_differ(case, chunks, groups)
    return compared, worst, problems


def shown_losses(losses: list[float]) -> dict[str, float]:
    """What every rank would print: the last stage's mean over microbatches."""
    means = {"loss": sum(losses) / len(losses)} if losses else {}
    return broadcast_from_last_stage(means)


def piece_of(full: torch.Tensor, param: torch.Tensor, groups: Any) -> torch.Tensor:
    """What this rank holds of a tensor of the whole model that is cut as `param` is."""
    group = tensor_group(param, groups)
    return shard_parameter(full, param, group.rank(), group.size())


def copies_that_differ(case: Case, chunks: list, groups: Any) -> list[str]:
    """Weights that several ranks hold must stay bit-equal: over tp, over dp, tied embeddings."""
    shared: dict[str, list] = {}
    for chunk in chunks:
        for name, param in named_global_parameters(unwrap_model(chunk)):
            kind = kind_of(param)
            shared.setdefault(kind.reduce, []).append((name, param.detach()))
            if not (param.tensor_model_parallel and tensor_group(param, groups).size() > 1):
                shared.setdefault(kind.tensor, []).append((name, param.detach()))
            if name == "embedding.word_embeddings.weight" and (
                case.mtp or model_of(case).is_tied(case)
            ):
                shared.setdefault("embd", []).append((name, param.detach()))
    problems = []
    # A rank may have two copies in two chunks; then one of them stands for it.
    (name, mine), *others = shared.get("embd", [("", None)])
    if any(not torch.equal(mine, other) for _, other in others):
        problems.append(f"{case}: copies of {name} differ on one rank")
    shared |= {"embd": [(name, mine)] if mine is not None else []}
    for kind, params in shared.items():
        group = getattr(groups, kind)
        if params and group is not None and group.size() > 1:
            mine = torch.cat([param.flatten() for _, param in params])
            first = mine.clone()
            collectives.broadcast(first, 0, group)
            pieces = first.split([param.numel() for _, param in params])
            for (name, param), piece in zip(params, pieces, strict=True):
                if not torch.equal(piece, param.flatten()):
                    problems.append(f"{case}: copies of {name} differ over {kind}")
    return problems


@cache
def load_reference(path: str) -> dict[str, torch.Tensor]:
    """What `reference` found; many cases share one. The file is mapped, not read."""
    saved = torch.load(path, mmap=True)
    found = {}
    for dtype, shapes in saved["shapes"].items():
        pieces = saved["long"][dtype].split([math.prod(shape) for shape in shapes.values()])
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            found[name] = piece.view(shape)
    return found


def sizes_of(case: Case) -> tuple:
    """What process groups depend on."""
    return case.tp, case.cp, case.pp, case.vp, case.ep, case.etp if case.experts else None


def groups_of_case(case: Case) -> tuple:
    """The same, and what the embedding's groups depend on."""
    copies = (not case.llama, case.layout) if case.mtp or case.split else None
    return *sizes_of(case), copies, case.model, case.split


def make_groups(case: Case) -> None:
    """Of this case, in place of those that there are."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    model = model_of(case)
    parallel_state.initialize_model_parallel(
        get_embedding_ranks=model.get_embedding_ranks(case),
        get_position_embedding_ranks=model.get_position_embedding_ranks(case),
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp if case.experts else None,
    )


def run_cases(
    cases: list[tuple[Case, str]], num_steps: int | None = None
) -> list[tuple[str, int, float, list[str]]]:
    """In one rank: every case of one world size, with its reference's path.

    `num_steps` None means `NUM_STEPS`. In the second the optimizer has moments from the first.
    """
    steps = {} if num_steps is None else {"num_steps": num_steps}
    results = []
    layout = None
    for case, path in sorted(cases, key=lambda item: str(groups_of_case(item[0]))):
        if layout != groups_of_case(case):
            make_groups(case)
            layout = groups_of_case(case)
        model_parallel_cuda_manual_seed(1)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        results.append((str(case), *compare(case, load_reference(path), groups, **steps)))
    return results
