"""The table of names is what the installed torch calls, in its Python source and in its C++ header."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from minimegatron.backend.torch_names import METHODS, with_torch_names

CALLED = {name for names in METHODS.values() for name in names}
LEFT_TO_TORCH = {
    "what a group is": {
        *("rank", "size", "name", "getRank", "getSize", "getBackendName", "get_group_store"),
        *("getGroupName", "setGroupName", "getGroupDesc", "setGroupDesc"),
        *("_set_group_name", "_set_group_desc"),
    },
    "the backends inside": {
        *("_get_backend", "_register_backend", "_set_default_backend", "get_backend"),
        "_set_sequence_number_for_group",
    },
    "more time, for a backend that has a watchdog": {"_add_ephemeral_timeout"},
    "hooks, which torch asks its own class about": {"_has_hooks", "_wait_for_pending_works"},
    "ranks that join a group later": {
        *("mergeRemoteGroup", "get_reconfigure_handle", "reconfigure", "supports_reconfigure"),
    },
    "memory of other ranks that one writes to": {"new_window"},
}
"""What torch calls and no operation of METHODS is."""
KNOWN = CALLED.union(*LEFT_TO_TORCH.values())
NEW_IN_2_14 = {"gather_single", "set_timeout"}
"""Methods that no older torch calls."""


def called_from_python(source: str) -> set[str]:
    """Attributes that the source calls, of those that a process group has."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    attributes = (func for func in calls if isinstance(func, ast.Attribute))
    return {
        func.attr
        for func in attributes
        if hasattr(dist.ProcessGroup, func.attr) and not hasattr(object, func.attr)
    }


def called_from_cpp(header: str) -> set[str]:
    """Names that `PyProcessGroup` looks for in the Python class; not those of its `PyWork`."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", header, flags=re.DOTALL)
    macros = r"(?:PYBIND11_OVERRIDE|WORK_OVERRIDE)\(\s*(?:[^,()]+,\s*)?ProcessGroup,\s*(\w+)"
    quoted = r"static_cast<const ProcessGroup\*>\(this\),\s*\"(\w+)\""
    return set(re.findall(macros, text)) | set(re.findall(quoted, text))


def python_source() -> str:
    return Path(distributed_c10d.__file__).read_text()


def header() -> str:
    """The file has moved in torch 2.14, so it is looked for."""
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    (path,) = folder.rglob("PyProcessGroup.hpp")
    return path.read_text()


def test_every_name_that_torch_calls_from_python_is_known():
    names = called_from_python(python_source())
    assert {"allreduce", "barrier", "recv_anysource", "shutdown"} <= names
    assert names - KNOWN == set()


def test_every_name_that_torch_looks_up_from_cpp_is_known():
    names = called_from_cpp(header())
    assert {"allreduce", "barrier", "splitGroup", "getRank"} <= names
    assert names - KNOWN == set()


def test_no_row_has_only_names_that_nobody_calls():
    names = called_from_python(python_source()) | called_from_cpp(header())
    unused = {method for method, row in METHODS.items() if not names & set(row)}
    assert unused <= (set() if hasattr(dist, "gather_single") else NEW_IN_2_14)


def test_a_name_stands_in_one_row_and_our_name_is_its_first():
    assert len(CALLED) == sum(len(names) for names in METHODS.values())
    assert all(names[0] == method for method, names in METHODS.items())
    assert not CALLED & set().union(*LEFT_TO_TORCH.values())


@pytest.mark.parametrize(
    "source, found",
    [
        ("work = group.allreduce([tensor], opts)", {"allreduce"}),
        ("whatever_it_is_called.barrier(opts=opts)", {"barrier"}),
        ("work.no_method_of_a_group()", set()),
        ("allreduce(tensor); group.barrier", set()),
    ],
)
def test_what_counts_as_a_call_from_python(source, found):
    assert called_from_python(source) == found


@pytest.mark.parametrize(
    "text, found",
    [
        ("WORK_OVERRIDE(\n // py::object\n ProcessGroup, /* Parent */\n allnew, a)", {"allnew"}),
        (
            "PYBIND11_OVERRIDE(\n int, /* Type */\n ProcessGroup, /* Parent */\n getNew, )",
            {"getNew"},
        ),
        ('get_override(\n static_cast<const ProcessGroup*>(this),\n "all_new");', {"all_new"}),
        ("PYBIND11_OVERRIDE(bool, Work, wait, timeout)", set()),
        ("// WORK_OVERRIDE(ProcessGroup, allnew, a)", set()),
    ],
)
def test_what_counts_as_a_look_up_from_cpp(text, found):
    assert called_from_cpp(text) == found


def test_a_class_gets_every_name_of_the_methods_it_writes():
    @with_torch_names
    class Group:
        def all_gather_single(self, output, input, opts=None):
            return "mine"

        def barrier(self, opts=None):
            return "all here"

    assert Group().all_gather_single(1, 2) == Group()._allgather_base(1, 2) == "mine"
    assert Group().barrier(opts=3) == "all here"
    assert not any(hasattr(Group, name) for name in CALLED - {*vars(Group)})
    assert {name for name in vars(Group) if name in CALLED} == {
        *("all_gather_single", "_allgather_base", "barrier"),
    }


def test_a_method_of_torch_stays_torchs():
    @with_torch_names
    class Group(dist.ProcessGroup):
        def split_group(self, ranks, timeout=None):
            return None

    assert vars(Group)["splitGroup"] is vars(Group)["split_group"]
    assert not {"allreduce", "_allgather_base", "all_gather_single"} & set(vars(Group))


@with_torch_names
class OneRank(dist.ProcessGroup):
    """A group of one rank that notes what it is asked. It has no backend inside that could answer."""

    def __init__(self):
        super().__init__(0, 1)
        self.asked = []

    def all_gather_single(self, output, input, opts=None):
        self.asked.append("all_gather_single")
        output.copy_(input)
        return Done()

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        self.asked.append(("all_to_all_single", output_splits, input_splits))
        output.copy_(input)
        return Done()


class Done(dist.Work):
    """The work of what is over."""

    def wait(self, timeout=None):
        return True


def test_torch_reaches_the_methods_from_python():
    group, got, given = OneRank(), torch.zeros(2), torch.tensor([1.0, 2.0])
    # torch 2.13 renamed the function too, and warns about the older name.
    all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather_single(got, given, group=group)
    assert torch.equal(got, given)
    dist.all_to_all_single(got, given + 1, group=group)
    assert torch.equal(got, given + 1)
    assert group.asked == ["all_gather_single", ("all_to_all_single", [], [])]


@pytest.mark.parametrize("name", METHODS["all_to_all_single"])
def test_torch_reaches_the_methods_from_cpp(name):
    """The base class's own method goes through C++, which looks the name up in the Python class."""
    if not hasattr(dist.ProcessGroup, name):
        pytest.skip("torch has this name since 2.13")
    group, got, given = OneRank(), torch.zeros(2), torch.tensor([1.0, 2.0])
    getattr(dist.ProcessGroup, name)(group, got, given, [2], [2]).wait()
    assert torch.equal(got, given)
    assert group.asked == [("all_to_all_single", [2], [2])]
