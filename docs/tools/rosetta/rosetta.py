"""The table of every public symbol beside its counterpart in Megatron-Core.

Called by: `site_pages`, `source_pages`, `every_page`, and the records of Megatron;
tests/conformance holds it to the installed package. Calls: `package`, `rosetta_names`,
`signatures`.

What a module mirrors is said in its docstring ("Counterpart: ..."). A symbol's counterpart has the
same name there, unless rosetta.json, beside this file, says otherwise. Which parameters and methods
are left out follows from both signatures; theirs are in megatron_core.json (`megatron_core`).
rosetta.json holds what no signature says: a remark, the reason of each parameter that is ours, which
other values of a parameter that is left out are taken, what is refused or stricter here, and why.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rosetta import older_names, rosetta_names
from rosetta.signatures import Signature, Source
from source.package import Package
from source.places import RECORDS, ROOT, read_json
from source.stash import Stash

DATA = Path(__file__).with_name("rosetta.json")
RECORD = RECORDS / "megatron_core.json"
REPOSITORY = "https://github.com/NVIDIA/Megatron-LM/blob"
COUNTERPART = re.compile(r"megatron\.(?:core|training|rl)(?:\.\w+)*")
NOT_COMPARED = "–"
SHOWN = 6
"""Names that a cell lists; more are folded away."""


@dataclass(frozen=True)
class Entry:
    """One public symbol. `counterpart` is "" where Megatron has none."""

    module: str
    symbol: str
    kind: str
    counterpart: str
    remark: str
    added: dict[str, str] = field(default_factory=dict)
    """Parameters that Megatron's has not, each with a reason."""
    newer: str = ""
    """Not in the release that was recorded, and why it is named all the same."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.symbol}"


def entries(package: Package) -> list[Entry]:
    """All public functions and classes of modules that mirror Megatron, in the package's order."""
    data = read_json(DATA)
    found = []
    for name, page in package.pages.items():
        if not name.startswith(
            ("minimegatron.core.", "minimegatron.training.", "minimegatron.rl.")
        ):
            continue
        mirrored = counterpart_module(name, page.rows[0].prose, data["modules"])
        for symbol, definition in page.definitions.items():
            is_public = not any(part.startswith("_") for part in symbol.split("."))
            if definition.kind not in ("class", "function") or not is_public or "." in symbol:
                continue
            note = data["symbols"].get(f"{name.removeprefix('minimegatron.')}.{symbol}", {})
            counterpart = note.get("is", f"{mirrored}.{symbol}" if mirrored else "")
            notes = (note.get("left out", ""), note.get("added", {}), note.get("newer", ""))
            found.append(Entry(name, symbol, definition.kind, counterpart, *notes))
    return found


def counterpart_module(name: str, docstring: str, data: dict[str, str]) -> str:
    """The module of Megatron that this one mirrors, "" for none."""
    short = name.removeprefix("minimegatron.")
    if short in data:
        return data[short]
    text = docstring.replace("\n", " ")
    if "Counterpart" not in text:
        return ""
    match = COUNTERPART.search(text[text.index("Counterpart") :])
    if match is None:
        return ""
    # "...p2p_communication.P2PCommunicator" names a class of the module.
    parts = match[0].split(".")
    while parts and parts[-1][0].isupper():
        parts.pop()
    return ".".join(parts)


# -- Theirs beside ours --


class Record:
    """What `megatron_core` found."""

    def __init__(self, path: Path = RECORD):
        data = read_json(path)
        self.version: str = data["version"]
        self.symbols = {name: _signature(found) for name, found in data["symbols"].items()}
        self.repository: dict[str, list] = data["repository"]
        """Of `megatron.training` and `megatron.rl`: name -> file and line."""

    @property
    def tag(self) -> str:
        """The repository's tag of that release."""
        return f"core_v{self.version}"

    def url(self, name: str) -> str:
        """The line in the repository at the release's tag, "" for what was not recorded."""
        found = self.symbols.get(name)
        place = (found.file, found.line) if found else self.repository.get(name)
        return f"{REPOSITORY}/{self.tag}/{place[0]}#L{place[1]}" if place else ""


