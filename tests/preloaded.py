"""Done once, in the process that the tests' ranks are forked from, instead of in each of them.

Imported by that process: see `PRELOADED` in tests/ranks.py; and by the one that known mistakes are made
in, tests/mutation_runner.py. A rank that has to import the planner, a recorder or what judges an
exercise takes up to half a second for it. The words about the arguments of a run are read from the
source text, which takes a fifth of a second, and kept.
"""

import importlib
import pkgutil
from pathlib import Path

from minimegatron.training.arguments import _build_parser

PACKAGE = Path(__file__).parents[1] / "minimegatron"
PARTS = ("backend", "core", "doctor", "launching", "planner", "rl", "tracing", "training")
"""Parts of the package whose every module is imported."""
OF_EXERCISES = ("room.rank_side", "bench.gpt_step_judge", "labs.lab_side")
"""What a rank of an exercise, or of a lab, imports first."""


def import_the_package() -> None:
    """No test comes with it: pytest rewrites those before it imports them."""
    for part in PARTS:
        for module in pkgutil.walk_packages([str(PACKAGE / part)], f"minimegatron.{part}."):
            importlib.import_module(module.name)
    for name in OF_EXERCISES:
        importlib.import_module(f"minimegatron.exercises.{name}")


import_the_package()
_build_parser(None, {})
