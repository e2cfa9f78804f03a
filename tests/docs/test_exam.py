"""The exam: every answer is the package's, every link leads to a heading, and the page works."""

import importlib
import json
import re
import shutil
import subprocess
from collections import Counter
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
tour = importlib.import_module("tour.tour")

DOCS = Path(__file__).parents[2] / "docs"
SUBJECTS = """Launching and groups, A stage, Tensor parallelism, Data, train_step,
Choice of the schedule, forward_step, The loss contract, backward_step, Messages between stages, 1F1B,
Interleaving, Grad buffers, finalize_model_grads, Optimizer, The distributed optimizer, Checkpoints,
Layouts, Failure, Reading a trace"""
SIZE = {"width": 360, "height": 800}
DRAWN = exam_page.NUM_DRAWN
DRAW = DOCS / "javascripts" / "exam_draw.js"

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")


@pytest.fixture(scope="module")
def macros(package):
    return macros_module.Macros(package, "exam.md", set())


@pytest.fixture(scope="module")
def questions(macros):
    return exam_page.read_questions(macros._evaluate)


def test_every_page_has_a_question_and_every_subject(questions):
    asked = Counter(question.page for question in questions)
    pages = [page.page for page in tour.read_tour()]
    assert set(asked) == set(pages)
    assert list(dict.fromkeys(question.page for question in questions)) == pages
    assert len(questions) >= 60 and min(asked.values()) >= 1
    subjects = [question.subject for question in questions]
    assert set(re.split(r",\s+", SUBJECTS)) <= set(subjects)
    assert len(set(subjects)) == len(questions)
    assert len({question.id for question in questions}) == len(questions)
    # Each is an anchor, and a key of what is kept: never a number alone.
    assert all(re.fullmatch(r"[a-z0-9]*[a-z][a-z0-9-]+", question.id) for question in questions)


def test_e_the_exam_asks_about_each_page_that_it_says(questions, macros):
    pages = {question.page for question in questions}
    text = macros.expand((DOCS / "exam.md").read_text().replace("{{ exam }}", ""))
    assert f"# Exam: {DRAWN} of {len(questions)} questions" in text
    assert f"{len(questions)} questions, at least one on each of the {len(pages)} pages" in text
    assert DRAWN == 20 <= len(pages)


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


def test_no_two_answers_of_a_question_are_right(questions, macros):
    """Texts may have macros, so that two which differ in the file may be alike on the page."""
    for question in questions:
        texts = [macros.expand(choice.text) for choice in question.choices]
        assert len(set(texts)) == len(texts), question.id
        if question.answer is None:
            assert sum(choice.is_right for choice in question.choices) == 1, question.id
        else:
            close = [text for text in texts if exam_page.is_close(float(text), question.answer)]
            assert not close, question.id
            # The page shows the answer with six digits; whoever types these is right.
            assert exam_page.is_close(float(f"{question.answer:.6g}"), question.answer)


def test_the_right_option_is_not_told_by_its_length_or_place(questions, macros):
    texts = [
        [(len(macros.expand(choice.text)), choice.is_right) for choice in question.choices]
        for question in questions
        if question.answer is None
    ]
    longest = sum(max(options)[1] for options in texts)
    shortest = sum(min(options)[1] for options in texts)
    places = {[right for _, right in options].index(True) for options in texts}
    assert longest <= len(texts) / 3, longest
    assert shortest <= len(texts) / 3, shortest
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
        ({"section": "no-such"}, "the tour has no no-such"),
        ({"section": "one-f-one-b#"}, "the tour has no one-f-one-b#"),
        ({"wrong": [{"value": "42.1", "why": "no"}]}, "42.1 is called wrong, but is the answer"),
        ({"holds": "1 > 2"}, "1 > 2 does not hold"),
    ],
)
def test_a_question_that_is_not_right_ends_the_build(changes, words):
    assert exam_page._question(entry(), eval).answer == 42
    assert exam_page._question(entry(section="p2p"), eval).address == "tour/p2p.html"
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
        assert question.address in links and f"tour/{stem}.html" in links
        assert "<" not in exam_page._title(stem).replace("<code>", "").replace("</code>", "")
        assert "{{" not in exam_page._title(stem)
        assert not anchor or anchor in read(site / "tour" / f"{stem}.html").anchors


# -- Which questions are drawn --

RUN = """
require(process.argv[1]);
const { calls } = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(calls.map(([name, questions, seed, count, ...more]) => {
  const { drawExam, seedOfOthers } = globalThis.MM;
  if (name === "seedOfOthers") return seedOfOthers(questions, new Set(seed), count, ...more);
  return drawExam(questions, seed, count).map((question) => question.name);
})));
"""


