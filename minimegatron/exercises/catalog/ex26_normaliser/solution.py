"""A normaliser, solved.

Two values undo what comes later. Three values leave all of it to the end.
"""

import torch
import torch.distributed as dist

Report = dict[str, torch.Tensor]


def tokens_of_all(masks: list[torch.Tensor], dp_cp_group: dist.ProcessGroup) -> torch.Tensor:
    """N, on every rank; it is called once, before the step."""
    total = torch.stack([mask.sum() for mask in masks]).sum()
    dist.all_reduce(total, group=dp_cp_group)
    return total


def two_values(
    token_loss: torch.Tensor, mask: torch.Tensor, N: torch.Tensor, M: int, d: int, c: int
) -> tuple[torch.Tensor, Report]:
    """(loss, report) of one microbatch, with `calculate_per_token_loss` off."""
    total, count = (token_loss * mask).sum(), mask.sum()
    report = {"lm loss": torch.stack([total.detach(), count])}
    # c / M of the schedule and 1 / (d * c) of the buffers leave 1 / (M * d).
    return total * M * d / N.clamp(min=1), report


def three_values(
    token_loss: torch.Tensor, mask: torch.Tensor, N: torch.Tensor, M: int, d: int, c: int
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """(loss, n, report) of one microbatch, with `calculate_per_token_loss` on."""
    total, count = (token_loss * mask).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack([total.detach(), count])}


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
