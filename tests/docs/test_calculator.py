"""The calculator: it counts as Python does, says what is wrong, and shows what was measured."""

import dataclasses
import importlib
import itertools

import pytest
from playwright.sync_api import expect

from minimegatron.planner import memory
from minimegatron.planner.formulas import bubble_formulas
from minimegatron.planner.stage import PlanConfig
from tests.docs.conftest import Watched

choices = importlib.import_module("cases.choices")
layout_costs = importlib.import_module("cases.layout_costs")


@pytest.fixture
def opened(browser, address):
    def at(name: str) -> Watched:
        watched = Watched(browser, (address,))
        watched.page.goto(address + name, wait_until="load")
        return watched

    return at


def choice_layouts():
    """Layouts of all the page's tables, and all that were measured."""
    found = [run for run, _ in choices.measured_runs().values()]
    for name in choices.CHOICES:
        found += [choices.chosen(name), *choices.others(name)]
    return found


def test_a_measured_run_stands_beside_the_estimate(opened):
    with opened("tour/what-it-costs.html") as watched:
        page = watched.page
        row = page.locator(".mm-results tr", has_text="the same, measured")
        assert row.count() == 0
        for name, (_, measured) in choices.measured_runs().items():
            page.locator(".mm-measured").select_option(name)
            expect(page.locator(".mm-calculator-said")).to_be_empty()
            expect(row).to_contain_text(f"off by {choices.error(name):.1%}".replace("-", "−"))
            expect(row).to_contain_text(f"{measured / 1e6:.3g} MB")
        page.get_by_label("hidden size h").fill("512")
        expect(row).to_have_count(0)


def test_the_calculator_counts_as_python_does(opened):
    with opened("tour/what-it-costs.html") as watched:
        page = watched.page
        grid = [
            (s, b, 128, 8, t, c, sp, recompute)
            for s, b, t, c in itertools.product((64, 96), (1, 3), (1, 2, 8), (1, 2))
            for sp in (False, True)
            for recompute in ("none", "selective", "full")
        ]
        expected = [float(memory.activation_bytes_per_layer(*sizes)) for sizes in grid]
        script = "grid => grid.map(x => MMFormulas.activation_bytes_per_layer(...x))"
        assert page.evaluate(script, grid) == pytest.approx(expected)

        states = list(itertools.product((1000, 64), (2, 4), (2, 4), (1, 4), (False, True)))
        script = "grid => grid.map(x => MMFormulas.model_state_bytes(...x).total)"
        expected = [float(memory.model_state_bytes(*sizes).total) for sizes in states]
        assert page.evaluate(script, states) == pytest.approx(expected)

        configs = [
            PlanConfig(schedule, p, m, v, p)
            for schedule, v in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("no-pipelining", 1))
            for p, m in ((2, 4), (4, 8), (8, 64))
        ]
        script = "configs => configs.map(c => MMFormulas.bubble_formulas(c)[1].value)"
        found = page.evaluate(script, [dataclasses.asdict(config) for config in configs])
        assert found == pytest.approx([float(bubble_formulas(c)[1].value) for c in configs])

        layouts = [x for x in choice_layouts() for _ in range(2)]
        layouts = [dataclasses.replace(x, sp=bool(n % 2)) for n, x in enumerate(layouts)]
        for name in ("held_bytes", "step_seconds", "useful_share"):
            script = f"all => all.map(x => MMFormulas.{name}(x))"
            found = page.evaluate(script, [dataclasses.asdict(x) for x in layouts])
            assert found == pytest.approx([float(getattr(layout_costs, name)(x)) for x in layouts])

        first = page.locator(".mm-results tr").first
        before = first.inner_text()
        page.get_by_label("microbatches M").fill("8")
        expect(first).not_to_have_text(before, use_inner_text=True)

        page.wait_for_function("location.hash === '#calculator.M=8'")
        page.evaluate("location.hash = '#calculator.p=1e999&calculator.v=2'")
        said = page.locator(".mm-calculator-said")
        expect(said).to_contain_text("p = “1e999”, but it must be a whole number from 1")
        expect(page.get_by_label("chunks v")).to_have_value("2")
        expect(page.get_by_label("microbatches M")).to_have_value("64")


