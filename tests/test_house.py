"""The rules of the house, checked on the source itself: sizes, imports, docstrings, habits.

Nothing here imports the package in this process: the source is read with `ast` and `tokenize`.
"""

import ast
import importlib
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minimegatron"

sys.path.insert(0, str(ROOT / "docs" / "tools"))
annotate = importlib.import_module("source.annotate")
code_count = importlib.import_module("source.code_count")

MAX_FUNCTION_LINES = 60
"""Code lines below the signature, which the formatter gives a line per argument."""
MAX_FILE_LINES = 400

LAYERS = [
    {"core.left_out_record", "core.pipeline_parallel.interleaving_checks", "exports", "moved"},
    {
        "core.batch_sizes",
        "core.left_out",
        "core.rank_checks",
        "core.scheduler_state",
        "core.util_checks",
    },
    {
        "core",
        "core.activations",
        "core.tracing",
        "core.enums",
        "core.json_text",
        "core.knobs",
        "core.missing_groups",
        "core.network",
        "core.num_microbatches_calculator",
        "core.nvtx_ranges",
        "core.optimizer_param_scheduler",
        "core.orders.placement",
        "core.orders.work",
        "core.output",
        "core.pipeline_parallel.loop_of_pairs",
        "core.pipeline_parallel.schedule_table",
        "core.rank_generator",
        "core.straggler_words",
        "core.utils",
        "core.words",
        "exercises",
    },
    {
        "core.group_checks",
        "core.pipeline_parallel.loops",
        "core.microbatch_getters",
        "core.device_choice",
        "core.subject_fields",
        "core.recorded_graph",
    },
    {"core.model_parallel_config"},
    {"core.orders"},
    {"core.schedule_of_config"},
    {"backend"},
    {"core.collectives"},
    {"core.all_to_all"},
    {"core.rerun"},
    {"core.timer_reports"},
    {
        "core.full_cuda_graph",
        "core.parallel_state",
        "core.rerun_state_machine",
        "core.timers",
    },
    {"core.parallel_getters", "core.straggler_detector"},
    {"core.parameter", "core.parameter_marks", "core.process_groups_config", "core.inference"},
    {"core.tensor_parallel"},
    {"core.dist_checkpointing.core"},
    {"core.dist_checkpointing.mapping"},
    {"core.ssm.mamba_config"},
    {"core.pipeline_parallel", "core.transformer"},
    {"core.orders.runnable"},
    {"core.orders.shared_step"},
    {"core.orders.planned_schedule"},
    {"core.pipeline_parallel.schedules"},
    {"core.ssm"},
    {"core.datasets", "core.distributed", "core.models"},
    {"core.dist_checkpointing", "core.optimizer"},
    {"planner"},
    {"doctor", "tracing"},
    {"launching"},
    {"notebook", "training"},
    {"convert"},
    {"pretrain_bert", "pretrain_gpt", "pretrain_t5", "rl"},
    {"pretrain_mamba", "train_rl"},
    {"exercises.bench", "exercises.catalog"},
    {"exercises.exercise"},
    {"exercises.room"},
    {"exercises.check"},
    {"exercises.catalog.*", "exercises.labs"},
    {"exercises.student"},
    {"exercises.grading"},
    {"commands"},
    {"__main__"},
]
"""What may import what: each component only from rows above its own, and from itself.

A module's name in a string is an import too. `may_offer` says which names a module may look up in
rows below its own, for whoever imports them; if that is one of ours, it imports where they live.

Where a stage of the model is must be known long before messages are sent, and the runner of orders
needs what sends them: so some files of `core.orders` have rows of their own, and `schedules`, which
chooses a runner. "core" and "exercises" are those packages' own
`__init__`, which is loaded before everything in them.
"""

MEGATRONS_TWICE = ("enums.py", "utils.py")
"""Names of files that Megatron has in several folders."""

