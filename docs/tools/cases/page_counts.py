"""Numbers of pages, files and questions, and defaults, for macros.

Called by: `cases`. Calls: `tour`, `spine`.
"""

import tomllib

from minimegatron.core.optimizer import OptimizerConfig
from source.page_words import say
from source.spine import spine_files, spine_hours, spine_lines
from tour.exam_page import NUM_DRAWN, QUESTIONS
from tour.tour import pages_of, read_routes, read_tour


def num_tour_pages() -> int:
    """Pages of the tour, its index not counted."""
    return len(read_tour())


def num_hour_pages() -> int:
    """Pages of the shortest path."""
    return len(pages_of(read_routes()[0]))


def num_asides() -> int:
    """Pages that the longest path alone has."""
    return sum(page.aside for page in read_tour())


def spine_sentence() -> str:
    """How many files there are to read first, and how long that takes."""
    return say("page.spine", files=spine_files(), lines=spine_lines(), hours=spine_hours())


def num_exam_questions() -> int:
    return len(tomllib.loads(QUESTIONS.read_text())["question"])


def num_exam_drawn() -> int:
    """Questions that a reader of the exam gets, of all that there are."""
    return NUM_DRAWN


def default_of(field: str) -> str:
    """What the optimizer's config has where nobody says anything."""
    return f"{getattr(OptimizerConfig(lr=1.0), field):g}"
