"""The router: gradients of its losses against plain formulas, on one rank and on several; its state."""

import gc
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from minimegatron.core import tracing
from minimegatron.core.tensor_parallel.random import checkpoint
from minimegatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from minimegatron.core.transformer.moe.router import TopKRouter
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.core.transformer.moe.thread_ranks import groups_of_all_ranks, one_rank, run_threads

HIDDEN, EXPERTS, SEQUENCE, BATCH = 5, 4, 8, 3
COEFF = 0.7


def make_config(**options: Any) -> TransformerConfig:
    base = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 1}
    base |= {"num_moe_experts": EXPERTS, "params_dtype": torch.float64, "init_method_std": 0.5}
    return TransformerConfig(**{**base, **options})


def make_router(groups: Any = None, **options: Any) -> TopKRouter:
    """Of a world of one, or of `groups`; the same weight every time."""
    torch.manual_seed(5)
    router = TopKRouter(make_config(**options), groups or one_rank())
    router.set_layer_number(2)
    return router


def some_input(seed: int = 0, sequence: int = SEQUENCE) -> torch.Tensor:
    """[s, b, h], not the same for all experts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequence, BATCH, HIDDEN, generator=generator, dtype=torch.float64) + 0.3


@pytest.fixture(autouse=True)
def scale_of_nobody():
    yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


# -- A step of several ranks and microbatches --


@dataclass(frozen=True)
class Step:
    """A loss of balance, and how its tokens are divided."""

    kind: str
    t: int = 1
    c: int = 1
    d: int = 1
    M: int = 2
    per_token: bool = False
    topk: int = 2
    score: str = "softmax"
    sizes: tuple[int, ...] = (SEQUENCE,)
    """Lengths of the sequences of microbatches, in turn."""

    def inputs(self) -> list[list[torch.Tensor]]:
        """For each data-parallel rank, its microbatches."""
        return [
            [some_input(10 * d + m, self.sizes[m % len(self.sizes)]) for m in range(self.M)]
            for d in range(self.d)
        ]

    def config(self) -> dict[str, Any]:
        options = {
            "moe_router_topk": self.topk,
            "moe_router_pre_softmax": self.topk == 1,
            "moe_router_score_function": self.score,
            "calculate_per_token_loss": self.per_token,
            "tensor_model_parallel_size": self.t,
            "sequence_parallel": self.t > 1,
            "context_parallel_size": self.c,
            "add_bias_linear": False,
            "kv_channels": 1,
            "num_attention_heads": 2,
            "ffn_hidden_size": 4,
        }
        if self.kind == "z_loss":
            return options | {"moe_z_loss_coeff": COEFF}
        return options | {
            "moe_router_load_balancing_type": self.kind,
            "moe_aux_loss_coeff": COEFF,
        }


def plain_loss(step: Step, weight: torch.Tensor, inputs: list[list[torch.Tensor]]) -> torch.Tensor:
    """The mean over microbatches and data-parallel ranks of the loss, from its definition."""
    losses = []
    for m in range(step.M):
        for rank in inputs:
            logits = rank[m] @ weight.t()
            if step.kind == "z_loss":
                losses.append(logits.logsumexp(dim=-1).square().mean())
                continue
            scores = fractions_of(step, logits)
            if step.kind == "global_aux_loss":
                # Everything that any rank has chosen in this step so far.
                so_far = [x for others in inputs for x in others[: m + 1]]
                chosen = torch.cat([choice(step, x @ weight.t()).flatten(0, 1) for x in so_far])
                shares = chosen.sum(dim=0) / chosen.sum()
                losses.append(EXPERTS * (shares * scores.mean(dim=(0, 1))).sum())
            elif step.kind == "aux_loss":
                chosen = choice(step, logits)
                shares = chosen.sum(dim=(0, 1)) / chosen.sum()
                losses.append(EXPERTS * (shares * scores.mean(dim=(0, 1))).sum())
            else:
                for b in range(BATCH):
                    chosen = choice(step, logits)[:, b]
                    shares = chosen.sum(dim=0) / chosen.sum()
                    losses.append(EXPERTS * (shares * scores[:, b].mean(dim=0)).sum())
    return COEFF * torch.stack(losses).mean()


def fractions_of(step: Step, logits: torch.Tensor) -> torch.Tensor:
    if step.score == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() / logits.sigmoid().sum(dim=-1, keepdim=True)


def choice(step: Step, logits: torch.Tensor) -> torch.Tensor:
    numbers = logits.topk(step.topk, dim=-1).indices
    return torch.zeros_like(logits).scatter(-1, numbers, 1.0)


def run_rank(step: Step, place: dict[str, int], router: TopKRouter) -> tuple:
    """The microbatches of one rank, forward and backward: (gradient of the weight, of inputs)."""
    parts = []
    for m, whole in enumerate(step.inputs()[place["d"]]):
        part = whole.chunk(step.t * step.c)[place["c"] * step.t + place["t"]]
        parts.append(part.clone().requires_grad_())
        probs, _ = router(parts[m])
        for set_scale in router.config.aux_loss_scale_funcs:
            set_scale(torch.ones(1), step.M, step.c)
        (probs * 0.0).sum().backward()
    return router.weight.grad, [part.grad for part in parts]


def check(step: Step) -> None:
    """Gradients as `finalize_model_grads` leaves them are those of the definition, in float64."""
    ranks = groups_of_all_ranks(t=step.t, c=step.c, d=step.d)
    # The generator is one for all threads: weights are drawn here.
    routers = [make_router(groups, **step.config()) for _, groups in ranks]
    functions = [
        partial(run_rank, step, place, router)
        for (place, _), router in zip(ranks, routers, strict=True)
    ]
    results = run_threads(functions, [groups for _, groups in ranks])
    num_tokens = sum(x.size(0) * BATCH for rank in step.inputs() for x in rank)
    factor = 1 / num_tokens if step.per_token else 1 / (step.d * step.c)

    weight = make_router(**{**step.config(), "sequence_parallel": False, **ALONE}).weight
    inputs = [[x.requires_grad_() for x in rank] for rank in step.inputs()]
    plain_loss(step, weight, inputs).backward()
    grad = factor * sum(grad for grad, _ in results)
    assert weight.grad.abs().max() > 1e-3
    torch.testing.assert_close(grad, weight.grad, rtol=0, atol=1e-13)
    for (place, _), (_, grads) in zip(ranks, results, strict=True):
        for x, grad in zip(inputs[place["d"]], grads, strict=True):
            part = x.grad.chunk(step.t * step.c)[place["c"] * step.t + place["t"]]
            torch.testing.assert_close(grad * factor, part, rtol=0, atol=1e-13)


ALONE = {"tensor_model_parallel_size": 1, "context_parallel_size": 1}
KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


@pytest.mark.parametrize("per_token", [False, True], ids=["means", "per token"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_one_rank_is_its_definition(kind, per_token):
    check(Step(kind, per_token=per_token, M=3))
    check(Step(kind, per_token=per_token, topk=1, score="sigmoid"))


@pytest.mark.parametrize("per_token", [False, True], ids=["means", "per token"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", ["t", "c", "d", "tcd"])
def test_ranks_that_share_tokens_have_the_gradient_of_one(sizes, kind, per_token):
    check(Step(kind, per_token=per_token, **dict.fromkeys(sizes, 2)))


def test_the_global_loss_counts_tokens_not_microbatches():
    check(Step("global_aux_loss", M=3, sizes=(SEQUENCE, 2, 4)))


def test_without_sequences_of_one_length_the_others_are_right_too():
    for kind in ("aux_loss", "seq_aux_loss", "z_loss"):
        check(Step(kind, t=2, sizes=(SEQUENCE, 4)))


def test_several_losses_add_up():
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
    options = {
        "moe_router_load_balancing_type": kinds,
        "moe_aux_loss_coeff": [COEFF, 2 * COEFF, 3 * COEFF],
        "moe_z_loss_coeff": 4 * COEFF,
    }
    router, x = make_router(**options), some_input()
    (router(x)[0] * 0.0).sum().backward()
    weight = router.weight.detach().clone().requires_grad_()
    sum(
        factor * plain_loss(Step(kind, M=1), weight, [[x]])
        for factor, kind in enumerate([*kinds, "z_loss"], 1)
    ).backward()
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=0, atol=1e-13)


def test_the_loss_scale_multiplies_them():
    for per_token in (False, True):
        grads = []
        for scale in (1.0, 1024.0):
            router = make_router(moe_aux_loss_coeff=COEFF, calculate_per_token_loss=per_token)
            (set_scale,) = router.config.aux_loss_scale_funcs
            set_scale(torch.ones(1) * scale, 3, 1)
            (router(some_input())[0] * 0.0).sum().backward()
            grads.append(router.weight.grad)
        torch.testing.assert_close(grads[1], 1024 * grads[0])


# -- What counts, and what does not --

ALL = {
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": COEFF,
    "moe_z_loss_coeff": COEFF,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def counted(router: TopKRouter) -> tuple:
    """Everything that a router counts and adds up."""
    losses = {name: round(loss.item(), 12) for name, loss in router.losses.items()}
    counts = router.local_tokens_per_expert, router.global_tokens_per_expert
    return losses, router.num_counted, *(count.tolist() for count in counts)


def test_recompute_counts_once():
    plain, again = make_router(**ALL), make_router(**ALL)
    for x in (some_input(1), some_input(2)):
        plain(x)[0].square().sum().backward()
        x = x.requires_grad_()
        checkpoint(lambda x: again(x)[0], False, x).square().sum().backward()
    assert counted(plain) == counted(again)
    assert sum(counted(plain)[2]) == 2 * SEQUENCE * BATCH * 2
    torch.testing.assert_close(plain.weight.grad, again.weight.grad, rtol=0, atol=1e-14)


def test_evaluation_counts_nothing():
    router = make_router(**ALL)
    nothing = counted(router)
    assert nothing == ({}, 0, [0] * EXPERTS, [0] * EXPERTS)
    with torch.no_grad():
        router(some_input())
    router.eval()
    router(some_input())
    assert counted(router) == nothing
    router.train()
    router(some_input())
    assert counted(router) != nothing
    router.forget_step()
    assert counted(router) == nothing


def test_only_tokens_that_reach_an_expert_count():
    options = {"moe_router_score_function": "sigmoid", "moe_expert_capacity_factor": 0.5}
    for pads in (False, True):
        router = make_router(**options, moe_pad_expert_input_to_capacity=pads)
        logits = some_input()[..., :EXPERTS] + torch.tensor([2.0, 0.0, 0.0, -2.0])
        probs, routing_map = router.routing(logits)
        reach = (probs > 0).sum(dim=0)
        room = SEQUENCE * BATCH * 2 // EXPERTS // 2
        assert reach.max() == room and reach.min() < room
        assert torch.equal(router.local_tokens_per_expert, reach)
        assert pads == bool((routing_map.sum(dim=0) == room).all())


def test_nothing_of_a_microbatch_is_kept():
    router, x = make_router(**ALL), some_input()
    probs, routing_map = router(x)
    kept = [weakref.ref(tensor) for tensor in (probs, routing_map)]
    probs.square().sum().backward()
    del probs, routing_map
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    assert not any(loss.requires_grad for loss in router.losses.values())


# -- 16 bits --


def test_sixteen_bits_leave_counts_and_bias_as_they_are():
    router = make_router(**ALL, params_dtype=torch.float32)
    bias = torch.tensor([1.0005, -0.001, 0.0, 0.3])
    router.expert_bias.copy_(bias)
    outer = torch.nn.Sequential(router)
    for convert in (outer.bfloat16, outer.half, outer.double):
        convert()
        assert torch.equal(router.expert_bias, bias)
        assert router.expert_bias.dtype == torch.float32
        assert router.local_tokens_per_expert.dtype == torch.int64
    assert router.weight.dtype == torch.float64
    again = make_router(**ALL).bfloat16()
    again.load_state_dict(router.state_dict())
    assert torch.equal(again.expert_bias, bias)
    assert set(router.state_dict()) == {"weight", "expert_bias"}


def test_counts_of_a_16_bit_model_are_exact():
    router = make_router(**ALL, moe_router_topk=1, params_dtype=torch.float32).bfloat16()
    wanted = [257, 255, 256, 1]
    numbers = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(wanted))
    for half in (numbers[::2], numbers[1::2]):
        router.routing(torch.nn.functional.one_hot(half, EXPERTS).bfloat16().unsqueeze(1))
    assert router.local_tokens_per_expert.tolist() == wanted


def test_the_routers_dtype():
    x = some_input().bfloat16()
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64), (None, torch.bfloat16)):
        router = make_router(moe_router_dtype=name, moe_z_loss_coeff=COEFF).bfloat16()
        probs, _ = router(x)
        assert probs.dtype == dtype
        probs.square().sum().backward()
        assert router.weight.grad.dtype == torch.bfloat16


# -- Ways to choose --


def test_the_weight_is_whole_and_its_gradient_may_be_a_part():
    for sizes in ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}):
        options = {"hidden_size": 8, "num_attention_heads": 2, "add_bias_linear": False}
        weight = make_router(**options, **sizes).weight
        assert weight.shape == (EXPERTS, 8) and weight.sequence_parallel == bool(sizes)
        assert not weight.tensor_model_parallel and getattr(weight, "allreduce", True)


def test_jitter_is_noise_in_training():
    router, x = make_router(moe_input_jitter_eps=0.1), torch.ones(50, 2, HIDDEN)
    noisy = router.apply_input_jitter(x)
    assert 0.9 <= noisy.min() < 0.92 and 1.08 < noisy.max() <= 1.1
    router.eval()
    assert torch.equal(router.apply_input_jitter(x), x)


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_balances_in_training_alone(topk):
    router = make_router(moe_router_load_balancing_type="sinkhorn", moe_router_topk=topk)
    logits = torch.randn(32, 1, EXPERTS, dtype=torch.float64) + torch.tensor([3.0, 0, 0, 0])
    probs, routing_map = router.routing(logits.requires_grad_())
    even = routing_map.sum(dim=0)
    scores = logits.flatten(0, 1)
    scores = scores.sigmoid() if topk == 1 else scores.softmax(dim=-1)
    assert torch.equal(probs, scores * routing_map)
    probs.sum().backward()
    assert logits.grad.abs().sum() > 0
    router.eval()
    uneven = router.routing(logits)[1].sum(dim=0)
    assert even.sum() == uneven.sum() == 32 * topk
    assert even.max() < uneven.max() and uneven[0] > 25


def test_the_trace_says_where_tokens_went_and_which_were_dropped():
    seen = []

    class Observer:
        def start(self, call):
            seen.append((call.name, call.attributes))

        def stop(self, call):
            pass

    router = make_router(moe_expert_capacity_factor=0.5)
    with tracing.observed_by(Observer()):
        _, routing_map = router(some_input())
    (route, layer), (counts, said) = [(n, a) for n, a in seen if n.startswith("moe")]
    assert (route, counts, layer) == ("moe-route", "moe-counts", {"layer": 2})
    assert said["layer"] == 2
    assert said["tokens_per_expert"] == routing_map.sum(dim=0).tolist()
    assert said["dropped"] == SEQUENCE * BATCH * 2 - int(routing_map.sum()) > 0
