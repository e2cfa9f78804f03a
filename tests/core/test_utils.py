"""Wrappers, divisions, groups that may be missing; the device and the backend."""

import importlib
import logging

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import nvtx_ranges, utils
from minimegatron.core.enums import ModelType
from minimegatron.core.transformer import transformer_config
from tests.ranks import run_ranks


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = "inner config"
        self.model_type = ModelType.encoder_or_decoder
        self.nothing = None


class Wrapper(torch.nn.Module):
    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module


class OtherWrapper(Wrapper):
    config = None


def test_unwrap_model():
    inner = Inner()
    model = OtherWrapper(Wrapper(inner))
    assert utils.unwrap_model(model) is inner
    assert utils.unwrap_model([model, inner]) == [inner, inner]
    assert utils.unwrap_model(model, OtherWrapper) is model.module
    assert utils.unwrap_model(model, (Wrapper,)) is inner
    assert utils.unwrap_model(inner) is inner


def test_attributes_of_wrapped_models():
    inner = Inner()
    model = OtherWrapper(Wrapper(inner))
    assert utils.get_model_config(model) == "inner config"
    assert utils.get_attr_wrapped_model(model, "config") is None
    assert utils.get_attr_wrapped_model(model, "nothing") is None
    assert utils.get_attr_wrapped_model(model, "model_type", return_model_obj=True) is inner
    assert utils.get_model_type(model) is ModelType.encoder_or_decoder
    with pytest.raises(RuntimeError, match="neither OtherWrapper nor what it wraps has 'depth'"):
        utils.get_attr_wrapped_model(model, "depth")
    with pytest.raises(RuntimeError, match="'nothing'"):
        utils.get_attr_wrapped_model(model, "nothing", allow_none=False)
    with pytest.raises(ValueError, match="list of 2 chunks"):
        utils.get_attr_wrapped_model([model, model], "config")


def test_divide():
    assert utils.divide(12, 4) == 3
    with pytest.raises(ValueError, match="13 is not divisible by 4; .*: 12 and 16"):
        utils.divide(13, 4)
    with pytest.raises(ValueError, match="2 is not divisible by 4"):
        utils.ensure_divisibility(2, 4)


def ask_groups() -> tuple:
    pairs = [dist.new_group([0]), dist.new_group([1, 2])]
    mine = pairs[min(dist.get_rank(), 1)]
    logger = logging.getLogger("ask_groups")
    seen = []
    logger.addHandler(type("Kept", (logging.Handler,), {"emit": lambda _, r: seen.append(r.msg)})())
    utils.log_single_rank(logger, logging.WARNING, "one", rank=2)
    utils.log_on_each_pipeline_stage(
        logger, logging.WARNING, "stage", tp_group=mine, dp_cp_group=None
    )
    return utils.get_pg_size(mine), utils.get_pg_rank(mine), utils.get_pg_src_rank(mine), seen


def test_groups_that_may_be_missing():
    assert utils.get_pg_size(None) == 1
    assert utils.get_pg_rank(None) == 0
    assert utils.get_pg_src_rank(None) == 0
    assert run_ranks(ask_groups, 3) == [
        (1, 0, 0, ["stage"]),
        (2, 0, 1, ["stage"]),
        (2, 1, 1, ["one"]),
    ]


def test_device_and_backend(monkeypatch):
    monkeypatch.setattr(utils, "_device", None)
    with pytest.raises(ValueError, match="device is \"?'?tpu"):
        utils.set_device("tpu")
    assert utils.set_device("cpu") == utils.get_device() == torch.device("cpu")
    assert utils.choose_backend(1) == "gloo"


def test_ranks_share_gpus_when_they_outnumber_them(monkeypatch):
    monkeypatch.setattr(utils, "_device", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert [utils.set_device("cuda", rank, 4).index for rank in range(4)] == [0, 1, 0, 1]
    assert {utils.set_device("auto", rank, 4).type for rank in range(4)} == {"cpu"}
    assert [utils.set_device("auto", rank, 2).index for rank in range(2)] == [0, 1]
    assert utils.choose_backend(2) == "nccl"
    assert utils.choose_backend(4) == "gloo"
    assert utils.set_device("cpu", 1).type == "cpu"
    assert utils.choose_backend(2) == "gloo"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no usable GPU here"):
        utils.set_device("cuda")


def test_megatrons_names_whose_functions_stand_above():
    assert utils.init_method_normal is transformer_config.init_method_normal
    names = set(dir(utils))
    assert {"get_tensor_model_parallel_group_if_none", "scaled_init_method_normal"} <= names
    tp_utils = importlib.import_module("minimegatron.core.tensor_parallel.utils")
    assert utils.make_viewless_tensor is tp_utils.make_viewless_tensor


@pytest.fixture
def nvtx_calls(monkeypatch) -> list:
    calls: list = []
    monkeypatch.setattr(nvtx_ranges, "_nvtx_enabled", False)
    monkeypatch.setattr(nvtx_ranges, "_nvtx_ranges", [])
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    return calls


@pytest.mark.parametrize("has_gpu", [False, True])
def test_profiler_ranges(nvtx_calls, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    utils.nvtx_range_pop("nothing is checked before profiling is asked for")
    utils.configure_nvtx_profiling(True)
    utils.nvtx_range_push("step")
    utils.nvtx_range_push(suffix="mlp")
    with pytest.raises(ValueError, match=r"begun last is 'tests.*ranges.mlp', not 'step'"):
        utils.nvtx_range_pop("step")
    utils.nvtx_range_pop(suffix="mlp")
    utils.nvtx_range_pop("step")
    with pytest.raises(RuntimeError, match="no range has begun"):
        utils.nvtx_range_pop("step")
    mlp = f"{__name__}.test_profiler_ranges.mlp"
    assert nvtx_calls == (["step", mlp, "end", "end"] if has_gpu else [])
