"""What the command prints about exercises: the list, a start, a hint, an end.

Called by: the command, `watch`. Calls: `student_folder`. Torch-free. Megatron has no counterpart.
"""

from minimegatron.exercises import verdict
from minimegatron.exercises.catalog import exercises
from minimegatron.exercises.exercise import TIERS, Exercise
from minimegatron.exercises.student_folder import Progress, StudentFolder, hints

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


def _row(exercise: Exercise, progress: Progress) -> str:
    ranks = f"{exercise.num_ranks} ranks" if exercise.num_ranks else "no ranks"
    name = f"{_mark(progress)} {exercise.name:34}"
    return f"  {name} {exercise.minutes:3} min  {ranks:8}  {exercise.title}"


def _mark(progress: Progress) -> str:
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
    ranks = f"on {exercise.num_ranks} ranks" if exercise.num_ranks else "without ranks"
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
        f"stuck?  `{PREFIX} hint`, {len(hints(exercise))} steps",
    ]
    return "\n".join(lines)


def after_check(folder: StudentFolder, exercise: Exercise, found: verdict.Verdict) -> str:
    """A line or two under a verdict."""
    if found.has_passed:
        lines = [progress_bar(folder), what_next(folder)]
        if exercise.mirrors:
            lines.insert(0, f"Now compare with the real one: {exercise.mirrors}")
        return "\n".join(lines)
    seen, total = folder.of(exercise).hints, len(hints(exercise))
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
