"""Worked problems: three for each page of the tour, from docs/problems, with folded solutions.

Called by: `macros`, tests/docs. Calls: `places`, `page_words`. A file has the name of its page. It
holds, for each problem, the question, and below it `??? question "Solution"` with the solution,
indented. Problems in Chinese are in docs/zh/problems: below the front matter that says which text they
were made from; "Solution" is said in Chinese there.
"""

import re
from typing import NamedTuple

from source.page_words import DEFAULT, own_anchor, say, spoken
from source.places import DOCS

PROBLEMS = DOCS / "problems"
PROBLEM = r"(.+?)\n\n\?\?\? question \"{head}\"\n((?:    [^\n]*\n|\n)+)"
HEADS = {DEFAULT: "Solution"}
"""What a solution is called; in another language by any word."""
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


class Problem(NamedTuple):
    """A question and its solution, both Markdown with macros."""

    question: str
    solution: str


def read_problems(stem: str, language: str = DEFAULT) -> list[Problem]:
    """The problems of the page with this name; [] if it has none.

    Raises ValueError for a file that has anything but questions and their solutions.
    """
    folder = PROBLEMS if language == DEFAULT else DOCS / language / "problems"
    path = folder / f"{stem}.md"
    if not path.exists():
        return []
    text = FRONT_MATTER.sub("", path.read_text())
    pattern = re.compile(PROBLEM.format(head=HEADS.get(language, r'[^"\n]+')), re.DOTALL)
    left = pattern.sub("", text).strip()
    if left:
        way = "" if language == DEFAULT else f"{language}/"
        raise ValueError(f"docs/{way}problems/{path.name}: no solution follows {left[:60]!r}")
    return [Problem(question.strip(), solution) for question, solution in pattern.findall(text)]


def problems_of(stem: str) -> str:
    """The section that ends the page; "" if it has no problems. Macros are still to be filled in."""
    parts = []
    for number, problem in enumerate(read_problems(stem, spoken()), 1):
        name = say("page.problem", number=number)
        solution = say("page.solution", number=number)
        parts.append(
            f"**{name}** {problem.question}\n\n"
            f'??? question "{solution}"\n{problem.solution.rstrip()}\n'
        )
    # What explains should be found, not the exercises on it.
    title, anchor = say("page.problems"), own_anchor("problems")
    head = f"\n## {title} {{ {anchor}data-search-exclude }}\n"
    return "\n".join([head, *parts]) if parts else ""
