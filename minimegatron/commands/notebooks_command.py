"""`minimegatron notebooks`: puts the notebooks into a folder of one's own, to run and to change.

Torch-free. Megatron has no counterpart. An installed package has them beside its other data; a
clone has them in `notebooks/`.
"""

import argparse
import importlib.util
from importlib import metadata
from pathlib import Path

from minimegatron.core.datasets.atomic_file import write_atomically

CLONE = Path(__file__).parents[2] / "notebooks"
FOLDER = "notebooks"

EXAMPLES = ("", "~/course")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to."""
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(FOLDER), help="default: ./%(default)s"
    )


def run(args: argparse.Namespace) -> None:
    """Copies what is not there yet. Raises ValueError where there is nothing to copy."""
    found = installed_notebooks()
    if not found:
        raise ValueError(
            "the notebooks were not installed with this package; they are in the folder "
            f"{FOLDER!r} of its repository"
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    new = [path for path in found if not (args.folder / path.name).exists()]
    for path in new:
        write_atomically(args.folder / path.name, path.read_bytes())
    kept = f"; left as they were: {len(found) - len(new)}" if len(new) < len(found) else ""
    print(f"Notebooks put into {args.folder}: {len(new)}{kept}")
    if importlib.util.find_spec("jupyterlab") is None:
        print("What runs them is not installed yet:  pip install 'minimegatron[notebooks]'")
    print(f"Open the first one:  jupyter lab {args.folder / found[0].name}")


def installed_notebooks() -> list[Path]:
    """Every notebook, in its order; none if there are none."""
    if CLONE.is_dir():
        return sorted(CLONE.glob("*.ipynb"))
    files = metadata.files("minimegatron") or []
    return sorted(Path(file.locate()).resolve() for file in files if file.suffix == ".ipynb")