OFFERS_OF_NEIGHBOURS = {
    "minimegatron.core.collectives": "minimegatron.core.all_to_all",
    "minimegatron.core.parallel_state": "minimegatron.core.parallel_getters",
    "minimegatron.core.utils": "minimegatron.core.device_choice",
}
"""Modules that offer all that a file beside them has, also what is not Megatron's."""

TORCH_FREE = [
    "minimegatron.core.batch_sizes",
    "minimegatron.core.tracing",
    "minimegatron.core.datasets.megatron_tokenizer",
    "minimegatron.core.dist_checkpointing.core",
    "minimegatron.core.enums",
    "minimegatron.core.json_text",
    "minimegatron.core.knobs",
    "minimegatron.core.left_out",
    "minimegatron.core.network",
    "minimegatron.core.num_microbatches_calculator",
    "minimegatron.core.optimizer_param_scheduler",
    "minimegatron.core.output",
    "minimegatron.core.parameter",
    "minimegatron.core.orders.loop_recorder",
    "minimegatron.core.orders.orders",
    "minimegatron.core.pipeline_parallel.loops",
    "minimegatron.core.pipeline_parallel.schedule_table",
    "minimegatron.core.orders.send_limits",
    "minimegatron.core.rank_checks",
    "minimegatron.core.rank_generator",
    "minimegatron.core.scheduler_state",
    "minimegatron.core.ssm.mamba_config",
    "minimegatron.core.ssm.mamba_hybrid_layer_allocation",
    "minimegatron.core.transformer.enums",
    "minimegatron.core.transformer.layer_placement",
    "minimegatron.core.transformer.pipeline_parallel_layer_layout",
    "minimegatron.core.words",
    "minimegatron.doctor.diagnosis",
    "minimegatron.doctor.shared_record",
    "minimegatron.doctor.watchman",
    "minimegatron.commands.exercises_command",
    "minimegatron.exports",
    "minimegatron.commands.trace_command",
    "minimegatron.planner",
    "minimegatron.tracing.trace_view",
    "minimegatron.training.checkpoint_folder",
    "minimegatron.launching.user_file",
]
"""Modules, and all modules of packages, that must load where torch does not exist."""

MAY_ASK_PARALLEL_STATE = re.compile(
    r"minimegatron\.(training\..*|rl\..*|pretrain_\w+|train_rl|tracing\..*|doctor\..*|exercises\..*"
    r"|core\.parallel_(state|getters)|core\.process_groups_config|core\.inference\.communication_utils"
    r"|core\.pipeline_parallel\.(schedules|steps|p2p_communication|rank_microbatches)"
    r"|core\.tensor_parallel\.utils)"
)
"""The edges of the package; everything between them is given its process groups."""

MAY_READ_ENVIRONMENT = re.compile(
    r"minimegatron\.(launching\.launcher|backend\.gloo_inside"
    r"|training\.(arguments|failures|initialize|process_group)"
    r"|exercises\.(check|check\.torchrun|grading\.cells))"
)
"""Before arguments are parsed, or instead of parsing them; and what torch's own backends read there."""


# -- Reading the source --


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Numbers of the lines that hold code: no blank lines, comments or docstrings."""
    return code_count.code_lines(path.read_text())


@cache
def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]


@cache
def offered(name: str) -> dict[str, str]:
    """The names that the module looks up on first use (`lazily`, `all_of`), and where they live."""
    table = annotate.looked_up(tree(modules()[name]))
    if annotate.ANY_OTHER not in table:
        return {key: dotted for key, dotted in table.items() if dotted.startswith("minimegatron.")}
    place = table[annotate.ANY_OTHER]
    for node in tree(modules()[place]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {key: f"{place}.{key}" for key in ast.literal_eval(node.value)}
    pytest.fail(f"{name} offers all of {place}, which has no __all__")


def reached_by(dotted: str) -> list[str]:
    """The module that has a dotted name; if it looks the name up, also the one where that is found."""
    last = ""
    while dotted and dotted not in modules():
        dotted, _, last = dotted.rpartition(".")
    if last in (offered(dotted) if dotted else {}):
        return [dotted, *reached_by(offered(dotted)[last])]
    return [dotted] if dotted else []


def imported(node: ast.AST, package: str) -> list[str]:
    """The modules of this package that one import statement reaches."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{package}: relative import in line {node.lineno}"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    reached = (module for name in names for module in reached_by(name))
    return [module for module in reached if module not in ("minimegatron", package)]