def ask_node(calls: list[list]) -> list:
    done = subprocess.run(
        ["node", "-e", RUN, DRAW],
        input=json.dumps({"calls": calls}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def draws(pool: list[dict], seeds: list[str], count: int = DRAWN) -> list[list[str]]:
    return ask_node([["drawExam", pool, seed, count] for seed in seeds])


@pytest.fixture(scope="module")
def pool(questions) -> list[dict]:
    return [{"name": question.id, "page": question.page} for question in questions]


@needs_node
def test_a_draw_has_twenty_questions_of_twenty_pages_in_order(pool):
    page_of = {question["name"]: question["page"] for question in pool}
    order = list(page_of)
    for drawn in draws(pool, ["a", "class-1", *map(str, range(50))]):
        assert len(drawn) == len({page_of[name] for name in drawn}) == DRAWN
        assert drawn == sorted(drawn, key=order.index)


@needs_node
def test_the_same_seed_draws_the_same_and_another_seed_others(pool):
    seeds = [f"{number:05d}" for number in range(300)]
    found, again = draws(pool, seeds), draws(pool, seeds)
    assert found == again
    assert len({*map(tuple, found)}) == len(seeds)
    often = Counter(name for drawn in found for name in drawn)
    page_of = {question["name"]: question["page"] for question in pool}
    pages = Counter(page_of[name] for drawn in found for name in drawn)
    # Every page, and every question, about as often as any other.
    assert set(often) == set(page_of)
    assert min(pages.values()) > 0.8 * len(seeds) * DRAWN / len(pages)
    alike = Counter(page_of.values())
    assert all(n > 0.6 * pages[page_of[x]] / alike[page_of[x]] for x, n in often.items())


@needs_node
def test_a_draw_stays_when_a_page_is_added_or_moved(pool):
    seeds = [*map(str, range(40))]
    before = draws(pool, seeds)
    more = [*pool, {"name": "new", "page": "a-new-page"}]
    after = draws(more, seeds)
    assert all(len(set(a) - set(b)) <= 1 for a, b in zip(after, before, strict=True))
    assert any("new" in drawn for drawn in after)
    moved = draws(pool[::-1], seeds)
    assert [drawn[::-1] for drawn in moved] == before


@needs_node
def test_with_few_pages_a_draw_has_every_page_before_a_second_question():
    few = [{"name": f"{page}{n}", "page": page} for page in "abc" for n in range(4)]
    five, all_of_them = ask_node([["drawExam", few, "s", 5], ["drawExam", few, "s", 50]])
    assert len(five) == 5 and {name[0] for name in five} == set("abc")
    assert all_of_them == [question["name"] for question in few]


@needs_node
def test_others_are_others(pool):
    (seen,) = draws(pool, ["first"])
    seeds = [f"{number:x}" for number in range(100)]
    (seed,) = ask_node([["seedOfOthers", pool, seen, DRAWN, seeds]])
    repeated = [len(set(drawn) & set(seen)) for drawn in draws(pool, seeds)]
    (chosen,) = draws(pool, [seed])
    assert len(set(chosen) & set(seen)) == min(repeated) <= DRAWN / 5


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


def asked(page: Page, questions: list) -> list:
    """The questions that the reader sees, in their order."""
    names = page.locator("[data-question]:visible").evaluate_all(
        "all => all.map((element) => element.dataset.question)"
    )
    by_name = {question.id: question for question in questions}
    return [by_name[name] for name in names]


def test_the_exam_is_taken(browser, address, questions):
    with Watched(browser, (address,), viewport=SIZE, reduced_motion="reduce") as watched:
        page = watched.page
        page.goto(f"{address}exam.html#exam.draw=class-1")
        score = page.locator(".mm-exam-score")
        expect(score).to_contain_text(f"0 of {DRAWN} right")
        drawn = asked(page, questions)
        first, *others = drawn
        wrong = next(choice for choice in first.choices if not choice.is_right)
        answer(page, first, wrong.text)
        verdict = page.locator(f"[data-question='{first.id}'] .mm-exam-verdict")
        expect(verdict).to_contain_text("Not right.")
        number = next(question for question in others if question.answer is not None)
        answer(page, number, number.choices[0].text)
        expect(page.locator(f"[data-question='{number.id}'] .mm-exam-verdict")).to_contain_text(
            "Not right."
        )
        answer(page, number, "1234567")
        expect(score.get_by_role("listitem")).to_have_count(2)
        answer(page, number, "many")
        expect(page.locator(f"[data-question='{number.id}'] .mm-exam-verdict")).to_contain_text(
            "Type a number"
        )
        for question in drawn:
            answer(page, question, right_answer(question))
        expect(score).to_contain_text(f"{DRAWN} of {DRAWN} right. {DRAWN - 2} at the first try.")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZE["width"]
        assert not (found := violations(page)), "\n".join(found)

        # The address need not say it again.
        page.goto(f"{address}exam.html")
        expect(score).to_contain_text(f"{DRAWN} of {DRAWN} right. {DRAWN - 2} at the first try.")
        expect(verdict).to_contain_text("Right.")
        assert asked(page, questions) == drawn
        # What is not ours is left out.
        answers = {first.id: ["9", 3], number.id: ["12; alert(1)"], "none": ["1"], "x": None}
        kept = {"draw": "class-1", "all": 1, "answers": answers}
        page.evaluate("kept => localStorage.setItem('mm-exam', kept)", json.dumps(kept))
        page.reload()
        expect(score).to_contain_text(f"0 of {DRAWN} questions are answered")

        answer(page, first, right_answer(first))
        again = score.get_by_role("button").last
        again.click()
        expect(score).to_contain_text(f"1 of {DRAWN} right")
        again.click()
        expect(score).to_contain_text("All answers are removed.")
        expect(score).to_contain_text(f"0 of {DRAWN} right")


def test_a_reason_is_given_for_what_was_answered(browser, address, questions):
    """Of each kind of question: the reason that docs/exam.toml has for this answer."""
    plain = [q for q in questions if not re.search(r"[`*{]", "".join(c.why for c in q.choices))]
    number = next(question for question in plain if question.answer is not None)
    chosen = next(question for question in plain if question.answer is None)
    with Watched(browser, (address,)) as watched:
        page = watched.page
        page.goto(f"{address}exam.html#exam.draw=all")
        for question in (number, chosen):
            wrong = next(choice for choice in question.choices if not choice.is_right)
            answer(page, question, wrong.text)
            verdict = page.locator(f"[data-question='{question.id}'] .mm-exam-verdict")
            expect(verdict).to_contain_text(f"Not right. {wrong.why}")


def test_a_reader_gets_a_draw_keeps_it_and_draws_others(browser, address, questions):
    with Watched(browser, (address,), reduced_motion="reduce") as watched:
        page = watched.page
        page.goto(f"{address}exam.html")
        expect(page.get_by_text("Without scripts")).to_be_hidden()
        draw = page.locator(".mm-exam-draw")
        expect(draw).to_contain_text(f"You have {DRAWN} of {len(questions)} questions.")
        drawn = asked(page, questions)
        assert len({question.page for question in drawn}) == DRAWN
        # Above each question stands its page, before anything is answered.
        for question in drawn:
            where = page.locator(f"[data-question='{question.id}'] .mm-exam-page a")
            expect(where).to_be_visible()
            assert where.get_attribute("href") == f"tour/{question.page}.html"
        link = draw.get_by_role("link").get_attribute("href")
        page.reload()
        assert asked(page, questions) == drawn

        draw.get_by_role("button", name=f"Draw {DRAWN} others").press("Enter")
        others = asked(page, questions)
        assert sum(question in drawn for question in others) <= DRAWN / 5
        assert page.locator(".mm-exam-question:visible h2 > span").all_inner_texts() == [
            str(number) for number in range(1, DRAWN + 1)
        ]
        draw.get_by_role("button", name=f"Show all {len(questions)}").press("Enter")
        assert asked(page, questions) == questions
        page.reload()
        assert asked(page, questions) == questions
        draw.get_by_role("button", name=f"Back to {DRAWN}").press("Enter")
        assert asked(page, questions) == others

        # A link names a draw, for every reader alike; other words are refused.
        page.goto(f"{address}exam.html{link}")
        assert asked(page, questions) == drawn
        page.goto(f"{address}exam.html#exam.draw=no%20such!")
        expect(draw).to_contain_text("it must be 1 to 24 letters")
        assert asked(page, questions) == drawn


def test_a_link_to_one_question_shows_it(browser, address, questions):
    """The search finds questions that are not in a reader's draw."""
    with Watched(browser, (address,), reduced_motion="reduce") as watched:
        page = watched.page
        page.goto(f"{address}exam.html#exam.draw=class-1")
        drawn = asked(page, questions)
        hidden = next(question for question in questions[::-1] if question not in drawn)
        page.goto(f"{address}exam.html#{hidden.id}")
        expect(page.locator(f"[id='{hidden.id}']")).to_be_in_viewport()
        assert asked(page, questions) == questions


@pytest.mark.full
def test_the_exam_without_scripts_or_memory(browser, address, questions):
    with Watched(browser, (address,), java_script_enabled=False) as watched:
        watched.page.goto(f"{address}exam.html")
        answers = watched.page.locator(".mm-exam-answer")
        expect(answers).to_have_count(len(questions))
        assert asked(watched.page, questions) == questions
        expect(watched.page.locator(".mm-exam-draw")).to_be_hidden()
        expect(watched.page.get_by_text("Without scripts nothing is drawn")).to_be_visible()
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
        first, *_ = asked(watched.page, questions)
        answer(watched.page, first, right_answer(first))
        expect(watched.page.locator(".mm-exam-score")).to_contain_text(f"1 of {DRAWN} right")
