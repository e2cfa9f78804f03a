"""The cases of parity: which layouts, schedules and options are compared with one process.

Used by tests/test_parity.py. `parity` compares them. `make test` runs `pairwise_cases` and
`NAMED_CASES`; `make test-full` runs the grids `all_cases` and `system_cases`, and `unusual_cases`.
"""

import random
from dataclasses import replace
from functools import cache

from tests.covering import Row, Rule, Space, covering_array
from tests.parity import Case

# -- Every pair of options --

SPACE = Space(
    {
        "world": (2, 3, 4, 6, 8),
        "tp": (1, 2, 4),
        "pp": (1, 2, 3, 4),
        "dp": (1, 2),
        "vp": (None, 2, 3),
        "group": (None, "p", "p + 1", "2p"),
        "microbatches": ("one group", "remainder", "two groups"),
        "p2p": ("batched", "unbatched", "overlap"),
        "planned": (False, True),
        "deallocate": (False, True),
        "llama": (False, True),
        "sp": (False, True),
        "recompute": (None, "selective", "full"),
        "num_partial": (None, 1, 2),
        "dist_opt": (False, True),
        "overlap_grad_reduce": (False, True),
        "align_grad_reduce": (False, True),
        "overlap_param_gather": (False, True),
        "align_param_gather": (False, True),
        "per_token": (False, True),
        "delay_wgrad": (False, True),
        "deferral": (None, 0, 1, 2),
        "loss_scale": (1.0, 65536.0),
        "evaluates_in": (None, "grad", "no_grad", "inference_mode"),
        "fails": (False, True),
        "frozen": (None, "embedding", "all but middle layer", "all but low rank"),
        "weights": (False, True),
        "logits": (None, "sliced", "gathered"),
        "dtype": ("float64", "float32"),
        "shared_memory": (True, False),
    },
    [
        Rule(("world", "tp", "pp", "dp"), lambda world, tp, pp, dp: world == tp * pp * dp),
        Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1),
        Rule(("vp", "group"), lambda vp, group: (vp is None) == (group is None)),
        # What is batched may cross on a ring of two; overlapping is of the interleaved schedule.
        Rule(("pp", "vp", "p2p"), lambda pp, vp, p2p: p2p != "batched" or vp is None or pp > 2),
        Rule(("vp", "p2p"), lambda vp, p2p: p2p != "overlap" or vp is not None),
        Rule(("pp", "p2p"), lambda pp, p2p: p2p == "batched" or pp > 1),
        Rule(("tp", "sp"), lambda tp, sp: not sp or tp > 1),
        Rule(("pp", "num_partial"), lambda pp, num_partial: num_partial is None or pp > 1),
        Rule(
            ("recompute", "num_partial"),
            lambda recompute, num_partial: num_partial is None or recompute != "selective",
        ),
        Rule(("dp", "dist_opt"), lambda dp, dist_opt: not dist_opt or dp > 1),
        Rule(("overlap_grad_reduce", "align_grad_reduce"), lambda overlap, align: overlap >= align),
        Rule(("dist_opt", "overlap_param_gather"), lambda zero, gather: zero >= gather),
        Rule(
            ("overlap_grad_reduce", "overlap_param_gather"), lambda reduce, gather: reduce >= gather
        ),
        Rule(("overlap_param_gather", "align_param_gather"), lambda gather, align: gather >= align),
        # Over gloo alone the other ranks would wait for a time-out.
        Rule(("fails", "shared_memory"), lambda fails, shared_memory: shared_memory or not fails),
        # Sixteen microbatches through four ranks' chunks take longest; `unusual_cases` draws such ones.
        Rule(
            ("pp", "group", "microbatches"),
            lambda pp, group, number: pp < 4 or group != "2p" or number != "two groups",
        ),
    ],
)
"""The options of parity. World sizes are an axis, so that every option is on in each of them."""


@cache
def pairwise_rows() -> list[Row]:
    """Rows of `SPACE` in which every two values that may meet do meet."""
    return covering_array(SPACE, cost=lambda row: case_of(row).cost)


def pairwise_cases(shared_memory: bool) -> list[Case]:
    """The cases of `pairwise_rows`, with shared memory between the ranks or over gloo alone."""
    return [case_of(row) for row in pairwise_rows() if row["shared_memory"] == shared_memory]


