"""Against megatron-core: a step that predicts further tokens gives the same losses and gradients.

Both packages get the same weights, by name, and the same microbatches, whose masks differ. What 0.16.1
is known to lack stands at the end:
- per token, depth k's losses have no factor n_0 / max(n_k, 1) (`with_the_factor` adds it);
- with tied weights and p > 1 the last stage allocates an `output_layer.weight` that nothing uses;
- a mask whose tokens all roll out divides 0 by 0;
- without labels, as when text is generated, it raises AttributeError;
- the scale has no factor c beside a loss function's two-tuple, which gets one.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.core.transformer.zigzag import take_part
from tests.benchmarks.megatron_like import OURS
from tests.conformance import test_moe_step as experts
from tests.conformance.test_moe_step import BATCH, CORES, SEQUENCE, VOCABULARY, Norm, off
from tests.figures import figure
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
THEIRS = next(core.package for core in CORES.values() if core.package != OURS)
LIMIT, LIMIT_OF_THE_LOG = 1e-10, 1e-6
"""Relative, of the largest value of each gradient. What the log shows is float32."""
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 10,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.3,
}


@dataclass(frozen=True)
class Case:
    """A layout, and options of the configuration; as many layers as stages, or two."""

    t: int = 1
    p: int = 1
    v: int | None = None
    e: int = 1
    K: int = 1
    M: int = 2
    tied: bool = False
    per_token: bool = False
    layout: str | None = None
    num_layers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        found = {
            "tensor_model_parallel_size": self.t,
            "pipeline_model_parallel_size": self.p,
            "expert_model_parallel_size": self.e,
        }
        return found | ({} if self.v is None else {"virtual_pipeline_model_parallel_size": self.v})

    @property
    def config(self) -> dict[str, Any]:
        """For either package."""
        return {
            **self.sizes,
            "num_layers": self.num_layers or max(2, self.p * (self.v or 1)),
            "mtp_num_layers": self.K,
            "mtp_loss_scaling_factor": 0.7,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "ffn_hidden_size": 12,
            "calculate_per_token_loss": self.per_token,
            "params_dtype": torch.float64,
            "pipeline_dtype": torch.float64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": 0.3,
            "batch_p2p_comm": False,
            "overlap_p2p_comm": self.v is not None,
            **({"pipeline_model_parallel_layout": self.layout} if self.layout else {}),
            **self.options,
        }

    def embedding_ranks(self, pp_ranks: list[int]) -> list[int]:
        """Who has a copy: who embeds, who predicts further tokens, who has tied logits."""
        stages = {0, self.p - 1 if self.tied or not self.layout else 0}
        if self.layout:
            stages |= {i % self.p for i, s in enumerate(self.layout.split("|")) if "m" in s}
        return [pp_ranks[stage] for stage in sorted(stages)]


# -- The same step in both packages --


def names_of(core: SimpleNamespace) -> SimpleNamespace:
    module = partial(importlib.import_module, package=core.package)
    return SimpleNamespace(
        gpt=module(".models.gpt.gpt_model"),
        specs=module(".models.gpt.gpt_layer_specs"),
        mtp=module(".transformer.multi_token_prediction"),
    )


def build(core: SimpleNamespace, case: Case) -> list[torch.nn.Module]:
    """This rank's chunks in DDP."""
    is_ours = core.package == OURS
    theirs = {"gradient_accumulation_fusion": False, "bias_activation_fusion": False}
    config = core.TransformerConfig(
        use_cpu_initialization=True, **case.config, **({} if is_ours else theirs)
    )
    config.finalize_model_grads_func = core.finalize_model_grads
    state, specs, chunks = core.parallel_state, names_of(core).specs, []
    for stage in range(case.v or 1):
        vp_stage = None if case.v is None else stage
        at = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": stage}
        also = {} if is_ours else {"use_transformer_engine": False}
        spec = core.get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **also)
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = Norm
            layer.submodules.pre_mlp_layernorm = Norm
        spec.layer_norm = Norm
        layer = spec.layer_specs[-1] if spec.layer_specs else local_layer(core, config)
        further = specs.get_gpt_mtp_block_spec(config, layer, False, vp_stage)
        for layer in further.layer_specs if further else ():
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = Norm
        chunk = core.GPTModel(
            config,
            spec,
            VOCABULARY,
            SEQUENCE,
            state.is_pipeline_first_stage(**at),
            state.is_pipeline_last_stage(**at),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope",
            mtp_block_spec=further,
            vp_stage=vp_stage,
        )
        chunks.append(
            core.DistributedDataParallel(config, experts.ddp_config(core), chunk.double())
        )
    return chunks


