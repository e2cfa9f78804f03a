"""Ranges that NVIDIA's profiler shows in its timeline.

Counterpart: `megatron.core.utils`, where these functions can be imported here too.
"""

import sys

import torch

_nvtx_enabled = False
_nvtx_ranges: list[str] = []


def configure_nvtx_profiling(enabled: bool) -> None:
    """Whether `nvtx_range_push` and `nvtx_range_pop` mark ranges; at first they do nothing."""
    global _nvtx_enabled
    _nvtx_enabled = enabled


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Begins a range of Nsight Systems' timeline; `nvtx_range_pop` ends it.

    Its name is `msg`, by default the calling function's module and name, then "." and `suffix` if
    given. Does nothing before `configure_nvtx_profiling(True)`. Without a GPU the names are kept and
    compared, and nothing is marked.
    """
    if not _nvtx_enabled:
        return
    name = _nvtx_name(msg, suffix)
    _nvtx_ranges.append(name)
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(name)


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """Ends the range begun last, which must have the same name: give `msg` and `suffix` again.

    Raises RuntimeError if no range has begun, ValueError if the one begun last has another name.
    """
    if not _nvtx_enabled:
        return
    name = _nvtx_name(msg, suffix)
    if not _nvtx_ranges:
        raise RuntimeError(f"no range has begun; call nvtx_range_push() before the end of {name!r}")
    if name != _nvtx_ranges[-1]:
        raise ValueError(
            f"the range begun last is {_nvtx_ranges[-1]!r}, not {name!r}; end the ranges in the "
            "opposite order, each in the function that began it or by its name"
        )
    _nvtx_ranges.pop()
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def _nvtx_name(msg: str | None, suffix: str | None) -> str:
    """Called by the two functions above: their caller is two frames away."""
    if msg is None:
        caller = sys._getframe(2)
        msg = f"{caller.f_globals['__name__']}.{caller.f_code.co_name}"
    return msg if suffix is None else f"{msg}.{suffix}"
