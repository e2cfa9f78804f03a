"""The table of torch's internals is what the code uses, and the installed torch has them."""

import tomllib
from pathlib import Path

import pytest

from tests import torch_internals

ROOT = Path(__file__).parents[1]


def test_the_table_lists_what_the_code_uses():
    assert torch_internals.used() == torch_internals.listed()


def test_the_installed_torch_has_them():
    """But for those without which something is left out, as the table says."""
    optional = {row["name"] for row in torch_internals.table() if "without" in row}
    assert set(torch_internals.missing()) <= optional


@pytest.mark.parametrize(
    "text, name",
    [
        ("import torch\ntorch._new_name(1)", "torch._new_name"),
        ("from torch import _new_name", "torch._new_name"),
        ("import torch.distributed as dist\ndist._new_name()", "torch.distributed._new_name"),
        (
            "dist.distributed_c10d._get_default_group()",
            "torch.distributed.distributed_c10d._get_defa",
        ),
        ("getattr(torch, '_new_name', None)", "torch._new_name"),
        ("sys.modules.get('torch._C._new')", "torch._C._new"),
        ("loss._grad_fn", "torch.Tensor._grad_fn"),
    ],
)
def test_a_new_use_is_found(text, name):
    (found,) = torch_internals.names_in(text)
    assert found.startswith(name)


@pytest.mark.parametrize("text", ["self._base", "x._own = 1; x._own", "'see torch._C for more'"])
def test_what_is_no_use(text):
    assert torch_internals.names_in(text) == set()


def test_a_name_that_torch_has_not_is_missing():
    assert not torch_internals.is_there("torch.Tensor._no_such_name")
    assert not torch_internals.is_there("torch.no_such_module._name")
    assert torch_internals.is_there("torch.distributed.ProcessGroup._get_backend")


def test_every_row_says_why():
    rows = tomllib.loads((ROOT / "docs" / "torch_internals.toml").read_text())["internal"]
    for row in rows:
        assert set(row) - {"without"} == {"name", "file", "why"} and row["why"], row
        assert (ROOT / "minimegatron" / row["file"]).exists()
