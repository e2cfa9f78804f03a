"""What MkDocs is asked to do for us: finished HTML where its comment stands; what the navigation cannot
know before the build, which notebooks and exercises there are, and the tour's order; pages in another
language with all words around them in it; a smaller stylesheet of the theme; what search looks through;
a description per page; the list of versions, in a site that has several.

Called by: MkDocs. Calls: `stash`, `tour`, `tour_frame`, `trim_css`, `search_index`, `page_heads`,
`translations`, `strings`; the catalogue, for the order of its exercises.
"""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from minimegatron.exercises.exercise import exercises
from pages.page_heads import set_description
from pages.search_index import write_search
from pages.translations import (
    OWN_NAMES,
    links_to_others,
    made_from,
    nav_of,
    older_notice,
    with_tabs,
)
from pages.trim_css import trim_site
from player.strings import words_file
from source.page_words import DEFAULT, LANGUAGES, language_of, say, speaking, translated
from source.stash import fill
from tour.tour import page_after, page_of
from tour.tour_frame import tour_nav

ORDER = ["index.md", *(f"{exercise.name}.md" for exercise in exercises())]
"""As in the list that the command prints: what is quick comes first."""


def on_config(config):
    tabs = [tab for tab in config["nav"] if isinstance(tab, dict)]
    practise = next((tab["Practise"] for tab in tabs if "Practise" in tab), [])
    for place, folder in enumerate(("notebooks", "exercises")):
        names = sorted(path.name for path in Path(config["docs_dir"], folder).glob("*.md"))
        if names:
            names.sort(key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
            pages = [f"{folder}/{name}" for name in names]
            practise.insert(place, {folder.capitalize(): pages})
    for tab in tabs:
        if "Tour" in tab:
            tab["Tour"] = tour_nav()
        if "Look up" in tab:
            tab["Look up"] = with_translations(tab["Look up"], Path(config["docs_dir"]))
    config["extra"] |= version_list(os.environ)
    return config


def with_translations(entries, docs):
    """The tab's entries; that of a language has all its pages, in their order."""
    names = {OWN_NAMES[language]: language for language in LANGUAGES}
    found = []
    for entry in entries:
        (name,) = entry if isinstance(entry, dict) else [entry]
        found.append({name: nav_of(names[name], docs)} if name in names else entry)
    return found


def version_list(environ):
    """The theme's setting that lists versions on each page, where `mike` builds one of them.

    The theme then asks for versions.json beside the site. A site of `make docs` has none: each of its
    pages would report an error.
    """
    if "MIKE_DOCS_VERSION" not in environ:
        return {}
    return {"version": {"provider": "mike", "alias": True}}


def on_pre_build(config):
    # It would look again and again through what MkDocs keeps until the end: a tenth of the time.
    gc.disable()


def on_nav(nav, config, files):
    """The page before and the page after one are in its own language.

    But after a translation's last page of the tour comes the one that its last lines name.
    """
    chains = {}
    for page in nav.pages:
        chains.setdefault(language_of(page.file.src_uri), []).append(page)
    for pages in chains.values():
        for before, page, after in zip([None, *pages[:-1]], pages, [*pages[1:], None], strict=True):
            page.previous_page, page.next_page = before, after
    named = {page.file.src_uri: page for page in nav.pages}
    for uri, page in named.items():
        of_tour = page_of(uri)
        following = of_tour and page_after(of_tour)
        english = following and named.get(f"tour/{following.page}.md")
        if english and translated(f"tour/{following.page}.md", language_of(uri)) not in named:
            page.next_page = english
    return nav


def on_page_content(html, page, config, files):
    of_site = config["site_description"] if page.is_homepage else ""
    page.meta["made_from"] = made_from(page.file.src_uri)
    set_description(page.meta, html, page.file.src_uri.replace(".md", ".html"), of_site)
    return links_to_others(page.file.src_uri) + older_notice(page.file.src_uri) + html


def on_page_context(context, page, config, nav):
    # What the theme itself says: "Previous", "Table of contents", and the language of the page.
    config["theme"]["language"] = language_of(page.file.src_uri)
    with speaking(language_of(page.file.src_uri)):
        context["no_script"] = say("page.no-script")
    return context


def on_post_page(output, page, config):
    language = language_of(page.file.src_uri)
    output = output.replace(f'{words_file(DEFAULT)}"', f'{words_file(language)}"')
    output = with_tabs(output, language)
    return fill(output, Path(config["docs_dir"]).with_name("pieces") / f"{page.file.src_uri}.json")


def on_post_build(config):
    site = Path(config["site_dir"])
    trim_site(site)
    write_search(site)
    gc.enable()
