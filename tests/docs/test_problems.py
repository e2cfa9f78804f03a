"""The worked problems: three below each page of the tour, whose solutions are computed."""

import importlib
import re
from pathlib import Path

import pytest

from minimegatron.core import parallel_state
from minimegatron.training.utils import GPT_BATCH_KEYS, batch_keys

macros_module = importlib.import_module("pages.macros")
problems_module = importlib.import_module("tour.problems")

DOCS = Path(__file__).parents[2] / "docs"
STEMS = sorted(path.stem for path in (DOCS / "tour").glob("*.md") if path.stem != "index")
AHEAD = sorted(path.stem for path in (DOCS / "problems").glob("*.md"))

NUMBER = re.compile(r"(?<![\w.-])\d+(?:[.,/]\d+)*(?!\w)")
COUNTS = ("three", "four", "five", "six", "seven", "eight", "nine", "ten")
MAX_QUESTION, MAX_SOLUTION = 70, 90


def words_of(text: str) -> list[str]:
    """Of the page, a macro counted as one word."""
    return macros_module.MACRO.sub("x", text).split()


def test_every_page_of_the_tour_has_three():
    assert [stem for stem in STEMS if len(problems_module.read_problems(stem)) != 3] == []
    assert all(len(problems_module.read_problems(stem)) == 3 for stem in AHEAD)


@pytest.mark.parametrize("stem", AHEAD)
def test_a_problem_can_be_worked_out_and_its_solution_is_computed(stem):
    for question, solution in problems_module.read_problems(stem):
        macros = [found[2] for found in macros_module.MACRO.finditer(solution)]
        typed = macros_module.MACRO.sub("", solution)
        given = NUMBER.findall(question)
        assert given, f"no number is given: {question}"
        assert macros and not any(NUMBER.fullmatch(argument) for argument in macros), solution
        assert len(words_of(question)) <= MAX_QUESTION, question
        assert len(words_of(solution)) <= MAX_SOLUTION, solution
        # Numbers that are not computed must be those of the question.
        assert not set(NUMBER.findall(typed)) - {*given, "0", "1"}, solution
        counted = [word for word in COUNTS if re.search(rf"\b{word}\b", typed)]
        assert not [word for word in counted if word not in question.lower()], solution


@pytest.mark.parametrize("stem", AHEAD)
def test_every_solution_can_be_filled_in(package, stem):
    glossary = macros_module.read_glossary(DOCS / "glossary.md")
    macros = macros_module.Macros(package, f"tour/{stem}.md", glossary)
    text = macros.expand(problems_module.problems_of(stem))
    assert macros.faults == []
    assert "{{" not in text
    assert text.count('??? question "Solution of problem ') == 3


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3)])
def test_e_no_rank_has_two_chunks_of_a_gpt_that_read_data(p, v, monkeypatch):
    """So the problem about a shared iterator is BERT's, whose chunks all read."""
    monkeypatch.setattr(parallel_state, "sizes_set_by_hand", {})
    monkeypatch.setattr(parallel_state, "ranks_set_by_hand", {})
    monkeypatch.setattr(parallel_state, "_virtual_size", None)
    parallel_state.set_pipeline_model_parallel_world_size(p)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(v)
    for rank in range(p):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        reading = [chunk for chunk in range(v) if batch_keys(chunk, GPT_BATCH_KEYS)]
        assert len(reading) == (rank in (0, p - 1))
    question = problems_module.read_problems("data-and-broadcast")[2][0]
    assert "both chunks" in question and "BERT" in question


def test_a_file_that_is_not_problems_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(problems_module, "PROBLEMS", tmp_path)
    assert problems_module.problems_of("page") == ""
    (tmp_path / "page.md").write_text('M = 2?\n\n??? question "Solution"\n    4.\n\nM = 3?\n')
    with pytest.raises(ValueError, match=r"no solution follows 'M = 3\?'"):
        problems_module.read_problems("page")


def test_problems_stand_below_their_page(site):
    for stem in set(STEMS) & set(AHEAD):
        text = (site / "tour" / f"{stem}.html").read_text()
        section = text[text.index('id="problems"') :]
        assert section.count("<summary>Solution of problem ") == 3, stem
    assert not (site / "problems").exists()
    assert "Solution of problem" not in (site / "search" / "search_index.json").read_text()
