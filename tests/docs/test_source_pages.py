"""A page of annotated source as a reader has it: its head, its folds, and where a link leads to."""

import importlib
import inspect
import re

import pytest
from playwright.sync_api import expect
from pygments.lexers import PythonLexer

from minimegatron.core.pipeline_parallel import step_frame
from tests.docs.conftest import Watched

FOLDER = "source/minimegatron.core.pipeline_parallel."
STEP_FRAME, SCHEDULES = f"{FOLDER}step_frame.html", f"{FOLDER}schedules.html"
PHONE, WIDE = {"width": 360, "height": 740}, {"width": 1440, "height": 900}
MIDDLE = (0.3, 0.6)
"""Of the screen's height: where the top of a target may be."""


@pytest.fixture
def opened(browser, address):
    def at(name: str, **options) -> Watched:
        watched = Watched(browser, (address,), **options)
        watched.page.goto(address + name, wait_until="load")
        return watched

    return at


def row_of(site, name: str, anchor: str) -> str:
    """The HTML of the row that opens there."""
    text = (site / name).read_text()
    begin = text.index(f'id="{anchor}"')
    end = text.find('<div class="mm-row', begin)
    return text[begin : end if end > 0 else len(text)]


def line_of(words: str) -> str:
    """The anchor of the first line of `step_frame` that begins so."""
    lines = inspect.getsource(step_frame).splitlines()
    return f"L{1 + next(n for n, line in enumerate(lines) if line.strip().startswith(words))}"


def place_of(page, anchor: str) -> float:
    """Where the element's top is, as a part of the screen's height."""
    top = page.locator(f'[id="{anchor}"]').evaluate("e => e.getBoundingClientRect().top")
    return top / page.viewport_size["height"]


TRICKY = r"""
match = re.match(pattern, x.type); case_1 = case.list
match match:
    case _: return not x_1 if is_last else  None
    case [r"raw", *rb'bytes', f"{a_b.c!r:>{width}}", b'x', U'\n']:
        r'''docstring with x_1 = y.z'''
x = -.5e3j+0x1F.real==[...][1:2] ; a_b:= r2
@d.e_f
async def __init__(self, *, of): pass
"""
"""Words that are a keyword or a builtin in one place and a name in another; prefixes of strings."""


def test_pieces_of_code_are_those_of_pygments(package):
    """The site's rules come before Pygments' own, and find the same sooner."""
    ours, theirs = importlib.import_module("source.code_html").Lexer, PythonLexer
    for source in [TRICKY, *[page.source for page in package.pages.values()][::40]]:
        pieces = [list(lexer(ensurenl=False).get_tokens(source)) for lexer in (ours, theirs)]
        assert pieces[0] == pieces[1]


def test_a_row_says_who_calls_it(site):
    row = row_of(site, STEP_FRAME, "GradSync.enable")
    (names,) = re.findall(r'<div class="mm-callers">Called by<ul>(.*?)</ul>', row)
    numbers = re.findall(r'href="#L(\d+)"', names)
    assert len(numbers) == 3
    for number in numbers:
        line = re.search(rf'id="L{number}">(.*?)\n', (site / STEP_FRAME).read_text())[1]
        assert "grad_sync.enable" in re.sub("<.*?>", "", line)
    row = row_of(
        site,
        "source/minimegatron.core.distributed.finalize_model_grads.html",
        "finalize_model_grads",
    )
    assert "Called as <code>finalize_model_grads_func</code> by" in row and "mm-because" in row


def test_excerpts_of_the_tour_link_methods(site):
    text = (site / "tour" / "one-f-one-b.html").read_text()
    for module, method in (
        ("steps", "ModelChunk.backward_step"),
        ("p2p_communication", "P2PCommunicator.send_forward_recv_backward"),
    ):
        link = rf'class="mm-name" href="\.\./{FOLDER}{module}\.html#{method}"'
        assert re.search(link, text), method


