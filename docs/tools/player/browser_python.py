"""Python for the page: Pyodide, fetched once, and the planner's modules, which need no torch.

Called by: `build_docs`. Calls: npm, `package`. Writes below the site's folder:

    python/                        Pyodide; planner.zip: the planner and `in_browser`
    javascripts/workbench_data.js  the schedules' own source to start from, and what Python weighs

Nothing of Pyodide is in the repository. Where npm is not there, or has no network, the page says so
and everything else works.
"""

import ast
import hashlib
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

from player.emit_orders import script
from source.package import Package
from source.places import ROOT, write

VERSION = "314.0.7"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
CACHE = ROOT / "build" / "pyodide"
HERE = Path(__file__).resolve().parent
ENTRY = HERE / "in_browser.py"
BESIDE = (HERE / "__init__.py", HERE / "plan_words.py")
"""What the entry imports that is not of the package."""

EXAMPLES = HERE / "example_orders.py"
LOOPS = "minimegatron.core.pipeline_parallel.loops"
WRITTEN = "minimegatron.planner.written_loops"
ORDERS = "minimegatron.core.orders.orders"
SCHEDULES = {
    "gpipe": (WRITTEN, ["gpipe"]),
    "1f1b": (LOOPS, ["one_f_one_b"]),
    "interleaved": (LOOPS, ["InterleavedRun", "_arrived", "interleaved_1f1b"]),
    "combined": (WRITTEN, ["_step", "combined"]),
}
"""Loops to start from, with their messages: of a module these definitions, the loop last."""

NOTICE = f"""Pyodide {VERSION}, unchanged, from the npm package `pyodide`: CPython for the browser.
Licence: Mozilla Public License 2.0. Source: https://github.com/pyodide/pyodide
planner.zip holds modules of minimegatron, under this project's own licence.
"""


def write_browser_python(package: Package, out: Path) -> None:
    """Everything that "Edit the Python" loads."""
    folder, is_missing = out / "python", False
    try:
        archive = fetch_pyodide()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        is_missing = True
        print(f"The site has no Python for the browser: npm could not fetch it ({error})")
    else:
        folder.mkdir(parents=True)
        unpack(archive, folder)
        (folder / "planner.zip").write_bytes(planner_zip(package, CACHE / "planner.zip"))
        (folder / "README.txt").write_text(NOTICE)
    data = {
        "texts": starting_texts(package),
        "python": {
            "name": f"Pyodide {VERSION}",
            "isMissing": is_missing,
            "sizes": {
                path.name: path.stat().st_size for path in folder.glob("*") if path.suffix != ".txt"
            },
        },
    }
    write(out / "javascripts" / "workbench_data.js", script(data, "workbench"))


# -- Pyodide --


def fetch_pyodide(folder: Path = CACHE) -> Path:
    """The package's archive, from an earlier build or from the registry that npm is set up for."""
    archive = folder / f"pyodide-{VERSION}.tgz"
    if not archive.exists():
        if shutil.which("npm") is None:
            raise FileNotFoundError("npm is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "pack", "--silent", "--fetch-retries=1", f"pyodide@{VERSION}"],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=120,
        )
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        archive.unlink()
        raise ValueError(f"pyodide-{VERSION}.tgz has the SHA-256 {found}, expected {SHA256}")
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """The few files that a browser needs."""
    with tarfile.open(archive) as tar:
        for name in FILES:
            (folder / name).write_bytes(tar.extractfile(f"package/{name}").read())


# -- The planner --


def needed_modules(package: Package, source: str) -> list[str]:
    """The package's modules that a text imports, and those that they import.

    Only imports in a module's body count: what a function imports is not there in the page.
    """
    needed, waiting = set(), _imported(package, ast.parse(source))
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += _imported(package, ast.parse("\n".join(package.pages[name].lines)))
    return sorted(needed)


def _imported(package: Package, tree: ast.Module) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    places = [package.find(name) for name in names]
    modules = [f"{name}".rpartition(".")[0] for name in names]
    return [place.page.module for place in places if place] + [
        name for name in modules if name in package.pages
    ]


def planner_zip(package: Package, path: Path) -> bytes:
    """The modules and their packages' `__init__`, as one archive that Python can unpack."""
    # `minimegatron/__init__.py` imports the old names of modules.
    beside = {ENTRY.name: ENTRY} | {f"{HERE.name}/{file.name}": file for file in BESIDE}
    text = "\n".join(["import minimegatron.moved", *(file.read_text() for file in beside.values())])
    names = {package.pages[name].path for name in needed_modules(package, text)}
    for name in list(names):
        parents = Path(name).parents
        names |= {str(folder / "__init__.py") for folder in parents if folder != Path(".")}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(names):
            # One date for all, so that equal sources make equal archives.
            info = zipfile.ZipInfo(name)
            archive.writestr(info, (ROOT / name).read_bytes(), zipfile.ZIP_DEFLATED)
        for name, file in beside.items():
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return path.read_bytes()


# -- Where a reader starts --


def starting_texts(package: Package) -> dict[str, dict[str, str]]:
    """Name -> {kind: "schedule" (with its messages) or "order" (work alone), source: the text}."""
    texts = {
        name: {"kind": "schedule", "source": text_of(package.pages[module].lines, names, module)}
        for name, (module, names) in SCHEDULES.items()
    }
    breadth_first = text_of(package.pages[ORDERS].lines, ["breadth_first"], ORDERS)
    texts["breadth-first"] = {"kind": "order", "source": breadth_first}
    lines = EXAMPLES.read_text().splitlines()
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef):
            name = ast.literal_eval(node.decorator_list[0].args[0])
            text = text_of(lines, [node.name], keeps_decorators=True)
            texts[name] = {"kind": "order", "source": text}
    return texts


def text_of(
    lines: list[str], names: list[str], module: str = "", keeps_decorators: bool = False
) -> str:
    """Definitions of a file as a file of their own, with the imports that they use.

    `module` is what the file is imported as: a text takes the file's other definitions from there.
    Without their decorators definitions register nothing: the page takes the last function.
    """
    tree = ast.parse("\n".join(lines))
    found = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    nodes = [found[name] for name in names]
    first_lines = []
    for node in nodes:
        decorators = node.decorator_list if keeps_decorators else []
        first_lines.append(min([node.lineno, *(d.lineno for d in decorators)]))
        node.decorator_list = decorators
    used = {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}
    imports = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            kept = [alias.name for alias in node.names if alias.name in used]
            if kept:
                imports.append(f"from {node.module} import {', '.join(kept)}")
    if own := sorted(used & found.keys() - set(names)):
        imports.append(f"from {module} import {', '.join(own)}")
    texts = [
        "\n".join(lines[first - 1 : node.end_lineno])
        for first, node in zip(first_lines, nodes, strict=True)
    ]
    return "\n\n\n".join(["\n".join(imports), *texts]) + "\n"
