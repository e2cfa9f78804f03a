"""Notices what torch asks of groups over shared memory.

torch calls the methods of such a group directly. Before those of gloo and NCCL stands an operation,
which a dispatch mode sees. Megatron has no counterpart.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minimegatron.backend import METHODS, SharedMemoryGroup

MOVE_NOTHING = {
    *("abort", "shutdown", "set_timeout", "split_group", "monitored_barrier"),
    *("_start_coalescing", "_end_coalescing"),
}
NAMES = [name for method in METHODS if method not in MOVE_NOTHING for name in METHODS[method]]

Notice = Callable[[str, dict[str, Any]], None]


@contextmanager
def methods_noticed(notice: Notice) -> Iterator[None]:
    """Within it, `notice` is told of each collective and message that torch asks such a group for.

    It gets the method's name and its arguments by name; `self` is the group.
    """
    watch, methods = _Watch(notice), {name: vars(SharedMemoryGroup)[name] for name in NAMES}
    for name, method in methods.items():
        setattr(SharedMemoryGroup, name, watch.noticed(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(SharedMemoryGroup, name, method)


class _Watch:
    def __init__(self, notice: Notice):
        self._notice, self._is_inside = notice, False

    def noticed(self, method: Callable) -> Callable:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if self._is_inside:  # the group's own methods call each other
                return method(*args, **options)
            self._notice(method.__name__, dict(signature.bind(*args, **options).arguments))
            self._is_inside = True
            try:
                return method(*args, **options)
            finally:
                self._is_inside = False

        return call
