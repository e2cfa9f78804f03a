"""Two flags of older launch scripts, which change nothing here.

Counterpart: `--local-rank` and `--data-impl` of earlier `megatron.training.arguments`; today's has
neither.

    --local-rank N     added by `python -m torch.distributed.launch`; the environment says the same
    --data-impl mmap   indexed datasets were once read in several ways; this one is left
"""

import argparse

from minimegatron.training.config import Arguments


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """Both, None where a script does not have them."""
    group = parser.add_argument_group("Older launch scripts (no flags of today's Megatron)")
    group.add_argument(
        "--local-rank",
        "--local_rank",
        dest="given_local_rank",
        type=int,
        help="This process, of those on this machine; LOCAL_RANK in the environment says it too.",
    )
    group.add_argument("--data-impl", help="How to read indexed datasets: mmap.")


def check_old_flags(args: argparse.Namespace) -> None:
    """Raises ValueError, with the remedy, for a value that would change something."""
    if args.given_local_rank not in (None, args.local_rank):
        raise ValueError(
            f"--local-rank is {args.given_local_rank}, but LOCAL_RANK is {args.local_rank} in the "
            "environment; drop it, the launcher says both"
        )
    if args.data_impl not in (None, "mmap"):
        raise ValueError(
            f"--data-impl {args.data_impl} is not there any more; drop it, or give mmap: indexed "
            "datasets are mapped into memory"
        )


def print_old_flags(args: Arguments) -> None:
    """A line for each flag that was given."""
    if args.given_local_rank is not None:
        print("--local-rank: taken from LOCAL_RANK in the environment, which says the same")
    if args.data_impl is not None:
        print("--data-impl mmap: the only way to read indexed datasets, with or without this flag")
