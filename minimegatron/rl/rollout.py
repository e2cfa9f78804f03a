"""The model answers prompts: token by token, through the pipeline, all positions computed anew.

Counterpart: `get_environment_rollouts` of `megatron.rl.rl_utils`, which asks an inference engine.

Which numbers a token is drawn with depends on its row in the global batch and on nothing else, so that
no layout changes an answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minimegatron.core import parallel_state, tensor_parallel
from minimegatron.core.inference.communication_utils import broadcast_from_last_pipeline_stage
from minimegatron.core.transformer.zigzag import take_part
from minimegatron.core.utils import get_device
from minimegatron.rl.rl_utils import gather_sequence, selective_log_softmax
from minimegatron.rl.tasks import Task, Tokens
from minimegatron.training.global_vars import get_args
from minimegatron.training.pipeline_schedule import schedule_of_run


@dataclass
class Answers:
    """Rows of tokens, prompt and answer, of this copy of the model. The same on all of its ranks."""

    prompts: Sequence[Tokens]
    tokens: torch.Tensor
    """int64 [rows, s]; 0 after the answer."""
    mask: torch.Tensor
    """bool [rows, s], True for tokens of the answer, its end included."""
    logprobs: torch.Tensor
    """[rows, s - 1], float32 or float64: with which each token of the answer was drawn; 0 elsewhere."""

    def answer(self, row: int) -> Tokens:
        """The tokens of one answer."""
        return tuple(self.tokens[row][self.mask[row]].tolist())


def generate_answers(
    model: list[torch.nn.Module],
    prompts: Sequence[Tokens],
    task: Task,
    uniforms: torch.Tensor | None,
) -> Answers:
    """An answer to each of this copy's `prompts`. Every rank must call it, without gradients.

    The schedule runs forward once for each token of the longest answer there may be, also where all
    answers have ended: copies that share experts must not do different numbers of forwards.

    Args:
        prompts: as many on each copy, a whole number of microbatches that the schedule can do.
        uniforms: float64 [rows, task.answer_length] in [0, 1), on the CPU: what is drawn; None for the
            likeliest token each time.
    """
    args, device = get_args(), get_device()
    num_rows, first = len(prompts), torch.tensor([len(prompt) for prompt in prompts]).to(device)
    tokens = torch.zeros(num_rows, args.seq_length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    rows = torch.arange(num_rows, device=device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    logprobs = torch.zeros(num_rows, args.seq_length - 1, dtype=torch.float64, device=device)
    is_open = torch.ones(num_rows, dtype=torch.bool, device=device)
    for number in range(task.answer_length):
        place = first + number
        drawn = None if uniforms is None else uniforms[:, number].to(device)
        token, logprob = _next_tokens(model, tokens, place - 1, drawn)
        open_rows, place = rows[is_open], place[is_open]
        tokens[open_rows, place] = token[is_open]
        mask[open_rows, place] = True
        logprobs[open_rows, place - 1] = logprob[is_open]
        is_open &= token != task.end
    return Answers(prompts, tokens, mask, logprobs)


def _next_tokens(
    model: list[torch.nn.Module],
    tokens: torch.Tensor,
    places: torch.Tensor,
    uniforms: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that follows place `places[row]` of each row, int64 [rows], and its log-probability,
    float64 [rows]; drawn on the last stage, the same on all ranks of this copy."""
    args = get_args()
    size = args.micro_batch_size
    parts = list(zip(tokens.split(size), places.split(size), strict=True))
    found = schedule_of_run()(
        forward_step_func=_forward_step,
        data_iterator=[iter(parts) for _ in model],
        model=model,
        num_microbatches=len(parts),
        seq_length=args.seq_length,
        micro_batch_size=size,
        forward_only=True,
        collect_non_loss_data=True,
    )
    chosen = None
    if found:
        logits = torch.cat(found)[:, : args.unpadded_vocab_size] / args.rl_default_temperature
        token = draw(logits, uniforms)
        logprob = selective_log_softmax(logits, token)
        chosen = torch.stack([token.double(), logprob.double()])
    chosen = broadcast_from_last_pipeline_stage((2, len(tokens)), torch.float64, chosen)
    return chosen[0].long(), chosen[1]


def _forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens, places = next(data_iterator)
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    group = parallel_state.get_context_parallel_group()
    output = model(take_part(tokens, 1, group), take_part(positions, 1, group), None)
    return output, partial(_logits_at, places)


def _logits_at(
    places: torch.Tensor, output_tensor: torch.Tensor, non_loss_data: bool = True
) -> torch.Tensor:
    """From logits [b, s/c, v/t] those at one place of each row, [b, v], float32 or float64."""
    logits = gather_sequence(output_tensor)
    logits = logits[torch.arange(len(places), device=places.device), places].contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group)
    return logits if logits.dtype == torch.float64 else logits.float()


def draw(logits: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """One token of softmax(logits) for each row: [rows, v] -> int64 [rows].

    It is the first one up to which the probabilities sum to more than the row's uniform number, or the
    likeliest if there are no uniform numbers.

    >>> draw(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0.4, 0.6]).double())
    tensor([0, 1])
    """
    if uniforms is None:
        return logits.argmax(dim=-1)
    sums = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    wanted = (uniforms * sums[:, -1]).unsqueeze(-1)
    return torch.searchsorted(sums, wanted, right=True).squeeze(-1).clamp(max=logits.size(-1) - 1)
