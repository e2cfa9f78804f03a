"""A program's calls of `stimer` are those of megatron-core: names, arguments, defaults, off at first.

Megatron's measures with CUDA events, and `configure` does nothing without them: its times are not
compared.
"""

import inspect

import pytest

from minimegatron.core.straggler_detector import StragglerDetector
from tests.conformance.megatron import megatron_module

theirs = megatron_module("utils")
METHODS = ("configure", "reset", "elapsed", "report", "__call__", "__enter__", "__exit__")


@pytest.mark.parametrize("method", METHODS)
def test_arguments_and_defaults_are_megatrons(method):
    ours, megatrons = (
        [
            (name, parameter.default)
            for name, parameter in inspect.signature(getattr(owner, method)).parameters.items()
            if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        for owner in (StragglerDetector, theirs.StragglerDetector)
    )
    assert ours == megatrons


def test_both_are_one_object_that_is_off_and_takes_every_call():
    for owner in (StragglerDetector, theirs.StragglerDetector):
        stimer = owner()
        assert owner() is stimer and not stimer.enabled
        with stimer(bdata=True) as entered:
            pass
        stimer.start()
        stimer.stop()
        assert entered is stimer and set(stimer.elapsed()) == {0}
