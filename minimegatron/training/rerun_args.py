"""Flags of steps that are run again, and which values cannot work.

Counterpart: those checks of `megatron.training.arguments`.
"""

import argparse

from minimegatron.core.rerun.tracker import ResultTracker


def check_reruns(args: argparse.Namespace) -> None:
    """Raises ValueError, with the remedy, for the first flag that would do nothing."""
    wrong = [number for number in args.iterations_to_skip or () if number < 1]
    if wrong:
        raise ValueError(f"--iterations-to-skip is {wrong[0]}; give 1 or more: 1 is the first")
    if args.error_injection_rate and args.rerun_mode != "validate_results":
        raise ValueError(
            f"--error-injection-rate {args.error_injection_rate} with --rerun-mode "
            f"{args.rerun_mode}, in which no step is run again for a bad result; add --rerun-mode "
            "validate_results"
        )
    if args.error_injection_type != "transient_error" and not args.error_injection_rate:
        raise ValueError(
            f"--error-injection-type {args.error_injection_type} without --error-injection-rate, so "
            "nothing is injected; add --error-injection-rate 1000, or another rate"
        )
    ResultTracker(args.result_rejected_tracker_filename)  # raises where it cannot be appended to
