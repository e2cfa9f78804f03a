"""Who calls what, and where a method's name leads: read off the source, and right.

What is listed is held to known facts, to the text of the lines, and to a step that really runs.
"""

import ast
import collections
import importlib
import re
import sys
import threading

import pytest

from tests.core.pipeline_parallel.fake_step import Case, run_programs
from tests.docs.conftest import ROOT
from tests.figures import figure

annotate = importlib.import_module("source.annotate")
caller_lists = importlib.import_module("source.caller_lists")
callers = importlib.import_module("source.callers")
code_html = importlib.import_module("source.code_html")
families = importlib.import_module("source.class_families")
links = importlib.import_module("source.links")
package_module = importlib.import_module("source.package")

PIPELINE = "minimegatron.core.pipeline_parallel."


def package_of(**sources: str):
    files = {f"p/{name}.py": text for name, text in sources.items()}
    pages = [annotate.annotate(*file) for file in files.items()]
    return package_module.Package({page.module: page for page in pages})


ENGINE = """
from typing import NamedTuple

class Engine:
    power: int = 1
    parts: "list[Engine]"

    def start(self): return self

    @property
    def twin(self) -> "Engine | None": ...

    def again(self) -> "Engine": ...

    def __enter__(self) -> "Engine": ...
    def __exit__(self, *_): ...

class Diesel(Engine):
    def start(self): return super().start()

class Clock:
    def start(self): ...

class Pair(NamedTuple):
    engine: Engine
    clock: Clock

def make() -> Engine: ...
def several() -> tuple[Clock, Engine]: ...
"""

KNOWN = {
    "a parameter's annotation": "def f(x: Engine): x.start()",
    "a quoted annotation": 'def f(x: "Engine"): x.start()',
    "one that may be None": "def f(x: Engine | None): x.start()",
    "a default that is made": "def f(x: Engine | None = None):\n    x = x or Engine()\n    x.start()",
    "a constructor": "def f():\n    x = Engine()\n    x.start()",
    "a result": "make().start()",
    "a result's part": "def f():\n    _, x = several()\n    x.start()",
    "a method's result": "def f(x: Engine): x.again().start()",
    "a property": "def f(x: Engine): x.twin.start()",
    "a field of a pair": "def f(x: Pair): x.engine.start()",
    "a part of a pair": "def f(x: Pair):\n    y, _ = x\n    y.start()",
    "a loop over pairs": "def f(x: list[Pair]):\n    for y, _ in x: y.start()",
    "what a loop makes": "def f(y):\n    z = [make() for x in y]\n    z[0].start()",
    "a list that grows": (
        "class A:\n    x: list[Engine] = []\n    def g(self): self.x += [1]\n"
        "    def f(self):\n        for y in self.x: y.start()"
    ),
    "a loop": "def f(x: list[Engine]):\n    for y in x: y.start()",
    "a loop with numbers": "def f(x: list[Engine]):\n    for i, y in enumerate(x): y.start()",
    "a loop over two": "def f(x: list[Engine]):\n    for _, y in zip(x, x): y.start()",
    "a dict's values": "def f(x: dict[str, Engine]):\n    for y in x.values(): y.start()",
    "a comprehension": "def f(x: Engine): return [y.start() for y in x.parts]",
    "a place in a list": "def f(x: Engine, i): x.parts[i].start()",
    "with": "def f(x: Engine):\n    with x as y: y.start()",
    "a function inside": "def f(x: Engine):\n    def g(): x.start()",
    "self.x of a parameter": (
        "class A:\n    def __init__(self, x: Engine): self.x = x\n    def f(self): self.x.start()"
    ),
    "self.x of a tuple": (
        "class A:\n    def __init__(self, x: Engine): self.x, self.y = x, 1\n"
        "    def f(self): self.x.start()"
    ),
    "what is inherited": "class A(Engine):\n    def f(self): self.start()",
    "super": "class A(Engine):\n    def start(self): super().start()",
    "the module of a constant": "X = Engine()\ndef f(): X.start()",
}
UNKNOWN = {
    "no annotation": "def f(x): x.start()",
    "two classes": "def f(x: Engine | Clock): x.start()",
    "a parameter hides the constant": "X = Engine()\ndef f(X): X.start()",
    "a loop hides the constant": "X = Engine()\ndef f(y):\n    for X in y: X.start()",
    "a lambda hides the constant": "X = Engine()\nf = lambda X: X.start()",
    "a comprehension hides the constant": "X = Engine()\ndef f(y): return [X.start() for X in y]",
    "two attributes of one name": (
        "class A:\n    def g(self): self.x = Engine()\n    def h(self): self.x = Clock()\n"
        "    def f(self): self.x.start()"
    ),
    "a class from elsewhere comes first": (
        "import other\nclass A(other.Thing, Engine):\n    def f(self): self.start()"
    ),
}

