"""Records which files Megatron's repository has at the release's tag, and the lines that pages link to.

Run by: a person, with the path of a clone that has the tag, after a page has a new link to a line:

    python docs/tools/record.py megatron-files CLONE

Calls: `rosetta`. Writes megatron_files.json beside this file; tests/docs/test_megatron_links.py holds
every link of the site to it, offline.
"""

import argparse
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from rosetta.rosetta import Record
from source.places import RECORDS, ROOT

FILES = RECORDS / "megatron_files.json"
FOLDERS = (ROOT / "docs", ROOT / "minimegatron" / "exercises", ROOT / "notebooks")
WRITTEN = (".md", ".py", ".toml", ".json")
LINE = re.compile(
    r"\{\{ megatron ([\w/.]+\.py)#L(\d+)|Megatron-LM/blob/[\w.]+/megatron/([\w/.]+)#L(\d+)"
)
MAX_TEXT = 110


def linked_lines(folders: Iterable[Path] = FOLDERS) -> Iterator[tuple[str, int]]:
    """(path, line) of every link to a line, in pages and in Rosetta's record."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in WRITTEN and path.is_file():
                for file, line, other, number in LINE.findall(path.read_text()):
                    yield f"megatron/{file or other}", int(line or number)
    record = Record()
    for found in record.symbols.values():
        yield found.file, found.line
    for file, line in record.repository.values():
        yield file, line


class Clone:
    """A clone of Megatron-LM, looked at as it was at a tag. Raises SystemExit if it lacks the tag."""

    def __init__(self, folder: Path, tag: str):
        self.folder, self.tag = folder, tag
        if self._git("rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}").returncode:
            raise SystemExit(f"{folder} is no clone of Megatron-LM that has {tag}")

    def _git(self, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["git", "-C", str(self.folder), *words], capture_output=True, text=True
        )

    def paths(self) -> list[str]:
        """All Python files of Megatron itself."""
        listed = self._git("ls-tree", "-r", "--name-only", self.tag).stdout.split()
        return [path for path in listed if re.fullmatch(r"(megatron/.*|[\w.]+)\.py", path)]

    def lines(self, path: str) -> list[str]:
        """A file's text; empty for a file that is not there."""
        return self._git("show", f"{self.tag}:{path}").stdout.splitlines()


def record(clone: Clone, wanted: Iterable[tuple[str, int]]) -> dict:
    """{"tag", "paths", "lines": {path: {line: text}}}; a line beyond a file's end has no text."""
    by_path: dict[str, set[int]] = {}
    for path, line in wanted:
        by_path.setdefault(path, set()).add(line)
    lines = {}
    for path, numbers in sorted(by_path.items()):
        text = clone.lines(path)
        lines[path] = {
            str(n): text[n - 1].strip()[:MAX_TEXT] if n <= len(text) else ""
            for n in sorted(numbers)
        }
    return {"tag": clone.tag, "paths": clone.paths(), "lines": lines}


def write(data: dict, path: Path = FILES) -> None:
    """A line for each file, so that a change is seen."""
    rows = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in data["lines"].items()]
    paths = ",\n".join(json.dumps(name) for name in data["paths"])
    joined = ",\n".join(rows)
    path.write_text(
        f'{{"tag": "{data["tag"]}",\n"paths": [\n{paths}\n],\n"lines": {{\n{joined}\n}}}}\n'
    )


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help="of NVIDIA/Megatron-LM, with the release's tag")
    args = parser.parse_args()
    data = record(Clone(args.clone, Record().tag), linked_lines())
    write(data)
    number = sum(len(lines) for lines in data["lines"].values())
    print(f"{FILES.name}: {len(data['paths'])} files, {number} lines, at {data['tag']}")
