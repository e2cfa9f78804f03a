"""Arguments of Megatron's that our signatures lack: the recorded value is taken, no other is."""

import copy
import dataclasses
import functools
import importlib
import inspect
import pickle
import re
import runpy
from importlib.machinery import SourceFileLoader

import pytest
import torch

from minimegatron.core import left_out_record
from minimegatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
)
from minimegatron.core.datasets.gpt_dataset import GPTDatasetConfig
from minimegatron.core.datasets.megatron_tokenizer import ByteLevelTokenizer
from minimegatron.core.left_out import OurModules, accept_left_out
from minimegatron.core.left_out_record import LeftOut, Recorded
from minimegatron.core.optimizer import OptimizerConfig
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
    args, given = left_out_record.without_left_out(name, own, args, given, int(is_bound))
    return args[is_bound:], given


RECORD = left_out_record.record()


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

    @accept_left_out
    def area(width, *, height=1, depth=1):
        return width, height, depth

    about = Recorded(
        ("width", "unit", "height", "frame"),
        {"unit": LeftOut(("cm", "AttnBackend.auto", False)), "frame": LeftOut((None, [1, 2], 0))},
    )
    monkeypatch.setattr(left_out_record, "record", lambda: {left_out_record.name_of(area): about})
    return area


def test_a_call_of_ours_goes_straight_through(recorded, monkeypatch):
    monkeypatch.setattr(left_out_record, "record", None)  # nobody may ask
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
    @accept_left_out
    class Base:
        def __init__(self, size):
            self.size = size

    class Derived(Base):
        def __init__(self, size, shape=None):
            super().__init__(size, shape=shape)

    about = {
        left_out_record.name_of(Base): Recorded(("size", "shape"), {"shape": LeftOut((None,))})
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_out_record, "record", lambda: about)
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
    assert "moe_grouped_gemm" not in {field.name for field in dataclasses.fields(config)}
    with pytest.raises(ValueError, match="multi_latent_attention is True, .* leave it at False"):
        TransformerConfig(
            num_layers=2, hidden_size=8, num_attention_heads=2, multi_latent_attention=True
        )


# -- Fields that are left out can be read --

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def test_f3_fields_that_are_left_out_read_as_megatrons_default():
    """As clients ask: `if config.fp8 is not None`, `config.moe_grouped_gemm or ...`."""
    for config in (TransformerConfig(**SIZES), TransformerConfig(**SIZES, fp8=None)):
        config = copy.deepcopy(pickle.loads(pickle.dumps(config)))
        assert (config.fp8, config.fp8_recipe, config.moe_grouped_gemm) == (None, "delayed", False)
        assert config.attention_backend is AttnBackend.auto
        assert config.min_offloaded_tensor_size == 1 << 20
        assert dataclasses.replace(config, num_layers=3).softmax_type == "vanilla"
        config.offload_modules.append("mine")  # nobody else's list
        assert config.offload_modules == []
        assert getattr(config, "no_such_field", 7) == 7
        with pytest.raises(AttributeError, match="'TransformerConfig' .* no attribute 'fp88'"):
            _ = config.fp88
    assert TransformerConfig(**SIZES, min_offloaded_tensor_size=1024 * 1024).fp8 is None
    assert OptimizerConfig(lr=1.0).exp_avg_dtype is torch.float32


@dataclasses.dataclass
class _Mine(TransformerConfig):
    fp8: str | None = "mine"


def test_f3_a_field_of_a_subclass_comes_first():
    assert (_Mine(**SIZES).fp8, _Mine(**SIZES).fp4) == ("mine", None)


@pytest.mark.parametrize("config", [GPTDatasetConfig, BlendedMegatronDatasetConfig])
def test_f5_what_means_the_same_is_taken(config):
    """As Megatron's own `pretrain_gpt` writes it: these fields come from its arguments."""
    known = {"random_seed": 1, "sequence_length": 8, "tokenizer": ByteLevelTokenizer()}
    same = {"multiple_validation_sets": False, "full_validation": False}
    same |= {"num_dataset_builder_threads": 4, "mmap_bin_files": False}
    if config is GPTDatasetConfig:
        same |= {"context_parallel_size": 1, "data_parallel_size": 2, "sequence_parallel_size": 4}
    made = config(**known, **same)
    assert {name: getattr(made, name) for name in same} == same
    assert config(**known).multiple_validation_sets is None
    assert config(**known).num_dataset_builder_threads == 1
    for name in ("multiple_validation_sets", "full_validation"):
        with pytest.raises(ValueError, match=f"{name} is True, .* leave it at None or False"):
            config(**known, **{name: True})


# -- Modules --


@pytest.mark.parametrize("name", RECORD)
def test_what_is_recorded_is_wrapped_when_its_module_is_imported(name):
    target = resolve(name)
    function = target.__init__ if isinstance(target, type) else target
    assert hasattr(function, "__wrapped__")


def test_a_module_is_found_as_before_but_for_its_loader():
    module = importlib.import_module("minimegatron.core.num_microbatches_calculator")
    spec = module.__spec__
    assert isinstance(spec.loader, SourceFileLoader) and spec.has_location
    assert spec.origin == module.__file__ and spec.cached.endswith(".pyc")
    assert inspect.getsource(module).startswith('"""')
    assert OurModules.find_spec("minimegatron.core.tracing") is None
    assert OurModules.find_spec("minimegatron.core.utils", ["/no/such/folder"]) is None


def test_a_program_of_a_recorded_module_runs():
    """`python -m` asks the loader for code."""
    name = "minimegatron.core.num_microbatches_calculator"
    assert runpy.run_module(name, run_name="program")["NumMicroBatchesCalculator"]


def test_a_cache_of_what_is_recorded_can_be_emptied():
    """As frameworks do with the rotary angles; the door stands outside `functools.lru_cache`."""
    calls = []
    cached = accept_left_out(functools.lru_cache(lambda number: calls.append(number)))
    assert cached(2) is cached(2) is None and cached.cache_info().hits == 1
    cached.cache_clear()
    assert cached(2) is None and calls == [2, 2]
