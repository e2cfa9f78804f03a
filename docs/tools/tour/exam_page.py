"""The exam: questions of docs/exam.toml as a form, with the answers that the package gives.

Called by: `macros`, `page_counts`, tests/docs. Calls: `strings`, `tour`. Without a script the page is
all questions with folded answers. docs/javascripts/exam.js shows a reader some of them, checks and
counts; exam_draw.js says which. They read all that they need from the page.
"""

import random
import re
import tomllib
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, NamedTuple

from markdown import markdown

from player.strings import read_strings
from source.places import DOCS
from tour.tour import Page, read_tour

QUESTIONS = DOCS / "exam.toml"
NUM_DRAWN = 20
"""Questions that a reader gets, of all that there are."""
TOLERANCE = 0.005
"""How far a typed number may be from the answer, as in exam.js: of a number above 1 a share."""

Evaluate = Callable[[str], Any]
Expand = Callable[[str], str]


class Choice(NamedTuple):
    """An option, or a number that readers type by mistake; `why` says what is wrong with it."""

    text: str
    why: str
    is_right: bool = False


class Question(NamedTuple):
    """One question. `answer` is None where a reader chooses among `choices`.

    With an answer, `choices` are the known wrong numbers.
    """

    id: str
    subject: str
    section: str
    text: str
    why: str
    answer: float | None
    choices: list[Choice]

    @property
    def page(self) -> str:
        """The page of the tour that it asks, without the heading."""
        return self.section.partition("#")[0]

    @property
    def address(self) -> str:
        """Of the section, seen from the exam."""
        page, mark, anchor = self.section.partition("#")
        return f"tour/{page}.html{mark}{anchor}"


def read_questions(evaluate: Evaluate) -> list[Question]:
    """All questions, in the order of the tour; options shuffled, in each build alike.

    Raises ValueError where the package gives another answer than docs/exam.toml says, where a known
    wrong number is right, and where the tour has no such section.
    """
    entries = tomllib.loads(QUESTIONS.read_text())["question"]
    questions = [_question(entry, evaluate) for entry in entries]
    return sorted(questions, key=lambda question: _page(question.page).number)


def _question(entry: dict[str, Any], evaluate: Evaluate) -> Question:
    name = entry["id"]
    _check_section(name, entry["section"])
    if "holds" in entry and evaluate(entry["holds"]) is not True:
        raise ValueError(f"exam.toml: {name}: {entry['holds']} does not hold")
    answer = None
    if "answer" in entry:
        answer = float(evaluate(entry["answer"]))
        choices = [
            Choice(f"{float(evaluate(wrong['value'])):.4g}", wrong["why"])
            for wrong in entry.get("wrong", [])
        ]
        if same := [choice.text for choice in choices if is_close(float(choice.text), answer)]:
            raise ValueError(f"exam.toml: {name}: {same[0]} is called wrong, but is the answer")
    else:
        choices = [
            Choice(option["text"], option.get("why", ""), option.get("right", False))
            for option in entry["option"]
        ]
        if sum(choice.is_right for choice in choices) != 1:
            raise ValueError(f"exam.toml: {name}: one option must be right")
        random.Random(name).shuffle(choices)
    return Question(
        name, entry["subject"], entry["section"], entry["text"], entry["why"], answer, choices
    )


def is_close(typed: float, answer: float) -> bool:
    """Whether the typed number counts as the answer; exam.js says the same.

    >>> is_close(0.333, 1 / 3), is_close(0.32, 1 / 3), is_close(301, 300), is_close(302, 300)
    (True, False, True, False)
    """
    return abs(typed - answer) <= TOLERANCE * max(1.0, abs(answer))


def _check_section(name: str, section: str) -> None:
    stem, mark, anchor = section.partition("#")
    pages = {page.page: page for page in read_tour()}
    heads = re.findall(r"^##+ (.+)$", pages[stem].text, re.MULTILINE) if stem in pages else []
    if stem not in pages or (mark and anchor not in map(slug, heads)):
        raise ValueError(
            f"exam.toml: {name}: the tour has no {section}; it has {heads or [*pages]}"
        )


