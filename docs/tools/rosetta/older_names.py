"""The part of Rosetta with names that other texts about Megatron use and that are not here.

Called by: `rosetta`. Reads docs/older_names.toml, whose head says what a row has.
"""

import re
import tomllib

from source.package import Package
from source.places import ROOT

DATA = ROOT / "docs" / "older_names.toml"
LINK = re.compile(r"<(minimegatron[\w.]+)>")
TITLE = "Names in older texts"


def rows() -> list[dict]:
    """Each with names, was, here, megatron."""
    return tomllib.loads(DATA.read_text())["row"]


def section(package: Package) -> list[str]:
    """Its Markdown. Raises ValueError for a link to what is not there, and for a name in two rows."""
    seen: set[str] = set()
    parts = [
        f"\n## {TITLE}\n",
        "Names of older releases, local names of functions that texts quote, and arguments: what each "
        "was, what does that here, and since when or until when Megatron has it. Also read "
        "[the walk-throughs, section by section](walkthroughs.md).\n",
        '<div class="mm-stacked" markdown="1">\n',
        "| name | what it is or was in Megatron | here | in Megatron |\n|---|---|---|---|",
    ]
    for row in rows():
        if twice := seen & set(row["names"]):
            raise ValueError(f"older_names.toml has {', '.join(sorted(twice))} in two rows")
        seen |= set(row["names"])
        names = ", ".join(f"`{name}`" for name in row["names"])
        here = LINK.sub(lambda found: _link(found[1], package), row["here"])
        parts.append(f"| {names} | {row['was']} | {here} | {row['megatron']} |")
    parts.append("\n</div>\n")
    return parts


def _link(name: str, package: Package) -> str:
    place = package.find(name)
    if place is None or place.definition is None:
        raise ValueError(f"older_names.toml leads to {name}, which is not there")
    return f"[`{name.rpartition('.')[2]}`](source/{place.page.module}.md#{place.anchor})"
