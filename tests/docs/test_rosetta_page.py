"""The page Rosetta: its filter hides what it should, counts, opens modules; classes have methods."""

import re

import pytest
from playwright.sync_api import expect

from tests.docs.conftest import Watched
from tests.docs.test_browser import PHONE, violations

# Of a list of elements, those that take room on the page.
SEEN = """all => all.filter(e => {
  const box = e.getBoundingClientRect();
  return box.width * box.height > 0 && e.checkVisibility();
}).map(e => e.innerText)"""
ROWS = ".mm-rosetta tbody tr"


@pytest.fixture
def page(browser, address):
    with Watched(browser, (address,)) as watched:
        watched.page.goto(address + "rosetta.html", wait_until="load")
        yield watched.page


def seen(page, selector: str) -> list[str]:
    return page.locator(selector).evaluate_all(SEEN)


def test_the_filter(page):
    total = page.locator(ROWS).count()
    count = page.locator("#mm-filter-count")
    expect(count).to_have_text(f"{total} rows")
    # Folded: no row of a module is seen. A reader opens one.
    assert not seen(page, "#mm-rosetta tbody tr")
    first = page.locator(".mm-fold").first
    first.locator("summary").first.click()
    assert seen(page, "#mm-rosetta tbody tr")

    page.get_by_label("Show rows with").fill("finalize_model_grads")
    rows = seen(page, ROWS)
    assert 1 <= len(rows) < total / 50
    assert all("finalize_model_grads" in row for row in rows)
    expect(count).to_have_text(f"{len(rows)} of {total} rows")
    # Headings, tables and modules without a row take no room; what is left says how many rows.
    folds = seen(page, ".mm-fold")
    assert folds and all("finalize_model_grads" in text for text in folds)
    assert "Only here" not in " ".join(seen(page, ".mm-rosetta h2"))
    assert re.search(r"\d+ of \d+", folds[0])
    assert len(seen(page, ".mm-rosetta thead")) <= len(rows)

    # A method that is folded away in its cell is shown.
    page.get_by_label("Show rows with").fill("P2PCommunicator send_backward_recv_forward")
    cells = seen(page, ".mm-methods")
    assert any("send_backward_recv_forward" in text for text in cells)

    page.get_by_label("Show rows with").fill("no_such_name")
    assert not seen(page, ROWS) and not seen(page, ".mm-rosetta h2, .mm-fold, .mm-rosetta table")
    expect(count).to_contain_text("Nothing found")
    expect(count).to_contain_text("no_such_name")

    page.get_by_label("Show rows with").fill("")
    expect(count).to_have_text(f"{total} rows")
    assert page.locator(".mm-fold[open]").count() == 1, "modules are as the reader left them"


@pytest.mark.full
def test_modules_open_by_key_and_fit_on_a_phone(page):
    page.set_viewport_size({"width": PHONE, "height": 800})
    page.locator(".mm-fold summary").nth(3).focus()
    page.keyboard.press("Enter")
    page.get_by_label("Show rows with").fill("p2p_communication")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    heights = page.locator(".mm-fold:visible > summary").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().height)"
    )
    assert min(heights) >= 44
    page.evaluate("document.querySelectorAll('.mm-rosetta [hidden]').forEach(e => e.remove())")
    assert not violations(page)


def test_a_class_lists_its_methods(site):
    text = (site / "rosetta.html").read_text()
    row = text[text.index('#P2PCommunicator"') :].partition("</tr>")[0]
    assert 'p2p_communication.html#P2PCommunicator.send_forward"' in row
    methods, _, own = row.partition("methods only here")
    assert "send_forward_recv_backward" in methods and "send_forward_recv_backward" not in own
