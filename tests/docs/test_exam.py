"""The exam: every answer is the package's, every link leads to a heading, and the page works."""

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from minimegatron.core.optimizer import OptimizerConfig
from tests.docs.conftest import Watched
from tests.docs.test_browser import violations
from tests.docs.test_site import read

exam_page = importlib.import_module("tour.exam_page")
macros_module = importlib.import_module("pages.macros")
cases_of_code = importlib.import_module("cases.tensor_cases")

DOCS = Path(__file__).parents[2] / "docs"
SUBJECTS = """Launching and groups, A stage, Tensor parallelism, Data, train_step,
Choice of the schedule, forward_step, The loss contract, backward_step, Messages between stages, 1F1B,
Interleaving, Grad buffers, finalize_model_grads, Optimizer, The distributed optimizer, Checkpoints,
Layouts, Failure, Reading a trace"""
SIZE = {"width": 360, "height": 800}


@pytest.fixture(scope="module")
def macros(package):
    return macros_module.Macros(package, "exam.md", set())


@pytest.fixture(scope="module")
def questions(macros):
    return exam_page.read_questions(macros._evaluate)


def test_every_subject_has_a_question(questions):
    assert len(questions) == 20
    assert {question.subject for question in questions} == set(re.split(r",\s+", SUBJECTS))
    assert len({question.id for question in questions}) == 20


def test_e_the_exam_asks_about_each_page_that_it_says(questions, macros):
    pages = {question.section.partition("#")[0] for question in questions}
    text = macros.expand((DOCS / "exam.md").read_text().replace("{{ exam }}", ""))
    assert f"# Exam: {len(questions)} questions" in text
    assert f"One question on each of {len(pages)} pages" in text
    assert len(pages) == len(questions)


def test_e_what_holds_runs_with_the_defaults_of_the_package(macros, monkeypatch):
    """A loss scale with another hysteresis once made a wrong option hold."""
    seen, make = [], cases_of_code._get_grad_scaler
    monkeypatch.setattr(cases_of_code, "_get_grad_scaler", lambda c: seen.append(c) or make(c))
    exam_page.read_questions(macros._evaluate)
    usual = OptimizerConfig(lr=1.0, fp16=True)
    stated = {"initial_loss_scale"}
    others = [field.name for field in fields(usual) if field.name not in stated]
    assert seen
    assert all(getattr(c, name) == getattr(usual, name) for c in seen for name in others)


def test_every_wrong_answer_has_its_reason(questions):
    for question in questions:
        wrong = [choice for choice in question.choices if not choice.is_right]
        assert all(choice.why for choice in wrong), question.id
        assert len({choice.text for choice in question.choices}) == len(question.choices)
        if question.answer is None:
            assert 3 <= len(question.choices) <= 4, question.id
        else:
            assert wrong and "{{" not in question.text, question.id


def test_the_right_option_is_not_told_by_its_length_or_place(questions, macros):
    texts = [
        [(len(macros.expand(choice.text)), choice.is_right) for choice in question.choices]
        for question in questions
        if question.answer is None
    ]
    longest = sum(max(options)[1] for options in texts)
    places = {[right for _, right in options].index(True) for options in texts}
    assert longest <= len(texts) / 3, longest
    assert len(places) >= 3
    again = exam_page.read_questions(macros._evaluate)
    assert [question.choices for question in again if question.answer is None] == [
        question.choices for question in questions if question.answer is None
    ]


def entry(**changes: object) -> dict:
    return {
        "id": "q",
        "subject": "s",
        "section": "one-f-one-b#the-code",
        "text": "?",
        "why": "so",
        "answer": "6 * 7",
        "wrong": [{"value": "6 + 7", "why": "not the sum"}],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wrong": [{"value": "42", "why": "no"}]}, "42 is called wrong, but is the answer"),
        ({"section": "one-f-one-b#no-such"}, "the tour has no one-f-one-b#no-such"),
        ({"section": "no-such#the-code"}, "the tour has no no-such#the-code"),
    ],
)
def test_a_question_that_is_not_right_ends_the_build(changes, words):
    assert exam_page._question(entry(), eval).answer == 42
    with pytest.raises(ValueError, match=words):
        exam_page._question(entry(**changes), eval)


