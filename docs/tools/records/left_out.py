"""Records Megatron's arguments that are left out here, for `minimegatron.core.left_out`.

Called by: `megatron_core`; tests/conformance holds the file to the installed package.
Calls: `rosetta`, `signatures`. Writes minimegatron/core/left_out.json.

rosetta.json says for which of our functions and classes ("left out of"); for which arguments other
values than Megatron's default are taken too, and why ("taken"); and what else the refusal of another
value says ("said").
"""

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

from minimegatron.core.left_out_record import split_name
from rosetta.rosetta import DATA, counterpart_module
from rosetta.signatures import Argument, Definition, Source
from source.places import ROOT, read_json

LEFT_OUT = ROOT / "minimegatron" / "core" / "left_out.json"


def counterparts() -> dict[str, str]:
    """Our name of what is recorded, without the package's -> Megatron's name."""
    data = read_json(DATA)
    found = {}
    for name in data["left out of"]:
        module, symbol = split_name(name)
        text = file_of(module).read_text()
        mirrored = counterpart_module(
            f"minimegatron.{module}", ast.get_docstring(ast.parse(text)) or "", data["modules"]
        )
        found[name] = _counterpart(name, symbol, mirrored, data["symbols"])
    return found


def file_of(module: str) -> Path:
    """Of a module of the package, or of a package in it."""
    path = ROOT.joinpath("minimegatron", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definitions(body: list[ast.stmt], prefix: str = "") -> list[tuple[str, Any]]:
    """Functions and classes, and those inside classes, by their qualified names."""
    found = []
    for node in body:
        if isinstance(node, Definition):
            found.append((f"{prefix}{node.name}", node))
            if isinstance(node, ast.ClassDef):
                found += definitions(node.body, f"{prefix}{node.name}.")
    return found


def _counterpart(name: str, symbol: str, mirrored: str, notes: dict[str, dict]) -> str:
    """Megatron's name, also of a method of a class that has another name there."""
    if "is" in notes.get(name, {}):
        return notes[name]["is"]
    owner, _, method = symbol.rpartition(".")
    if owner:
        module = name.removesuffix(f".{symbol}")
        return f"{_counterpart(f'{module}.{owner}', owner, mirrored, notes)}.{method}"
    return f"{mirrored}.{symbol}"


def record_left_out(source: Source, old: dict[str, dict] | None = None) -> dict[str, dict]:
    """{our name: {"order": [...], "left out": {argument: values}}}.

    What `source` does not have, such as `megatron.training`, is taken from `old`.
    """
    notes = read_json(DATA)["symbols"]
    ours = Source(ROOT)
    found = {}
    for name, counterpart in counterparts().items():
        theirs = source.arguments(counterpart)
        if theirs is None:
            found |= {name: old[name]} if old and name in old else {}
            continue
        own = {x.name for x in ours.arguments(f"minimegatron.{name}")}
        taken = notes.get(name, {}).get("taken", {})
        found[name] = {
            "order": [x.name for x in theirs if x.by_position],
            "left out": {x.name: _values(x, taken) for x in theirs if x.name not in own},
        }
        if said := notes.get(name, {}).get("said"):
            found[name]["said"] = said
    return found


def _values(argument: Argument, taken: dict[str, list]) -> Any:
    """A list of values, or {"any": values}. The first is Megatron's default. An argument that is
    required, and is not in `taken`, has none."""
    values = [] if argument.default is None else [_value(argument.default)]
    if argument.name not in taken:
        return values
    more = taken[argument.name][0]
    return {"any": values} if more == "any" else [*values, *(x for x in more if not _in(x, values))]


def _in(value: Any, values: list) -> bool:
    """As `in`, but False is not 0."""
    return any(value == known and type(value) is type(known) for known in values)


def _value(text: str) -> Any:
    """A literal as it is; other expressions as their text.

    >>> _value("(1, None)"), _value("AttnBackend.auto"), _value("list()"), _value("1024 * 1024")
    ([1, None], 'AttnBackend.auto', [], 1048576)
    """
    if re.fullmatch(r"\d+( \* \d+)+", text):
        return math.prod(map(int, text.split(" * ")))
    if text in ("list()", "dict()", "tuple()"):
        text = {"list()": "[]", "dict()": "{}", "tuple()": "()"}[text]
    try:
        value = ast.literal_eval(text)
    except ValueError:
        return text
    return list(value) if isinstance(value, tuple) else value


def write(source: Source, version: str) -> str:
    """Writes the file; returns what to say of it."""
    old = read_json(LEFT_OUT)["symbols"] if LEFT_OUT.exists() else {}
    symbols = record_left_out(source, old)
    lines = [f"{json.dumps(name)}: {json.dumps(about)}" for name, about in symbols.items()]
    body = ",\n".join(lines)
    LEFT_OUT.write_text(f'{{"version": "{version}",\n"symbols": {{\n{body}\n}}}}\n')
    number = sum(len(about["left out"]) for about in symbols.values())
    return f"{LEFT_OUT.name}: {number} arguments of {len(symbols)} functions and classes"
