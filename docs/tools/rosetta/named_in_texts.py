"""Where each name leads that the four texts of docs/walkthroughs.md use.

    python docs/tools/tell.py names SITE [TEXT ...]

prints, for each recorded name, the pages of the built site that have it; before them, the names of the
texts that are not recorded. The record is named_in_texts.txt beside it, one name in each line. Where a
text has lost its line ends, two words stand as one: `return+loss_mask` says of what it is made.

Called by: tests/docs/test_named_in_texts.py. Calls: nothing.
"""

import html
import re
import sys
from collections import defaultdict
from pathlib import Path

RECORD = Path(__file__).resolve().with_suffix(".txt")
KINDS = (
    r"(?<![\w.])([A-Za-z_]\w*_\w*\w|[A-Z][a-z0-9]+[A-Z]\w*|[A-Z]{2,}[a-z]\w+)",  # snake, camel
    r"\b([A-Za-z_]\w+)\(",  # called
    r"args\.([A-Za-z]\w+)",
    r"\.([a-z]\w*_\w+)",  # of an object
)
PREFERRED = ("walkthroughs", "rosetta", "glossary", "tour/", "notebooks/", "source/")


def names_in(text: str) -> set[str]:
    """What looks like a name in code: `loss_func`, `BertModel`, `partial(`, `args.split`."""
    return {name for kind in KINDS for name in re.findall(kind, text, re.ASCII)}


def recorded() -> tuple[set[str], dict[str, list[str]]]:
    """The names; and what only looks like one, with the words that it is."""
    names, joined = set(), {}
    for line in RECORD.read_text(encoding="utf-8").split():
        words = line.split("+")
        if len(words) == 1:
            names.add(line)
        else:
            joined["".join(words)] = words
    return names, joined


def pages_with(names: set[str], site: Path) -> dict[str, list[str]]:
    """Addresses of pages by name, the best to begin with first; a name that no page has is left out."""
    found = defaultdict(list)
    for page in sorted(site.rglob("*.html")):
        words = set(re.findall(r"\w+", html.unescape(_text(page)), re.ASCII))
        for name in names & words:
            found[name].append(str(page.relative_to(site).with_suffix("")).removesuffix("/index"))
    return {name: sorted(pages, key=_preference) for name, pages in found.items()}


def _text(page: Path) -> str:
    """What is read on it, without what stands around every page."""
    _, _, body = page.read_text(encoding="utf-8").partition("<article")
    return re.sub(r"<[^>]*>", "", body)


def _preference(page: str) -> tuple[int, str]:
    kinds = [number for number, begin in enumerate(PREFERRED) if page.startswith(begin)]
    return (kinds[0] if kinds else len(PREFERRED), page)


def main() -> int:
    """The exit status: how many names have no place."""
    site, *texts = sys.argv[1:]
    names, joined = recorded()
    for text in texts:
        missing = names_in(Path(text).read_text(encoding="utf-8")) - names - joined.keys()
        print(*sorted(missing), sep="\n")
    pages = pages_with(names, Path(site))
    for name in sorted(names):
        print(f"{name:55} {', '.join(pages.get(name, ['NOWHERE'])[:3])}")
    print(f"{len(names)} names, {len(names - pages.keys())} without a place")
    return len(names - pages.keys())