NOW = {
    "now one, now the other": "def f():\n    x = Engine()\n    x = Clock()\n    x.start()",
    "another value than was declared": "def f(x: Engine):\n    x = Clock()\n    x.start()",
}


LIKELY = {
    "a function sets it": "X = Engine()\ndef f(y):\n    global X\n    X = y\ndef g(): X.start()",
    "a class below has another": (
        "class A:\n    def g(self): self.x = Engine()\n    def f(self): self.x.start()\n"
        "class B(A):\n    def h(self): self.x = Clock()"
    ),
    "a decorator that may change the result": (
        "import other\n@other.mark\ndef g() -> Engine: ...\ndef f(): g().start()"
    ),
}
"""Another object may come from where jedi does not look. It says what it knows."""


@pytest.fixture(scope="module")
def starts() -> dict[str, set[str]]:
    """Case -> what `.start` leads to in its code."""
    names = {
        f"case_{number}": case for number, case in enumerate([*KNOWN, *UNKNOWN, *NOW, *LIKELY])
    }
    before = "from p.engine import Clock, Engine, Pair, make, several\n"
    code = {**KNOWN, **UNKNOWN, **NOW, **LIKELY}
    files = {name: f"{before}{code[case]}\n" for name, case in names.items()}
    found = links.uses_of(package_of(engine=ENGINE, **files))
    return {
        case: {use.target[1] for use in found[f"p.{name}"] if use.name == "start"}
        for name, case in names.items()
    }


@pytest.mark.parametrize("case", [*KNOWN, *LIKELY])
def test_the_class_of_an_object_is_known_from(starts, case):
    assert starts[case] == {"Engine.start"}


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_is_said_where_there_is(starts, case):
    assert starts[case] == set()


@pytest.mark.parametrize("case", NOW)
def test_the_value_counts_that_a_name_has_there(starts, case):
    assert starts[case] == {"Clock.start"}


def test_a_call_may_reach_a_method_that_overrides_the_one_named():
    code = "from p.engine import Engine\ndef run(x: Engine):\n    with x: x.start()\n"
    sites = callers.sites_of(package_of(engine=ENGINE, code=code))
    assert [one[:5] for one in sites["p.engine", "Diesel.start"]] == [
        ("p.code", 3, "run", "start", "call")
    ]
    assert sites["p.engine", "Diesel.start"][0].through == "Engine.start"
    # `super().start()` means that of the class above, and no other.
    lines = [(one.symbol, one.line) for one in sites["p.engine", "Engine.start"]]
    assert lines == [("run", 3), ("Diesel.start", 19)]
    assert [one.name for one in sites["p.engine", "Engine.__exit__"]] == ["with"]
    package = package_of(engine=ENGINE, code=code)
    assert callers.overrides_of(package, ("p.engine", "Engine.start")) == [
        ("p.engine", "Diesel.start")
    ]


# -- The package --


def called_from(package, module: str, symbol: str) -> dict[str, list[str]]:
    """Function -> the lines in which it calls this one; exercises apart."""
    found: dict[str, list[str]] = {}
    for one in callers.sites_of(package)[module, symbol]:
        if one.how == callers.CALL and not one.module.startswith("minimegatron.exercises"):
            line = package.pages[one.module].lines[one.line - 1].strip()
            found.setdefault(one.symbol, []).append(line)
    return found


def test_who_lets_the_gradients_go(package):
    found = called_from(package, PIPELINE + "step_frame", "GradSync.enable")
    assert found == {
        "StepFrame.let_go": ["self.grad_sync.enable()"],
        "StepFrame.finish": ["self.grad_sync.enable()"],
        "StepFrame.let_all_go": ["self.grad_sync.enable()"],
    }
    found = called_from(package, PIPELINE + "step_frame", "StepFrame.let_go")
    assert found.keys() == {
        "StepFrame.before_forward",
        "StepFrame.before_backward",
        "HookedFrame.let_go",
    }
    # The chunk calls its frame, of which it knows only the class above.
    found = called_from(package, PIPELINE + "step_frame", "StepFrame.before_backward")
    assert found == {
        "ModelChunk.begin_backward": ["self.frame.before_backward(self)"],
        "HookedFrame.before_backward": ["super().before_backward(chunk)"],
    }
    found = called_from(package, PIPELINE + "steps", "ModelChunk.begin_backward")
    assert found.keys() == {
        "ModelChunk.backward_step",
        "_step_of_chunk",
        "CombinedSteps._begin_backward",
    }
    found = called_from(package, PIPELINE + "failed_step", "StepOnGroups.__exit__")
    assert set(found["forward_backward_pipelining_without_interleaving"]) == {"with frame:"}


