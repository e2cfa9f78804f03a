"""What one rank calls in one recorded step, and how often: down the chain, and back up.

Called by: the page that ends the way through a step. Calls: the recording of 1F1B, line by line.
"""

import re
from collections import Counter
from html import escape

from source.page_words import say
from source.places import UNROLLED, read_json

RUN = "1f1b-paced"
RANK = 1
"""Of a middle stage: it receives and sends in both directions."""
ABOVE = ("pretrain", "train")
"""Who calls `train_step`; a recording of a step begins there."""
Path = tuple[str, ...]
NOTES = {
    "finalize_model_grads/_ParamAndGradBucketGroup.start_grad_sync": "page.calls.sync",
    "MegatronOptimizer.step/MegatronOptimizer._copy_model_grads_to_main_grads": "page.calls.prepare",
    "MegatronOptimizer.clip_grad_norm/all_reduce": "page.calls.squares",
    "train_step/all_reduce": "page.calls.agree",
    "steps.forward_step/forward_step_calc_loss": "page.calls.no-loss",
}
"""What to say of a call, by its caller's name and its own."""


def chain_calls() -> dict[Path, int]:
    """Names of the links of the chain, from `train_step` down, and how often each is called."""
    data = read_json(UNROLLED / f"{RUN}.json")
    (rank,) = (rank for rank in data["ranks"] if rank["rank"] == RANK)
    nodes, found = rank["nodes"], Counter()
    paths: list[Path] = []
    for view, caller, _, num_calls, _, _, is_link, *_ in nodes:
        name = data["names"][data["views"][view][0]]
        above = paths[caller] if caller >= 0 else ()
        paths.append((*above, name) if is_link else above)
        if is_link:
            found[paths[-1]] += num_calls
    return dict(found)


def chain_table() -> str:
    """The calls as nested lists, each with its number."""
    calls = chain_calls()
    children: dict[Path, list[Path]] = {}
    for path in calls:
        children.setdefault(path[:-1], []).append(path)

    def item(path: Path) -> str:
        below = "".join(map(item, children.get(path, ())))
        inner = f"<ul>{below}</ul>" if below else ""
        shown = f"{_name(path[-1])}&nbsp;×&nbsp;{calls[path]}{_note(path, calls[path])}"
        return f"<li>{shown}{inner}</li>"

    inner = "".join(map(item, children[()]))
    for name in reversed(ABOVE):
        inner = f"<li>{_name(name)}<ul>{inner}</ul></li>"
    return f'<ul class="mm-chain-calls">{inner}</ul>'


def _note(path: Path, num_calls: int) -> str:
    name = NOTES.get("/".join(path[-2:]))
    per_microbatch, rest = divmod(num_calls, num_microbatches())
    if name is not None:
        words = say(name)
    elif per_microbatch > 1 and not rest:
        words = say("page.calls.each", n=per_microbatch)
    else:
        return ""
    return f" <small>({words})</small>"


def _name(name: str) -> str:
    # A long name may break after an underscore or a dot.
    return f"<code>{re.sub(r'(?<=[a-z][._])(?=[a-z])', '<wbr>', escape(name))}</code>"


def num_microbatches() -> int:
    """Of the recorded step: the rank ran the program's function so often."""
    (number,) = (n for path, n in chain_calls().items() if path[-1] == "pretrain_gpt.forward_step")
    return number
