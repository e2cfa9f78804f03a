"""Tables of the page on who divides the loss by what, out of rows that can be run.

Called by: `problem_cases`. Calls: the package's own `loss_contract`.

The batch has 8 rows of 8 tokens; one row has none that counts.
"""

import torch

from cases.case_words import table
from minimegatron.rl.loss_contract import BREAKS, ROWS, Row, coefficients, counts_of, formula

LENGTHS = (1, 5, 2, 7, 4, 3, 6, 0)
"""Tokens that count, by row; one or two more are real, those of a prompt."""
REPOSITORIES = {
    "megatron": "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1",
    "ROLL": "https://github.com/alibaba/ROLL/blob/8eb27cc",
    "verl": "https://github.com/verl-project/verl/blob/1dda039",
    "slime": "https://github.com/THUDM/slime/blob/624b824",
    "NeMo-RL": "https://github.com/NVIDIA-NeMo/RL/blob/7ea279a",
}
CUTS = ((4, 1, 1), (8, 1, 1), (1, 2, 1), (2, 1, 2))
"""(M, d, c) that the table of mistakes shows."""


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens count, and which are real; float64 [8, 8]."""
    place, ends = torch.arange(8), torch.tensor(LENGTHS).unsqueeze(-1)
    return (place < ends).double(), (place < (ends + 2) // 2 * 2).double()


def link(row: Row) -> str:
    """The line in the framework's repository."""
    repository, _, place = row.place.partition(": ")
    name = place.rpartition("/")[2].partition("#")[0]
    if repository not in REPOSITORIES:  # of no release
        return f"`{name}` of {repository}"
    return f"[`{name}`]({REPOSITORIES[repository]}/{place})"


def row_table() -> str:
    """Each framework's hand-over; a row stands here only if its gradient is the stated one."""
    mask, real = batch()
    lines = []
    for row in ROWS:
        for M, d, c in CUTS:
            off = coefficients(row, mask, real, M, d, c) - formula(row, mask, M, d, c)
            assert float(off.abs().max()) < 1e-9, (row.name, M, d, c)
        values = f"({row.factor_words}, report)"
        if row.count is not None:
            values = f"({row.factor_words}, {row.count_words}, report)"
        gather = {"": "not gathered", "sum": "gathered; sums", "part": "gathered; its part"}
        flag = "on" if row.is_per_token else "off"
        lines.append([row.name, values, flag, gather[row.gather], row.gradient_of, link(row)])
    head = ["framework", "the loss function returns", "flag", "over c ranks", "gradient of", "line"]
    return table(head, lines)


def ratios(row: Row, M: int, d: int, c: int) -> str:
    """How much tokens count, as a multiple of what the formula says; least and most."""
    mask, real = batch()
    found = coefficients(row, mask, real, M, d, c) / formula(row, mask, M, d, c)
    least, most = float(found[mask > 0].min()), float(found[mask > 0].max())
    if most - least < 1e-9:
        return f"{least:.4g}"
    return f"{least:.3g} to {most:.3g}"


def break_table() -> str:
    """What one exchanged part does, at some cuts."""
    lines = [
        [broken.words, broken.times_words, *(ratios(broken.row, *cut) for cut in CUTS)]
        for broken in BREAKS
    ]
    cuts = [f"M={M}, d={d}, c={c}" for M, d, c in CUTS]
    return table(["one part exchanged", "times", *cuts], lines)


def times(words: str, M: int, d: int, c: int) -> str:
    """Of one mistake, by its words in the table, at one cut."""
    (row,) = (broken.row for broken in BREAKS if broken.words == words)
    return ratios(row, M, d, c)


def num_tokens() -> int:
    """N of the small case."""
    mask, real = batch()
    return int(counts_of(mask, real, 1, 1, 1).tokens)


def least_and_most(number: int) -> str:
    """Of the flag left off: by M alone."""
    (row,) = (broken.row for broken in BREAKS if broken.words.startswith("train_rl without"))
    return ratios(row, number, 1, 1)
