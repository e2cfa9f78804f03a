"""All notebooks, started once and run two at a time."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

from pages.notebook_runs import executing, sources  # noqa: E402


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest):
    """Name -> the future of its run, for those notebooks that tests of this session ask for."""
    wanted = {
        item.callspec.params["path"]
        for item in request.session.items
        if item.path.is_relative_to(Path(__file__).parent)  # others may have fixtures of this name
        if "runs" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    }
    with executing(path for path in sources() if path in wanted) as futures:
        yield futures
