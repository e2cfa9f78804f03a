"""The cases of parity: which layouts, schedules and options are compared with one process.

Used by tests/test_parity.py. `parity` compares them.
"""

import random
from dataclasses import replace

from tests.parity import Case


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
            "evaluates": maybe(),
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
