"""Checks what only a GPU can show: `python3 -m tests.gpu`, from the root of the repository.

    python3 -m tests.gpu [--limit-minutes 8] [--only NAME ...] [--report FILE] [--rehearse] [--gpus N]

Nothing is installed; this needs torch, numpy, tqdm; a part that needs more says so.
Each part runs in a process of its own with a time-out of its own, and the next one runs whatever came
of it. The report (docs/gpu/report.json) and a page of it (build/gpu.md) are written after every part;
with `--report`, both there.
With `--rehearse`, the parts do the same in small on the CPU; such a report stays in build.
"""

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

from tests.gpu.parts import PARTS  # noqa: E402
from tests.gpu.report import FAILED, Check  # noqa: E402

REPORT = ROOT / "docs" / "gpu" / "report.json"
REHEARSAL = ROOT / "build" / "gpu_rehearsal.json"
NO_GPU = "Nothing was checked: torch finds no GPU here. With --rehearse, the CPU stands for one."


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if a part that was run does not hold, 2 if torch does not work here."""
    begun = time.monotonic()
    args = _arguments(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    check = Check(
        args.report or (REHEARSAL if args.rehearse else REPORT),
        deadline=begun + 60 * args.limit_minutes,
        device="cpu" if args.rehearse else "cuda",
        is_quick=args.rehearse,
        commit=args.commit,
        say=_say,
    )
    works = check.probe(args.gpus if args.rehearse else None)
    if works and not check.report["num_gpus"]:
        _say(NO_GPU)
        return 0
    if not works:
        check.write()
        _say("\n".join([check.report["problem"], *check.report["log"]]))
        return 2
    folder = ROOT / "build" if check.path == REPORT else check.path.parent

    def after_part(text: str) -> None:
        _say(text)
        _write_page(check.path, folder)

    check.say = after_part
    _say(f"{check.report['num_gpus']} x {check.report['gpu']}")
    check.run(PARTS, args.only)
    page = _write_page(check.path, folder)
    _say(f"Written after {time.monotonic() - begun:.0f} s: {check.path}, and a page of it, {page}")
    return int(any(entry["state"].startswith(FAILED) for entry in check.report["parts"]))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    only = f"run these parts alone: {', '.join(names)}"
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--limit-minutes", type=_minutes, default=8.0, help="for all parts together"
    )
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="NAME", help=only)
    parser.add_argument("--report", type=Path, help="where to write it")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    parser.add_argument("--gpus", type=int, default=8, help="how many a rehearsal pretends to have")
    parser.add_argument("--commit", default="", help="what is run, in a copy without git's data")
    args = parser.parse_args(argv)
    if args.gpus < 1:
        parser.error(f"--gpus is {args.gpus}; give 1 or more")
    return args


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0.5 <= minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} minutes; give half a minute or more")
    return minutes


def _say(text: str) -> None:
    """Nobody may be listening any more; the report is what counts."""
    with contextlib.suppress(OSError, ValueError):
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)


def _write_page(report: Path, folder: Path) -> Path | str:
    """The page; what is wrong with it must not take the report along."""
    try:
        from cases.gpu_page import write_gpu_page

        folder.mkdir(parents=True, exist_ok=True)
        return write_gpu_page(folder, report)
    except Exception as error:
        return f"which could not be made ({type(error).__name__}: {error})"


if __name__ == "__main__":
    sys.exit(main())
