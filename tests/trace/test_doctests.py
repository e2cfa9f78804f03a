"""The examples in the docstrings of the trace tools are true."""

import doctest
import importlib
import pkgutil

import pytest

import minimegatron.tracing

MODULES = [module.name for module in pkgutil.iter_modules(minimegatron.tracing.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    result = doctest.testmod(importlib.import_module(f"minimegatron.tracing.{name}"))
    assert result.failed == 0
