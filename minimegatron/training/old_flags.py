"""Flags that are taken and change nothing here, because what they ask for is always so.

Counterpart: `--local-rank` and `--data-impl` of earlier `megatron.training.arguments`, and
`--exit-signal-handler` of today's.

    --local-rank N          added by `python -m torch.distributed.launch`; the environment says the same
    --data-impl mmap        indexed datasets were once read in several ways; this one is left
    --exit-signal-handler   SIGTERM saves and ends a run, with or without it
"""

import argparse

from minimegatron.training.config import Arguments


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """All three. The arguments hold them where a script gives them, and only there."""
    group = parser.add_argument_group("Flags that change nothing here")
    group.add_argument(
        "--local-rank",
        "--local_rank",
        dest="given_local_rank",
        type=int,
        default=argparse.SUPPRESS,
        help="This process, of those on this machine; LOCAL_RANK in the environment says it too.",
    )
    group.add_argument(
        "--data-impl", default=argparse.SUPPRESS, help="How to read indexed datasets: mmap."
    )
    group.add_argument(
        "--exit-signal-handler",
        action="store_true",
        default=argparse.SUPPRESS,
        help="Save and end on SIGTERM, which is always done.",
    )


def check_old_flags(args: argparse.Namespace) -> None:
    """Raises ValueError, with the remedy, for a value that would change something."""
    given = vars(args)
    if given.get("given_local_rank", args.local_rank) != args.local_rank:
        raise ValueError(
            f"--local-rank is {args.given_local_rank}, but LOCAL_RANK is {args.local_rank} in the "
            "environment; drop it, the launcher says both"
        )
    if given.get("data_impl", "mmap") != "mmap":
        raise ValueError(
            f"--data-impl {args.data_impl} is not there any more; drop it, or give mmap: indexed "
            "datasets are mapped into memory"
        )


def print_old_flags(args: Arguments) -> None:
    """A line for each flag that was given."""
    if "given_local_rank" in args.extra:
        print("--local-rank: taken from LOCAL_RANK in the environment, which says the same")
    if "data_impl" in args.extra:
        print("--data-impl mmap: the only way to read indexed datasets, with or without this flag")
    if "exit_signal_handler" in args.extra:
        print("--exit-signal-handler: SIGTERM saves and ends a run, with or without this flag")
