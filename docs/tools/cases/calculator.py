"""The planner's formulas as JavaScript, translated from their source for the page's calculator.

Called by: `site_pages`, `macros` (the form). Calls: `ast`, `choices`. Only what those functions use is
translated: arithmetic, comparisons, assignments, conditions. Anything else ends the build, so the
page cannot drift.
"""

import ast
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict

from cases import choices, layout_costs, memory_cases
from minimegatron.core.orders import orders
from minimegatron.planner import context_costs, expert_memory, formulas, memory

CONSTANTS = {
    name: repr(getattr(orders, name))
    for name in (
        "BREADTH_FIRST",
        "COMBINED",
        "GPIPE",
        "INTERLEAVED",
        "NO_PIPELINING",
        "ONE_F_ONE_B",
    )
}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
FUNCTIONS = [
    memory.activation_bytes_per_layer,
    memory.message_bytes,
    memory.num_layer_parameters,
    memory.model_state_bytes,
    formulas.is_looped,
    formulas.bubble_formulas,
    formulas.message_formula,
    memory_cases.layer_flops_per_token,
    context_costs.key_value_elements,
    expert_memory.num_expert_layer_parameters,
    expert_memory.expert_activation_bytes,
    expert_memory.all_to_all_bytes,
    *(
        function
        for function in vars(layout_costs).values()
        if inspect.isfunction(function) and function.__module__ == layout_costs.__name__
    ),
]
OF_JAVASCRIPT = {"min": "Math.min", "max": "Math.max", "int": "Math.trunc"}
RECORDS = ("Formula", "LayerParameters", "ModelStateBytes")


def calculator_script() -> str:
    """`MMFormulas.activation_bytes_per_layer(...)` and so on, with Python's argument order."""
    functions = ",\n".join(translate(function) for function in FUNCTIONS)
    return (
        '"use strict";\n'
        "const Formula = (text, value) => ({text, value});\n"
        "const ModelStateBytes = (weights, gradients, optimizer) =>\n"
        "  ({weights, gradients, optimizer, total: weights + gradients + optimizer});\n"
        "const LayerParameters = (dense, experts) => ({dense, experts});\n"
        f"const MMFormulas = {{\n{functions}\n}};\n"
        "globalThis.MMFormulas = MMFormulas;\n"
    )


def translate(function: Callable) -> str:
    """
    >>> _function(ast.parse("def half(x, y=2): return x // y if x else -y").body[0])
    'half(x, y = 2) {\\nreturn (x ? Math.floor(x / y) : -y);\\n}'
    """
    (node,) = ast.parse(inspect.getsource(function)).body
    return _function(node)


def _function(node: ast.FunctionDef) -> str:
    names = [a.arg for a in node.args.args]
    defaults = [None] * (len(names) - len(node.args.defaults)) + node.args.defaults
    parameters = ", ".join(
        name if default is None else f"{name} = {_expression(default)}"
        for name, default in zip(names, defaults, strict=True)
    )
    body = [s for s in node.body if not (isinstance(s, ast.Expr) and _is_text(s.value))]
    return f"{node.name}({parameters}) {{\n{_block(body, set(names))}\n}}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _block(body: list[ast.stmt], known: set[str]) -> str:
    return "\n".join(_statement(statement, known) for statement in body)


def _statement(node: ast.stmt, known: set[str]) -> str:
    match node:
        case ast.Return():
            return f"return {_expression(node.value)};"
        case ast.Raise():
            return 'throw new RangeError("no such value");'
        case ast.Assign(targets=[target]):
            return _assignment(target, _expression(node.value), known)
        case ast.AnnAssign():
            return _assignment(node.target, _expression(node.value), known)
        case ast.AugAssign():
            sign = OPERATORS[type(node.op)]
            return f"{_expression(node.target)} {sign}= {_expression(node.value)};"
        case ast.If():
            # Names that the branches or the condition give are wanted after them.
            new = sorted(_assigned(node) - known)
            known |= set(new)
            declared = f"let {', '.join(new)};\n" if new else ""
            otherwise = f" else {{\n{_block(node.orelse, known)}\n}}" if node.orelse else ""
            test = _expression(node.test)
            return f"{declared}if ({test}) {{\n{_block(node.body, known)}\n}}{otherwise}"
    raise ValueError(f"line {node.lineno}: {ast.unparse(node)!r} is not translated")


def _assigned(node: ast.AST) -> set[str]:
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _assignment(target: ast.expr, value: str, known: set[str]) -> str:
    names = _assigned(target)
    word = "" if names <= known else "let "
    known |= names
    text = f"{word}{_expression(target)} = {value};"
    return f";{text}" if text.startswith("[") else text


