"""Heads of pages, addresses without a page, print, forced colours, no scripts."""

import functools
import http.server
import re
import threading
from html import unescape
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from playwright.sync_api import expect

from pages import page_heads, redirects
from tests.docs.conftest import ROOT, Watched
from tests.docs.test_browser import violations

META = re.compile(r'<meta (?:name|property)="([^"]+)" content="([^"]*)"')
SITE_URL = "https://example.org/some/path/"


def pages_of(site: Path) -> dict[str, dict[str, str]]:
    """Address -> tags of the head, of all pages but redirects."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        head = path.read_text().partition("</head>")[0]
        if 'content="noindex"' not in head:
            found[path.relative_to(site).as_posix()] = dict(META.findall(head))
    return found


def test_every_page_says_what_it_is(site):
    pages = pages_of(site)
    assert len(pages) > 300
    by_description: dict[str, list[str]] = {}
    for name, tags in pages.items():
        for tag in ("description", "og:title", "og:description", "og:type", "twitter:card"):
            assert tags.get(tag), f"{name}: no {tag}"
        assert tags["description"] == tags["og:description"], name
        text = unescape(tags["description"])
        assert 12 <= len(text) <= page_heads.MAX or name == "index.html", f"{name}: {text}"
        by_description.setdefault(text, []).append(name)
        assert "og:url" not in tags, "the address of this build is not known"
    alike = [names for names in by_description.values() if len(names) > 1]
    assert not alike, alike
    assert pages["index.html"]["og:type"] == "website"


@pytest.fixture(scope="module")
def small_site(tmp_path_factory) -> Path:
    """Three pages, built by the same settings for an address that is known."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "docs" / "tour").mkdir(parents=True)
    for name in ("index.md", "tour/index.md", "source.md"):
        (folder / "docs" / name).write_text(f"# A title\n\nWhat {name} says.\n")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(folder / "docs"),
        site_dir=str(folder / "site"),
        site_url=SITE_URL,
        nav=["index.md", "tour/index.md"],
        plugins=["search"],
    )
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder / "site"


def test_a_known_address_is_named(small_site):
    text = (small_site / "tour" / "index.html").read_text()
    assert f'<link rel="canonical" href="{SITE_URL}tour/index.html">' in text
    assert f'<meta property="og:url" content="{SITE_URL}tour/index.html">' in text
    listed = re.findall(r"<loc>(.*?)</loc>", (small_site / "sitemap.xml").read_text())
    # All pages, those that the navigation does not have too.
    wanted = {f"{SITE_URL}{name}" for name in ("", "tour/index.html", "source.html")}
    assert {url.removesuffix("index.html") for url in listed} == {
        url.removesuffix("index.html") for url in wanted
    }
    assert 'href="/some/path/tour/index.html"' in (small_site / "404.html").read_text()


# -- Addresses without a page --