def _signature(data: dict) -> Signature:
    return Signature(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


def faults(entry: Entry, ours: Signature, theirs: Signature | None) -> list[str]:
    """Where a name or a parameter does not agree with Megatron, and no reason is given."""
    if theirs is None:
        missing = f"{entry.name}: megatron-core has no {entry.counterpart}"
        return [] if entry.newer else [missing]
    found = []
    own = [name for name in ours.parameters if name not in theirs.parameters]
    found += [f"{entry.name}: parameter {x} is not Megatron's" for x in own if x not in entry.added]
    stale = [x for x in entry.added if x not in own]
    found += [f"{entry.name}: rosetta.json explains {x}, which is Megatron's too" for x in stale]
    shared = [name for name in ours.parameters if name in theirs.parameters]
    order = [name for name in theirs.parameters if name in shared]
    # Fields of a dataclass are given by name.
    if shared != order and ours.kind != "record":
        found.append(f"{entry.name}: order {shared}, in Megatron {order}")
    return found


def left_out(ours: Signature, theirs: Signature) -> dict[str, list[str]]:
    """Megatron's parameters and public methods that ours lacks."""
    what = {"record": "fields", "enum": "members"}.get(theirs.kind, "parameters")
    takes_all = any(name.startswith("*") for name in ours.parameters)
    missing = {
        what: [x for x in theirs.parameters if x not in ours.parameters and not takes_all],
        "methods": [x for x in theirs.methods if x not in ours.methods],
    }
    return {kind: names for kind, names in missing.items() if names}


# -- The page --


class Made(NamedTuple):
    """What rows are made from."""

    source: Source
    record: Record
    stash: Stash


def rosetta_page(package: Package, stash: Stash | None = None) -> str:
    """The page's Markdown. What is folded away in a cell goes into `stash`: Markdown would take its end
    for that of the module's fold."""
    stash = stash or Stash()
    record, source = Record(), Source(ROOT)
    all_entries = entries(package)
    num_mirrored = sum(bool(entry.counterpart) for entry in all_entries)
    parts = [
        "---\ntitle: Rosetta\nhide: [toc]\n---\n",
        "# Rosetta: here and in Megatron-Core\n",
        f"Every public function and class of `core` and `training`, {len(all_entries)} in all, "
        f"beside its counterpart in NVIDIA's Megatron; {num_mirrored} have one. Parameters and "
        f"methods were compared with `megatron-core` {record.version}, to whose lines the names "
        "lead. Where the last column is empty, parameters and methods are the same, and no difference "
        "in meaning is known but shorter bodies and errors: here ValueError, where Megatron often "
        f"asserts. {NOT_COMPARED} means that nothing was compared: `megatron.training` is in "
        "Megatron's repository and not in that package, so of its symbols only the names were looked "
        "up. Open a module, or type a part of a name. With a walk-through of Megatron in hand, see "
        "[the walk-throughs, section by section](walkthroughs.md). Further down: "
        "[modules that are only here]"
        "(#only-here), [names that a package offers](#names-that-a-package-offers), [arguments that "
        "are left out](#arguments-that-are-left-out), [what is refused](#what-is-refused), "
        "[names in older texts](#names-in-older-texts).\n",
        FILTER,
        '<div id="mm-rosetta" class="mm-rosetta" markdown="1">\n',
    ]
    by_module: dict[str, list[Entry]] = {}
    for entry in all_entries:
        by_module.setdefault(entry.module, []).append(entry)
    mirrored = {name: rows for name, rows in by_module.items() if any(e.counterpart for e in rows)}
    own = {name: rows for name, rows in by_module.items() if name not in mirrored}
    for title, modules in (("Here and in Megatron", mirrored), ("Only here", own)):
        parts.append(f'\n<div class="mm-part" markdown="1">\n\n## {title}\n')
        for module, rows in modules.items():
            parts += _fold(module, rows, package, Made(source, record, stash))
        parts.append("\n</div>\n")
    parts.append("\n</div>\n")
    parts += rosetta_names.sections(read_json(DATA), package)
    parts += older_names.section(package)
    parts.append('<link rel="stylesheet" href="stylesheets/rosetta.css">\n')
    parts.append('<script defer src="javascripts/rosetta.js"></script>\n')
    return "\n".join(parts)


FILTER = (
    '<div class="mm-filter mm-needs-script"><label>Show rows with <input type="search" '
    'id="mm-filter" placeholder="for example ddp" autocomplete="off"></label>'
    '<output id="mm-filter-count" for="mm-filter"></output></div>\n'
)


def _fold(module: str, rows: list[Entry], package: Package, made: Made) -> list[str]:
    """A module's table, folded under its name."""
    shown = module.removeprefix("minimegatron.")
    there = most_common(entry.counterpart.rpartition(".")[0] for entry in rows)
    number = f"{len(rows)} name{'s' * (len(rows) > 1)}"
    parts = [
        '\n<details class="mm-fold" markdown="1">',
        f'<summary><h3 id="{shown}"><code>{shown}</code></h3> '
        f'<span class="mm-fold-count">{number}</span></summary>\n',
    ]
    if there:
        parts.append(f"In Megatron `{there}`.\n")
    parts.append("| here | in Megatron | left out or different |\n|---|---|---|")
    for entry in rows:
        link = f"[`{entry.symbol}`](source/{module}.md#{entry.symbol})"
        here, words = link + _methods(entry, package, made), _words(entry, made)
        parts.append(f"| {here} | {_there(entry, there, made.record)} | {words} |")
    parts.append("\n</details>\n")
    return parts


def _methods(entry: Entry, package: Package, made: Made) -> str:
    """The public methods of a class, each with its place; those that Megatron's has not stand apart."""
    theirs = made.record.symbols.get(entry.counterpart)
    definitions = package.pages[entry.module].definitions
    names = [
        name.rpartition(".")[2]
        for name, definition in definitions.items()
        if name.startswith(f"{entry.symbol}.") and definition.kind == "method"
    ]
    names = [name for name in dict.fromkeys(names) if not name.startswith("_")]
    own = [name for name in names if theirs is not None and name not in theirs.methods]
    shared = [name for name in names if name not in own]
    lists = (("methods", shared), ("methods only here", own))
    return "".join(_method_list(title, found, entry, made.stash) for title, found in lists if found)


def _method_list(title: str, names: list[str], entry: Entry, stash: Stash) -> str:
    page = f"source/{entry.module}.html#{entry.symbol}"
    links = [f'<a href="{page}.{name}"><code>{name}</code></a>' for name in names]
    return f'<span class="mm-methods">{title}: {_some(links, stash)}</span>'


def most_common(modules: Iterable[str]) -> str:
    """The module that most counterparts are in, "" without any."""
    counts = Counter(module for module in modules if module)
    return max(counts, key=counts.get, default="")


def _there(entry: Entry, module: str, record: Record) -> str:
    """The counterpart's name, without its module where the section has said it."""
    if not entry.counterpart:
        return "none"
    shown = entry.counterpart.removeprefix(f"{module}.")
    url = record.url(entry.counterpart)
    return f"[`{shown}`]({url})" if url else f"`{shown}`"


def _words(entry: Entry, made: Made) -> str:
    theirs = made.record.symbols.get(entry.counterpart)
    said = [words for words in (entry.remark, entry.newer) if words]
    if theirs is not None:
        missing = left_out(made.source.find(entry.name), theirs)
        taken = rosetta_names.left_out().get(entry.name.removeprefix("minimegatron."), {})
        for kind, names in missing.items():
            are_taken = kind != "methods" and set(names) <= set(taken)
            how = " [taken at one value](#arguments-that-are-left-out)" if are_taken else ""
            said.append(f"{kind}{how} {_names(names, made.stash)}")
    said += [f"here also {names}: {reason}" for names, reason in _by_reason(entry.added)]
    return "<br>".join([NOT_COMPARED, *said] if theirs is None else said)


def _by_reason(added: dict[str, str]) -> list[tuple[str, str]]:
    """Parameters with one reason together."""
    reasons: dict[str, list[str]] = {}
    for name, reason in added.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    return [(", ".join(names), reason) for reason, names in reasons.items()]


def _names(names: list[str], stash: Stash) -> str:
    return _some([f"<code>{name}</code>" for name in names], stash)


def _some(words: list[str], stash: Stash) -> str:
    """The first few; the others folded away."""
    if len(words) <= SHOWN + 2:
        return ", ".join(words)
    rest = ", ".join(words[SHOWN:])
    more = f"<details><summary>and {len(words) - SHOWN} more</summary>{rest}</details>"
    return ", ".join(words[:SHOWN]) + " " + stash.put(more)
