"""What a value is, as far as the source says: an object of a class of the package, a list of such, ...

Called by: `classes`, `scopes`, `receivers`. Calls nothing.

None stands for everything that is not known; whoever asks says nothing then.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Symbol = tuple[str, str]
"""Module and qualified name."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of this class of the package, or of one below it."""

    cls: Symbol


@dataclass(frozen=True, slots=True)
class ClassOf:
    """The class itself."""

    cls: Symbol


@dataclass(frozen=True, slots=True)
class Parent:
    """What `super()` gives in a method of this class."""

    cls: Symbol


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method of the package."""

    symbol: Symbol
    receiver: Symbol | None = None
    """The class of the object that a method was taken from."""


@dataclass(frozen=True, slots=True)
class ModuleOf:
    """A module of the package."""

    name: str


@dataclass(frozen=True, slots=True)
class Many:
    """A list, an iterator, a set."""

    element: "Kind | None"


@dataclass(frozen=True, slots=True)
class Table:
    """A dict."""

    key: "Kind | None"
    value: "Kind | None"


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple of known length."""

    parts: "tuple[Kind | None, ...]"


@dataclass(frozen=True, slots=True)
class Entered:
    """A context manager that is not of a class of the package; `with` gives `value`."""

    value: "Kind | None"


@dataclass(frozen=True, slots=True)
class Mark:
    """What says nothing about the kind of a name that is bound several times."""

    what: str


Kind = Instance | ClassOf | Parent | Function | ModuleOf | Many | Table | Several | Entered | Mark

NOTHING = Mark("None")
"""The value None: what may be None is of the kind that it is otherwise."""
ITSELF = Mark("itself")
"""A name bound to something made of itself, as in `groups = groups or default()`."""


def joined(kinds: Iterable[Kind | None]) -> Kind | None:
    """What a value is that is one of these; None unless they agree, apart from the value None.

    >>> joined([Many(None), NOTHING]), joined([Many(None), Instance(("m", "C"))]), joined([NOTHING])
    (Many(element=None), None, Mark(what='None'))
    """
    every = set(kinds)
    found = every - {NOTHING, ITSELF}
    if len(found) == 1:
        return found.pop()
    return NOTHING if not found and NOTHING in every else None


def element_of(kind: Kind | None) -> Kind | None:
    """What a loop over it gives.

    >>> element_of(Several((NOTHING, Many(None))))
    Many(element=None)
    """
    match kind:
        case Many(element):
            return element
        case Table(key, _):
            return key
        case Several(parts):
            return joined(parts)
    return None
