"""What is refused of a run's global objects.

Megatron has no counterpart: it asserts.
"""

from typing import NoReturn


def refuse_unset(name: str) -> NoReturn:
    """Raises RuntimeError: a program asks for an object that no run has made yet."""
    raise RuntimeError(
        f"the global {name} is not set yet; call pretrain or initialize_megatron first"
    )


def refuse_second_set() -> NoReturn:
    """Raises RuntimeError: a run begins in a process that has another one's objects."""
    raise RuntimeError("initialize_megatron was called twice; call destroy_global_vars between")
