"""A is mended in the file, and predicted as it is now.

Expected: Version A of your file is not the one that was handed out. The check
runs the handed-out one.
"""

from collections.abc import Iterator

RIGHT = "C"


def version_a(num_warmup_microbatches, num_microbatches, grad_sync) -> Iterator[None]:
    """Gradients leave with the last backward of the cool-down."""
    for _ in range(num_warmup_microbatches, num_microbatches):  # steady state
        yield
    grad_sync.enable()
    for i in range(num_warmup_microbatches):  # cool-down
        if i == num_warmup_microbatches - 1:
            grad_sync.enable()
        yield


def version_b(num_warmup_microbatches, num_microbatches, grad_sync) -> Iterator[None]:
    """Gradients leave with the last backward of the steady state, and of the cool-down."""
    for i in range(num_warmup_microbatches, num_microbatches):  # steady state
        if i == num_microbatches - 1:
            grad_sync.enable()
        yield
    grad_sync.disable()
    for i in range(num_warmup_microbatches):  # cool-down
        if i == num_warmup_microbatches - 1:
            grad_sync.enable()
        yield


def version_c(num_warmup_microbatches, num_microbatches, grad_sync) -> Iterator[None]:
    """Gradients leave with the last backward of the steady state if no cool-down follows."""
    for i in range(num_warmup_microbatches, num_microbatches):  # steady state
        if i == num_microbatches - 1 and num_warmup_microbatches == 0:
            grad_sync.enable()
        yield
    for i in range(num_warmup_microbatches):  # cool-down
        if i == num_warmup_microbatches - 1:
            grad_sync.enable()
        yield


def num_backwards_that_send(version: str, pp_size: int, pp_rank: int, num_microbatches: int) -> int:
    """During how many backwards of stage `pp_rank` gradient communication is let go."""
    num_warmup = min(pp_size - pp_rank - 1, num_microbatches)
    num_steady = num_microbatches - num_warmup
    if version == "A":
        return 1
    if version == "B":
        return (1 if num_steady > 0 else 0) + (1 if num_warmup > 0 else 0)
    return 1
