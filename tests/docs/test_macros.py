"""What stands between double braces: filled in from the code, or the build ends."""

import importlib
from pathlib import Path

import pytest

macros_module = importlib.import_module("macros")

ROOT = Path(__file__).parents[2]
STEPS = "minimegatron.core.pipeline_parallel.steps"


@pytest.fixture
def macros(package):
    return macros_module.Macros(package, "pages/page.md", {"bubble"})


def lines_shown(html: str) -> list[int]:
    return [int(n) for n in macros_module.re.findall(r'data-n="(\d+)"', html)]


def test_code_is_the_symbol_without_its_docstring(macros, package):
    macros.expand("{{ code " + STEPS + ".custom_backward }}")
    (html,) = macros.stash.pieces
    page = package.pages[STEPS]
    definition = page.definitions["custom_backward"]
    shown = lines_shown(html)
    assert shown[0] == definition.line and shown[-1] == definition.end_line
    text = "".join(page.lines[n - 1] for n in shown)
    assert "run_backward" in text and "The engine underneath" not in text
    assert f"../source/{STEPS}.html#custom_backward" in html


def test_an_excerpt_has_whole_statements(macros, package):
    macros.expand("{{ code " + STEPS + '.custom_backward from="raise" to="grad_output = " }}')
    assert any("cuts the statement 'if output.numel() != 1:'" in fault for fault in macros.faults)
    macros.expand("{{ code " + STEPS + '.custom_backward from="raise" shows="scalar" }}')
    shown = lines_shown(macros.stash.pieces[0])
    lines = package.pages[STEPS].lines
    assert lines[shown[0] - 1].strip() == "raise ValueError("
    assert lines[shown[-1] - 1].strip() == ")"


@pytest.mark.parametrize(
    ("macro", "words"),
    [
        ("{{ code " + STEPS + ".no_such }}", "the package has no"),
        ("{{ code " + STEPS + '.custom_backward from="no such words" }}', "no lines have"),
        ("{{ code " + STEPS + '.custom_backward from="output" }}', "lines have"),
        ("{{ code " + STEPS + '.custom_backward shows="run_backward, no such" }}', "not show 'no"),
        ("{{ code minimegatron.core.pipeline_parallel.schedules.forward_step }}", "is defined as"),
        ("{{ value 1 / 0 }}", "ZeroDivisionError"),
        ("{{ value 2 }}. Because", "a list's number"),
        ("{{ term no such term }}", "glossary has no"),
        ("{{ unheard_of x }}", "no inline macro"),
        ("{{ run rm -rf x }}", "only minimegatron commands"),
        ("{{ run minimegatron plan --pp 0 --microbatches 1 }}", "ended with"),
    ],
)
def test_what_cannot_be_filled_in_is_a_fault(macros, macro, words, capsys):
    macros.expand(f"text\n\n{macro}\n")
    assert len(macros.faults) == 1
    assert words in macros.faults[0] and "pages/page.md" in macros.faults[0]


def test_a_page_of_the_tour_says_what_an_excerpt_shows(package):
    macros = macros_module.Macros(package, "tour/page.md", set())
    macros.expand("{{ code " + STEPS + '.custom_backward shows="run_backward" }}')
    assert not macros.faults
    macros.expand("{{ code " + STEPS + ".custom_backward }}")
    assert "say which words it shows" in macros.faults[0]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "tour").glob("*.md")), ids=lambda p: p.stem
)
def test_every_page_of_the_tour_can_be_filled_in(package, path):
    glossary = macros_module.read_glossary(ROOT / "docs" / "glossary.md")
    macros = macros_module.Macros(package, f"tour/{path.name}", glossary)
    macros.expand(path.read_text())
    assert macros.faults == []


def test_headings_of_stages_do_not_overlap():
    picture = importlib.import_module("cases").placement_figure(8, 4, 2)
    column = 92  # of `stages_picture`; 6.6 is the width of a letter in its small bold font
    heads = macros_module.re.findall(r'<text [^>]*mm-strong">([^<]*)</text>', picture)
    assert len(heads) == 16 and all(6.6 * len(words) < column for words in heads), heads


def test_values_are_computed(macros):
    assert macros.expand("{{ value fraction_words(bubble(4, 8)) }}.") == "3/11 = 27.3%."
    assert macros.expand("{{ value 1 }} and {{ value 2 }}") == "1 and 2"


def test_layers_of_experts_are_drawn_and_counted(macros):
    assert macros.expand("{{ value layer_words() }}") == "206, all-to-all 64, exposed 14"
    assert macros.expand('{{ value layer_words("ordinary", 16) }}').startswith("1024, ")
    macros.expand("{{ figure layer_pair() | One pair }}")
    assert (
        "all-to-all: dispatch of layer 0, forward of microbatch 1, 2 to 3" in macros.stash.pieces[0]
    )
    macros.expand("{{ figure layer_timeline(2, 2, (2, 2, 3, 3)) }}")
    assert "ordinary: 96, all-to-all 48, exposed 48" in macros.stash.pieces[-1]
    macros.expand("{{ figure layered_timeline(2, 4, 2) }}")
    assert "all-to-all 64, exposed 40" in macros.stash.pieces[-1]
    assert "| combined | 248 | 192 | 64 | 40 |" in macros.expand("{{ table ways_table(2, 4, 2) }}")
    assert "| ordinary | 256 |" in macros.expand("{{ table ways_table(1, 4, layers=4) }}")


def test_a_command_is_run(macros):
    text = macros.expand("{{ run minimegatron plan --pp 2 --microbatches 2 }}")
    assert text.startswith("```console\n$ minimegatron plan") and "makespan" in text


def test_blocks_keep_their_indentation(macros):
    text = macros.expand('??? question "x"\n    {{ table bubble_table((2,), (4,)) }}\n')
    assert "\n    | p = 2 | 20.0% |" in text


def test_code_in_fences_and_spans_is_left_alone(macros):
    for text in ("```\n{{ value 1 }}\n```", "`{{ value 1 }}`"):
        assert macros.expand(text) == text


def test_formulas_become_mathml(macros):
    assert macros.expand("$p - 1$").startswith("<math")
    macros.expand("$$\\frac{1}{2}$$")
    assert "<mfrac>" in macros.stash.pieces[0]
    assert macros.expand("costs $5 and $6") == "costs $5 and $6"


def test_pictures_of_one_page_share_no_ids(macros):
    macros.expand('{{ figure timeline("1f1b", 2, 2) }}\n\n{{ figure timeline("1f1b", 2, 2) }}\n')
    ids = macros_module.re.findall(r' id="([^"]+)"', "".join(macros.stash.pieces))
    assert ids and len(ids) == len(set(ids))


def test_links(macros):
    assert "NVIDIA/Megatron-LM/issues/675" in macros.expand("{{ thread MLM#675 }}")
    assert "(../glossary.md#bubble)" in macros.expand("{{ term bubble }}")
    assert f"(../source/{STEPS}.md#forward_step)" in macros.expand(
        "{{ link " + STEPS + ".forward_step }}"
    )
