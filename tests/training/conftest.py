"""What all tests of `training` share."""

import pytest

from minimegatron.core.orders import orders


@pytest.fixture(autouse=True)
def own_orders(monkeypatch):
    """Orders that a test registers are forgotten after it."""
    monkeypatch.setattr(orders, "_SCHEDULES", dict(orders._SCHEDULES))
