"""Numbers of pages and questions, and defaults, for macros. Called by: `cases`. Calls: `tour`."""

import tomllib

from minimegatron.core.optimizer import OptimizerConfig
from source.places import DOCS
from tour.exam_page import NUM_DRAWN
from tour.tour import read_tour


def num_tour_pages() -> int:
    """Pages of the tour, its index not counted."""
    return len(read_tour())


def num_asides() -> int:
    """Pages that the longest path alone has."""
    return sum(page.aside for page in read_tour())


def num_exam_questions() -> int:
    return len(_exam_sections())


def num_exam_drawn() -> int:
    """Questions that a reader of the exam gets, of all that there are."""
    return NUM_DRAWN


def num_exam_pages() -> int:
    """Pages of the tour that the exam asks about."""
    return len({section.partition("#")[0] for section in _exam_sections()})


def _exam_sections() -> list[str]:
    text = (DOCS / "exam.toml").read_text()
    return [question["section"] for question in tomllib.loads(text)["question"]]


def default_of(field: str) -> str:
    """What the optimizer's config has where nobody says anything."""
    return f"{getattr(OptimizerConfig(lr=1.0), field):g}"
