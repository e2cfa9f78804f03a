"""Worked problems: three for each page of the tour, from docs/problems, with folded solutions.

Called by: `macros`, tests/docs. Calls: `places`. A file has the name of its page. It holds, for
each problem, the question, and below it `??? question "Solution"` with the solution, indented.
"""

import re
from typing import NamedTuple

from source.places import DOCS

PROBLEMS = DOCS / "problems"
HEAD = '??? question "Solution"'
PROBLEM = re.compile(rf"(.+?)\n\n{re.escape(HEAD)}\n((?:    [^\n]*\n|\n)+)", re.DOTALL)


class Problem(NamedTuple):
    """A question and its solution, both Markdown with macros."""

    question: str
    solution: str


def read_problems(stem: str) -> list[Problem]:
    """The problems of the page with this name; [] if it has none.

    Raises ValueError for a file that has anything but questions and their solutions.
    """
    path = PROBLEMS / f"{stem}.md"
    if not path.exists():
        return []
    text = path.read_text()
    left = PROBLEM.sub("", text).strip()
    if left:
        raise ValueError(f"docs/problems/{path.name}: no solution follows {left[:60]!r}")
    return [Problem(question.strip(), solution) for question, solution in PROBLEM.findall(text)]


def problems_of(stem: str) -> str:
    """The section that ends the page; "" if it has no problems. Macros are still to be filled in."""
    parts = [
        f"**Problem {number}.** {problem.question}\n\n"
        f'??? question "Solution of problem {number}"\n{problem.solution.rstrip()}\n'
        for number, problem in enumerate(read_problems(stem), 1)
    ]
    # What explains should be found, not the exercises on it.
    return "\n".join(["\n## Problems { data-search-exclude }\n", *parts]) if parts else ""
