"""The rerun state machine of this process: one place, so that iterators can ask it too.

Torch-free. Counterpart: the global of `megatron.core.rerun_state_machine`. That module here puts a
machine in, and has these functions under Megatron's names.
"""

from typing import Any

_machine: Any = None


def this_machine() -> Any:
    """The one that was put in last; None before there is any."""
    return _machine


def put_machine(machine: Any) -> None:
    """From now on `machine` is the one."""
    global _machine
    _machine = machine
