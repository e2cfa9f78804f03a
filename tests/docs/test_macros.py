"""What stands between double braces: filled in from the code, or the build ends."""

import importlib
import re
from pathlib import Path

import pytest

macros_module = importlib.import_module("pages.macros")

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
    module = "minimegatron.core.pipeline_parallel.user_results"
    quoted = "{{ code " + module + '.refuse_gradient from="raise ValueError"'
    macros.expand(quoted + ' to="raise RuntimeError" }}')
    assert any("cuts the statement 'if grad is None:'" in fault for fault in macros.faults)
    macros.expand(quoted + ' shows="scalar" }}')
    shown = lines_shown(macros.stash.pieces[0])
    lines = package.pages[module].lines
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


NUMBER = re.compile(r"(?<![\w.-])\d+(?:[.,/]\d+)*(?!\w)")
COMPUTED = ("table", "figure", "run", "player")
INDEX_PAGES = ("index.md", "tour/index.md", "exam.md", "symptoms/index.md", "teachers.md")
COUNTED = "pages|questions|notebooks|exercises|labs|files|symptoms|problems"
WORDS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty"
FEW = {"0", "1", "2"}
WITH_CASES = [
    path for name in ("tour", "symptoms") for path in sorted((ROOT / "docs" / name).glob("*.md"))
]


def typed_results(text: str) -> list[str]:
    """Numbers typed into a paragraph below a computed table or picture that are not given before.

    Given is what stands above on the page or in the paragraph's macros, `x = 3`, code, and what a
    paragraph says that ends with a colon: it introduces the next case. 0 to 2 are too common to tell.
    A question of the reader's gives numbers, and its answer must compute others.
    """
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    given, is_below, found = set(), False, []
    for block in re.split(r"\n\s*\n", text):
        macro = macros_module.MACRO.fullmatch(block.strip())
        if block.startswith("#"):
            is_below = False
        elif macro and macro[1] in COMPUTED:
            is_below = True
        else:
            question, _, answer = (
                block.partition("\n    ") if block.startswith("???") else ("", "", block)
            )
            given |= numbers_of(question, with_macros=True)
            in_macros = numbers_of(
                " ".join(m[2] or "" for m in macros_module.MACRO.finditer(block))
            )
            typed = numbers_of(answer) - {n for n in numbers_of(answer) if f"= {n}" in block}
            known = given | in_macros | FEW
            must_compute = (is_below or question) and not block.rstrip().endswith(":")
            if must_compute and not block.startswith("|") and (new := typed - known):
                found.append(f"{sorted(new)}: {' '.join(block.split())[:90]}")
        given |= numbers_of(block, with_macros=True)
    return found


def numbers_of(text: str, with_macros: bool = False) -> set[str]:
    """Of prose: without links, formulas and code, and without macros unless asked."""
    if not with_macros:
        text = re.sub(r"\$\$?[^$]*\$\$?|`[^`]*`", "", macros_module.MACRO.sub("", text))
    text = re.sub(r"\]\([^)]*\)|\{ #.*?\}|<[^>]*>", "", text)
    return set(NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)))


@pytest.mark.parametrize("path", WITH_CASES, ids=lambda path: path.stem)
def test_e_numbers_below_a_computed_table_are_computed(path):
    assert not typed_results(path.read_text())


def test_e_a_typed_result_is_found():
    page = "p = 4, M = 8.\n\n{{ table bubble_table() }}\n\n"
    assert not typed_results(page + "Of 8 it is {{ value 16 }}; with M = 32 less.")
    for wrong in (
        "It idles 27.3 %.",
        "So the step takes 33 units.",
        '??? question "Why 7?"\n    It is 21.',
    ):
        assert len(typed_results(page + wrong)) == 1, wrong
    assert "different exchange" not in (ROOT / "docs/tour/why-times-two.md").read_text()


def test_e_exchanges_that_wait_are_counted(macros):
    """The four ranks do not all stand in different exchanges, as the page once said."""
    page = (ROOT / "docs/tour/why-times-two.md").read_text()
    assert not re.search(r"exchange \d", page)
    assert macros.expand("{{ value symptoms.stuck_in(1, 4, 8, 2) }}") == "10, 11, 11 and 10"
    assert macros.expand("{{ table symptoms.who_waits(1, 4, 8, 2) }}").count("| 11 |") == 3


@pytest.mark.parametrize("name", INDEX_PAGES)
def test_e_index_pages_count_by_macros(name):
    text = (ROOT / "docs" / name).read_text()
    found = re.findall(rf"\b(?:\d+|{WORDS}) (?:{COUNTED})\b", text, re.IGNORECASE)
    assert not [words for words in found if words not in ("two labs", "three labs")], found


def test_headings_of_stages_do_not_overlap():
    picture = importlib.import_module("cases.cases").placement_figure(8, 4, 2)
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


def test_f8_the_page_has_the_keyword_of_a_collecting_loss_function():
    page = (ROOT / "docs" / "tour" / "loss-contract.md").read_text()
    assert "loss_func(output, non_loss_data=True)" in page