def _page(stem: str) -> Page:
    return next(page for page in read_tour() if page.page == stem)


def slug(heading: str) -> str:
    """The anchor that MkDocs gives a heading.

    >>> slug("What goes wrong"), slug("Why is the warm-up times two?")
    ('what-goes-wrong', 'why-is-the-warm-up-times-two')
    """
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


# -- As HTML --


def exam_html(expand: Expand, evaluate: Evaluate) -> str:
    """What is shown of them, the questions, each a form, and the place of the score."""
    words = read_strings()
    questions = read_questions(evaluate)
    parts = [
        part
        for number, question in enumerate(questions, 1)
        for part in _question_html(number, question, words, expand)
    ]
    return "".join(
        [
            f'<div class="mm-exam" id="mm-exam" data-drawn="{NUM_DRAWN}">',
            f'<p class="mm-exam-whole">{words["exam.no_script"]}</p>',
            f'<section class="mm-exam-draw" hidden aria-label="{words["exam.draw_head"]}"></section>',
            *parts,
            f'<section class="mm-exam-score" hidden><h2>{words["exam.score_head"]}</h2></section>',
            '</div><script src="javascripts/exam_draw.js" defer></script>'
            '<script src="javascripts/exam.js" defer></script>',
        ]
    )


def _question_html(
    number: int, question: Question, words: dict[str, Any], expand: Expand
) -> Iterator[str]:
    def inline(text: str) -> str:
        return markdown(expand(text)).removeprefix("<p>").removesuffix("</p>")

    answer = "" if question.answer is None else f' data-answer="{question.answer:.6g}"'
    yield (
        f'<section class="mm-exam-question" data-question="{question.id}" '
        f'data-page="{question.page}"{answer}>'
        f'<h2 id="{question.id}"><span>{number}</span> {escape(question.subject)}</h2>'
        f'<p class="mm-exam-page">{words["exam.page"]} '
        f'<a href="tour/{question.page}.html">{_title(question.page)}</a></p>'
        f"<form><fieldset><legend>{inline(question.text)}</legend>"
    )
    if question.answer is not None:
        yield (
            f'<label class="mm-exam-typed">{words["exam.number"]} '
            '<input type="text" inputmode="decimal" autocomplete="off" name="typed"></label>'
        )
    else:
        for place, choice in enumerate(question.choices):
            yield (
                f'<label class="mm-exam-option"><input type="radio" name="{question.id}" '
                f'value="{place}"> <span>{inline(choice.text)}</span></label>'
            )
    yield (
        f'</fieldset><button type="submit" hidden>{words["exam.check"]}</button></form>'
        '<div class="mm-exam-verdict"></div>'
        f'<details class="mm-exam-answer"><summary>{words["exam.answer"]}</summary>'
    )
    right = f"{question.answer:.6g}" if question.answer is not None else ""
    right = right or inline(next(choice.text for choice in question.choices if choice.is_right))
    yield f'<p><strong>{right}</strong></p><p class="mm-exam-why">{inline(question.why)}</p><ul>'
    for place, choice in enumerate(question.choices):
        value = choice.text if question.answer is not None else place
        if choice.is_right:
            continue
        shown = escape(choice.text) if question.answer is not None else inline(choice.text)
        yield f'<li data-value="{value}">{shown}: <span>{inline(choice.why)}</span></li>'
    yield (
        f'</ul><p class="mm-exam-section">{words["exam.says"]} '
        f'<a href="{question.address}">{_title(question.page)}</a></p></details></section>'
    )


def _title(stem: str) -> str:
    # Without the page's number: Markdown would begin a list.
    title = markdown(re.sub(r"^[\d.]+ ", "", _page(stem).title))
    return title.removeprefix("<p>").removesuffix("</p>")
