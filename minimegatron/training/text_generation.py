"""A sample of text from the model as it stands, token by token, through the pipeline.

Counterpart: Megatron generates with an inference engine of its own (`megatron.core.inference`),
which keeps keys and values; this recomputes all positions for every token, which is short and slow.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from minimegatron.core import parallel_state, tensor_parallel
from minimegatron.core.inference.communication_utils import broadcast_from_last_pipeline_stage
from minimegatron.core.utils import get_device
from minimegatron.training.global_vars import get_args, get_tokenizer
from minimegatron.training.pipeline_schedule import schedule_of_run, smallest_num_microbatches


def generate(
    model: list[torch.nn.Module], prompt: str, num_tokens: int, temperature: float = 0.8
) -> str:
    """`prompt` and `num_tokens` more tokens, the same text on every rank.

    The model sees the last `--seq-length` tokens at most. Every rank must call it.
    """
    args, tokenizer = get_args(), get_tokenizer()
    text = tokenizer.tokenize(prompt) or [tokenizer.eod]
    generator = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = _next_token_logits(model, text[-args.seq_length :])
            token = None
            if logits is not None:
                chances = torch.softmax(logits[: tokenizer.vocab_size] / temperature, dim=-1)
                token = torch.multinomial(chances, 1, generator=generator).to(get_device())
            text.append(int(broadcast_from_last_pipeline_stage((1,), torch.int64, token)))
    return tokenizer.detokenize(text)


def _next_token_logits(model: list[torch.nn.Module], text: list[int]) -> torch.Tensor | None:
    """What the model thinks of each next token; float32 [v] on the host, None but on the last stage.

    The input is padded on the right: causal attention does not look there.
    """
    args = get_args()
    tokens = torch.zeros(1, args.seq_length, dtype=torch.int64)
    tokens[0, : len(text)] = torch.tensor(text)
    logits = schedule_of_run()(
        forward_step_func=partial(_forward_step, tokens.to(get_device()), len(text) - 1),
        data_iterator=[None] * len(model),
        model=model,
        # Where one microbatch is too few for the schedule: the same one, repeated.
        num_microbatches=smallest_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return logits[0] if logits else None


def _forward_step(
    tokens: torch.Tensor, last: int, data_iterator: Iterator | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return model(tokens, position_ids, None), partial(_logits_at, last)


def _logits_at(last: int, output_tensor: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
    """From logits [1, s, v/t]: those at position `last`, for the whole vocabulary."""
    group = parallel_state.get_tensor_model_parallel_group()
    logits = output_tensor[:, last : last + 1].contiguous()
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group)
    return logits[0, 0].float().cpu()