@cache
def imports(name: str) -> frozenset[str]:
    nodes = ast.walk(tree(modules()[name]))
    return frozenset(reached for node in nodes for reached in imported(node, name))


def in_strings(source: ast.Module) -> set[str]:
    """Dotted names of this package that are strings by themselves: of modules, of what is in them.

    Also the beginning of one that is put together, as in `f"minimegatron.commands.{name}"`.
    """
    return {
        node.value.replace(":", ".").rstrip(".")
        for node in ast.walk(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"minimegatron(\.\w+)+(\.|:\w+(\.\w+)*)?", node.value)
    }


@cache
def named(name: str) -> frozenset[str]:
    """The modules that the module names in strings, but for what it only offers: see `offered`."""
    places = {dotted.rpartition(".")[0] for dotted in offered(name).values()}
    found = in_strings(tree(modules()[name])) - {*offered(name).values(), *places}
    reached = {module for dotted in found for module in reached_by(dotted)}
    return frozenset(reached - {"minimegatron", name})


@cache
def names_of_megatron() -> frozenset[str]:
    """`megatron.core.utils.divide`: what is recorded of Megatron's modules, as `make rosetta` does."""
    records = ROOT / "docs" / "tools" / "records"
    found = set(json.loads((records / "megatron_core.json").read_text())["symbols"])
    for file, lines in json.loads((records / "megatron_files.json").read_text())["lines"].items():
        place = file.removesuffix(".py").replace("/", ".")
        for line in lines.values():
            found |= {f"{place}.{name}" for name in re.findall(r"^(?:def|class) (\w+)", line)}
    return frozenset(found)


def may_offer(name: str, key: str, dotted: str) -> bool:
    """Whether a module may look up a name that lives in a row below its own.

    A package may offer what is in it. Any other module may offer what Megatron has in the module of
    that name, from the same room: `core` offers nothing of `training`. See also `OFFERS_OF_NEIGHBOURS`.
    """
    if dotted == f"{OFFERS_OF_NEIGHBOURS.get(name)}.{key}":
        return True
    if modules()[name].name == "__init__.py" and dotted.startswith(f"{name}."):
        return True
    is_megatrons = f"{name.removeprefix('mini')}.{key}" in names_of_megatron()
    return is_megatrons and dotted.split(".")[1] == name.split(".")[1]


def component(module: str) -> str:
    """`core.optimizer` for `minimegatron.core.optimizer.clip_grads`, `training` for the rest alike.

    A module that has a row of its own is a component by itself.
    """
    parts = module.split(".")[1:]
    if any(".".join(parts) in row for row in LAYERS):
        return ".".join(parts)
    if parts[:2] == ["exercises", "catalog"] and len(parts) > 2:
        return "exercises.catalog.*"
    return ".".join(parts[:2]) if parts[0] in ("core", "exercises") else parts[0]


def everything_but_inits() -> list[str]:
    """Also without what students write and read: an exercise's own page says what it is."""
    return [
        name
        for name, path in modules().items()
        if path.name != "__init__.py" and not name.startswith("minimegatron.exercises.catalog.")
    ]


# -- Sizes --


def test_functions_are_short():
    long = []
    for name, path in modules().items():
        for function in functions(path):
            body = range(function.body[0].lineno, function.end_lineno + 1)
            count = len(code_lines(path).intersection(body))
            if count > MAX_FUNCTION_LINES:
                long.append(f"{name}.{function.name}: {count} code lines")
    assert not long


def test_files_are_short():
    counts = {name: len(code_lines(path)) for name, path in modules().items()}
    assert not {name: count for name, count in counts.items() if count > MAX_FILE_LINES}


