"""`minimegatron exercises list|start|check|watch|hint|reset|submit|...`: write a piece of it.

Torch-free: what runs a student's code is a process of its own. Works on the folder it is called in,
or on `--folder`. Exit code 1 of `check` means that something is not right yet. Megatron has no
counterpart.
"""

import argparse
import contextlib
import os
import signal
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from minimegatron.commands.help_text import with_examples
from minimegatron.exercises.check.runner import Runner
from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.grading.cell import NAMESPACES, OTHER_USER, SAME_USER, Limits
from minimegatron.exercises.grading.grade import (
    NOT_RUN,
    NOT_SUBMITTED,
    Grade,
    Report,
    Settings,
    drawn_seed,
    grade,
)
from minimegatron.exercises.grading.reports import (
    NotWritten,
    form_of,
    stopped_report,
    summary,
    try_report,
    write_report,
)
from minimegatron.exercises.grading.submissions import find_submissions, unread_names
from minimegatron.exercises.labs.labs import OUTCOMES, find_lab, outcome_of, run_lab, start_lab
from minimegatron.exercises.room import plain_text
from minimegatron.exercises.room.verdict import DEFECT, Verdict, render
from minimegatron.exercises.student import pages
from minimegatron.exercises.student.markdown import print_markdown
from minimegatron.exercises.student.student_folder import StudentFolder, digest
from minimegatron.exercises.student.watch_files import ANSWER_SECONDS, watch

