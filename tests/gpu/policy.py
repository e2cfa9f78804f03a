"""A part on one GPU: reinforcement learning draws, scores and learns as on the CPU.

Called by: `run_part`. Calls: short runs of `train_rl`.
"""

from collections.abc import Iterator
from functools import partial

import torch

from tests.gpu.place import Finding, Place, at_most, each, is_equal
from tests.rl.short_rl_runs import LAYOUTS, run

STEPS, PER_ROLLOUT = 6, 4
SCORES_BOUND, LOSS_BOUND, FIGURES = 1e-4, 1e-3, ("lm loss", "rl/kl_term", "rl/pi_over_pi_old")
"""Scores of the last rollout, after four updates; reported losses. float32, with TF32 off."""


def rows_and_figures(flags: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """In a rank: the last rollout of a short run, on the CPU, and what its steps reported."""
    found = run(flags, STEPS)
    return {name: rows.cpu() for name, rows in found["rows"].items()}, found["figures"]


def beside(name: str, flags: str, num_ranks: int, place: Place, wanted: tuple) -> Iterator[Finding]:
    """One layout; ranks share the GPU."""
    *_, (rows, figures) = place.launch(
        rows_and_figures, num_ranks, flags, shared=num_ranks > 1, seconds=90.0
    )
    different = int((rows["tokens"] != wanted[0]["tokens"]).sum())
    yield is_equal(f"{name}: tokens that are drawn otherwise", different, 0)
    scores = float((rows["old_logprobs"] - wanted[0]["old_logprobs"]).abs().max())
    yield at_most(f"{name}: log-probabilities, largest difference", scores, SCORES_BOUND)
    drawn = (rows["old_logprobs"] - rows["inference_logprobs"]).abs()[rows["loss_mask"][:, 1:] > 0]
    yield at_most(f"{name}: scores beside drawing, of one GPU", float(drawn.max()), SCORES_BOUND)
    first = [step for number, step in enumerate(figures) if number % PER_ROLLOUT == 0]
    clipped = [step["rl/truncated_from_above"] + step["rl/truncated_from_below"] for step in first]
    ratios = [step["rl/pi_over_pi_old"] for step in first]
    yield is_equal(f"{name}: ratios at first inner steps", ratios, [1.0] * len(first))
    yield is_equal(f"{name}: share clipped there", clipped, [0.0] * len(first))
    pairs = zip(figures, wanted[1], strict=True)
    worst = max(abs(here[key] - there[key]) for here, there in pairs for key in FIGURES)
    yield at_most(f"{name}: losses and ratios, largest difference", worst, LOSS_BOUND)


def beside_the_cpu(place: Place) -> Iterator[Finding]:
    """Rollouts, scores and six steps, on one rank and on two stages that share the GPU."""
    (wanted,) = place.on_the_cpu().launch(rows_and_figures, 1, "")
    layouts = (("one rank", "", 1), ("two stages", LAYOUTS["p=2"], 2))
    sections = (partial(beside, *layout, place, wanted) for layout in layouts)
    yield from each(*sections)
