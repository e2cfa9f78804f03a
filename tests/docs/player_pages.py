"""Pages that hold nothing but players and replays, opened as files with the site's own scripts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.docs.conftest import Watched

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>test</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"></head>
<body style="margin: 8px">{body}<script src="javascripts/player.js"></script></body></html>"""
PLAYER = '<div class="mm-player" data-schedule="1f1b" data-pp="4" data-microbatches="8"></div>'
SMALL = PLAYER.replace("<div ", '<div data-small="true" data-choose="gap" ')
REPLAY = '<div class="mm-replay" data-recording="1f1b-paced"></div>'
PAGES = {
    "player.html": PLAYER,
    "replay.html": REPLAY,
    "small.html": SMALL,
    "three.html": PLAYER + PLAYER.replace("1f1b", "gpipe") + REPLAY,
}


def write_pages(out: Path, site: Path) -> Path:
    """The pages, in a folder beside links to the site's scripts."""
    for name in ("javascripts", "stylesheets", "recordings", "python"):
        if (site / name).exists():
            (out / name).symlink_to(site / name)
    for name, body in PAGES.items():
        (out / name).write_text(PAGE.format(body=body))
    return out


class Opened(Watched):
    """A page whose players and replays are there."""

    def __init__(
        self, browser: Browser, folder: Path, name: str, fragment: str = "", **options: Any
    ):
        super().__init__(browser, ("file:",), **options)
        self.page.goto((folder / name).as_uri() + fragment)
        for element in self.page.locator(".mm-player, .mm-replay").all():
            element.locator("xpath=self::*[@data-ready]").wait_for()

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def player(self, expression: str, number: int = 0) -> Any:
        """A JavaScript expression about `player`, evaluated."""
        script = f"() => {{ const player = [...document.querySelectorAll('.mm-player')][{number}]"
        return self.page.evaluate(f"{script}.mmPlayer; return {expression}; }}")

    def replay(self, expression: str) -> Any:
        script = "() => { const replay = document.querySelector('.mm-replay').mmReplay"
        return self.page.evaluate(f"{script}; return {expression}; }}")

    def address_has(self, words: str) -> None:
        """Waits: the address is written a moment after the last change."""
        self.page.wait_for_function("words => location.hash.includes(words)", arg=words)


class Shared(Opened):
    """One page for many tests of its player: each begins with the player as it was at first."""

    SIZE = {"width": 1200, "height": 900}

    @contextmanager
    def shown(self, fragment: str = "") -> Iterator["Shared"]:
        """The page as if it had been opened with this fragment. Leaving checks for errors."""
        self.page.set_viewport_size(self.SIZE)
        self.page.emulate_media(media="screen", color_scheme="light")
        self.page.evaluate(
            """async (fragment) => {
              history.replaceState(null, "", location.pathname + fragment);
              document.activeElement.blur();
              const player = document.querySelector(".mm-player").mmPlayer;
              clearTimeout(player.address.writing);
              player.reset();
              for (const details of document.querySelectorAll("details")) details.open = false;
              await player.openAsAsked(false);
              scrollTo(0, 0);
            }""",
            fragment,
        )
        yield self
        self.check(fragment)