def case_of(row: Row) -> Case:
    """A row of `SPACE` as a case."""
    same = [
        "tp",
        "pp",
        "dp",
        "vp",
        "planned",
        "deallocate",
        "llama",
        "sp",
        "recompute",
        "num_partial",
        "dist_opt",
    ]
    same += ["overlap_grad_reduce", "align_grad_reduce", "overlap_param_gather"]
    same += ["align_param_gather", "per_token", "delay_wgrad", "loss_scale", "dtype"]
    same += ["evaluates_in", "fails", "frozen", "weights", "logits"]
    options = {name: row[name] for name in same}
    p = row["pp"]
    if row["vp"] is None:
        options["M"] = {"one group": 1, "remainder": 3, "two groups": 6}[row["microbatches"]]
    else:
        group = {"p": p, "p + 1": p + 1, "2p": 2 * p}[row["group"]]
        options["M"] = {"one group": group, "remainder": group + p, "two groups": 2 * group}[
            row["microbatches"]
        ]
        options |= {"G": group, "batched": row["p2p"] == "batched"}
    options |= {"overlap": row["p2p"] == "overlap"}
    if row["vp"] is None and p > 1:
        options["batched"] = row["p2p"] == "batched"
    if row["deferral"] is not None:
        options |= {"defer_embedding": True, "deferral_limit": row["deferral"]}
    return Case(**options)


# -- What was wrong once, or is right only together --

RING = {"pp": 2, "vp": 2, "G": 2, "M": 4, "batched": False}
ZERO1 = {"dp": 2, "dist_opt": True, "overlap_grad_reduce": True}

NAMED_CASES = {
    "one microbatch, and fewer than stages": Case(pp=4, M=1),
    "tied embedding on two of three stages": Case(pp=3, M=3),
    "a remainder group over a ring of two": Case(**RING | {"G": 3, "M": 5, "overlap": True}),
    "three chunks and freed outputs": Case(
        pp=4, vp=3, G=8, M=8, batched=False, deallocate=True, llama=True
    ),
    "a2: recomputed above a frozen embedding": Case(
        pp=2, M=3, recompute="full", frozen="embedding"
    ),
    "a2: low-rank parts beside what is frozen and recomputed": Case(
        **RING | ZERO1, overlap=True, recompute="full", frozen="all but low rank", fails=True
    ),
    "a stage on which nothing is trained, gathered late": Case(
        **ZERO1, pp=2, M=3, num_layers=2, overlap_param_gather=True, frozen="all but last layer"
    ),
    "nothing is trained": Case(dp=2, M=2, recompute="full", frozen="everything", evaluates=True),
    "b14: recomputed after an evaluation in inference mode": Case(
        pp=2, M=2, llama=True, recompute="full", evaluates_in="inference_mode", weights=True
    ),
    "a deferred embedding after an evaluation": Case(
        pp=2, M=3, defer_embedding=True, deferral_limit=1, evaluates=True, planned=True
    ),
    "the planned runner gathers what the schedule asks for": Case(
        **RING | ZERO1, overlap_param_gather=True, align_param_gather=True, planned=True
    ),
    "the planned runner launches no gradient in an evaluation": Case(
        **RING | ZERO1, align_grad_reduce=True, evaluates=True, planned=True
    ),
    "the planned runner recomputes as many as the written one": Case(
        pp=4, M=5, recompute="full", num_partial=1, planned=True
    ),
    "an evaluation between steps that gather late": Case(
        **ZERO1, M=2, num_layers=4, overlap_param_gather=True, evaluates=True
    ),
    "a delayed gradient in a bucket on its way": Case(
        pp=2, dp=2, M=3, overlap_grad_reduce=True, delay_wgrad=True, defer_embedding=True
    ),
    "a loss scale with chunks": Case(**RING, loss_scale=65536.0, overlap=True),
    "deferral without a pipeline": Case(
        dp=2, M=3, defer_embedding=True, deferral_limit=1, overlap_grad_reduce=True
    ),
    "sequence, tokens and copies at once": Case(
        tp=2, pp=2, dp=2, M=3, sp=True, per_token=True, llama=True
    ),
    "ZeRO-1 in chunks that free and recompute": Case(
        **RING | ZERO1, overlap=True, deallocate=True, recompute="full", tp=2, sp=True
    ),
}
"""By what is said of them: configurations that failed while this package was made, or whose parts
are right alone."""

# -- Whole grids, for `make test-full` --


def layouts() -> list[Case]:
    """Every composition of tp, pp and dp over 2 to 8 ranks."""
    sizes = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 3, 4) for dp in (1, 2)]
    return [Case(tp=tp, pp=pp, dp=dp) for tp, pp, dp in sizes if 1 < tp * pp * dp <= 8]


def all_cases() -> list[Case]:
    """The schedules' grid: every layout, with every schedule and message mode on some."""
    cases = []
    for layout in layouts():
        cases += _plain(layout)
        if layout.pp > 1:
            cases += _interleaved(layout)
    return cases