def test_code_lines_are_counted_right(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('"""Doc."""\n\n# comment\nx = 1  # said\n"""Of x."""\ny = (\n    2\n)\n')
    assert code_lines(path) == {4, 6, 7, 8}


# -- Imports --


def test_imports_point_downward():
    row_of = {name: row for row, names in enumerate(LAYERS) for name in names}
    below = [name for name in modules() if name != "minimegatron"]
    components = {component(name) for name in below}
    assert not components - set(row_of), "give these a row in LAYERS"
    assert not set(row_of) - components, "these rows of LAYERS name nothing"
    assert not {
        f"{name} imports {other}"
        for name in below
        for other in imports(name) | named(name)
        if points_upward(name, other)
    }
    assert not {
        f"{name} offers {key} of {dotted}"
        for name in below
        for key, dotted in offered(name).items()
        if any(points_upward(name, other) for other in reached_by(dotted))
        and not may_offer(name, key, dotted)
    }


def points_upward(name: str, other: str) -> bool:
    """Whether a module's row forbids it to import the other, of another component."""
    row_of = {entry: row for row, entries in enumerate(LAYERS) for entry in entries}
    here, there = component(name), component(other)
    return there != here and row_of[there] >= row_of[here]


def test_a_name_in_a_string_is_an_import():
    source = """
        def late(kind):
            for name in ("minimegatron.training.utils:print_rank_0", f"minimegatron.rl.{kind}"):
                importlib.import_module(name)
            return "see minimegatron.planner"
        """
    found = in_strings(ast.parse(textwrap.dedent(source)))
    assert found == {"minimegatron.training.utils.print_rank_0", "minimegatron.rl"}
    utils = "minimegatron.core.utils"
    assert all(points_upward(utils, reached_by(name)[0]) for name in found)
    assert "minimegatron.core.nvtx_ranges" in reached_by(f"{utils}.nvtx_range_push")
    assert "minimegatron.core.nvtx_ranges" not in named(utils)
    assert may_offer(utils, "divide", "minimegatron.core.tensor_parallel.utils.divide")
    assert not may_offer(utils, "divide", "minimegatron.training.utils.divide")
    assert not may_offer(utils, "multiply", "minimegatron.core.tensor_parallel.utils.multiply")


def test_no_import_cycles():
    done, path = set(), []

    def visit(name: str) -> None:
        if name in path:
            pytest.fail("import cycle: " + " -> ".join([*path[path.index(name) :], name]))
        if name in done:
            return
        path.append(name)
        for other in sorted(imports(name)):
            visit(other)
        path.pop()
        done.add(name)

    for name in modules():
        visit(name)


def test_others_come_to_the_backend_by_its_door():
    """What its `__init__` names is all that the rest of the package uses of it."""
    inside = "minimegatron.backend."
    past = [
        f"{name} imports {other}"
        for name in modules()
        if not name.startswith(inside) and name != inside[:-1]
        for other in imports(name)
        if other.startswith(inside)
    ]
    assert not past


def test_one_name_has_one_meaning():
    """Two files or classes of one name only where Megatron has them, or in folders of exercises."""
    files: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for name, path in modules().items():
        if name.startswith("minimegatron.exercises.catalog."):
            continue
        if path.name not in ("__init__.py", "__main__.py", *MEGATRONS_TWICE):
            files.setdefault(path.name, []).append(name)
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(name)
    assert not {key: names for key, names in (files | classes).items() if len(names) > 1}


def test_schedules_know_no_layer():
    """They reach models, optimizers and losses through hooks and methods only."""
    for name in modules():
        if name.startswith(("minimegatron.core.pipeline_parallel.", "minimegatron.core.orders.")):
            reached = {component(other) for other in imports(name)}
            assert not reached & {"core.transformer", "core.models", "core.distributed"}, name
            assert "minimegatron.core.tensor_parallel.layers" not in imports(name), name


def test_no_imports_of_ours_inside_functions():
    inside = [
        f"{name}.{function.name} imports {reached}"
        for name, path in modules().items()
        if name != "minimegatron"  # whose __getattr__ is there so that it need not import
        for function in functions(path)
        for node in ast.walk(function)
        for reached in imported(node, "")
    ]
    assert not inside


def test_torch_free_modules_load_without_torch():
    names = [
        name
        for name in modules()
        if any(name == free or name.startswith(f"{free}.") for free in TORCH_FREE)
    ]
    assert set(TORCH_FREE) <= set(names)
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None  # importing it now raises ImportError\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_parallel_state_is_asked_at_the_edges_only():
    outside = [
        name
        for name in modules()
        if "minimegatron.core.parallel_state" in imports(name)
        and not MAY_ASK_PARALLEL_STATE.fullmatch(name)
    ]
    assert not outside


# -- Docstrings --


def test_every_module_says_what_it_is():
    empty = [
        name for name in everything_but_inits() if not (ast.get_docstring(tree(modules()[name])))
    ]
    assert not empty


CALLERS = re.compile(
    r"(^|[.;] )((Called|Read|Run|Used|Made|Filled in|Asked|Started|Set|Imported|Written|Built|Sent)"
    r"( and \w+)? by\b|Calls(:| nothing\b))"
)


def test_every_header_says_what_the_file_is_and_names_a_counterpart():
    """In its first line the one; in its text the other, or that Megatron has none.

    Who calls it is not written down: the annotated source computes and shows it.
    """
    wrong = {}
    for name in everything_but_inits():
        header = ast.get_docstring(tree(modules()[name])) or ""
        first, *_ = header.split("\n\n")
        if "\n" in first or not first.endswith((".", ":", "?")):
            wrong[name] = "the first paragraph is one line, a sentence: what the file is"
        elif not re.search(r"[Cc]ounterpart|Megatron", header):
            wrong[name] = "names no counterpart; if there is none: Megatron has no counterpart."
        elif any(CALLERS.search(" ".join(part.split())) for part in header.split("\n\n")):
            wrong[name] = "says who calls it, or what it calls: leave that to the annotated source"
    assert not wrong


def test_every_public_function_and_class_has_a_docstring():
    bare = []
    for name in everything_but_inits():
        for node in tree(modules()[name]).body:
            is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            if is_public and not ast.get_docstring(node):
                bare.append(f"{name}.{node.name}")
    assert not bare


# -- Habits --


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def test_nothing_is_left_for_later():
    for name, path in modules().items():
        found = re.search(r"\b(TODO|FIXME|XXX|HACK)\b|for now", path.read_text())
        assert not found, f"{name}: {found[0]}"
        for function in functions(path):
            assert not all(isinstance(node, ast.Pass) for node in function.body), function.name


def test_no_nonlocal():
    for name, path in modules().items():
        assert not any(isinstance(node, ast.Nonlocal) for node in ast.walk(tree(path))), name


def test_configurations_have_no_hidden_defaults():
    """`getattr(config, "x", 1)` hides a misspelt name and a second default."""
    hidden = [
        f"{name}:{call.lineno}"
        for name, path in modules().items()
        for call in calls(path)
        if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3
        if re.search(r"(config|args)$", ast.unparse(call.args[0]))
    ]
    assert not hidden


def test_the_environment_is_read_once():
    reading = [
        name
        for name, path in modules().items()
        if re.search(r"\bos\.(environ(?!\[\S+\] =)|getenv)\b", path.read_text())
        and not MAY_READ_ENVIRONMENT.fullmatch(name)
    ]
    assert not reading


def test_no_device_is_taken_for_granted():
    for name, path in modules().items():
        for call in calls(path):
            is_cuda = isinstance(call.func, ast.Attribute) and call.func.attr == "cuda"
            assert not is_cuda, f"{name}:{call.lineno} calls .cuda(); use get_device()"


def test_no_message_is_lost():
    """An f-string that is a statement of its own is half an error message that fell off."""
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            lost = isinstance(node, ast.Expr) and isinstance(node.value, ast.JoinedStr)
            assert not lost, f"{name}:{node.lineno}"


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_is_content(command):
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, *command, "minimegatron", "tests"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
