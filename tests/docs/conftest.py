"""The site, built once for all tests that look at it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))


@pytest.fixture(scope="session")
def package():
    """Every module of the package, annotated."""
    return importlib.import_module("package").Package.read()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning of MkDocs fails the build.

    While working on a test, MINIMEGATRON_SITE=site takes what `make docs` left, which is faster.
    """
    if os.environ.get("MINIMEGATRON_SITE"):
        return (ROOT / os.environ["MINIMEGATRON_SITE"]).resolve()
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    for command in (
        ["docs/tools/build_docs.py"],
        ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return folder
