"""What is computed while a hop is under way, told by which keys it is computed from.

Megatron has no counterpart.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_MATRICES = (
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "bmm",
    "baddbmm",
    "einsum",
    "tensordot",
    "linear",
)
PRODUCTS = (*_MATRICES, "mul", "__mul__", "__rmul__", "multiply", "scaled_dot_product_attention")
"""Calls of torch, one of which no block of attention can do without, forward or backward."""
EMPTY = ("empty", "zeros", "ones", "full")
"""In the names of calls that take shape and dtype of a tensor, and none of its numbers."""
QUERY = -1
Marks = frozenset[int]
"""What a tensor is made of: QUERY, and for keys and values the hops that they have made."""


class Company(TorchFunctionMode):
    """Follows query, keys and values through every call of torch.

    A block is a product of something made of the query and of keys or values, as they are. `hops`
    are those under way, each with `has_company`.
    """

    def __init__(self, query: torch.Tensor, keys: Iterable[torch.Tensor]):
        super().__init__()
        self.under_way: list[Any] = []
        self._kept: list[torch.Tensor] = []
        self._marks: dict[int, Marks] = {}
        self._scored: set[int] = set()
        self._scored_alone: set[int] = set()
        self.num_scores: Counter[int] = Counter()
        """By the hops that keys had made: numbers in the products of these keys and the query."""
        self._mark(query, frozenset([QUERY]))
        for key in keys:
            self._mark(key, frozenset([0]))

    @property
    def num_hidden(self) -> int:
        """How many hops' keys met their queries only while something was under way."""
        return len(self._scored - self._scored_alone)

    def arrive(self, sent: Iterable[torch.Tensor], came: Iterable[torch.Tensor]) -> bool:
        """Another rank's keys and values come where this rank's are sent; whether some are."""
        are_keys = [self._are_keys(self.marks(one)) for one in sent]
        for one, other, is_key in zip(sent, came, are_keys, strict=True):
            marks = (mark + 1 for mark in self.marks(one)) if is_key else ()
            self._mark(other, frozenset(marks))
        return any(are_keys)

    def marks(self, tensor: torch.Tensor) -> Marks:
        """Of what a tensor was made. Those that share memory share marks."""
        return self._marks.get(tensor.untyped_storage().data_ptr(), frozenset())

    def _mark(self, tensor: torch.Tensor, marks: Marks) -> None:
        # Kept, so that no other tensor gets its address.
        self._kept.append(tensor)
        self._marks[tensor.untyped_storage().data_ptr()] = marks

    @staticmethod
    def _are_keys(marks: Marks) -> bool:
        return bool(marks) and QUERY not in marks

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        found = [self.marks(one) for one in given]
        returned = function(*args, **kwargs)
        if name in PRODUCTS:
            self._notice(found)
            self._count(name, found, returned)
        if not any(word in name for word in EMPTY):
            made = args[:1] if name == "__setitem__" else tree_leaves(returned)
            replaced = name == "copy_" or name == "__setitem__" and args[1] in (..., slice(None))
            for one in made:
                if isinstance(one, torch.Tensor):
                    self._mark(one, frozenset().union(*found[1 if replaced else 0 :]))
        return returned

    def _notice(self, found: list[Marks]) -> None:
        keys = [marks for marks in found if self._are_keys(marks)]
        if not keys or not any(QUERY in marks for marks in found):
            return
        travelling = [hop for hop in self.under_way if not hop.is_waited]
        for hop in travelling:
            hop.has_company = True
        # Later products of a block may be made after the hop; its scores are made once.
        if frozenset([QUERY]) in found:
            self._scored.update(*keys)
            if not travelling:
                self._scored_alone.update(*keys)

    def _count(self, name: str, found: list[Marks], returned: Any) -> None:
        keys = {marks for marks in found if self._are_keys(marks) and len(marks) == 1}
        if name in _MATRICES and len(keys) == 1 and frozenset([QUERY]) in found:
            (hop,) = keys.pop()
            self.num_scores[hop] += returned.numel()
