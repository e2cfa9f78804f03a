"""The cases of parity with ranks that share sequences: layouts, ways to attend, experts, options.

Used by tests/test_parity_context.py. `parity` compares them with one process.
"""

from functools import cache

from tests.covering import Row, Rule, Space, covering_array
from tests.parity import Case

FURTHER_TOKENS = (None, 2)
"""How many further tokens are predicted."""

SPACE = Space(
    {
        "world": (2, 4),
        "tp": (1, 2),
        "cp": (2, 4),
        "pp": (1, 2),
        "dp": (1, 2),
        "vp": (None, 2),
        "comm": ("p2p", "all_gather", "a2a"),
        "llama": (False, True),
        "M": (1, 3),
        "mtp": FURTHER_TOKENS,
        "recompute": (None, "selective", "full"),
        "dist_opt": (False, True),
        "overlap_grad_reduce": (False, True),
        "per_token": (False, True),
        "delay_wgrad": (False, True),
        "defer_embedding": (False, True),
        "evaluates_in": (None, "no_grad", "inference_mode"),
        "fails": (False, True),
        "frozen": (None, "embedding", "all but low rank"),
        "weights": (False, True),
        "logits": (None, "gathered"),
        "loss_scale": (1.0, 65536.0),
        "experts": (None, 4),
        "ep": (1, 2),
        "dispatcher": ("alltoall", "allgather"),
        "balance": ("none", "aux", "seq", "bias"),
        "combined": (False, True),
    },
    [
        # Further tokens are scored by the model, with the labels.
        Rule(("logits", "mtp"), lambda logits, mtp: logits is None or mtp is None),
        Rule(
            ("world", "tp", "cp", "pp", "dp"),
            lambda world, tp, cp, pp, dp: world == tp * cp * pp * dp,
        ),
        Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1),
        Rule(("experts", "ep"), lambda experts, ep: experts or ep == 1),
        Rule(("experts", "dispatcher"), lambda experts, kind: experts or kind == "alltoall"),
        Rule(("experts", "balance"), lambda experts, balance: experts or balance == "none"),
        Rule(("combined", "ep"), lambda combined, ep: not combined or ep > 1),
        Rule(("combined", "dispatcher"), lambda combined, kind: not combined or kind == "alltoall"),
        Rule(("combined", "pp", "vp"), lambda combined, pp, vp: not combined or pp == 1 or vp),
        Rule(("combined", "recompute"), lambda combined, kind: not combined or kind != "full"),
        Rule(("mtp", "combined"), lambda mtp, combined: not mtp or not combined),
    ],
)
"""The options of parity with context parallelism. ZeRO-1 shards over the c ranks too."""

WIDE = Space(
    {**SPACE.axes, "world": (8,), "tp": (1, 2), "dp": (1, 2), "pp": (1, 2)},
    [
        *SPACE.rules,
        # Of the 4 groups of keys, a rank must have one at least.
        Rule(
            ("comm", "tp", "cp", "llama"),
            lambda comm, tp, cp, llama: comm != "a2a" or not llama or tp * cp <= 4,
        ),
    ],
)
"""The same on eight ranks, for `make test-full`."""


@cache
def pairwise_rows() -> list[Row]:
    """Rows of `SPACE` in which every two values that may meet do meet."""
    return covering_array(SPACE, cost=lambda row: case_of(row).cost)


def pairwise_cases() -> list[Case]:
    """Their cases."""
    return [case_of(row) for row in pairwise_rows()]


def case_of(row: Row) -> Case:
    """A row of `SPACE` as a case; as many layers as chunks, so that every chunk has one."""
    options = {name: value for name, value in row.items() if name != "world"}
    p, vp = row["pp"], row["vp"]
    options |= {"num_layers": p * (vp or 1), "sp": row["tp"] > 1}
    if vp is not None:
        options |= {"G": p, "M": p * (1 if row["M"] == 1 else 2), "batched": False}
    return Case(**options)


NAMED_CASES = {
    "a ring of two": Case(cp=2, M=2, num_layers=1),
    "a ring of four, tokens counted": Case(cp=4, M=2, num_layers=1, per_token=True),
    "all keys at once, grouped": Case(cp=4, M=1, num_layers=2, comm="all_gather", llama=True),
    "heads for tokens, grouped": Case(cp=4, M=1, num_layers=2, comm="a2a", llama=True),
    "overlapped messages, freed outputs": Case(
        cp=2, pp=2, vp=2, G=2, M=4, batched=False, overlap=True, deallocate=True, llama=True
    ),
    "ZeRO-1, gathered late": Case(
        cp=2,
        dp=2,
        M=2,
        num_layers=2,
        dist_opt=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    "in float32": Case(cp=2, M=2, num_layers=2, llama=True, dtype="float32"),
    "by the planned runner": Case(cp=2, pp=2, M=3, planned=True, deallocate=True),
}
"""By what is said of them: smallest cases of known mistakes, and options that meet nowhere else."""
