"""The table of every public symbol beside its counterpart in Megatron-Core.

Called by: `site_pages`; the conformance test reads `entries`. Calls: `package`.

What a module mirrors is said in its docstring ("Counterpart: ..."). A symbol's counterpart has the
same name there, unless rosetta.json, beside this file, says otherwise or says what is left out.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from package import Package

DATA = Path(__file__).with_name("rosetta.json")
COUNTERPART = re.compile(r"megatron\.(?:core|training)(?:\.\w+)*")


@dataclass(frozen=True)
class Entry:
    """One public symbol. `counterpart` is "" where Megatron has none."""

    module: str
    symbol: str
    kind: str
    counterpart: str
    left_out: str


def entries(package: Package) -> list[Entry]:
    """All public functions and classes of modules that mirror Megatron, in the package's order."""
    data = json.loads(DATA.read_text())
    found = []
    for name, page in package.pages.items():
        if not name.startswith(("minimegatron.core.", "minimegatron.training.")):
            continue
        mirrored = counterpart_module(name, page.rows[0].prose, data["modules"])
        for symbol, definition in page.definitions.items():
            is_public = not any(part.startswith("_") for part in symbol.split("."))
            if definition.kind not in ("class", "function") or not is_public or "." in symbol:
                continue
            note = data["symbols"].get(f"{name.removeprefix('minimegatron.')}.{symbol}", {})
            counterpart = note.get("is", f"{mirrored}.{symbol}" if mirrored else "")
            found.append(
                Entry(name, symbol, definition.kind, counterpart, note.get("left out", ""))
            )
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


def rosetta_page(package: Package) -> str:
    """The page's Markdown."""
    parts = [
        "---\ntitle: Rosetta\nhide: [toc]\n---\n",
        "# Rosetta: here and in Megatron-Core\n",
        "Every public function and class, beside its counterpart in NVIDIA's "
        "`megatron-core`. Where the last column is empty, names and meaning are the same and only "
        "the body is shorter. Made from the source and from `docs/tools/rosetta.json`.\n",
        '<label class="mm-filter">Show rows with <input type="search" id="mm-filter" '
        'aria-controls="mm-rosetta" placeholder="for example ddp"></label>\n',
        '<div id="mm-rosetta" class="mm-rosetta" markdown="1">\n',
    ]
    by_module: dict[str, list[Entry]] = {}
    for entry in entries(package):
        by_module.setdefault(entry.module, []).append(entry)
    for module, rows in by_module.items():
        parts.append(f"\n## `{module.removeprefix('minimegatron.')}`\n")
        parts.append("| here | in Megatron | left out or different |\n|---|---|---|")
        for entry in rows:
            there = f"`{entry.counterpart}`" if entry.counterpart else "none"
            link = f"[`{entry.symbol}`](source/{module}.md#{entry.symbol})"
            parts.append(f"| {link} | {there} | {entry.left_out} |")
    parts.append("\n</div>\n")
    return "\n".join(parts)
