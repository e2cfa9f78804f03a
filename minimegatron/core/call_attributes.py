"""What observers are told of a call: read from its arguments.

Torch-free. Megatron has no counterpart. Each function is what a `@traced` link has as `describe`.
"""

from typing import Any


def of_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of `forward_step`."""
    return {
        "microbatch": arguments["current_microbatch"],
        "chunk": arguments["vp_stage"] or 0,
        "is_last_stage": arguments["is_last_stage"],
    }


def of_loss(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of `forward_step_calc_loss`."""
    return {"chunk": arguments["vp_stage"] or 0}
