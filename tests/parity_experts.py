"""The cases of parity with experts: layouts, ways to choose and to balance, dispatchers, options.

Used by tests/test_parity_experts.py. `parity` compares them with one process. What differs from one
process by design (capacity, sinkhorn under sequence parallelism, the global loss over several copies)
is compared with one that routes the same parts: see tests/test_moe_shards.py.
"""

from functools import cache

from tests.covering import Row, Rule, Space, covering_array
from tests.parity import Case

SPACE = Space(
    {
        "world": (2, 4),
        "tp": (1, 2, 4),
        "pp": (1, 2),
        "dp": (1, 2, 4),
        "vp": (None, 2),
        "ep": (1, 2, 4),
        "etp": (1, 2),
        "experts": (2, 4, 8),
        "topk": (1, 2, 3),
        "dispatcher": ("alltoall", "allgather"),
        "balance": ("none", "aux", "seq", "two and z", "bias", "groups"),
        "shared": (False, True),
        "moe_freq": ((1,), (1, 0, 0, 1)),
        "llama": (False, True),
        "M": (1, 3),
        "recompute": (None, "selective", "full"),
        "dist_opt": (False, True),
        "overlap_grad_reduce": (False, True),
        "per_token": (False, True),
        "delay_wgrad": (False, True),
        "evaluates_in": (None, "no_grad", "inference_mode"),
        "fails": (False, True),
        "frozen": (None, "embedding", "all but experts", "all but low rank"),
        "weights": (False, True),
        "logits": (None, "gathered"),
        "combined": (False, True),
    },
    [
        Rule(("world", "tp", "pp", "dp"), lambda world, tp, pp, dp: world == tp * pp * dp),
        Rule(("tp", "dp", "ep", "etp"), lambda tp, dp, ep, etp: tp * dp % (ep * etp) == 0),
        Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1),
        Rule(("experts", "ep"), lambda experts, ep: experts % ep == 0),
        Rule(("experts", "topk"), lambda experts, topk: topk < experts or topk == 1),
        # One of two groups of experts has to give all of a token's choices.
        Rule(
            ("experts", "topk", "balance"),
            lambda experts, topk, balance: balance != "groups" or topk <= experts // 2,
        ),
        # Biases would be added by each rank that shares an expert; shared experts have none.
        Rule(("etp", "llama"), lambda etp, llama: etp == 1 or llama),
        Rule(("shared", "llama"), lambda shared, llama: not shared or llama),
        Rule(("dp", "dist_opt"), lambda dp, dist_opt: not dist_opt or dp > 1),
        Rule(("combined", "ep"), lambda combined, ep: not combined or ep > 1),
        Rule(
            ("combined", "dispatcher"),
            lambda combined, dispatcher: not combined or dispatcher == "alltoall",
        ),
        Rule(("combined", "pp", "vp"), lambda combined, pp, vp: not combined or pp == 1 or vp),
        Rule(
            ("combined", "recompute"),
            lambda combined, recompute: not combined or recompute != "full",
        ),
    ],
)
"""The options of parity with experts."""

WIDE = Space(
    {
        **SPACE.axes,
        "world": (8,),
        "pp": (1, 2, 4),
        "dp": (1, 2, 4, 8),
        "ep": (1, 2, 4, 8),
        "experts": (4, 8),
    },
    [*SPACE.rules, Rule(("pp", "vp"), lambda pp, vp: pp * (vp or 1) <= 4)],
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
    """A row of `SPACE` as a case; four layers, so that every layout has some of each kind."""
    options = {name: value for name, value in row.items() if name != "world"}
    p, vp = row["pp"], row["vp"]
    options |= {"num_layers": 4, "sp": row["tp"] > 1}
    if vp is not None:
        options |= {"G": p, "M": p * (1 if row["M"] == 1 else 2), "batched": False}
    return Case(**options)


PAIR = {"experts": 4, "ep": 2, "num_layers": 1}
NAMED_CASES = {
    "two ranks share the experts, one microbatch": Case(dp=2, M=1, **PAIR),
    "replicas of experts on tensor ranks, clipped": Case(tp=2, sp=True, M=2, **PAIR),
    "an expert cut where dense layers are whole": Case(
        dp=2, M=2, experts=4, etp=2, llama=True, num_layers=1
    ),
    "experts over tensor ranks, with biases": Case(
        tp=2, dp=2, sp=True, M=2, experts=4, ep=4, num_layers=2, balance="aux"
    ),
    "per token, under sequence parallelism": Case(
        tp=2, sp=True, M=2, per_token=True, balance="two and z", **PAIR
    ),
    "ZeRO-1, freed outputs, gathered late": Case(
        dp=4,
        M=2,
        experts=4,
        ep=2,
        num_layers=2,
        dist_opt=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        balance="bias",
    ),
    "a loss scale and an evaluation between steps": Case(
        pp=2, dp=2, M=3, experts=4, ep=2, balance="aux", loss_scale=65536.0, evaluates=True
    ),
    "unequal chunks": Case(
        pp=2,
        vp=2,
        G=2,
        M=4,
        batched=False,
        overlap=True,
        deallocate=True,
        num_layers=4,
        layout="Et|t||ttL",
        experts=4,
        dp=2,
        ep=2,
        moe_freq=(0, 1, 1, 0),
    ),
    "an empty first chunk says its line of the log": Case(
        pp=2,
        vp=2,
        G=2,
        M=2,
        batched=False,
        num_layers=4,
        layout="Ettt||t|L",
        experts=2,
        evaluates_in="no_grad",
    ),
    "experts alone, tried again, their all-to-alls hidden": Case(
        pp=2,
        vp=2,
        G=2,
        M=2,
        dp=2,
        batched=False,
        num_layers=4,
        experts=4,
        ep=2,
        balance="bias",
        combined=True,
        frozen="all but experts",
        fails=True,
    ),
    "more experts than tokens choose": Case(dp=2, M=1, experts=16, ep=2, topk=1, num_layers=1),
}
"""By what is said of them: smallest cases of known mistakes, and options that meet nowhere else."""
