"""Further tokens: losses written out by hand, what is rolled, what the log says, what is refused."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from minimegatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)
from tests.core.models.gpt_support import BATCH, CASES, SEQUENCE, VOCABULARY, Case
from tests.fake_transport import FakeGroup

TIED, LLAMA, QWEN, *_ = CASES.values()
GROUPS = SimpleNamespace(
    **dict.fromkeys(("tp", "cp", "pp", "dp_cp", "embd", "pos_embd"), FakeGroup())
)
NUM_MICROBATCHES = 3


@pytest.fixture(autouse=True)
def _empty_tracker(monkeypatch):
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))


def build(case: Case, num_depths: int, **options: Any):
    config = case.make_config(mtp_num_layers=num_depths, mtp_loss_scaling_factor=0.3, **options)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    return case.build(config, GROUPS, mtp_block_spec=get_gpt_mtp_block_spec(config, spec))


def microbatches(masked: str = "uneven") -> list[dict[str, torch.Tensor]]:
    """Token ids, labels and mask; masks differ, and one token in the middle does not count."""
    found = []
    for number in range(NUM_MICROBATCHES):
        generator = torch.Generator().manual_seed(number)
        text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        mask = torch.ones(BATCH, SEQUENCE, dtype=torch.float64)
        mask[:, SEQUENCE - 2 * number :] = 0.0
        mask[0, 2] = 0.0
        if masked == "all of one" and number == 1:
            mask.zero_()
        found.append({"ids": text[:, :-1], "labels": text[:, 1:], "mask": mask})
    return found


def loss_func(mask, output):
    return (output * mask).sum(), mask.sum().int(), {"loss": (output * mask).sum().detach()}


def forward_step(iterator, model):
    batch = next(iterator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    more = {"labels": batch["labels"], "loss_mask": batch["mask"]}
    return model(batch["ids"], positions, None, **more), partial(loss_func, batch["mask"])


def step(model, batches, forward_only: bool = False, forward_step=forward_step) -> dict:
    """Gradients of one step by the schedule."""
    model.zero_grad()
    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        pg_collection=GROUPS,
    )
    return {name: param.grad for name, param in model.named_parameters()}


# -- Written out by hand --


def shifted(tensor: torch.Tensor, places: int) -> torch.Tensor:
    return F.pad(tensor[:, places:], (0, places))


def by_hand(model, batch) -> list[torch.Tensor]:
    """Loss of each token, [b, s], at each depth from 0."""
    ids, positions = batch["ids"], torch.arange(SEQUENCE).expand(BATCH, -1)
    angles = None if model.rotary_pos_emb is None else model.rotary_pos_emb(SEQUENCE)
    states = model.decoder(model.embedding(ids, positions), None, rotary_pos_emb=angles)
    weight = model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight if weight is None else weight
    found = []
    for depth in range(1 + len(model.mtp.layers)):
        if depth:
            layer = model.mtp.layers[depth - 1]
            tokens = model.embedding(shifted(ids, depth), shifted(positions, depth))
            both = torch.cat([layer.enorm(tokens), layer.hnorm(states)], dim=-1)
            states, _ = layer.transformer_layer(
                F.linear(both, layer.eh_proj.weight), None, rotary_pos_emb=angles
            )
            states = layer.final_layernorm(states)
        logits = F.linear(states, weight).permute(1, 2, 0)  # [b, v, s]
        found.append(F.cross_entropy(logits, shifted(batch["labels"], depth), reduction="none"))
    return found


def objective(model, batches, per_token: bool) -> torch.Tensor:
    """The whole step's loss, without autoscaler."""
    f, num_depths = model.config.mtp_loss_scaling_factor, model.config.mtp_num_layers
    total = 0.0
    for batch in batches:
        masks = [shifted(batch["mask"], depth) for depth in range(1 + num_depths)]
        means = [
            (mask * losses).sum() / max(mask.sum().item(), 1)
            for mask, losses in zip(masks, by_hand(model, batch), strict=True)
        ]
        of_batch = means[0] + f / num_depths * sum(means[1:])
        total = total + of_batch * (masks[0].sum() if per_token else 1 / len(batches))
    return total


@pytest.mark.parametrize("per_token", [False, True], ids=("means", "per token"))
@pytest.mark.parametrize("num_depths", [1, 2, 3])
@pytest.mark.parametrize("case", [TIED, LLAMA, QWEN], ids=("tied", "llama", "qwen"))
def test_gradients_are_those_of_the_sum_of_losses(case, num_depths, per_token):
    model = build(case, num_depths, calculate_per_token_loss=per_token)
    batches = microbatches("all of one" if num_depths == 2 else "uneven")
    found = step(model, batches)
    model.zero_grad()
    objective(model, batches, per_token).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None and found[name].isfinite().all(), name
        torch.testing.assert_close(found[name], param.grad, rtol=1e-9, atol=1e-12, msg=name)
    assert found["mtp.layers.0.eh_proj.weight"].abs().max() > 1e-4


def test_a_mask_of_nothing_and_no_mask():
    model = build(LLAMA, 2)
    batches = microbatches()[:1]
    batches[0]["mask"] = torch.zeros_like(batches[0]["mask"])
    assert all(not grad.any() for grad in step(model, batches).values())
    # One token that counts, the first: at no further depth does one.
    batches[0]["mask"][1, 0] = 1.0
    found = step(model, batches)
    assert found["decoder.layers.0.mlp.linear_fc1.weight"].any()
    assert not found["mtp.layers.1.eh_proj.weight"].any()
    assert all(grad.isfinite().all() for grad in found.values())
    # No mask: all tokens count, but for those that the sequence does not have.
    ones = [dict(batches[0], mask=torch.ones(BATCH, SEQUENCE, dtype=torch.float64))]
    wanted = step(model, ones)

    def without_mask(iterator, model):
        batch = next(iterator)
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        output = model(batch["ids"], positions, None, labels=batch["labels"])
        return output, partial(loss_func, batch["mask"])

    found = step(model, ones, forward_step=without_mask)
    for name, grad in wanted.items():
        assert torch.equal(found[name], grad), name
