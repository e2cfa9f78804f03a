"""What a session of pytest asks of one file: so that a fixture makes no more than its tests need.

Called by: fixtures of a module, with pytest's `request`.
"""

from typing import Any

import pytest


def asked_for(request: pytest.FixtureRequest, test: str, argument: str) -> list[Any]:
    """Values of a parameter of one test of the fixture's file, as far as they are among the chosen."""
    return [item.callspec.params[argument] for item in _chosen(request, test)]


def asks_for(request: pytest.FixtureRequest, test: str) -> bool:
    """Whether this test of the fixture's file is among the chosen."""
    return bool(_chosen(request, test))


def _chosen(request: pytest.FixtureRequest, test: str) -> list[pytest.Function]:
    return [
        item
        for item in request.session.items
        if item.path == request.path and getattr(item, "originalname", None) == test
    ]
