"""The files of the package that one training step enters, and the frames between schedule and wire.

    python -m tests.step_files [--train] [--layout vpp]

Two ranks take a step of plain 1F1B (p = 2, t = 1, no observer, messages in shared memory); a third
one has nothing to warm up. A file counts where a function of it was entered; the frames of module
bodies and comprehensions do not count.
"""

import sys
from collections import Counter
from pathlib import Path

import minimegatron
from minimegatron.tiny_gpt import TinyGPT
from tests.ranks import run_ranks

PACKAGE = Path(minimegatron.__file__).parent
NOT_PLUMBING = ("core/models/", "core/transformer/", "core/tensor_parallel/", "core/distributed/")
USERS_FILE = "tiny_gpt.py"


def files_of_a_step(rank_step) -> dict[str, int]:
    """Calls `rank_step`; returns how many calls entered each file of the package."""
    entered: Counter[str] = Counter()
    root = f"{PACKAGE}/"

    def profile(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root):
            entered[name.removeprefix(root)] += 1

    sys.setprofile(profile)
    try:
        rank_step()
    finally:
        sys.setprofile(None)
    return dict(entered)


def rank_program(vp: int | None = None) -> dict[str, int]:
    gpt = TinyGPT(pp=2, vp=vp, num_layers=4)
    gpt.step(4)
    return files_of_a_step(lambda: gpt.step(4))


def main():
    found = run_ranks(rank_program, 2)
    union = sorted(set(found[0]) | set(found[1]))
    plumbing = [f for f in union if not f.startswith(NOT_PLUMBING) and f != USERS_FILE]
    print(len(union), "files;", len(plumbing), "plumbing")
    for f in union:
        print("  ", "*" if f in plumbing else " ", f, [x.get(f, 0) for x in found])


if __name__ == "__main__":
    main()
