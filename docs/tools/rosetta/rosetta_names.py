"""Parts of the page Rosetta: names that packages offer, arguments that are left out, refusals.

Called by: `rosetta`. Calls: `package`, `left_out`.

All three are generated: names from the packages' own tables, arguments from
minimegatron/core/left_out.json, the reasons from rosetta.json.
"""

import ast
from collections.abc import Iterable
from typing import NamedTuple

from source.annotate import looked_up
from source.package import Package
from source.places import ROOT, read_json

LEFT_OUT = ROOT / "minimegatron" / "core" / "left_out.json"


class Export(NamedTuple):
    """A name that a package of `core` or `training` offers, and where it lives."""

    package: str
    name: str
    target: str
    """Dotted; the package's own name where it is defined there."""


def exports() -> list[Export]:
    """All of them: looked up on first use (`exports.lazily`), or imported and in `__all__`."""
    found = []
    for room in ("core", "training"):
        for path in sorted((ROOT / "minimegatron" / room).rglob("__init__.py")):
            package = ".".join(path.relative_to(ROOT).parent.parts)
            tree = ast.parse(path.read_text())
            names = _imported(tree) | looked_up(tree)
            found += [Export(package, name, target) for name, target in sorted(names.items())]
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    offered: set[str] = set()
    targets = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            targets |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            offered = set(ast.literal_eval(node.value))
    return {name: target for name, target in targets.items() if name in offered}


def left_out() -> dict[str, dict[str, list | dict]]:
    """Our name, without the package's -> argument -> values that are taken, or {"any": the default}."""
    symbols = read_json(LEFT_OUT)["symbols"]
    return {name: about["left out"] for name, about in symbols.items()}


# -- Sections of the page --


def sections(data: dict, package: Package) -> list[str]:
    """Markdown: names, arguments, refusals. `data` is rosetta.json."""
    parts = []
    for section in (
        _exports_section(package),
        _arguments_section(data["symbols"]),
        _refusals_section(data),
    ):
        head = '\n<div class="mm-rosetta mm-names mm-part" markdown="1">\n'
        parts += [head, *section, "\n</div>\n"]
    return parts


def _exports_section(sources: Package) -> list[str]:
    all_exports = exports()
    parts = [
        "\n## Names that a package offers\n",
        f"{len(all_exports)} names can be imported from a package, as in Megatron: put `mini` before "
        "the import. A package that must load without torch looks its names up on first use.\n",
        "| package | names |\n|---|---|",
    ]
    by_package: dict[str, list[Export]] = {}
    for export in all_exports:
        by_package.setdefault(export.package, []).append(export)
    for package, of_package in by_package.items():
        names = ", ".join(_export_link(export, sources) for export in of_package)
        parts.append(f"| `{package.removeprefix('minimegatron.')}` | {names} |")
    return parts


def _export_link(export: Export, sources: Package) -> str:
    """A link to the definition, wherever it stands; none where nothing can be read off the source."""
    place = sources.find(export.target)
    if place is None:
        return f"`{export.name}`"
    anchor = f"#{place.anchor}" if place.symbol else ""
    return f"[`{export.name}`](source/{place.page.module}.md{anchor})"


def _arguments_section(notes: dict[str, dict]) -> list[str]:
    recorded = {name: arguments for name, arguments in left_out().items() if arguments}
    number = sum(len(arguments) for arguments in recorded.values())
    parts = [
        "\n## Arguments that are left out\n",
        f"A call may give {number} arguments of {len(recorded)} functions and classes that our "
        "signatures do not have. Their value must be the one named here, which is Megatron's default "
        "unless a reason is given. Another value raises ValueError, with the argument, its value and "
        "the value that is taken. "
        "[`accept_left_out`](source/minimegatron.core.left_out.md#accept_left_out) decides, which "
        "wraps them when their module is imported; the arguments are recorded by `make rosetta`.\n",
        "| function or class | arguments, and the value that is taken |\n|---|---|",
    ]
    for name, arguments in recorded.items():
        module, symbol = _split(name)
        reasons = notes.get(name, {}).get("taken", {})
        link = f"[`{symbol}`](source/minimegatron.{module}.md#{symbol})"
        parts.append(f"| {link} | {_folded(_taken(arguments, reasons))} |")
    return parts


def _split(name: str) -> tuple[str, str]:
    """The module of a dotted name, and the rest: a function, a class or `Class.method`."""
    module, symbol = name, ""
    while not ROOT.joinpath("minimegatron", *module.split(".")).with_suffix(".py").exists():
        if ROOT.joinpath("minimegatron", *module.split("."), "__init__.py").exists():
            break
        module, _, last = module.rpartition(".")
        symbol = f"{last}.{symbol}" if symbol else last
    return module, symbol


def _taken(arguments: dict[str, list | dict], reasons: dict[str, list]) -> list[str]:
    words = []
    for name, values in arguments.items():
        said = "any value" if isinstance(values, dict) else " or ".join(map(_value, values))
        why = f" ({reasons[name][1]})" if name in reasons else ""
        words.append(f"<code>{name}</code>: {said or 'none'}{why}")
    return words


def _value(value: object) -> str:
    is_name = isinstance(value, str) and "." in value  # a member of an enumeration, a dtype
    return f"<code>{value if is_name else repr(value)}</code>"


def _folded(words: list[str], shown: int = 8) -> str:
    if len(words) <= shown + 2:
        return "; ".join(words)
    rest = "; ".join(words[shown:])
    more = f"<details><summary>and {len(words) - shown} more</summary>{rest}</details>"
    return "; ".join(words[:shown]) + " " + more


def _refusals_section(data: dict) -> list[str]:
    return [
        "\n## What is refused\n",
        "Other values of the arguments above are refused, and what stands in these tables. A refusal "
        "is one sentence. It comes when something is called.\n",
        *_table("offered, and refuses", "when, and what to do", data["refuses"].items()),
        "\nStricter here than in Megatron, and why:\n",
        *_table("what", "here", data["stricter"].items()),
        "\nNames of Megatron that are not here, which programs that use it import:\n",
        *_table("in Megatron", "because", data["not here"].items()),
    ]


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {first} | {second} |\n|---|---|", *(f"| {_code(a)} | {b} |" for a, b in rows)]


def _code(name: str) -> str:
    return f"`{name}`" if " " not in name else name