CALCULATOR_FAULTS = [
    ({"p": ""}, "stages p: type a whole number from 1"),
    ({"p": "0"}, "stages p: 0 is not a whole number from 1"),
    ({"p": "-3"}, "stages p: −3 is not a whole number"),
    ({"p": "1.5"}, "stages p: 1.5 is not a whole number"),
    ({"p": "1000000"}, "L = 64 is no multiple of p = 1,000,000."),
    ({"p": "1e9"}, "is not a whole number from 1 to 1,000,000"),
    ({"v": "3"}, "L = 64 is no multiple of p × v = 24."),
    ({"v": "2", "M": "63"}, "M = 63 is no multiple of p = 8."),
    ({"p": "1", "v": "2"}, "p = 1 needs v = 1, not 2."),
    ({"t": "3"}, "a = 64 is no multiple of t = 3."),
    ({"a": "60", "t": "1"}, "h = 8,192 is no multiple of a = 60."),
    ({"s": "4095"}, "s = 4,095 is no multiple of t = 8."),
    ({"c": "3"}, "s = 4,096 is no multiple of 2 × c = 6."),
    ({"e": "2"}, "Without experts, E = 0, there is nothing to divide"),
    ({"E": "8", "e": "3"}, "E = 8 is no multiple of e = 3."),
    ({"E": "128", "e": "128"}, "t × c × d = 64 is no multiple of e = 128."),
    ({"E": "4", "k": "5"}, "A token cannot go to k = 5 of E = 4 experts."),
    ({"rate": "0"}, "tokens per second and GPU: 0 is not a number from 0.001"),
    ({"rate": "99999"}, "99999 tokens per second would take"),
    ({"peak": ""}, "type a number from 0.001"),
]


SET_SIZES = """values => {
  for (const [name, value] of Object.entries(values)) {
    const field = document.querySelector(`.mm-fields [name=${name}]`);
    field.value = value;
    field.dispatchEvent(new Event("input", {bubbles: true}));
  }
  const bad = [...document.querySelectorAll(".mm-fields [aria-invalid=true]")];
  const said = document.querySelector(".mm-calculator-said").textContent;
  return [said, document.querySelector(".mm-results").className, bad.map(e => e.name)];
}"""


def test_calculator_says_what_is_wrong_and_greys_its_answers(opened):
    with opened("tour/what-it-costs.html") as watched:
        page = watched.page
        said, results = page.locator(".mm-calculator-said"), page.locator(".mm-results")
        sizes = "all => Object.fromEntries(all.map(e => [e.name, e.value]))"
        given = page.locator(".mm-fields input[type=number]").evaluate_all(sizes)
        answers = results.inner_text()
        for values, words in CALCULATOR_FAULTS:
            text, classes, bad = page.evaluate(SET_SIZES, values)
            assert words in text and "The grey answers are those of before" in text
            assert "mm-stale" in classes and (set(values) <= set(bad) or len(values) > 1 and bad)
            assert page.evaluate(SET_SIZES, {name: given[name] for name in values})[0] == ""
            assert results.inner_text() == answers
        # Experts over tensor-parallel ranks have their tokens by sequence parallelism.
        parallel = page.locator(".mm-fields [name=sp]")
        page.evaluate(SET_SIZES, {"E": "8"})
        parallel.uncheck()
        expect(said).to_contain_text("Experts need sequence parallelism where t > 1; t is 8.")
        parallel.check()
        page.evaluate(SET_SIZES, {"E": given["E"]})
        expect(said).to_be_empty()
        # Letters are no number, whatever the browser makes of them; thousands with a comma are one.
        field = page.locator(".mm-fields [name=h]")
        for text, words in (("abc", "hidden size h: type a whole number"), ("8,192", None)):
            field.press("Control+A")
            page.keyboard.insert_text(text)
            expect(said).to_contain_text(words) if words else expect(said).to_be_empty()
