"""Against megatron-core: a whole step of GPT on real ranks gives the same losses and gradients.

Both packages get the same weights and the same microbatches, each runs its own schedule over its own
process groups, one after the other in the same ranks.
"""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.pipeline_parallel import schedules
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.benchmarks.peers import P2P_MODES
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.conformance.test_gpt_model import SHARED_FIELDS
from tests.core.models import gpt_support
from tests.core.models.gpt_support import BATCH, SEQUENCE, VOCABULARY
from tests.figures import figure
from tests.ranks import run_ranks

THEIRS = {
    name: megatron_module(module)
    for name, module in {
        "state": "parallel_state",
        "schedules": "pipeline_parallel.schedules",
        "model": "models.gpt.gpt_model",
        "specs": "models.gpt.gpt_layer_specs",
        "random": "tensor_parallel.random",
        "config": "transformer.transformer_config",
    }.items()
}
pytestmark = pytest.mark.filterwarnings("ignore")

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative, of the largest value of each gradient. Their rotary angles are float32 whatever the rest
is, so the float64 cases have learned positions."""


@dataclass(frozen=True)
class Cut:
    """How a model is cut, and how many microbatches a step has."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None
    M: int = 4
    mode: str = "batched"
    kind: str = "mixed: LayerNorm, SwiGLU with bias, learned, untied"
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        return f"tp={self.tp} pp={self.pp} vp={self.vp} M={self.M} {self.mode} {short} {self.kind}"


LLAMA = "llama: RMSNorm, SwiGLU, rope, GQA, untied"
TIED = "gpt2: LayerNorm, GELU, learned, tied"
CUTS = [
    *(
        Cut(tp, pp, None, M)
        for tp, pp, M in ((1, 1, 1), (1, 1, 5), (2, 1, 5), (1, 2, 1), (1, 2, 5))
    ),
    *(Cut(1, 2, 2, M, mode) for M, mode in ((2, "overlap"), (4, "unbatched"))),
    Cut(2, 2, None, 5),
    Cut(1, 4, None, 1),
    *(Cut(1, 4, 2, 8, mode) for mode in ("batched", "overlap")),
    Cut(2, 2, 2, 4, "unbatched"),
    Cut(1, 2, 1, 4, "unbatched"),
    Cut(1, 4, 2, 4, kind=TIED),
    *(Cut(*cut, kind=LLAMA, dtype=torch.float32) for cut in ((2, 1), (1, 2))),
    Cut(2, 2, 2, 4, "overlap", LLAMA, torch.float32),
]
MORE_CUTS = [
    *(Cut(tp, pp, None, M) for tp, pp, M in ((2, 1, 1), (2, 2, 1), (1, 4, 5))),
    *(Cut(1, 2, 2, M, mode) for M, mode in ((2, "unbatched"), (4, "overlap"))),
    Cut(1, 4, 2, 8, "unbatched"),
    Cut(2, 2, None, 4, kind=TIED),
    *(Cut(*cut, kind=LLAMA, dtype=torch.float32) for cut in ((2, 2), (1, 4))),
]
"""For `make test-full`."""


# -- The same step in both packages --


def microbatches(cut: Cut) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shape = (cut.M, BATCH, SEQUENCE)
    return [
        {
            "input_ids": tokens,
            "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1),
            "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool(),
        }
        for tokens in torch.randint(VOCABULARY, shape, generator=generator)
    ]


def loss_func(weights: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict]:
    loss = (logits.sin() * weights).sum()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    # Weights that differ from one microbatch to the next, so that no mix-up cancels out.
    weights = batch["input_ids"].double().add(1.0).cos().unsqueeze(-1)
    weights = weights.transpose(0, 1) if model.config.sequence_parallel else weights
    return model(**batch), partial(loss_func, weights.to(model.config.params_dtype))


def run_step(schedule: Callable, cut: Cut, chunks: list[torch.nn.Module]) -> list[float]:
    data = [iter(microbatches(cut)) for _ in chunks]
    reports = schedule(
        forward_step_func=forward_step,
        data_iterator=data if cut.vp else data[0],
        model=chunks if cut.vp else chunks[0],
        num_microbatches=cut.M,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    return [report["loss"].item() for report in reports]


def build(cut: Cut, make: Callable, state: Any) -> list[torch.nn.Module]:
    """This rank's chunks; `make(pre_process, post_process, vp_stage)` makes one."""
    first, last = state.is_pipeline_first_stage, state.is_pipeline_last_stage
    chunks = []
    for stage in range(cut.vp or 1):
        at = {"ignore_virtual": False, "vp_stage": stage} if cut.vp else {}
        chunks.append(make(first(**at), last(**at), stage if cut.vp else None))
    return chunks


def sizes(cut: Cut) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": cut.tp,
        "pipeline_model_parallel_size": cut.pp,
        "virtual_pipeline_model_parallel_size": cut.vp,
    }


def options(cut: Cut) -> dict[str, Any]:
    layers = cut.pp * (cut.vp or 1)
    return {
        **sizes(cut),
        "num_layers": max(2, layers),
        "params_dtype": cut.dtype,
        "pipeline_dtype": cut.dtype,
        **P2P_MODES[cut.mode],
    }


