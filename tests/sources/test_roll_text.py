"""ROLL's way of calling the schedule: `partial(inner_forward_step, loss_func)`, one iterator per chunk.

Its loss function returns two values: a sum over tokens, divided by those of the whole batch,
times M x d in place. Its scores are dictionaries of tensors. Its microbatches have different lengths.
Written for this test; facts about ROLL are in the comments of the functions.
"""

from functools import partial

import pytest
import torch

from minimegatron.core.pipeline_parallel import get_forward_backward_func
from minimegatron.core.tensor_parallel import vocab_parallel_cross_entropy
from minimegatron.training.tiny_gpt import TinyGPT
from tests.ranks import run_ranks
from tests.rl.boxes import boxes, whole

NUM_MICROBATCHES, LENGTHS, NUM_LAYERS = 4, (6, 12, 10, 8), 4
"""Of the global batch; every second one goes to the second of two copies."""
LAYOUTS = {
    "alone": ({}, 1),
    "d=2": ({}, 2),
    "two chunks": ({"pp": 2, "vp": 2}, 2),
    "t=2, p=2": ({"tp": 2, "pp": 2}, 4),
}


def batches():
    """Of the global batch: tokens, a response mask, advantages, old log-probabilities; lengths vary."""
    generator = torch.Generator().manual_seed(8)
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(64, (2, length), generator=generator)
        place = torch.arange(length)
        ends = torch.tensor([[length - 1 - number % 2], [length - 3]])
        yield {
            "input_ids": tokens,
            "response_mask": ((place >= 2) & (place < ends)).double()[:, 1:],
            "advantages": torch.randn(2, 1, generator=generator, dtype=torch.float64),
            "old_log_probs": -4.2
            + 0.2 * torch.randn(2, length - 1, generator=generator, dtype=torch.float64),
        }


NUM_TOKENS = sum(float(batch["response_mask"].sum()) for batch in batches())


class Strategy:
    """What stands between a trainer and the schedule."""

    def __init__(self, layout):
        self.gpt = TinyGPT(
            **layout,
            num_layers=NUM_LAYERS,
            params_dtype=torch.float64,
            pipeline_dtype=torch.float64,
            variable_seq_lengths=True,
        )
        self.models, copies = self.gpt.chunks, self.gpt.groups.dp
        self.num_copies = copies.size()
        self.microbatches = list(batches())[copies.rank() :: copies.size()]

    def run(self, loss_func, forward_only):
        # Each chunk has its own iterator over the same list.
        return get_forward_backward_func()(
            forward_step_func=partial(self.inner_forward_step, loss_func),
            data_iterator=[iter(self.microbatches) for _ in self.models],
            model=self.models,
            num_microbatches=len(self.microbatches),
            seq_length=max(LENGTHS),
            micro_batch_size=2,
            forward_only=forward_only,
        )

    def inner_forward_step(self, loss_func, data_iterator, model):
        data = next(data_iterator)
        # All by keyword, positions left to the model.
        output = model(
            input_ids=data["input_ids"],
            attention_mask=None,
            position_ids=None,
            labels=None,
            packed_seq_params=None,
            loss_mask=data["response_mask"],
        )

        def loss_wrapper(output_tensor):
            loss, metrics = loss_func(data, output_tensor)
            if isinstance(loss, torch.Tensor):
                loss *= len(self.microbatches) * self.num_copies  # in place
            return loss, metrics

        return output, loss_wrapper

    def train_step(self):
        for chunk in self.models:
            chunk.zero_grad_buffer()
        return self.run(policy_loss, forward_only=False)

    def compute_log_probs(self):
        for chunk in self.models:
            chunk.eval()
        with torch.no_grad():  # the caller's: forward_only alone leaves autograd on
            return self.run(scores, forward_only=True)


def log_probs_of(data, logits):
    """Of the following token, from vocabulary shards: the last position has none."""
    labels = data["input_ids"].roll(-1, dims=1)
    losses = vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), labels.t())
    return -losses.t()[:, :-1]


def scores(data, logits):
    log_probs = log_probs_of(data, logits)
    return 0.0, {"log_probs": log_probs, "entropy": -log_probs.exp() * log_probs}


def policy_loss(data, logits):
    log_probs = log_probs_of(data, logits)
    ratio = (log_probs - data["old_log_probs"]).exp()
    gains = torch.min(ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"])
    loss = -(gains * data["response_mask"]).sum() / NUM_TOKENS
    return loss, {"actor/loss": loss.detach().item(), "actor/ratios": ratio.detach().flatten()}


def one_step(layout):
    """In a rank: scores, what the step reported, and its gradients as boxes of whole tensors."""
    strategy = Strategy(layout)
    found = strategy.compute_log_probs()
    reported = strategy.train_step()
    return found, reported, boxes(strategy.models), strategy.gpt.groups.dp.rank()


def truth():
    """In a rank: gradients of the written formula, over all microbatches, by autograd alone."""
    strategy = Strategy({})
    model = strategy.models[0].module
    named = dict(model.named_parameters())
    total, log_probs = 0.0, []
    for data in batches():
        logits = model(data["input_ids"], None, None)
        chances = logits[:, :-1].log_softmax(-1)
        current = chances.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        ratio, a = torch.exp(current - data["old_log_probs"]), data["advantages"]
        gain = torch.where(a > 0, ratio.clamp(max=1.2) * a, ratio.clamp(min=0.8) * a)
        total = total - (gain * data["response_mask"]).sum()
        log_probs.append(current.detach())
    gradients = torch.autograd.grad(total / NUM_TOKENS, list(named.values()))
    return dict(zip(named, gradients, strict=True)), log_probs


@pytest.fixture(scope="module")
def wanted():
    return run_ranks(truth, 1)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_pattern_computes_the_formula(name, wanted):
    layout, num_ranks = LAYOUTS[name]
    gradients, log_probs = wanted
    per_rank = run_ranks(one_step, num_ranks, layout, timeout=120)
    found = whole([of_rank[2] for of_rank in per_rank])
    assert found.keys() == gradients.keys()
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[parameter], rtol=0, atol=1e-12)
    seen = 0
    for scored, reported, _, copy in per_rank:
        copies = 2 if name == "d=2" else 1
        for here, there in zip(scored, log_probs[copy::copies], strict=False):
            torch.testing.assert_close(here["log_probs"], there, rtol=0, atol=1e-12)
            assert here["entropy"].shape == there.shape and not here["entropy"].requires_grad
            seen += 1
        assert len(scored) == len(reported)
        assert {len(report["actor/ratios"]) for report in reported} <= {2 * n - 2 for n in LENGTHS}
    # The last stage alone has results; there, each tensor rank.
    assert seen == NUM_MICROBATCHES * layout.get("tp", 1)