def local_layer(core: SimpleNamespace, config: Any) -> Any:
    """For a stage that has no layer whose kind could be taken."""
    layer = core.get_gpt_layer_local_spec(config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return layer


def microbatches(case: Case, replica: int) -> list[dict[str, torch.Tensor]]:
    """Others for each copy of the model. Masks have holes: ten tokens count, then six, then ten.

    So the tokens of a step are a power of two: theirs divides by them in float32.
    """
    generator = torch.Generator().manual_seed(7 + replica)
    texts = torch.randint(VOCABULARY, (case.M, BATCH, SEQUENCE + 1), generator=generator)
    ranks = torch.rand((case.M, BATCH * SEQUENCE), generator=generator).argsort().argsort()
    masks = ranks < torch.tensor([10, 6]).repeat(case.M // 2)[:, None]
    return [
        {
            "input_ids": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1),
            "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool(),
            "loss_mask": mask.view(BATCH, SEQUENCE).double(),
        }
        for text, mask in zip(texts, masks, strict=True)
    ]


def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> tuple:
    loss = (losses * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.detach().clone()}


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple:
    batch = next(data_iterator)
    return model(**batch), partial(loss_func, batch["loss_mask"])


def run_step(core: SimpleNamespace, case: Case, chunks: list[torch.nn.Module]) -> list[float]:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    replica = core.parallel_state.get_data_parallel_rank()
    data = [iter(microbatches(case, replica)) for _ in chunks]
    reports = core.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if case.v else data[0],
        model=chunks if case.v else chunks[0],
        num_microbatches=case.M,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [report["loss"].item() for report in reports]


@contextlib.contextmanager
def with_the_factor(core: SimpleNamespace) -> Iterator[None]:
    """Theirs with what came after 0.16: per token, depth k's losses times n_0 / max(n_k, 1)."""
    if core.package == OURS:
        yield
        return
    names, counts = names_of(core), {}
    postprocess, roll = names.gpt.GPTModel._postprocess, names.gpt.roll_tensor
    scaler = names.gpt.MTPLossAutoScaler

    def begin(model, *args, loss_mask=None, **kwargs):
        counts["main"] = None if loss_mask is None else loss_mask.sum()
        return postprocess(model, *args, loss_mask=loss_mask, **kwargs)

    def count(tensor, **kwargs):
        rolled, total = roll(tensor, **kwargs)
        counts["depth"] = total  # the mask is rolled last
        return rolled, total

    class Scaler(scaler):
        @staticmethod
        def apply(hidden, losses):
            factor = counts["main"] / counts["depth"].clamp_min(1)
            return scaler.apply(hidden, losses * factor)

    with (
        mock.patch.object(names.gpt.GPTModel, "_postprocess", begin),
        mock.patch.multiple(names.gpt, roll_tensor=count, MTPLossAutoScaler=Scaler),
    ):
        yield


Found = dict[str, torch.Tensor]


def one_step(
    core: SimpleNamespace, case: Case, weights: list | None = None, is_newer: bool = True
) -> tuple[Found, list]:
    """Losses, what the log shows, and gradients by name; and the weights they were taken at."""
    core.parallel_state.destroy_model_parallel()
    add_factor = case.per_token and is_newer
    newer = with_the_factor(core) if add_factor else contextlib.nullcontext()
    with experts.surroundings(core), newer:
        core.parallel_state.initialize_model_parallel(
            **case.sizes, get_embedding_ranks=case.embedding_ranks
        )
        log = names_of(core).mtp.MTPLossLoggingHelper
        log.tracker.clear()
        chunks = build(core, case)
        weights = weights or experts.weights_of(chunks)
        experts.give(weights, chunks)
        losses, shown = run_step(core, case, chunks), {}
        log.track_mtp_metrics(1 / case.M, 3, None, total_loss_dict=shown)
    found = {f"loss {i}": torch.tensor(loss) for i, loss in enumerate(losses)}
    found |= {name: value.clone() for name, value in shown.items()}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.module.named_parameters():
            found[f"{number} {name}"] = param.main_grad.clone()
    return found, weights


def both_steps(case: Case, **how: Any) -> list[Found]:
    """Ours and theirs, at the same weights; what theirs has and nothing uses is left out."""
    found, weights = [], None
    for core in CORES.values():
        step, weights = one_step(core, case, weights, **how)
        found.append({k: v for k, v in step.items() if not k.endswith("router.bias")})
    ours, theirs = found
    for name in UNUSED if case.tied and case.p > 1 else ():
        for key in [key for key in theirs if key.endswith(name) and key not in ours]:
            assert not theirs.pop(key).any()
    return found


UNUSED = ("output_layer.weight",)

CASES = {
    "two copies": Case(),
    "two copies, tied, per token": Case(K=2, tied=True, per_token=True),
    "stages": Case(p=2, K=2),
    "stages, tied, per token": Case(p=2, tied=True, per_token=True),
    "stages by a layout": Case(p=2, K=2, tied=True, layout="Ett|tmmL", num_layers=3),
    "interleaved": Case(p=2, v=2, K=2, M=4, per_token=True),
    "interleaved, tied": Case(p=2, v=2, M=4, tied=True),
    "tensor ranks": Case(t=2, tied=True),
    "tensor ranks that share the sequence": Case(
        t=2, K=2, per_token=True, options={"sequence_parallel": True}
    ),
    "experts": Case(e=2, options=EXPERTS),
}
MORE_CASES = {
    "a stage for it alone": Case(p=4, K=2, layout="Ett|tt|mm|L", num_layers=4),
    "a stage for it alone, tied, per token": Case(
        p=4, tied=True, per_token=True, layout="Ett|tt|m|L", num_layers=4
    ),
    "stages of tensor ranks": Case(t=2, p=2, K=2, tied=True, options={"sequence_parallel": True}),
    "copies of stages": Case(p=2, K=2, per_token=True),
    "experts in stages": Case(p=2, e=2, tied=True, options=EXPERTS),
}
"""On four ranks."""


def differences(cases: dict[str, Case]) -> dict[str, float]:
    found = {}
    for name, case in cases.items():
        ours, theirs = both_steps(case)
        assert ours.keys() == theirs.keys(), (name, sorted(ours.keys() ^ theirs.keys()))
        floor = 1e-3 * max(value.abs().max().item() for value in theirs.values())
        for key, value in ours.items():
            found[f"{name}: {key}"] = off(value, theirs[key], floor)
    return found


def check(results: list[dict[str, float]], cases: dict[str, Case]) -> None:
    worst = 0.0
    for rank, found in enumerate(results):
        for name, difference in found.items():
            is_of_the_log = " mtp_" in name
            limit = LIMIT_OF_THE_LOG if is_of_the_log else LIMIT
            assert difference <= limit, f"{name} on rank {rank}: {difference:.1e}"
            worst = worst if is_of_the_log else max(worst, difference)
    tensors = sum(map(len, results))
    figure(f"{len(cases)} steps on {len(results)} ranks, {tensors} tensors; worst: {worst:.1e}")


def rolled() -> list[list[torch.Tensor]]:
    """This rank's part of tokens and of a mask, rolled twice, and its sum: ours and theirs."""
    found = []
    for core in CORES.values():
        roll, group = names_of(core).mtp.roll_tensor, torch.distributed.group.WORLD
        found.append([])
        for length in (4 * group.size(), 2 * group.size()):
            tokens = torch.arange(1, BATCH * length + 1)
            for values in (tokens, tokens / 7):
                tensor = take_part(values.view(BATCH, length), 1, group)
                with experts.surroundings(core):
                    for _ in range(2):
                        tensor, total = roll(tensor, shifts=-1, dims=-1, cp_group=group)
                        found[-1] += [tensor, total]
    return found


def on_two_ranks() -> tuple[dict[str, float], dict[str, Any], list[list[torch.Tensor]]]:
    return differences(CASES), gaps(), rolled()


@pytest.fixture(scope="module")
def results() -> tuple[list, list, list]:
    """Of both ranks: differences, what 0.16.1 lacks, what is rolled. One start of ranks."""
    return tuple(zip(*run_ranks(on_two_ranks, 2), strict=True))


def test_same_losses_and_gradients(results):
    check(results[0], CASES)


def test_same_rolled_over_ranks_that_share_a_sequence(results):
    for mine, other in results[2]:
        assert all(map(torch.equal, mine, other))


@pytest.mark.full
def test_same_losses_and_gradients_on_four_ranks():
    check(run_ranks(differences, 4, MORE_CASES), MORE_CASES)


# -- What theirs is known to lack, beside what ours does --


def gaps() -> dict[str, Any]:
    """By gap: what its test needs of ours and of theirs."""
    return {
        "factor": gradients_per_token(),
        "unused": unused_weights(),
        "empty": with_an_empty_mask(),
        "no labels": without_labels(),
        "scale": [scale_of(core) for core in CORES.values()],
    }


def gradients_per_token() -> list[dict[str, float]]:
    """Theirs over ours by parameter of what predicts a further token: as it is, and with the factor."""
    found = []
    with mock.patch.object(sys.modules[__name__], "microbatches", full_masks):
        for is_newer in (False, True):
            ours, theirs = both_steps(Case(per_token=True), is_newer=is_newer)
            further = [key for key in ours if ".mtp.layers" in key.replace(" ", ".")]
            found.append({key: ratio(theirs[key], ours[key]) for key in further})
    return found


def full_masks(case: Case, replica: int) -> list[dict[str, torch.Tensor]]:
    ones = torch.ones(BATCH, SEQUENCE, dtype=torch.float64)
    return [{**batch, "loss_mask": ones} for batch in microbatches_with_holes(case, replica)]


microbatches_with_holes = microbatches


def ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two tensors that are multiples of each other but for round-off; 0 if they are not."""
    largest = other.abs().argmax()
    found = one.flatten()[largest] / other.flatten()[largest]
    return found.item() if off(one, found * other) < 1e-6 else 0.0


def test_per_token_theirs_lacks_the_factor(results):
    """With full masks of s tokens it is s / (s - 1) for depth 1."""
    for found in results[1]:
        as_it_is, with_it = found["factor"]
        assert len(as_it_is) > 15
        assert set(as_it_is) == set(with_it)
        for name in as_it_is:
            assert as_it_is[name] == pytest.approx((SEQUENCE - 1) / SEQUENCE, abs=1e-6), name
            assert with_it[name] == pytest.approx(1.0, abs=1e-6), name


def unused_weights() -> list[list[str]]:
    """Names on this rank that only one package has, ours and theirs."""
    case = Case(p=2, tied=True)
    ours, theirs = (set(one_step(core, case)[0]) for core in CORES.values())
    return [sorted(ours - theirs), sorted(theirs - ours)]


def test_tied_over_stages_theirs_has_a_weight_that_nothing_uses(results):
    """That its gradient is zero is checked with the cases."""
    assert [found["unused"] for found in results[1]] == [[[], []], [[], ["0 output_layer.weight"]]]


def with_an_empty_mask() -> list[bool]:
    """Is every gradient finite where the only token that counts rolls out? Ours and theirs."""
    with mock.patch.object(sys.modules[__name__], "microbatches", first_tokens_alone):
        return [
            all(value.isfinite().all() for value in one_step(core, Case())[0].values())
            for core in CORES.values()
        ]


def first_tokens_alone(case: Case, replica: int) -> list[dict[str, torch.Tensor]]:
    mask = torch.zeros(BATCH, SEQUENCE, dtype=torch.float64)
    mask[:, 0] = 1.0
    return [{**batch, "loss_mask": mask} for batch in microbatches_with_holes(case, replica)]


def test_where_all_tokens_roll_out_theirs_divides_zero_by_zero(results):
    assert [found["empty"] for found in results[1]] == [[True, False]] * 2


def without_labels() -> list[str]:
    """What the model gives that is asked for logits: their shape, or what is raised."""
    found = []
    for core in CORES.values():
        core.parallel_state.destroy_model_parallel()
        with experts.surroundings(core):
            core.parallel_state.initialize_model_parallel()
            (chunk,) = build(core, Case())
            batch = microbatches(Case(), 0)[0]
            del batch["labels"], batch["loss_mask"]
            try:
                found.append(str(tuple(chunk(**batch).shape)))
            except AttributeError as error:
                found.append(str(error))
    return found


def test_without_labels_theirs_gives_no_logits(results):
    for found in results[1]:
        ours, theirs = found["no labels"]
        assert ours == str((BATCH, SEQUENCE, VOCABULARY))
        assert "'clone'" in theirs


def scale_of(core: SimpleNamespace) -> list[float]:
    """The gradient of a further token's loss, scaled by 8, with c = 2 and M = 4.

    With `calculate_per_token_loss` off, and on.
    """
    schedules = importlib.import_module(f"{core.package}.pipeline_parallel.schedules")
    found = []
    for per_token in (False, True):
        config = core.TransformerConfig(**{**Case(per_token=per_token).config, "num_layers": 1})
        config.grad_scale_func = lambda loss: 8.0 * loss
        more = [torch.tensor(1)] if per_token else []
        with experts.surroundings(core):
            schedules.forward_step_calc_loss(
                SimpleNamespace(vp_stage=None),
                torch.ones(1),
                lambda output, more=more: (output.sum(), *more, {}),
                config,
                None,
                False,
                num_microbatches=4,
                forward_data_store=[],
                cp_group_size=2,
                is_last_stage=True,
            )
            loss = torch.ones(3, requires_grad=True)
            hidden = torch.ones(1, requires_grad=True)
            scaler = names_of(core).mtp.MTPLossAutoScaler
            scaler.apply(hidden * 1.0, loss).sum().backward()
        found.append(loss.grad[0].item())
    return found


def test_the_scale_theirs_has_no_factor_c(results):
    for found in results[1]:
        ours, theirs = found["scale"]
        assert (ours, theirs) == ([8 * 2 / 4, 8.0], [8 / 4, 8.0])