def test_who_runs_a_backward(package):
    assert called_from(package, PIPELINE + "steps", "backward_step").keys() == {
        "ModelChunk.backward_step"
    }
    found = called_from(package, PIPELINE + "steps", "ModelChunk.backward_step")
    assert found.keys() == {
        "gpipe",
        "no_pipelining",
        "one_f_one_b",
        "InterleavedRun._backward",
        "PlannedRun._one_by_one",
    }
    in_1f1b = found["one_f_one_b"]
    assert in_1f1b == ["input_grad = chunk.backward_step(grad)"] * 2  # steady state, cool-down


def test_who_exchanges_in_the_steady_state(package):
    module, symbol = PIPELINE + "p2p_communication", "P2PCommunicator.send_forward_recv_backward"
    assert called_from(package, module, symbol).keys() == {"one_f_one_b"}
    (site,) = [
        one
        for one in callers.sites_of(package)[module, symbol]
        if not one.module.startswith("minimegatron.exercises")
    ]
    lines = package.pages[site.module].lines[: site.line]
    notes = [match[1] for line in lines if (match := re.match(r"\s*# -- (.*) --", line))]
    assert notes[-1].startswith("Steady state")


def test_who_calls_what_is_handed_over(package):
    schedule = "forward_backward_pipelining_without_interleaving"
    found = called_from(package, PIPELINE + "schedules", schedule)
    assert found.keys() == {"train_step", "evaluate"}
    found = called_from(package, PIPELINE + "step_frame", "finish_step")
    assert found.keys() == {"StepFrame.finalize"}
    module = "minimegatron.core.distributed.finalize_model_grads"
    assert called_from(package, module, "finalize_model_grads").keys() == {"finish_step"}
    assert called_from(package, "minimegatron.training.training", "train_step").keys() == {"train"}


def test_every_listed_line_has_the_name(package):
    count = 0
    for (module, symbol), sites in callers.sites_of(package).items():
        last = symbol.rpartition(".")[2]
        for one in sites:
            count += 1
            line = package.pages[one.module].lines[one.line - 1]
            assert re.search(rf"\b{one.name}\b", line), f"{one}: {line}"
            # Under another name only as said: imported so, a hook, `with`, an object that is called.
            others = ("__enter__", "__exit__", "__call__", "forward")
            aliases = package.pages[one.module].aliases
            is_said = one.through or last in others or one.name in aliases
            assert one.name == last or is_said, f"{module}.{symbol}: {one}: {line}"
    figure(f"{count} places where something of the package is called, handed on or a decorator")
    assert count > 8000


def test_both_ends_of_every_hook_exist(package, monkeypatch, tmp_path):
    table = callers.hooks_of(package)
    assert table["hook"] and table["form"]
    for hook in table["hook"]:
        place = package.find(hook["in"])
        lines = place.page.lines[place.definition.line : place.definition.end_line]
        assert any(hook["line"] in line and hook["through"] in line for line in lines), hook
        assert all(package.find(called).definition.kind != "variable" for called in hook["calls"])
        for name in re.findall(r"`([\w.]+)`", hook["because"]):
            last = name.rpartition(".")[2]
            assert any(last in page.source for page in package.pages.values()), hook
    for form in table["form"]:
        place = package.find(form["name"])
        methods = {
            name.rpartition(".")[2]
            for name, one in place.page.definitions.items()
            if name.startswith(f"{place.symbol}.") and one.kind == "method"
        }
        for cls in form["classes"]:
            symbol = (package.find(cls).page.module, package.find(cls).symbol)
            node = families.families_of(package).nodes[symbol]
            own = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
            for name in methods:
                assert package.find(f"{cls}.{name}") or name in own, (cls, name)


@pytest.mark.parametrize("old", ["= forward_backward_func(", "pretrain_gpt.loss_func"])
def test_a_hook_that_has_gone_is_an_error(package, monkeypatch, tmp_path, old):
    path = tmp_path / "hooks.toml"
    path.write_text(callers.HOOKS.read_text().replace(old, "gone"))
    monkeypatch.setattr(callers, "HOOKS", path)
    with pytest.raises(callers.HookError, match="gone"):
        callers.sites_of.__wrapped__(package)