class _BelowAPath(http.server.SimpleHTTPRequestHandler):
    """Serves the site under /sub/, and 404.html for what is not there, as hosts of static pages do."""

    def log_message(self, *_):
        pass

    def translate_path(self, path):
        below = path.removeprefix("/sub") if path.startswith("/sub/") else "/no/such/file"
        return super().translate_path(below)

    def send_error(self, code, *_, **__):
        body = Path(self.directory, "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_missing_page_leads_on_below_any_path(browser, site):
    handler = functools.partial(_BelowAPath, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_address[1]}/sub/"
    watched = Watched(browser, (root,), viewport={"width": 360, "height": 700})
    page = watched.page
    try:
        page.goto(f"{root}some/deep/place/one-f-one-b.html", wait_until="load")
        expect(page.locator("html")).to_have_attribute("data-root", "/sub/")
        hrefs = page.locator("a").evaluate_all("all => all.map(a => a.pathname)")
        assert len(hrefs) >= 5
        assert all((site / href.removeprefix("/sub/")).exists() for href in hrefs), hrefs
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert not violations(page)
        # What was looked for is in the field already, and the search of the home page takes it.
        expect(page.get_by_label("Search")).to_have_value("one f one b")
        page.get_by_role("button", name="Search").click()
        first = page.locator(".md-search-result__item a").first
        expect(first).to_have_attribute("href", re.compile(r"/sub/(tour/|glossary)"))
        assert not [error for error in watched.errors if "404" not in error], watched.errors
    finally:
        watched.context.close()
        server.shutdown()


# -- Redirects --


def test_old_addresses_lead_to_new_ones(tmp_path, browser, monkeypatch):
    monkeypatch.delenv("SITE_URL", raising=False)
    (tmp_path / "set-up").mkdir()
    (tmp_path / "set-up" / "new.html").write_text("<title>New</title><p id='part'>here</p>")
    (tmp_path / "redirects.toml").write_text(
        '"tour/old.html" = "set-up/new.html"\n"old.html" = "set-up/new.html#part"\n'
        '"set-up/old.html" = "set-up/new.html"\n'
    )
    read = redirects.read_redirects(tmp_path / "redirects.toml")
    moved = {old: new for old, new in read.items() if not old.startswith("source/")}
    redirects.write_redirects(tmp_path, moved)
    text = (tmp_path / "tour" / "old.html").read_text()
    assert '<noscript><meta http-equiv="refresh" content="0; url=../set-up/new.html">' in text
    assert '<link rel="canonical" href="../set-up/new.html">' in text
    with Watched(browser, ("file:",)) as watched:
        for old, ending in (
            ("tour/old.html?t=3#end", "set-up/new.html?t=3#end"),
            ("old.html", "set-up/new.html#part"),
            ("set-up/old.html", "set-up/new.html"),
        ):
            watched.page.goto(tmp_path.as_uri() + "/" + old)
            watched.page.wait_for_url(f"{tmp_path.as_uri()}/{ending}")

    redirects.write_redirects(tmp_path / "known", {}, "https://example.org/a/")
    redirects.write_redirects(tmp_path, {"b/c.html": "old.html"}, "https://example.org/a/")
    assert 'href="https://example.org/a/old.html"' in (tmp_path / "b" / "c.html").read_text()


def test_a_redirect_from_or_to_nowhere_ends_the_build(tmp_path):
    (tmp_path / "here.md").write_text("# Here")
    with pytest.raises(ValueError, match="there is a page at here.html"):
        redirects.write_redirects(tmp_path, {"here.html": "here.html"})
    with pytest.raises(ValueError, match="no such page"):
        redirects.write_redirects(tmp_path, {"old.html": "gone.html"})


def test_modules_that_have_moved_keep_their_pages(site):
    text = (site / "source" / "minimegatron.execution.html").read_text()
    assert 'href="minimegatron.training.pipeline_schedule.html"' in text


# -- Paper, forced colours, no scripts --


def luminance(page, selector: str) -> float:
    """Of the first letters, from 0 for black to 1 for white."""
    style = page.locator(selector).first.evaluate("""e => {
      const style = getComputedStyle(e);
      return e.ownerSVGElement ? style.fill : style.color;
    }""")
    # "rgb(1, 2, 3)", or "rgba(...)" on white paper.
    red, green, blue, *alpha = map(float, re.findall(r"[\d.]+", style))
    light = (0.299 * red + 0.587 * green + 0.114 * blue) / 255
    return 1 - (alpha[0] if alpha else 1) * (1 - light)


def test_on_paper(browser, address):
    """No navigation, code that is not cut, folded answers open, addresses of other sites."""
    size = {"width": 700, "height": 900}
    with Watched(browser, (address,), viewport=size, color_scheme="dark") as watched:
        page = watched.page
        page.goto(address + "tour/interleaving.html", wait_until="load")
        page.locator(".mm-player[data-ready]").wait_for()
        page.emulate_media(media="print")
        # Dark letters, also for those who read in dark colours; they fade into it.
        for words in (".md-content p", ".mm-line", ".mm-timeline svg text", ".md-content p a"):
            for _ in range(40):
                if luminance(page, words) < 0.45:
                    break
                page.wait_for_timeout(50)
            assert luminance(page, words) < 0.45, words
        for hidden in (".md-header", ".md-sidebar--primary", ".md-footer", ".md-clipboard"):
            assert not page.locator(hidden).first.is_visible(), hidden
        cut = page.locator(".mm-code pre, .mm-code code").evaluate_all(
            "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert cut == 0
        answers = page.locator("details.question > p")
        assert answers.count() and all(answer.bounding_box() for answer in answers.all())
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        expect(page.locator("details.question:not([open])")).to_have_count(0)
        link = page.locator(".md-content a[href^='https']").first
        after = link.evaluate("a => getComputedStyle(a, '::after').content")
        assert "github.com" in after or "attr(href)" in after


@pytest.mark.full
def test_in_forced_colours(browser, address):
    """What shadows and backgrounds said is said by outlines and borders."""
    with Watched(browser, (address,), forced_colors="active") as watched:
        page = watched.page
        page.goto(address + "tour/p2p.html", wait_until="load")
        outline = "e => parseFloat(getComputedStyle(e).outlineWidth)"
        assert page.locator(".md-tabs__item--active a").first.evaluate(outline) >= 2
        page.keyboard.press("Tab")
        assert page.locator(":focus").evaluate(outline) >= 2
        border = "e => parseFloat(getComputedStyle(e).borderBottomWidth)"
        assert page.locator(".md-header").evaluate(border) >= 1


def test_without_scripts(browser, address):
    """Nothing is shown that needs one, and what stands in for widgets is there."""
    with Watched(browser, (address,), java_script_enabled=False) as watched:
        page = watched.page
        page.goto(address + "tour/train-step.html", wait_until="load")
        assert page.locator(".mm-noscript").is_visible()
        assert page.locator(".mm-player svg").first.is_visible()
        for hidden in (".md-search", ".md-header label[for=__search]", "[for=__palette_1]"):
            assert not page.locator(hidden).first.is_visible(), hidden
        page.goto(address + "rosetta.html", wait_until="load")
        assert not page.locator("#mm-filter").is_visible()
        assert page.get_by_role("link", name="finalize_model_grads").first.count() == 1