def test_a_symbol_beside_long_code_is_in_the_middle(opened):
    """Where its words stay in view while the code goes by."""
    symbol = "forward_backward_pipelining_without_interleaving"
    with opened(f"{SCHEDULES}#{symbol}", viewport=WIDE) as watched:
        assert MIDDLE[0] < place_of(watched.page, symbol) < MIDDLE[1]


@pytest.mark.parametrize(
    "screen", [WIDE, pytest.param(PHONE, marks=pytest.mark.full)], ids=["wide", "phone"]
)
def test_the_target_is_in_the_middle(opened, screen):
    with opened(f"{STEP_FRAME}#L110", viewport=screen) as watched:
        page = watched.page
        expect(page.locator("#L110")).to_be_in_viewport()
        assert MIDDLE[0] < place_of(page, "L110") < MIDDLE[1]
        # A symbol, a line that stands as prose, a line in a fold.
        for anchor in (
            "StepFrame.prepare",
            line_of("# Without a pipeline, a"),
            line_of("import torch"),
        ):
            page.evaluate("anchor => { location.hash = anchor }", anchor)
            expect(page.locator(f'[id="{anchor}"]')).to_be_in_viewport()
            page.wait_for_function(
                """([anchor, low, high]) => {
                  const top = document.getElementById(anchor).getBoundingClientRect().top / innerHeight;
                  return low < top && top < high;
                }""",
                arg=[anchor, *MIDDLE],
            )
        expect(page.locator(".mm-imports")).to_have_attribute("open", "")
        assert page.locator(".mm-line:target").evaluate("e => e.closest('pre').scrollLeft") == 0


def test_the_fold_counts_its_imports(site):
    source = (site / SCHEDULES).read_text()
    count, inside = re.search(
        r'<details class="mm-imports"><summary>(\d+) imports.*?</summary>(.*?)</details>',
        source,
        re.DOTALL,
    ).groups()
    lines = [re.sub("<.*?>", "", line) for line in inside.split("\n")]
    assert int(count) == sum(line.startswith(("import ", "from ")) for line in lines)


@pytest.mark.full
def test_without_javascript_folds_open_and_are_printed(opened):
    with opened(f"{SCHEDULES}#L34", java_script_enabled=False) as watched:
        expect(watched.page.locator("#L34")).to_be_in_viewport()
        assert 0.3 < watched.page.locator("#L34").bounding_box()["y"] / 900 < 0.7
        watched.page.goto("about:blank")
    with opened(SCHEDULES, java_script_enabled=False) as watched:
        watched.page.emulate_media(media="print")
        assert watched.page.locator(".mm-imports .mm-line").first.bounding_box()["height"] > 5


def test_the_head_is_a_grid_and_imports_are_folded(opened):
    edges = """all => all.map(e => {
      const box = e.getBoundingClientRect();
      return [box.left, box.top, box.right];
    })"""
    with opened(SCHEDULES) as watched:
        page = watched.page
        facts = page.locator(".mm-facts")
        assert facts.locator("dt").all_text_contents() == [
            "File", "Spine", "Megatron", "Imported by", "Imports"
        ]  # fmt: skip
        expect(facts).to_contain_text("megatron.core.pipeline_parallel.schedules")
        for width in (1440, 1024, 768, 360):
            page.set_viewport_size({"width": width, "height": 900})
            names = facts.locator("dt").evaluate_all(edges)
            values = facts.locator("dd").evaluate_all(edges)
            assert len({round(left) for left, _, _ in names}) == 1
            assert len({round(left) for left, _, _ in values}) == 1
            for name, value in zip(names, values, strict=True):
                assert name[2] <= value[0] and abs(name[1] - value[1]) < 2, width
            assert max(right for _, _, right in values) <= width
        assert page.locator("h1").count() == 1
        fold = page.locator(".mm-imports")
        expect(fold.locator(".mm-line").first).not_to_be_visible()
        fold.locator("summary").click()
        expect(fold.locator(".mm-line").first).to_be_visible()