def system_cases() -> list[Case]:
    """Sequence parallelism x recompute x ZeRO-1, every composition that a layout allows."""
    cases = []
    for layout in layouts():
        for sp in (False, True) if layout.tp > 1 else (False,):
            for recompute in (None, "selective", "full"):
                for dist_opt in (False, True) if layout.dp > 1 else (False,):
                    if sp or recompute or dist_opt:
                        combined = {"sp": sp, "recompute": recompute, "dist_opt": dist_opt}
                        llama = (len(cases) % 2) == 1
                        cases.append(replace(layout, M=2, llama=llama, **combined))
        everything = {
            "sp": layout.tp > 1,
            "dist_opt": layout.dp > 1,
            "overlap_grad_reduce": layout.dp > 1,
            "overlap_param_gather": layout.dp > 1,
            "deallocate": True,
        }
        if layout.pp > 1:
            ring = {"vp": 2, "G": layout.pp, "M": 2 * layout.pp, "overlap": True}
            cases.append(replace(layout, recompute="full", **everything, **ring))
            cases.append(replace(layout, M=5, recompute="full", num_partial=1, **everything))
            cases.append(replace(layout, num_partial=2, **everything, **ring))
    return cases


def unusual_cases(count: int, world: int, seed: int = 0) -> list[Case]:
    """Options that nobody combines, drawn at random: each is on in about half of the cases."""
    draw = random.Random(f"{seed} {world}")

    def maybe() -> bool:
        return draw.random() < 0.5

    cases = []
    for _ in range(count):
        layout = draw.choice([one for one in layouts() if one.world == world])
        p, options = layout.pp, {"M": draw.choice((1, 2, 3, 5))}
        if p > 1 and draw.random() < 0.7:
            group = draw.choice((p, p, p + 1, 2 * p))
            num_microbatches = draw.choice((group, 2 * group, group + p))
            overlap = maybe()
            options = {"vp": draw.choice((2, 2, 3)), "G": group, "M": num_microbatches}
            options |= {"overlap": overlap, "batched": not overlap and p > 2 and maybe()}
        elif p > 1:
            options["batched"] = maybe()
        recompute = draw.choice((None, None, "selective", "full"))
        dist_opt, overlap_grad_reduce, defer = layout.dp > 1 and maybe(), maybe(), maybe()
        options |= {
            "llama": maybe(),
            "deallocate": maybe(),
            "sp": layout.tp > 1 and maybe(),
            "recompute": recompute,
            "num_partial": draw.choice((None, 1, 2)) if recompute == "full" and p > 1 else None,
            "dist_opt": dist_opt,
            "overlap_grad_reduce": overlap_grad_reduce,
            "overlap_param_gather": dist_opt and overlap_grad_reduce and maybe(),
            "per_token": maybe(),
            "delay_wgrad": maybe(),
            "defer_embedding": defer,
            "deferral_limit": draw.choice((0, 1, 2)) if defer else 0,
            "loss_scale": draw.choice((1.0, 1024.0, 65536.0)),
            "evaluates_in": draw.choice((None, "grad", "no_grad", "inference_mode")),
            "fails": maybe(),
            "frozen": draw.choice((None, *SPACE.axes["frozen"])),
            "weights": maybe(),
            "logits": draw.choice(SPACE.axes["logits"]),
            "planned": maybe(),
            "align_grad_reduce": overlap_grad_reduce and maybe(),
        }
        gathers = options["overlap_param_gather"]
        options |= {
            "align_param_gather": gathers and maybe(),
        }
        cases.append(replace(layout, **options))
    return cases


def _plain(layout: Case) -> list[Case]:
    cases = [replace(layout, M=M, llama=M % 2 == 1) for M in (1, 2, 3, 4, 8)]
    cases += [replace(layout, M=3), replace(layout, M=4, llama=True)]
    if layout.pp > 1:
        cases.append(replace(layout, M=8, batched=False, deallocate=True, llama=True))
    if layout.dp > 1:
        cases.append(replace(layout, M=3, overlap_grad_reduce=True))
        cases.append(replace(layout, M=2, per_token=True, llama=True))
    return cases


def _interleaved(layout: Case) -> list[Case]:
    p = layout.pp
    ring = replace(layout, vp=2, batched=p > 2)
    cases = [
        replace(ring, M=2 * p, G=p),
        replace(ring, M=2 * p, G=2 * p, llama=True, batched=False),
        replace(ring, M=2 * p + 1, G=p + 1, overlap=True, deallocate=True),  # a remainder group
        replace(ring, M=p, G=p, vp=3, overlap=True, llama=True),
    ]
    if p == 4 or layout.world > 4:
        return cases[1:3]
    return [*cases, replace(ring, M=8, G=8, vp=3, deallocate=True, batched=False)]
