"""One step of GRPO through the real schedule: every raw gradient is that of the formula, in float64.

The truth is autograd of the formula in one process, over all rows at once. Old log-probabilities, the
reference's and those of drawing have noise: ratios leave their bounds, and weights their cap.
"""

import pytest
import torch

from minimegatron import train_rl
from minimegatron.core import parallel_state
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.utils import unwrap_model
from minimegatron.rl.rl_utils import get_logprobs
from minimegatron.training.global_vars import get_args
from minimegatron.training.pipeline_schedule import schedule_of_run
from tests.ranks import run_ranks
from tests.rl.boxes import boxes, whole
from tests.rl.short_rl_runs import LAYOUTS, Run, leave

LENGTHS = (1, 5, 2, 6, 4, 3, 6, 0)
"""Tokens of each row's answer; the last row is one of padding."""
NUM_ROWS, LENGTH, PROMPT = len(LENGTHS), 8, 2
FLAGS = (
    f"--global-batch-size {NUM_ROWS} --grpo-prompts-per-step 4 --grpo-group-size 2 "
    "--grpo-kl-beta 0.1 --grpo-entropy-term-weight 0.03 --rl-inference-logprobs-is-correction "
    "--rl-importance-sampling-truncation-coef 1.05 --rl-default-temperature 0.8"
)
SHORTER = {"order": list(range(NUM_ROWS)), "length": LENGTH, "without": 0}


def rows_of(order, length, without):
    """(tokens, advantages, old, mask, reference, drawn), of `length` tokens; without the last rows."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(7, (NUM_ROWS, LENGTH), generator=generator)
    advantages = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
    first = -2.0 + 0.3 * torch.randn(
        3, NUM_ROWS, LENGTH - 1, generator=generator, dtype=torch.float64
    )
    noise = torch.randn(first.shape, generator=generator, dtype=torch.float64)
    old, ref, drawn = first + 0.3 * noise
    place = torch.arange(LENGTH)
    ends = PROMPT + torch.tensor(LENGTHS).unsqueeze(-1)
    mask = ((place >= PROMPT) & (place < ends)).double()
    advantages[-1] = 0.0
    fields = [tokens, advantages, old, mask, ref, drawn]
    more = length - LENGTH
    fields = [
        field if field.dim() == 1 else torch.nn.functional.pad(field, (0, more)) for field in fields
    ]
    return [field[order][: NUM_ROWS - without] for field in fields]


def gradients(flags, micro_batch_size, order, length, without):
    """In a rank: what one step leaves, as boxes of whole tensors (name, offset, shape, gradient)."""
    here = f"{FLAGS} {flags} --micro-batch-size {micro_batch_size} --seq-length {length}"
    count = NUM_ROWS - without
    try:
        this = Run(
            f"{here} --global-batch-size {count} --grpo-prompts-per-step 1 --grpo-group-size {count}",
            True,
        )
        copies, copy = get_args().data_parallel_size, parallel_state.get_data_parallel_rank()
        mine = [field.tensor_split(copies)[copy] for field in rows_of(order, length, without)]
        tokens = mine[0]
        positions = torch.arange(length).expand_as(tokens)
        fields = (*mine[:4], positions, *mine[4:])
        microbatches = list(zip(*(field.split(micro_batch_size) for field in fields), strict=True))
        for chunk in this.model:
            chunk.zero_grad_buffer()
        schedule_of_run()(
            forward_step_func=train_rl.forward_step,
            data_iterator=[iter(microbatches) for _ in this.model],
            model=this.model,
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )
        return boxes(this.model)
    finally:
        leave()


def truth():
    """In a rank: the same by autograd, of the formula written out, over all rows at once."""
    try:
        this = Run(f"{FLAGS} --micro-batch-size {NUM_ROWS}", double=True)
        model = unwrap_model(this.model[0])
        tokens, advantages, old, mask, ref, drawn = rows_of(**SHORTER)
        logits = model(tokens, torch.arange(LENGTH).expand_as(tokens), None) / 0.8
        chances = torch.softmax(logits[:, :-1], dim=-1)
        current = chances.gather(-1, tokens[:, 1:, None]).squeeze(-1).log()
        ratio = torch.exp(current - old)
        a = advantages[:, None]
        gain = torch.where(a > 0, ratio.clamp(max=1.28) * a, ratio.clamp(min=0.8) * a)
        weight = torch.exp(old - drawn).clamp(max=1.05)
        kl = torch.exp(ref - current) - (ref - current) - 1
        loss = -weight * gain + 0.1 * kl + 0.03 * current.exp() * current
        counts = mask[:, 1:]
        named = list(named_global_parameters(model))
        total = (loss * counts).sum() / counts.sum()
        found = torch.autograd.grad(total, [param for _, param in named])
        clipped = (((ratio > 1.28) | (ratio < 0.8)) & (counts > 0)).sum() / counts.sum()
        scores = get_logprobs(model, tokens, torch.arange(LENGTH).expand_as(tokens), no_grad=True)
        assert not scores.requires_grad
        torch.testing.assert_close(scores, current.detach(), rtol=1e-12, atol=1e-12)
        return {name: g for (name, _), g in zip(named, found, strict=True)}, float(clipped)
    finally:
        leave()


REVERSED = SHORTER | {"order": [7, 6, 5, 4, 3, 2, 1, 0]}
LONGER = SHORTER | {"length": 12}
WITHOUT_PADDING = SHORTER | {"without": 1}
CASES = {
    1: {
        **{f"M={8 // size}": ("", size, SHORTER) for size in (1, 2, 4, 8)},
        "other order": ("", 2, REVERSED),
        "longer rows": ("", 2, LONGER),
        "without the row of padding, M=1": ("", 7, WITHOUT_PADDING),
        "without the row of padding, M=7": ("", 1, WITHOUT_PADDING),
    },
    2: {
        **{f"d=2, M={4 // size}": (LAYOUTS["d=2"], size, SHORTER) for size in (1, 2, 4)},
        **{f"c=2, M={8 // size}": (LAYOUTS["c=2"], size, SHORTER) for size in (1, 8)},
        "c=2, longer rows": (LAYOUTS["c=2"], 2, LONGER),
        **{
            f"{name}, M=4": (LAYOUTS[name], 2, SHORTER)
            for name in ("p=2", "p=2, v=2", "t=2", "t=2, sequence parallel")
        },
    },
    4: {
        "t=2, p=2": (f"{LAYOUTS['t=2']} {LAYOUTS['p=2']}", 2, SHORTER),
        "c=2, p=2, v=2": (f"{LAYOUTS['c=2']} {LAYOUTS['p=2, v=2']}", 2, SHORTER),
        "d=2, p=2, longer rows": (LAYOUTS["p=2"], 1, LONGER),
        "d=2, c=2, other order": (LAYOUTS["c=2"], 2, REVERSED),
    },
}


def run_all(cases):
    return {name: gradients(flags, size, **rows) for name, (flags, size, rows) in cases.items()}


@pytest.fixture(scope="module")
def wanted():
    ((found, clipped),) = run_ranks(truth, 1)
    assert 0.2 < clipped < 0.95
    return found


@pytest.mark.parametrize("num_ranks", CASES)
def test_every_gradient_is_that_of_the_formula(wanted, num_ranks):
    per_rank = run_ranks(run_all, num_ranks, CASES[num_ranks], timeout=120)
    for case in CASES[num_ranks]:
        found = whole([of_rank[case] for of_rank in per_rank])
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            difference = float((gradient - wanted[name]).abs().max())
            assert difference < 1e-12, f"{case}: {name} is off by {difference:.2e}"
