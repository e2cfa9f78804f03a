"""The picture of the package: which part imports from which, read off the imports.

Called by: `site_pages`. Calls: `package`, `pictures`.
"""

from pictures import pictures
from source.package import Package

ORDERS = "core.orders"
OF_ORDERS = ("interleaving_checks", "loop_of_pairs", "loops", "schedule_table")
"""Of core.pipeline_parallel, what plans need too: without torch, as schedules are data there."""
RUNNER = ("planned_schedule", "runnable", "shared_step")
"""Of core.orders, what trains: `schedules` chooses it, as one of its own."""
OF_CONFIG = "core.ssm.mamba_config"
"""A part of `TransformerConfig`; what else is in its package imports layers."""


def component(module: str) -> str:
    """
    >>> component("minimegatron.core.optimizer.clip_grads"), component("minimegatron.training.utils")
    ('core.optimizer', 'training')
    """
    parts = module.split(".")[1:]
    if not parts:
        return ""
    if parts[:2] == ["core", "orders"] and parts[-1] in RUNNER:
        return "core.pipeline_parallel"
    if parts[:2] == ["core", "pipeline_parallel"] and parts[-1] in OF_ORDERS:
        return ORDERS
    if ".".join(parts) == OF_CONFIG:
        return "core.transformer"
    return ".".join(parts[:2]) if parts[0] == "core" else parts[0]


def edges(package: Package) -> dict[str, set[str]]:
    """Component -> the components that its modules import."""
    found: dict[str, set[str]] = {}
    for name, page in package.pages.items():
        here = component(name)
        if not here:
            continue
        found.setdefault(here, set())
        for target in {*page.imports, *page.aliases.values()}:
            place = package.find(target)
            there = component(place.page.module) if place else ""
            if there and there != here:
                found[here].add(there)
    return found


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rows, top first: each component right below the lowest of those that import it.

    Raises ValueError for a cycle.

    >>> levels({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": set()})
    [['a', 'd'], ['b'], ['c']]
    """
    importers: dict[str, set[str]] = {name: set() for name in graph}
    for name, imported in graph.items():
        for other in imported:
            importers[other].add(name)
    depth: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise ValueError("import cycle between " + " and ".join([*path, name]))
        if name not in depth:
            above = (visit(other, (*path, name)) for other in importers[name])
            depth[name] = 1 + max(above, default=-1)
        return depth[name]

    for name in graph:
        visit(name, ())
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in sorted(graph):
        rows[depth[name]].append(name)
    return rows


def architecture_svg(package: Package) -> str:
    """Boxes in rows; imports point downward only."""
    graph = edges(package)
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, page in package.pages.items():
        here = component(name)
        counts[here] = counts.get(here, 0) + len(page.lines) - 1
        first.setdefault(here, name)
    rows = []
    for row in levels(graph):
        # Long names need wide boxes.
        per_row = 3 if any(len(name) > 24 for name in row) else 4
        for start in range(0, len(row), per_row):
            part = row[start : start + per_row]
            rows.append([(n, f"{counts[n]} lines", f"source/{first[n]}.html") for n in part])
    title = "The parts of minimegatron; each imports only from rows below its own"
    return pictures.layers_picture(rows, title)