def _expression(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=None):
            return "null"
        case ast.Constant(value=bool()):
            return str(node.value).lower()
        case ast.Constant():
            return repr(node.value)
        case ast.JoinedStr():
            parts = [
                p.value if isinstance(p, ast.Constant) else f"${{{_expression(p.value)}}}"
                for p in node.values
            ]
            return f"`{''.join(parts)}`"
        case ast.Name():
            return CONSTANTS.get(node.id, node.id)
        case ast.NamedExpr(target=ast.Name()):
            return f"({node.target.id} = {_expression(node.value)})"
        case ast.Attribute():
            return f"{_expression(node.value)}.{node.attr}"
        case ast.Tuple():
            return f"[{', '.join(map(_expression, node.elts))}]"
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            sign = "-" if isinstance(node.op, ast.USub) else "!"
            return f"{sign}{_expression(node.operand)}"
        case ast.BinOp(op=ast.FloorDiv()):
            return f"Math.floor({_expression(node.left)} / {_expression(node.right)})"
        case ast.BinOp():
            sign = OPERATORS[type(node.op)]
            return f"({_expression(node.left)} {sign} {_expression(node.right)})"
        case ast.BoolOp():
            sign = " || " if isinstance(node.op, ast.Or) else " && "
            return "(" + sign.join(map(_expression, node.values)) + ")"
        case ast.IfExp():
            test, yes, no = map(_expression, (node.test, node.body, node.orelse))
            return f"({test} ? {yes} : {no})"
        case ast.Compare(ops=[op], comparators=[right]):
            return _comparison(_expression(node.left), op, _expression(right))
        case ast.Call(func=ast.Name()):
            return _call(node.func.id, [_expression(a) for a in node.args])
    raise ValueError(f"line {node.lineno}: {ast.unparse(node)!r} is not translated")


def _comparison(left: str, op: ast.cmpop, right: str) -> str:
    if isinstance(op, ast.In | ast.NotIn):
        return f"{'!' if isinstance(op, ast.NotIn) else ''}{right}.includes({left})"
    signs = {
        ast.Eq: "===",
        ast.NotEq: "!==",
        ast.Lt: "<",
        ast.Gt: ">",
        ast.GtE: ">=",
        ast.LtE: "<=",
        ast.Is: "===",
    }
    return f"({left} {signs[type(op)]} {right})"


def _call(name: str, arguments: list[str]) -> str:
    if name == "Fraction":
        return f"({' / '.join(arguments)})"
    if name == "_whole":
        return arguments[0]
    if name in OF_JAVASCRIPT or name in RECORDS:
        return f"{OF_JAVASCRIPT.get(name, name)}({', '.join(arguments)})"
    return f"MMFormulas.{name}({', '.join(arguments)})"


# -- The form --

ANY = "0.001"
"""The least of a size that need not be whole."""
MOST = 1_000_000
"""Of every size: more is a slip of the keys."""
GROUPS: dict[str, list[tuple[str, str, float, str]]] = {
    "model": [
        ("L", "layers L", 64, "1"),
        ("h", "hidden size h", 8192, "1"),
        ("a", "attention heads a", 64, "1"),
        ("V", "vocabulary V", 50304, "1"),
        ("s", "sequence length s", 4096, "1"),
        ("m", "bytes of a dropout mask's element", 1, "0"),
        ("E", "experts of a layer E", 0, "0"),
        ("k", "experts of a token k", 2, "1"),
        ("f", "width of an expert f", 2048, "1"),
    ],
    "cut": [
        ("t", "tensor-parallel ranks t", 8, "1"),
        ("p", "stages p", 8, "1"),
        ("v", "chunks v", 1, "1"),
        ("c", "context-parallel ranks c", 1, "1"),
        ("d", "data-parallel ranks d", 8, "1"),
        ("e", "expert-parallel ranks e", 1, "1"),
        ("b", "micro-batch size b", 1, "1"),
        ("M", "microbatches M", 64, "1"),
    ],
    "machine": [
        ("peak", "peak of a GPU, 10¹² operations per second", 989, ANY),
        ("share", "percent of it that computing reaches", 50, ANY),
        ("reading", "bandwidth of its memory, 10⁹ bytes per second", 3350, ANY),
        ("memory", "size of its memory, 10⁹ bytes", 80, ANY),
        ("node", "GPUs of a node", 8, "1"),
        ("inside", "within a node, 10⁹ bytes per second", 450, ANY),
        ("between", "between nodes, 10⁹ bytes per second", 50, ANY),
        ("rate", "tokens per second and GPU", 1000, ANY),
    ],
}
"""Legend -> name, label, value, least."""


def calculator_form(up: str = "") -> str:
    """The calculator's HTML; javascripts/calculator.js fills in the results.

    `up` leads from the page to the site's root.
    """
    groups = "".join(map(_group, GROUPS))
    names = "".join(f"<option>{name}</option>" for name in choices.measured_runs())
    runs = {
        name: asdict(layout) | {"measured": measured}
        for name, (layout, measured) in choices.measured_runs().items()
    }
    return (
        '<form class="mm-calculator" id="mm-calculator" novalidate>'
        f"{groups}"
        '<p class="mm-of-runs"><label>fill with a run that was measured '
        f'<select class="mm-measured"><option></option>{names}</select></label></p>'
        f'<script type="application/json" class="mm-measured-runs">{json.dumps(runs)}</script>'
        '<p class="mm-calculator-said" role="status"></p>'
        '<table class="mm-results" aria-live="polite"><tbody></tbody></table></form>'
        f'<script src="{up}javascripts/formulas.js" defer></script>'
        f'<script src="{up}javascripts/calculator.js" defer></script>'
    )


def _group(legend: str) -> str:
    inputs = "".join(
        f'<label>{label}<input type="number" name="{name}" min="{least}" max="{MOST}" '
        f'step="{"any" if least == ANY else 1}" value="{value}"></label>'
        for name, label, value, least in GROUPS[legend]
    )
    if legend == "cut":
        options = "".join(f"<option>{word}</option>" for word in ("selective", "none", "full"))
        inputs += (
            f'<label>recompute<select name="recompute">{options}</select></label>'
            '<label class="mm-check"><input type="checkbox" name="sp" checked> sequence parallelism'
            "</label>"
        )
    return f'<fieldset class="mm-fields"><legend>{legend}</legend>{inputs}</fieldset>'
