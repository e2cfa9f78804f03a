"""The rerun state machine of this process: one place, so that iterators can ask it too.

Torch-free. Counterpart: the global of `megatron.core.rerun_state_machine`. That module here puts a
machine in.
"""

from typing import Any

machine: Any = None
"""It; see `get_rerun_state_machine`."""


def get_rerun_state_machine() -> Any:
    """This process's. Before `initialize_rerun_state_machine` it is one that is disabled; None where
    `core.rerun_state_machine` is not even imported.
    """
    return machine


def set_rerun_state_machine(new_machine: Any) -> None:
    """Puts it in this process's place, until `destroy_rerun_state_machine`."""
    global machine
    machine = new_machine