SUBMISSION = "submission.zip"
EXAMPLES_OF = {
    "list": ("",),
    "start": ("", "ex06"),
    "check": ("", "ex06", "ex06 --open"),
    "watch": ("",),
    "page": ("", "ex06"),
    "hint": ("", "ex06"),
    "reset": ("ex06",),
    "submit": ("", "--output anna.zip"),
    "lab": ("list", "start backward-of-the-newest", "run backward-of-the-newest --predict loss"),
    "grade": ("handed_in --out grades.csv", "handed_in --out grades.csv --exercises ex01,ex06"),
    "solution": ("ex06",),
}
EXAMPLES = ("", "start ex06", "check", "lab list")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What there is to do with exercises."""
    parser.add_argument(
        "--folder", default=".", metavar="DIR", help="where your files are (default: here)"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    _add(actions, "list", "every exercise, and how far you are (the default)")
    _add_named(actions, "start", "put an exercise's file here (default: the next one)")
    checking = _add_named(actions, "check", "check your file; exit code 1 if it is not right")
    checking.add_argument("--open", action="store_true", help="open the replay of your run")
    _add(actions, "watch", "check again whenever you save, until all has passed")
    _add_named(actions, "page", "the exercise's page, as in the documentation")
    _add_named(actions, "hint", "the next hint")
    _add_named(actions, "reset", "bring the stub back; your file is kept beside it")
    submitting = _add(actions, "submit", "pack your files to hand in")
    submitting.add_argument("--output", default=SUBMISSION, metavar="FILE", type=Path)
    lab = _add(actions, "lab", "break a copy of the package, predict, run, explain")
    lab.add_argument("what", choices=("list", "start", "run"), help="list; start NAME; run NAME")
    lab.add_argument("name", nargs="?", metavar="NAME", help="a lab's name or number")
    lab.add_argument(
        "--predict",
        choices=tuple(OUTCOMES),
        metavar="OUTCOME",
        help=f"what you think will happen: {', '.join(OUTCOMES)}",
    )
    _add_grade(_add(actions, "grade", "for teachers: grade a folder of submissions"))
    solving = _add(actions, "solution", "for teachers: where the reference solution is")
    solving.add_argument("name", metavar="NAME")


def _add(actions: argparse._SubParsersAction, name: str, help_text: str) -> argparse.ArgumentParser:
    examples = with_examples(f"minimegatron exercises {name}", EXAMPLES_OF[name])
    return actions.add_parser(name, help=help_text, **examples)


def _add_named(
    actions: argparse._SubParsersAction, name: str, help_text: str
) -> argparse.ArgumentParser:
    parser = _add(actions, name, help_text)
    parser.add_argument("name", nargs="?", metavar="NAME", help="ex06, or more of its name")
    return parser


def _add_grade(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("submissions", metavar="SUBMISSIONS", type=Path, help="a folder or archive per student")
    add(
        "--out",
        action="append",
        required=True,
        metavar="FILE",
        type=Path,
        help="grades.csv, grades.json, grades.xml (JUnit) or results.json (Gradescope); repeatable",
    )
    add("--format", choices=("csv", "json", "junit", "gradescope"), help="default: by FILE's name")
    add("--exercises", metavar="NAMES", help="ex01,ex06,...: default, all that somebody handed in")
    add("--seed", type=int, default=0, metavar="N", help="hidden seed (default: drawn at random)")
    jobs = partial(_number, int, 0, 500, "0 for half the processors")
    seconds = partial(_number, float, 1, 86_400, "seconds")
    memory = partial(_number, int, 64, 1 << 24, "MiB")
    add(
        "--jobs", type=jobs, default=0, metavar="N", help="at a time (default: half the processors)"
    )
    add("--seconds", type=seconds, default=Limits.seconds, metavar="S", help="most for one file")
    add(
        "--memory-mib", type=memory, default=Limits.memory_bytes >> 20, metavar="N", help="likewise"
    )
    add(
        "--isolation",
        choices=(NAMESPACES, OTHER_USER, SAME_USER),
        metavar="KIND",
        help=f"{NAMESPACES!r}, {OTHER_USER!r} or {SAME_USER!r}, which trusts the students "
        "(default: the strongest there is)",
    )


def _number(kind: type, least: float, most: float, what: str, text: str) -> float:
    """What was typed, if it makes sense."""
    with contextlib.suppress(ValueError):
        if least <= (number := kind(text)) <= most:
            return number
    whole = "a whole number" if kind is int else "a number"
    raise argparse.ArgumentTypeError(
        f"{plain_text.line(text, 40)!r}: give {whole} from {least} to {most} ({what})"
    )


def run(args: argparse.Namespace) -> int:
    """Does it. Raises ValueError for a name that does not fit, or nothing started."""
    folder = StudentFolder.open(args.folder)
    action = args.action or "list"
    return {
        "list": _list,
        "start": _start,
        "check": _check,
        "watch": _watch,
        "page": _page,
        "hint": _hint,
        "reset": _reset,
        "submit": _submit,
        "lab": _lab,
        "grade": _grade,
        "solution": _solution,
    }[action](args, folder)


def _list(args: argparse.Namespace, folder: StudentFolder) -> int:
    print(pages.overview(folder))
    return 0


def _start(args: argparse.Namespace, folder: StudentFolder) -> int:
    following = folder.next()
    if args.name is None and following is None:
        print(pages.ending(folder))
        return 0
    exercise = following if args.name is None else find(args.name)
    folder.start(exercise)
    print(pages.start_words(folder, exercise))
    return 0


def _check(args: argparse.Namespace, folder: StudentFolder) -> int:
    exercise = folder.choose(args.name)
    path = folder.file(exercise)
    ranks = f" on {exercise.num_ranks} ranks" if exercise.num_ranks else ""
    print(f"checking {exercise.name}{ranks} ...", file=sys.stderr, flush=True)
    checked = digest(path)
    try:
        with Runner() as runner:
            found = runner.ask(exercise, path, ANSWER_SECONDS, replay=str(folder.replay(exercise)))
    except (TimeoutError, RuntimeError) as error:
        found = Verdict(DEFECT, str(error))
    if checked:
        folder.note(exercise, found, checked)
    print(render(found, exercise.name))
    if after := pages.after_check(folder, exercise, found):
        print(after)
    if args.open and found.replay:
        webbrowser.open(Path(found.replay).resolve().as_uri())
    return 0 if found.has_passed else 1


def _watch(args: argparse.Namespace, folder: StudentFolder) -> int:
    try:
        return watch(folder)
    except KeyboardInterrupt:
        print()
        return 0


def _page(args: argparse.Namespace, folder: StudentFolder) -> int:
    print_markdown(pages.page_words(folder.choose(args.name)))
    return 0


def _hint(args: argparse.Namespace, folder: StudentFolder) -> int:
    exercise = folder.choose(args.name)
    number, text = folder.hint(exercise)
    print(f"Hint {number}\n")
    print_markdown(text)
    if number == len(folder.hints(exercise)):
        print("\n(That is the last one.)")
    return 0


def _reset(args: argparse.Namespace, folder: StudentFolder) -> int:
    path, kept = folder.reset(folder.choose(args.name))
    print(f"{path.name} is the stub again" + (f"; yours is now {kept.name}" if kept else ""))
    return 0


def _submit(args: argparse.Namespace, folder: StudentFolder) -> int:
    names = folder.submit(args.output)
    print(f"wrote {args.output}: {len(names)} files")
    for name in names:
        exercise = find(name)
        state = "public checks passed" if folder.is_finished(exercise) else "not passed as it is"
        print(f"  {name:40} {state}")
    print(
        "Public checks are not the grade: your teacher grades with other data and other sizes, and "
        "may read what you wrote."
    )
    return 0


def _lab(args: argparse.Namespace, folder: StudentFolder) -> int:
    if args.what == "list":
        print(pages.lab_overview(folder))
        return 0
    if args.name is None:
        raise ValueError(f"which one? `{pages.PREFIX} lab list` names them")
    lab = find_lab(args.name)
    copy = folder.lab(lab.name)
    if args.what == "start" or not copy.exists():
        start_lab(lab, copy)
        print(pages.lab_words(lab))
    seen = folder.labs.setdefault(lab.name, {})
    predicted = args.predict or seen.get("predicted") or _ask_prediction()
    if predicted is not None:
        seen["predicted"] = predicted
        folder.save()
    if args.what == "start" or predicted is None:
        print(f"\nthe copy is in {copy}; predict and run: ", end="")
        print(f"`{pages.PREFIX} lab run {lab.name} --predict ...`")
        return 0
    print("running ...", file=sys.stderr, flush=True)
    found = run_lab(lab, copy)
    seen["outcome"] = outcome_of(found)
    folder.save()
    print(pages.lab_result(lab, predicted, found))
    return 0


def _ask_prediction() -> str | None:
    """Asks, where somebody can answer."""
    if not sys.stdin.isatty():
        return None
    while (answer := input("\nYour prediction: ").strip()) not in OUTCOMES:
        print(f"one of: {', '.join(OUTCOMES)}")
    return answer


def _grade(args: argparse.Namespace, folder: StudentFolder) -> int:
    for path in args.out:
        args.format or form_of(path)
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}; give 1 or more, 0 is the public one")
    names = [name.strip() for name in (args.exercises or "").split(",")]
    wanted = list(dict.fromkeys(find(name) for name in names if name))
    done: list[Grade] = []
    try:
        submissions, unread = find_submissions(args.submissions), unread_names(args.submissions)
        for path in args.out:
            try_report([one.student for one in submissions], path, args.format or "")
        if not wanted:
            handed_in = {name for one in submissions for name in one.sources}
            wanted = [exercise for exercise in exercises() if exercise.name in handed_in]
        settings = _settings(args)
        with _on_interrupt(_stop):
            report = grade(submissions, settings, wanted, tell=partial(_tell, done))
    except KeyboardInterrupt:
        if not done:
            print("stopped by Ctrl-C; nothing was graded", file=sys.stderr)
            return 130
    else:
        return _write(report, args, unread)
    _write(stopped_report(done, submissions, wanted, settings), args, unread)
    handed_in = sum(exercise.name in one.sources for one in submissions for exercise in wanted)
    num_done = sum(one.public != NOT_SUBMITTED for one in done)
    print(
        f"stopped by Ctrl-C; {num_done} of {handed_in} files were graded, the reports say "
        f"{NOT_RUN!r} of the others",
        file=sys.stderr,
    )
    return 130


def _settings(args: argparse.Namespace) -> Settings:
    hidden = [path.resolve() for path in (args.submissions, Path.cwd())]
    return Settings(
        # Drawn here, so that it is known if grading is stopped.
        seed=args.seed or drawn_seed(),
        kind=args.isolation or "",
        jobs=args.jobs,
        limits=Limits(seconds=args.seconds, memory_bytes=args.memory_mib << 20),
        hidden=tuple(map(str, hidden)),
    )


def _write(report: Report, args: argparse.Namespace, unread: Sequence[str]) -> int:
    """Writes all reports, then says where; the exit code."""
    written, failures = [], []
    # Nobody who presses Ctrl-C once more loses the reports.
    with _on_interrupt(signal.SIG_IGN):
        for path in args.out:
            try:
                written += write_report(report, path, args.format or "")
            except NotWritten as error:
                written += error.written
                failures.append(str(error))
    # All reports are written before anything is printed: nobody may be reading any more.
    for path in written:
        _say(f"wrote {path}")
    _say(summary(report, unread))
    for words in failures:
        print(words, file=sys.stderr)
    return 1 if failures else 0


@contextlib.contextmanager
def _on_interrupt(handler: Callable[..., object] | signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(*_: object) -> None:
    # Not by `print`, which may be at work at this very moment.
    os.write(2, b"stopping once the files at hand are done; press Ctrl-C again to stop at once\n")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def _tell(kept: list[Grade], done: Grade) -> None:
    kept.append(done)
    if done.public != NOT_SUBMITTED:
        student = plain_text.line(done.student)
        _say(f"  {student:24} {done.exercise:34} {done.words}")


def _say(words: str) -> None:
    print(plain_text.for_stream(words, sys.stdout), flush=True)


def _solution(args: argparse.Namespace, folder: StudentFolder) -> int:
    print(find(args.name).folder / "solution.py")
    return 0
