"""The exam: questions of docs/exam.toml as a form, with the answers that the package gives.

Called by: `macros`, tests/docs. Calls: `strings`. Without a script the page is questions with folded
answers; docs/javascripts/exam.js checks and counts. It reads all that it needs from the page.
"""

import random
import re
import tomllib
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, NamedTuple

from markdown import markdown

from player.strings import read_strings
from source.places import ROOT

DOCS = ROOT / "docs"
QUESTIONS = DOCS / "exam.toml"

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


def read_questions(evaluate: Evaluate) -> list[Question]:
    """All questions, in order; options shuffled, in each build alike.

    Raises ValueError where the package gives another answer than docs/exam.toml says, where a known
    wrong number is right, and where the tour has no such section.
    """
    return [
        _question(entry, evaluate) for entry in tomllib.loads(QUESTIONS.read_text())["question"]
    ]


def _question(entry: dict[str, Any], evaluate: Evaluate) -> Question:
    name = entry["id"]
    _check_section(name, entry["section"])
    answer = None
    if "answer" in entry:
        answer = float(evaluate(entry["answer"]))
        choices = [
            Choice(f"{float(evaluate(wrong['value'])):.4g}", wrong["why"])
            for wrong in entry.get("wrong", [])
        ]
        if same := [choice.text for choice in choices if float(choice.text) == answer]:
            raise ValueError(f"exam.toml: {name}: {same[0]} is called wrong, but is the answer")
    else:
        if evaluate(entry["holds"]) is not True:
            raise ValueError(f"exam.toml: {name}: {entry['holds']} does not hold")
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


def _check_section(name: str, section: str) -> None:
    stem, _, anchor = section.partition("#")
    path = DOCS / "tour" / f"{stem}.md"
    heads = re.findall(r"^##+ (.+)$", path.read_text(), re.MULTILINE) if path.exists() else []
    if anchor not in map(slug, heads):
        raise ValueError(f"exam.toml: {name}: the tour has no {section}; it has {heads}")


def slug(heading: str) -> str:
    """The anchor that MkDocs gives a heading.

    >>> slug("What goes wrong"), slug("Why is the warm-up times two?")
    ('what-goes-wrong', 'why-is-the-warm-up-times-two')
    """
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


# -- As HTML --


def exam_html(expand: Expand, evaluate: Evaluate) -> str:
    """The questions, each a form, and the place of the score."""
    words = read_strings()
    questions = read_questions(evaluate)
    parts = [
        part
        for number, question in enumerate(questions, 1)
        for part in _question_html(number, question, words, expand)
    ]
    return "".join(
        [
            '<div class="mm-exam" id="mm-exam">',
            *parts,
            f'<section class="mm-exam-score" hidden><h2>{words["exam.score_head"]}</h2></section>',
            '</div><script src="javascripts/exam.js" defer></script>',
        ]
    )


def _question_html(
    number: int, question: Question, words: dict[str, Any], expand: Expand
) -> Iterator[str]:
    def inline(text: str) -> str:
        return markdown(expand(text)).removeprefix("<p>").removesuffix("</p>")

    answer = "" if question.answer is None else f' data-answer="{question.answer:.6g}"'
    yield (
        f'<section class="mm-exam-question" data-question="{question.id}"{answer}>'
        f'<h2 id="{question.id}"><span>{number}</span> {escape(question.subject)}</h2>'
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
    stem, _, anchor = question.section.partition("#")
    title = _title(stem)
    yield (
        f'</ul><p class="mm-exam-section">{words["exam.says"]} '
        f'<a href="tour/{stem}.html#{anchor}">{title}</a></p></details></section>'
    )


def _title(stem: str) -> str:
    text = (DOCS / "tour" / f"{stem}.md").read_text()
    # Without the page's number: Markdown would begin a list.
    title = markdown(re.search(r"^# (?:[\d.]+ )?(.+)$", text, re.MULTILINE)[1])
    return title.removeprefix("<p>").removesuffix("</p>")
