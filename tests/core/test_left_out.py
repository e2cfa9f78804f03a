"""Arguments of Megatron's that our signatures lack: the recorded value is taken, no other is."""

import importlib
import inspect
import re

import pytest

from minimegatron.core import left_out
from minimegatron.core.left_out import LeftOut, Recorded, accepts_left_out
from minimegatron.core.transformer.enums import AttnBackend
from minimegatron.core.transformer.transformer_config import TransformerConfig


def resolve(name: str):
    """The function, method or class that is recorded under `name`."""
    module, _, symbol = f"minimegatron.{name}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), symbol)
    except ImportError:
        return getattr(resolve(module.removeprefix("minimegatron.")), symbol)


def passed_on(name: str, *args, **given):
    """What reaches our own function of a call, as (positional, named)."""
    target = resolve(name)
    function = target.__init__ if isinstance(target, type) else target
    parameters = inspect.signature(function).parameters
    own, is_bound = frozenset(parameters), next(iter(parameters), "") == "self"
    args = (object(), *args) if is_bound else args
    args, given = left_out._without_left_out(name, own, args, given, int(is_bound))
    return args[is_bound:], given


RECORD = left_out.record()


@pytest.mark.parametrize("name", RECORD)
def test_what_is_recorded_is_taken_and_nothing_else(name):
    for argument, about in RECORD[name].left_out.items():
        assert argument not in inspect.signature(resolve(name)).parameters
        for value in about.values or (object(),) * about.any_value:
            assert passed_on(name, **{argument: value}) == ((), {})
        if not about.any_value:
            stranger = f"not-{argument}"
            with pytest.raises(ValueError, match=f"{argument} is '{re.escape(stranger)}'"):
                passed_on(name, **{argument: stranger})


def test_there_are_many():
    assert len(RECORD) > 60 and sum(len(about.left_out) for about in RECORD.values()) > 400


def test_positions_are_megatrons():
    """What stands between ours there may be given, at its value; what is ours keeps its name."""
    from minimegatron.core.parallel_state import initialize_model_parallel as real

    name = "core.parallel_state.initialize_model_parallel"
    assert inspect.signature(real).parameters["context_parallel_size"].kind.name == "KEYWORD_ONLY"
    _, given = passed_on(name, 2, 4, None, None, False, 2)
    assert given == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 2,
    }
    with pytest.raises(ValueError, match=r"initialize_model_parallel: use_sharp is True, but"):
        passed_on(name, 2, 4, None, None, True)


@pytest.fixture
def recorded(monkeypatch):
    """A function `area(width, height, *, depth)`; Megatron's has `unit` second, and `frame` last."""

    @accepts_left_out
    def area(width, *, height=1, depth=1):
        return width, height, depth

    about = Recorded(
        ("width", "unit", "height", "frame"),
        {"unit": LeftOut(("cm", "AttnBackend.auto", False)), "frame": LeftOut((None, [1, 2], 0))},
    )
    monkeypatch.setattr(left_out, "record", lambda: {left_out.name_of(area): about})
    return area


def test_a_call_of_ours_goes_straight_through(recorded, monkeypatch):
    monkeypatch.setattr(left_out, "record", None)  # nobody may ask
    assert recorded(2, height=3, depth=4) == (2, 3, 4) and recorded(width=5) == (5, 1, 1)
    assert str(inspect.signature(recorded)) == "(width, *, height=1, depth=1)"


def test_values(recorded):
    assert recorded(2, "cm", 3) == (2, 3, 1)
    assert recorded(2, unit=AttnBackend.auto, frame=(1, 2), depth=7) == (2, 1, 7)
    assert recorded(2, "cm", 3, None, depth=2) == (2, 3, 2)
    for unit in (0, 0.0):
        with pytest.raises(ValueError, match="unit is 0"):
            recorded(2, unit)
    assert recorded(2, False, frame=0) == recorded(2, frame=0.0) == (2, 1, 1)
    for frame in (False, [2, 1], "None"):
        with pytest.raises(ValueError, match="frame is .* leave it at None or \\[1, 2\\] or 0"):
            recorded(2, frame=frame)


def test_a_tensor_is_not_compared(recorded):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="frame is tensor"):
        recorded(2, frame=torch.ones(2))


def test_what_megatron_refuses_too_is_pythons_to_say(recorded):
    with pytest.raises(TypeError, match="unexpected keyword argument 'unti'"):
        recorded(2, unti="cm")
    with pytest.raises(TypeError, match="positional argument"):
        recorded(2, "cm", 3, None, 5)
    with pytest.raises(TypeError):
        recorded(2, "cm", 3, height=3)
    with pytest.raises(TypeError, match="missing 1 required"):
        recorded(unit="cm")


def test_a_subclass_passes_what_is_left_out_to_its_base(recorded):
    @accepts_left_out
    class Base:
        def __init__(self, size):
            self.size = size

    class Derived(Base):
        def __init__(self, size, shape=None):
            super().__init__(size, shape=shape)

    about = {left_out.name_of(Base): Recorded(("size", "shape"), {"shape": LeftOut((None,))})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_out, "record", lambda: about)
        assert Derived(3).size == 3 and Base(4, None).size == 4
        with pytest.raises(ValueError, match="Base: shape is 'round'"):
            Derived(3, "round")


def test_a_configuration_takes_megatrons_fields():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        attention_backend=AttnBackend.auto,
        moe_grouped_gemm=False,
        moe_flex_dispatcher_backend="deepep",
    )
    assert not hasattr(config, "moe_grouped_gemm")
    with pytest.raises(ValueError, match="multi_latent_attention is True, .* leave it at False"):
        TransformerConfig(
            num_layers=2, hidden_size=8, num_attention_heads=2, multi_latent_attention=True
        )
