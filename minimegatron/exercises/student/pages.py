"""What the command prints about exercises: the list, a start, a hint, an end.

Torch-free. Megatron has no counterpart.
"""

import shutil
import textwrap

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.exercise import TIERS, Exercise, exercises
from minimegatron.exercises.labs.labs import (
    LABS,
    OUTCOMES,
    Lab,
    layout_words,
    outcome_of,
    patch_words,
)
from minimegatron.exercises.room import verdict
from minimegatron.exercises.student.beside import beside
from minimegatron.exercises.student.student_folder import ExerciseProgress, StudentFolder

PREFIX = "minimegatron exercises"


def overview(folder: StudentFolder) -> str:
    """Every exercise, by tier, with the student's progress."""
    lines = []
    for tier in TIERS:
        of_tier = [one for one in exercises() if one.tier == tier]
        if of_tier:
            minutes = sum(one.minutes for one in of_tier)
            lines += ["", f"{tier} ({minutes} minutes)"]
            lines += [_row(one, folder.of(one)) for one in of_tier]
    lines += ["", progress_bar(folder), "", what_next(folder)]
    return "\n".join(lines[1:])


def _row(exercise: Exercise, progress: ExerciseProgress) -> str:
    ranks = num_of(exercise.num_ranks, "rank") if exercise.num_ranks else "no ranks"
    start = f"{_mark(progress)} {exercise.number:5} {exercise.minutes:2} min"
    return f"{start} {ranks:8} {exercise.title}"


def _mark(progress: ExerciseProgress) -> str:
    if progress.passed:
        return "[x]"
    return "[-]" if progress.started else "[ ]"


def progress_bar(folder: StudentFolder, width: int = 36) -> str:
    """How many have passed, as a bar."""
    total = len(exercises())
    passed = sum(bool(folder.of(one).passed) for one in exercises())
    filled = round(width * passed / max(1, total))
    return f"[{'#' * filled}{'.' * (width - filled)}] {passed} of {total} passed"


def what_next(folder: StudentFolder) -> str:
    """The command that makes sense now."""
    following = folder.next()
    if following is None:
        return ending(folder)
    if folder.file(following).exists():
        return (
            f"next: edit {following.name}.py, then `{PREFIX} check`; or leave `{PREFIX} watch` open"
        )
    return f"next: `{PREFIX} start {following.number}`"


def start_words(folder: StudentFolder, exercise: Exercise) -> str:
    """What to read after a start."""
    ranks = f"on {num_of(exercise.num_ranks, 'rank')}" if exercise.num_ranks else "without ranks"
    lines = [
        f"{exercise.title} ({exercise.tier}, about {exercise.minutes} minutes, checked {ranks})",
        "",
        exercise.summary,
    ]
    if exercise.mirrors:
        lines += ["", f"The real one, for afterwards: {exercise.mirrors}"]
    lines += [
        "",
        f"read    `{PREFIX} page {exercise.number}`, or the page of the documentation",
        f"edit    {folder.file(exercise)}",
        f"check   `{PREFIX} check`, or leave `{PREFIX} watch` running beside your editor",
        f"stuck?  `{PREFIX} hint`: each time you ask, it says more",
    ]
    return "\n".join(lines)


def page_words(exercise: Exercise) -> str:
    """The exercise's page, with its title."""
    text = (exercise.folder / "page.md").read_text(encoding="utf-8")
    return f"# {exercise.title}\n\n{text.strip()}\n"


def after_check(folder: StudentFolder, exercise: Exercise, found: verdict.Verdict) -> str:
    """A line or two under a verdict."""
    if found.has_passed:
        width = shutil.get_terminal_size((100, 24)).columns
        compared = beside(exercise, folder.file(exercise), width)
        return "\n".join(
            [*([compared, ""] if compared else []), progress_bar(folder), what_next(folder)]
        )
    if found.kind in (verdict.MISSING, verdict.SYNTAX):
        return ""
    seen, total = folder.of(exercise).hints, len(folder.hints(exercise))
    if seen < total:
        return f"stuck? `{PREFIX} hint` ({total - seen} left)"
    return ""


def ending(folder: StudentFolder) -> str:
    """When everything has passed."""
    attempts = sum(folder.of(one).attempts for one in exercises())
    hinted = sum(folder.of(one).hints for one in exercises())
    return "\n".join(
        [
            f"All {len(exercises())} exercises pass: {attempts} checks, {hinted} hints.",
            "You have written the order, the messages, the gradients and the optimizer of a training",
            f"step over many ranks. What is left: break it on purpose (`{PREFIX} lab list`), or",
            "read the same step at full size in NVIDIA's repository: you know your way now.",
        ]
    )


# -- Labs --


def lab_overview(folder: StudentFolder) -> str:
    """Every lab, with what the student predicted and saw."""
    lines = ["Each breaks one line of a copy of the package. Predict, then run it.", ""]
    width = shutil.get_terminal_size((100, 24)).columns
    for number, lab in enumerate(LABS, 1):
        seen = folder.labs.get(lab.name, {})
        mark = "[x]" if "outcome" in seen else "[-]" if seen else "[ ]"
        start = f" {mark} {number:3} {lab.name:42} "
        words = {"initial_indent": start, "subsequent_indent": " " * len(start)}
        lines += textwrap.wrap(layout_words(lab), width, **words)
    right = sum(one.get("predicted") == one.get("outcome", "") for one in folder.labs.values())
    run = sum("outcome" in one for one in folder.labs.values())
    lines += ["", f"{run} of {len(LABS)} run, {right} predicted right", ""]
    return "\n".join([*lines, f"next: `{PREFIX} lab start NAME`"])


def lab_words(lab: Lab) -> str:
    """What to look at before the prediction."""
    choices = [f"  {name:10} {words}" for name, words in OUTCOMES.items()]
    lines = [f"Lab {lab.name}", "", patch_words(lab.fault), ""]
    lines += [f"One training step with this change: {layout_words(lab)}. What will happen?", ""]
    return "\n".join([*lines, *choices])


def lab_result(lab: Lab, predicted: str, found: verdict.Verdict) -> str:
    """What happened, beside the prediction, and why."""
    outcome = outcome_of(found)
    lines = [f"What happened: {OUTCOMES[outcome]}", ""]
    lines += [f"  {line}".rstrip() for line in found.text.splitlines()[:60]]
    agrees = "as you predicted" if predicted == outcome else f"you predicted: {OUTCOMES[predicted]}"
    lines += ["", f"It was {outcome!r}; {agrees}.", "", f"Why: {lab.fault.story}", ""]
    lines.append(
        "The project's own tests make the same change (tests/test_mutations.py) and must fail: that "
        "is how it is known that they look."
    )
    return "\n".join(lines)
