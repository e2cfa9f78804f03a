"""Nested dicts and lists: what a checkpoint keeps as boxes, what as JSON, and both together again.

Counterpart: `megatron.core.dist_checkpointing.state_dict_utils`.

Order of a save: `built`, then `tensors_in` and `plain_part`. Order of a load: `built`, `tensors_in`,
and once their memory is filled, `merged`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from minimegatron.core.json_text import check_depth

NOTHING = object()
"""Stands where a tree has no plain object."""


@dataclass
class _Built:
    """What a factory made, and how it becomes one tensor again."""

    tree: Any
    merge: Callable[[Any], torch.Tensor]


def built(tree: Any) -> Any:
    """`tree`, in new dicts and lists, with what its factories build."""
    if isinstance(tree, dict):
        return {key: built(part) for key, part in tree.items()}
    if isinstance(tree, list):
        return [built(part) for part in tree]
    if isinstance(tree, ShardedTensorFactory):
        return _Built(built(tree.build()), tree.merge_fn)
    return tree


def tensors_in(tree: Any) -> Iterator[ShardedTensor]:
    """Every ShardedTensor of a tree that is built."""
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, _Built):
        yield from tensors_in(tree.tree)
    elif isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


def plain_part(tree: Any) -> Any:
    """What is saved as JSON; NOTHING if there is none of it.

    Of a dict, the plain objects stay. A list with a plain object keeps its length, and None takes the
    place of everything else.
    """
    if isinstance(tree, ShardedTensor | LocalNonpersistentObject | _Built):
        return NOTHING
    if not isinstance(tree, dict | list) or not tree:
        return tree
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    parts = {key: plain_part(part) for key, part in items}
    if all(part is NOTHING for part in parts.values()):
        return NOTHING
    if isinstance(tree, list):
        return [None if part is NOTHING else part for part in parts.values()]
    return {key: part for key, part in parts.items() if part is not NOTHING}


def merged(plain: Any, tree: Any) -> Any:
    """What a load returns: the plain objects that were saved, and the tensors of `tree`.

    `tree` is built, and its tensors are filled. Its own plain objects do not count: what was not saved
    is not there.
    """
    if isinstance(tree, ShardedTensor):
        return tree.data
    if isinstance(tree, LocalNonpersistentObject):
        return tree.unwrap()
    if isinstance(tree, _Built):
        return tree.merge(merged(NOTHING, tree.tree))
    if isinstance(tree, dict):
        found = dict(plain) if isinstance(plain, dict) else {}
        for key, part in tree.items():
            value = merged(found.get(key, NOTHING), part)
            if value is not NOTHING:
                found[key] = value
        return found or plain
    if isinstance(tree, list):
        saved = plain if isinstance(plain, list) else []
        there = [*saved, *[NOTHING] * (len(tree) - len(saved))]
        values = [merged(*pair) for pair in zip(there, tree, strict=False)]
        if all(value is NOTHING for value in values):
            return plain
        return [None if value is NOTHING else value for value in values]
    return plain


def why_not_json(value: Any, place: str = "state_dict") -> str | None:
    """What in `value` cannot be read back from JSON, and what to do; None if all of it can.

    A tuple is written, and comes back as a list.

    >>> why_not_json({"lr": 0.1, "state": {0: "x"}})
    "state_dict['state'] has the key 0; make it text, or wrap what is below it"
    """
    if isinstance(value, dict | list | tuple):
        try:
            check_depth(value, place)
        except ValueError as error:
            return str(error)
    return _why_not_json(value, place)


def _why_not_json(value: Any, place: str) -> str | None:
    if value is None or isinstance(value, str | bool | int | float):
        return None
    if isinstance(value, torch.Tensor):
        return (
            f"{place} is a Tensor; make it a ShardedTensor, which says where it lies in the whole"
        )
    if not isinstance(value, dict | list | tuple):
        return (
            f"{place} is a {type(value).__name__}, and a checkpoint holds text, numbers, True, False, "
            "None, lists and dicts of them; save it as such, or leave it out"
        )
    is_dict = isinstance(value, dict)
    for key, part in value.items() if is_dict else enumerate(value):
        if is_dict and not isinstance(key, str):
            return f"{place} has the key {key!r}; make it text, or wrap what is below it"
        problem = _why_not_json(part, f"{place}[{key!r}]")
        if problem is not None:
            return problem
    return None
