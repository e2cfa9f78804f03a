"""Versions of the site: the list of them is asked for where `mike` builds one, and only there."""

import importlib
import os
import re
import subprocess

import pytest
import yaml

import minimegatron
from tests.docs.conftest import ROOT

hook = importlib.import_module("mkdocs_hook")


def recipe(*settings: str) -> str:
    """What `make docs-version` would do, whatever the environment of the tests has."""
    settings_around = ("VERSION", "ALIAS", "PUSH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {k: v for k, v in os.environ.items() if k not in settings_around}
    done = subprocess.run(
        ["make", "--dry-run", "docs-version", *settings],
        capture_output=True, text=True, cwd=ROOT, check=True, env=environment,
    )  # fmt: skip
    return done.stdout.replace("\\\n", " ")


def test_a_site_of_make_docs_asks_for_no_list_of_versions():
    """It is opened from a folder and below any path: a list that is missing is an error there."""
    assert hook.version_list({"SITE_URL": "https://host/site/"}) == {}
    assert "version" not in yaml.load((ROOT / "mkdocs.yml").read_text(), LooseLoader)["extra"]


def test_a_site_that_mike_builds_asks_for_it():
    """The variable is mike's own: it holds the version that is being built."""
    utils = pytest.importorskip("mike.mkdocs_utils", reason="mike is not installed")
    assert hook.version_list({utils.docs_version_var: "0.1"})["version"]["provider"] == "mike"


def test_the_version_is_the_package_s_and_site_stays_as_it_is():
    *_, deploy, _ = recipe().splitlines()
    number = re.match(r"\d+\.\d+", minimegatron.__version__)[0]
    assert deploy.rstrip().endswith(f"deploy --update-aliases  {number}")
    assert "MINIMEGATRON_SITE_DIR=build/version-site" in deploy
    text = (ROOT / "mkdocs.yml").read_text()
    assert "site_dir: !ENV [MINIMEGATRON_SITE_DIR, site]" in text


def test_an_alias_and_a_push():
    *_, deploy, default, _ = recipe("VERSION=0.3", "ALIAS=latest", "PUSH=yes").splitlines()
    assert deploy.endswith("deploy --update-aliases --push 0.3 latest")
    assert default.endswith("set-default --push latest")
    assert "--push" not in recipe("ALIAS=latest")


class LooseLoader(yaml.SafeLoader):
    """Reads `!ENV [NAME, default]` as the list it looks like."""


LooseLoader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))
