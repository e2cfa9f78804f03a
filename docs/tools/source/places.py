"""Where things are: the repository, its docs, what was recorded; how such a file is read or written.

Called by: all rooms. Calls nothing.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
TOOLS = DOCS / "tools"
RECORDS = TOOLS / "records"
"""Of each record the tool that makes it, NAME.py, and what it has written, NAME.json."""
RECORDINGS = DOCS / "recordings"
"""Of each run what the replay shows."""
UNROLLED = RECORDINGS / "unrolled"
"""Of each run the lines of one step."""


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(path.read_text())


def recorded(name: str) -> Any:
    """A record, as `python docs/tools/record.py NAME` has left it."""
    return read_json(RECORDS / f"{name}.json")


def project() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python_path(*folders: Path) -> str:
    """PYTHONPATH for another process: these folders, then those of this one's."""
    # The libraries may stand on the path that was given.
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def write(path: Path, text: str) -> None:
    """Writes a file, and the folders above it where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
