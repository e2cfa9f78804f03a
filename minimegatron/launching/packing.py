"""A function and its arguments on the way to ranks in other processes, and their results back.

Megatron needs no such module: there each rank runs a program of its own.
"""

import contextlib
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

try:
    import cloudpickle
except ImportError:  # an extra
    cloudpickle = None


@dataclass(frozen=True)
class PackedCall:
    """The function and its arguments, on the way to the ranks."""

    packed: bytes
    by_value: bool
    sources: dict[str, Any] = field(default_factory=dict)

    def unpack(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """On a rank: the function and its arguments."""
        linecache.cache.update(self.sources)
        return pickle.loads(self.packed)

    def pack_result(self, result: Any) -> bytes:
        """On a rank: what goes back to the caller."""
        # An object of a class that came by value can only go back the same way.
        return (cloudpickle if self.by_value else pickle).dumps(result)


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> PackedCall:
    """`fn` and `args` for the way into the ranks. Tensors go by value, for torch's own
    shared-memory way needs the sender to outlive the reader.

    What ranks can import goes by name, with plain pickle. What they cannot, such as a function of a
    notebook's cell or a lambda, goes by value, where cloudpickle is installed.
    """
    is_interactive = not can_ranks_import_main()
    problem = f"{fn!r} is defined {_place_of_main()}, where ranks cannot import it"
    # There, pickle would name what ranks cannot import, and not notice; without cloudpickle to ask,
    # go by where `fn` comes from.
    is_of_module = cloudpickle is None and getattr(fn, "__module__", None) != "__main__"
    if not is_interactive or is_of_module:
        try:
            return PackedCall(pickle.dumps((fn, args)), by_value=False)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            problem = f"{fn!r} and its arguments cannot be sent to the ranks ({error})"
    if cloudpickle is None:
        raise ValueError(
            f"{problem}; pip install 'minimegatron[notebooks]', whose cloudpickle sends it by value, "
            "or define the function at the top level of a module, and pass plain values and tensors"
        )
    try:
        return PackedCall(cloudpickle.dumps((fn, args)), by_value=True, sources=_unsaved_sources())
    except Exception as error:  # cloudpickle passes on whatever an object's own pickling raises
        raise ValueError(
            f"{fn!r} and its arguments cannot be sent to the ranks ({error}); pass plain values and "
            "tensors, and make what cannot be sent inside the function"
        ) from error


def can_ranks_import_main() -> bool:
    """Whether the ranks' `multiprocessing` finds the program again: as a file, or as a module.

    Not one typed in, read from standard input or given by `-c`, nor a package's or a zip file's
    `__main__.py`, which it leaves out.
    """
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return name.rpartition(".")[2] != "__main__"
    return os.path.isfile(getattr(main, "__file__", None) or "")


@contextlib.contextmanager
def main_left_out() -> Iterator[None]:
    """Within it, a new process does not run the program's file again if there is none to run."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None or can_ranks_import_main():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def _place_of_main() -> str:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return "in an interactive session" if path is None else f"in {path}"


def _unsaved_sources() -> dict[str, Any]:
    """The lines of code that is in no file, such as a notebook's cells: a rank's traceback shows
    them, if it has them."""
    return {
        name: entry
        for name, entry in list(linecache.cache.items())  # another thread may add some meanwhile
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
    }