def ours(cut: Cut) -> list[torch.nn.Module]:
    case = gpt_support.CASES[cut.kind]
    config: TransformerConfig = case.make_config(**options(cut))
    pg = ProcessGroupCollection.use_mpu_process_groups()

    def make(pre_process: bool, post_process: bool, vp_stage: int | None):
        where = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        return case.build(config, pg, **where)

    return build(cut, make, parallel_state)


def theirs(cut: Cut, like: list[torch.nn.Module]) -> list[torch.nn.Module]:
    case, like_config = gpt_support.CASES[cut.kind], like[0].config
    shared = {name: getattr(like_config, name) for name in SHARED_FIELDS}
    fusions = ("bias_dropout", "bias_activation", "masked_softmax", "gradient_accumulation")
    shared |= {f"{name}_fusion": False for name in fusions}
    config = THEIRS["config"].TransformerConfig(
        use_cpu_initialization=True, **{**shared, **options(cut)}
    )
    spec = THEIRS["specs"].get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )

    def make(pre_process: bool, post_process: bool, vp_stage: int | None):
        return (
            THEIRS["model"]
            .GPTModel(
                config,
                spec,
                VOCABULARY,
                SEQUENCE,
                pre_process,
                post_process,
                share_embeddings_and_output_weights=case.tied,
                position_embedding_type=case.positions,
                vp_stage=vp_stage,
            )
            .to(cut.dtype)
        )

    chunks = build(cut, make, THEIRS["state"])
    for chunk, source in zip(chunks, like, strict=True):
        chunk.load_state_dict({**chunk.state_dict(), **source.state_dict()})
    return chunks


# -- On a rank --


def compare(cut: Cut) -> dict[str, float]:
    """By what was compared: the relative difference, on this rank."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes(cut))
    our_chunks = ours(cut)
    our_losses = run_step(schedules.get_forward_backward_func(), cut, our_chunks)
    their_chunks, their_losses = _their_step(cut, our_chunks)
    pairs = zip(our_losses, their_losses, strict=True)
    found = {f"loss {i}": abs(a - b) / max(1.0, abs(b)) for i, (a, b) in enumerate(pairs)}
    for index, (mine, other) in enumerate(zip(our_chunks, their_chunks, strict=True)):
        found |= {f"chunk {index} {k}": v for k, v in gradient_differences(mine, other).items()}
    return found


def gradient_differences(mine: torch.nn.Module, other: torch.nn.Module) -> dict[str, float]:
    """Relative to the parameter's largest gradient, or to a thousandth of the chunk's largest.

    The latter for those that are zero but for round-off: a bias of the keys shifts every score alike.
    """
    theirs = {name: param.grad for name, param in other.named_parameters()}
    floor = 1e-3 * max(grad.abs().max().item() for grad in theirs.values())
    found = {}
    for name, param in mine.named_parameters():
        grad = theirs.pop(name)
        found[name] = ((param.grad - grad).abs().max() / grad.abs().max().clamp_min(floor)).item()
    assert not theirs, f"ours lacks {list(theirs)}"
    return found


def _their_step(cut: Cut, like: list[torch.nn.Module]) -> tuple[list, list[float]]:
    state, schedule = THEIRS["state"], THEIRS["schedules"]
    # Their tracker keeps states of CUDA generators; there is no dropout here to need them.
    tracker = THEIRS["random"].get_cuda_rng_tracker()
    quiet = warnings.catch_warnings(action="ignore")
    with quiet, cuda_calls_on_cpu(), mock.patch.object(tracker, "fork", contextlib.nullcontext):
        state.initialize_model_parallel(**sizes(cut))
        try:
            chunks = theirs(cut, like)
            losses = run_step(schedule.get_forward_backward_func(), cut, chunks)
        finally:
            state.destroy_model_parallel()
    return chunks, losses


def compare_all(cuts: list[Cut]) -> list[dict[str, float]]:
    return [compare(cut) for cut in cuts]


@pytest.mark.parametrize("size", sorted({cut.tp * cut.pp for cut in CUTS}))
def test_same_losses_and_gradients(size: int):
    check(CUTS, size)


@pytest.mark.full
@pytest.mark.parametrize("size", sorted({cut.tp * cut.pp for cut in MORE_CUTS}))
def test_same_losses_and_gradients_in_more_cuts(size: int):
    check(MORE_CUTS, size)


def check(all_cuts: list[Cut], size: int) -> None:
    cuts = [cut for cut in all_cuts if cut.tp * cut.pp == size]
    num_compared, worst = 0, dict.fromkeys((cut.dtype for cut in cuts), 0.0)
    for rank, results in enumerate(run_ranks(compare_all, size, cuts)):
        for cut, found in zip(cuts, results, strict=True):
            for name, difference in found.items():
                limit = LIMITS[cut.dtype]
                assert difference <= limit, f"{cut}: {name} on rank {rank}: {difference:.1e}"
                worst[cut.dtype] = max(worst[cut.dtype], difference)
            num_compared += len(found)
    shown = ", ".join(f"{str(dtype)[6:]} {value:.1e}" for dtype, value in worst.items())
    figure(f"{len(cuts)} steps on {size} ranks, {num_compared} tensors; worst: {shown}")