# -- Held to a run --


def calls_of_a_step() -> set[tuple]:
    """(file, line, file, first line) of each call in a step of 1F1B on three stages."""
    seen, folder = set(), str(ROOT / "minimegatron")

    def note(frame, event, _):
        back = frame.f_back
        if event == "call" and back is not None:
            code, caller = frame.f_code, back.f_code
            if code.co_filename.startswith(folder) and caller.co_filename.startswith(folder):
                seen.add((caller.co_filename, back.f_lineno, code.co_filename, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run_programs(Case(3, 4))
        run_programs(Case(3, 6, v=2, G=3))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def test_a_step_makes_the_calls_that_are_listed(package):
    """Where a line that ran has a name whose target is listed, that is what was called."""
    classes = families.families_of(package)
    begins = {
        (module, min([node.lineno, *(mark.lineno for mark in node.decorator_list)])): symbol
        for (module, symbol), node in classes.nodes.items()
        if isinstance(node, ast.FunctionDef)
    }
    modules = {str(ROOT / page.path): name for name, page in package.pages.items()}
    real = collections.defaultdict(set)
    for file, line, other, first in calls_of_a_step():
        if symbol := begins.get((modules[other], first)):
            real[modules[file], line].add((modules[other], symbol))
    count = 0
    for module in package.pages:
        for use in links.uses_of(package)[module]:
            last = use.target[1].rpartition(".")[2]
            called = {one for one in real[module, use.line] if one[1].rpartition(".")[2] == last}
            either = {use.receiver, *classes.below(use.receiver)}
            for there, symbol in called if use.how == "call" else ():
                is_override = (there, symbol.rpartition(".")[0]) in either
                assert (there, symbol) == use.target or is_override, (use, called)
                count += 1
    figure(f"{count} calls of methods in two steps that ran, each as the source pages say")
    assert count > 60


# -- Links --


def links_at(package, module: str, text: str) -> dict[str, str]:
    """Name -> URL in the first line with the text."""
    page = package.pages[module]
    number = next(n for n, line in enumerate(page.lines, 1) if text in line)
    links = code_html.links_of(page, package, "").get(number, {})
    line = page.lines[number - 1]
    return {line[at : at + length]: url for at, (length, url) in links.items()}


@pytest.mark.parametrize(
    ("module", "text", "name", "url"),
    [
        ("loops", "chunk.backward_step(grad)", "backward_step", "steps.html#ModelChunk."),
        (
            "loops",
            "p2p.send_forward(",
            "send_forward",
            "p2p_communication.html#P2PCommunicator.",
        ),
        ("schedules", "frame.add_chunk(", "add_chunk", "step_frame.html#StepFrame."),
        ("step_frame", "self.grad_sync.enable()", "enable", "#GradSync."),
        ("step_frame", "self.let_go(chunk)", "let_go", "#StepFrame."),
        (
            "steps",
            "self.frame.before_backward(self)",
            "before_backward",
            "failed_step.html#NoFrame.",
        ),
        ("loops", "].backward_step(", "backward_step", "steps.html#ModelChunk."),
    ],
)
def test_method_calls_are_links(package, module, text, name, url):
    before = "" if url.startswith("#") else PIPELINE
    assert links_at(package, PIPELINE + module, text)[name] == f"{before}{url}{name}"


def test_how_many_method_calls_are_links(package):
    """By names alone, as before; and with the classes of objects."""
    methods = {
        symbol.rpartition(".")[2]
        for (_, symbol), node in families.families_of(package).nodes.items()
        if "." in symbol and isinstance(node, ast.FunctionDef)
    }
    by_name, linked, every = 0, 0, 0
    for name, page in package.pages.items():
        named = {
            (one.line, one.column)
            for one in page.references
            if (place := package.find(one.target)) and place.symbol
        }
        uses = links.uses_of(package)[name]
        known = named | {(use.line, use.column) for use in uses if use.how != "with"}
        for call in (node for node in ast.walk(page.tree) if isinstance(node, ast.Call)):
            function = call.func
            if isinstance(function, ast.Attribute) and function.attr in methods:
                line = page.lines[function.end_lineno - 1].encode()[: function.end_col_offset]
                at = (function.end_lineno, len(line.decode()) - len(function.attr))
                by_name, linked, every = by_name + (at in named), linked + (at in known), every + 1
    figure(
        f"calls after a dot that are links: {by_name} by names alone, {linked} now, of {every} whose "
        "name some method of the package has (`get`, `append` and their like included)"
    )
    assert linked > 1.5 * by_name and linked > 1700