def test_a_statement_that_does_not_hold_ends_the_build():
    options = [{"text": "a", "right": True}, {"text": "b", "why": "no"}]
    choosing = entry(holds="1 < 2", option=options)
    del choosing["answer"]
    assert [c.text for c in exam_page._question(choosing, eval).choices if c.is_right] == ["a"]
    with pytest.raises(ValueError, match="2 < 1 does not hold"):
        exam_page._question({**choosing, "holds": "2 < 1"}, eval)
    with pytest.raises(ValueError, match="one option must be right"):
        exam_page._question({**choosing, "option": options[1:]}, eval)


def test_links_lead_to_headings(site, questions):
    links = [link for link in read(site / "exam.html").links if link.startswith("tour/")]
    for question in questions:
        stem, _, anchor = question.section.partition("#")
        assert f"tour/{stem}.html#{anchor}" in links
        assert "<" not in exam_page._title(stem).replace("<code>", "").replace("</code>", "")
        assert anchor in read(site / "tour" / f"{stem}.html").anchors


# -- In a browser --


def answer(page: Page, question, text: str) -> None:
    """Answers with what the reader sees: an option's words, or a number."""
    box = page.locator(f"[data-question='{question.id}']")
    if question.answer is None:
        options = [choice.text for choice in question.choices]
        box.get_by_role("radio").nth(options.index(text)).check()
    else:
        box.get_by_role("textbox").fill(text)
    box.get_by_role("button", name="Check").click()


def right_answer(question) -> str:
    if question.answer is not None:
        return f"{question.answer:.6g}"
    return next(choice.text for choice in question.choices if choice.is_right)


def test_the_exam_is_taken(browser, address, questions):
    with Watched(browser, (address,), viewport=SIZE, reduced_motion="reduce") as watched:
        page = watched.page
        page.goto(f"{address}exam.html")
        score = page.locator(".mm-exam-score")
        expect(score).to_contain_text("0 of 20 right")
        first, *others = questions
        wrong = next(choice for choice in first.choices if not choice.is_right)
        answer(page, first, wrong.text)
        verdict = page.locator(f"[data-question='{first.id}'] .mm-exam-verdict")
        expect(verdict).to_contain_text(f"Not right. {wrong.why}")
        number = next(question for question in others if question.answer is not None)
        answer(page, number, number.choices[0].text)
        expect(page.locator(f"[data-question='{number.id}'] .mm-exam-verdict")).to_contain_text(
            f"Not right. {number.choices[0].why}"
        )
        answer(page, number, "1234567")
        expect(score.get_by_role("listitem")).to_have_count(2)
        answer(page, number, "many")
        expect(page.locator(f"[data-question='{number.id}'] .mm-exam-verdict")).to_contain_text(
            "Type a number"
        )
        for question in questions:
            answer(page, question, right_answer(question))
        expect(score).to_contain_text("20 of 20 right. 18 at the first try.")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZE["width"]
        assert not (found := violations(page)), "\n".join(found)

        page.reload()
        expect(score).to_contain_text("20 of 20 right. 18 at the first try.")
        expect(verdict).to_contain_text("Right.")
        # What is not ours is left out.
        kept = {first.id: ["9", 3], number.id: ["12; alert(1)"], "none": ["1"], "x": None}
        page.evaluate("kept => localStorage.setItem('mm-exam', kept)", json.dumps(kept))
        page.reload()
        expect(score).to_contain_text("0 of 20 questions are answered")

        answer(page, first, right_answer(first))
        score.get_by_role("button").click()
        expect(score).to_contain_text("1 of 20 right")
        score.get_by_role("button").click()
        expect(score).to_contain_text("All answers are removed.")
        expect(score).to_contain_text("0 of 20 right")


@pytest.mark.full
def test_the_exam_without_scripts_or_memory(browser, address, questions):
    with Watched(browser, (address,), java_script_enabled=False) as watched:
        watched.page.goto(f"{address}exam.html")
        answers = watched.page.locator(".mm-exam-answer")
        expect(answers).to_have_count(len(questions))
        answers.first.locator("summary").click()
        expect(answers.first.locator(".mm-exam-why")).to_be_visible()
    with Watched(browser, (address,)) as watched:
        # Of the theme's own memory the theme takes care.
        watched.page.add_init_script(
            """for (const name of ["getItem", "setItem"]) {
              const before = Storage.prototype[name];
              Storage.prototype[name] = function (key, ...rest) {
                if (key === "mm-exam") throw new DOMException("not allowed", "SecurityError");
                return before.call(this, key, ...rest);
              };
            }"""
        )
        watched.page.goto(f"{address}exam.html")
        answer(watched.page, questions[0], right_answer(questions[0]))
        expect(watched.page.locator(".mm-exam-score")).to_contain_text("1 of 20 right")
