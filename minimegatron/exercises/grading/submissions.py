"""Finds the students' files in a folder of submissions, and reads them.

Torch-free. Megatron has no counterpart.

Each folder or archive in it is one student's, and so are the files of one student in a folder that
a learning platform has exported; a folder that holds exercises, and nothing that may be another
student's, is one submission. Nothing is unpacked to disk, links are not followed, and of all files
only those named after an exercise are read. Whatever goes wrong with one student's files is a problem
in this student's row.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from minimegatron.exercises.exercise import exercises
from minimegatron.exercises.grading import collection
from minimegatron.exercises.grading.archives import read_archive
from minimegatron.exercises.grading.collection import (
    FILE,
    FOLDER,
    LINK,
    MOST_PROBLEMS,
    Collection,
    Found,
    kind_of,
    read_plain,
    reason,
    short,
)
from minimegatron.exercises.grading.decoded_text import decode
from minimegatron.exercises.grading.file_names import (
    exercise_number,
    exported_name,
    is_hidden,
    without_archive_suffix,
    without_unread_suffix,
)
from minimegatron.exercises.room import plain_text

MOST_ARCHIVES = 3
"""In one student's folder."""
GRADESCOPE = Path("/autograder/submission")
"""Where Gradescope puts one student's files. Whatever is there, the student is to have a report."""
OURS = ("labs", "replays", "submission.zip")
"""What our own commands put into a student's folder, beside the exercises."""
MOST_NAME = 100
"""Characters of a student's name."""
MOST_PROBLEM = 400
"""Characters that say what is wrong with a file."""


@dataclass(frozen=True)
class Submission:
    """One student's files: exercise -> source."""

    student: str
    """Safe to print; no two submissions have the same."""
    sources: dict[str, str]
    problems: tuple[str, ...] = field(default=())
    """What could not be read, or is to be looked at."""


def find_submissions(folder: Path) -> list[Submission]:
    """Every student's. Raises ValueError if there is none."""
    entries = _top_entries(folder)
    if _is_one_students(folder, entries):
        name = folder.resolve().name or "submission"
        found = {name: _safely(name, partial(_read_folder, folder))}
        _look_for_a_class(folder, found[name], has_folders=False)
    else:
        found = _read_all(filter(None, map(_job, entries)))
        if len(found) == 1 and (folder / (only := next(iter(found)))).is_dir():
            _look_for_a_class(folder / only, found[only], has_folders=True)
    if not found:
        raise ValueError(
            f"{folder} holds neither folders nor zip files of students (nor tar archives, nor files "
            "named as Canvas, Moodle or Blackboard name them)"
        )
    labels = _labels(found)
    return [_submission(labels[name], one) for name, one in found.items()]


def unread_names(folder: Path) -> list[str]:
    """What lies beside the students' folders and is nobody's, safe to print."""
    entries = _top_entries(folder)
    if _is_one_students(folder, entries):
        return []
    nobodys = [one.name for one in entries if not is_hidden((one.name,)) and _job(one) is None]
    return [plain_text.line(name, MOST_NAME) for name in nobodys]


def _top_entries(folder: Path) -> list[os.DirEntry]:
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; give one that holds a folder or archive per student"
        )
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {reason(error)}") from error


def _is_one_students(folder: Path, entries: Iterable[os.DirEntry]) -> bool:
    """Whether exercises lie in it, and nothing that may be another student's."""
    if folder.resolve() == GRADESCOPE:
        return True
    has_exercise = False
    for entry in entries:
        name = entry.name
        if is_hidden((name,)) or name in OURS:
            continue
        is_archive = without_archive_suffix(name) or without_unread_suffix(name)
        if is_archive or os.path.isdir(entry.path) or exported_name(name):
            return False
        has_exercise = has_exercise or exercise_number(name) is not None
    return has_exercise


def _look_for_a_class(folder: Path, found: Collection, has_folders: bool) -> None:
    """Raises ValueError if one folder holds what may be several students', who would share a row."""
    if folder.resolve() == GRADESCOPE:
        return
    by_exercise: dict[str, list[Found]] = {}
    for one in found.files:
        by_exercise.setdefault(exercise_number(one.parts[-1]), []).append(one)
    for number, files in sorted(by_exercise.items()):
        at_top = [one for one in files if len(one.parts) == 1]
        if has_folders and at_top:
            continue  # the student's own; what lies deeper is older
        places = {one.parts[0]: one.data for one in (files if has_folders else at_top)}
        if len(set(places.values())) > 1:
            names = " and ".join(short(name) for name in sorted(places)[:2])
            cure = "Give each student a folder; of one student's, leave one."
            if has_folders:
                cure = f"Are they two students'? Then grade {folder}. If they are one's, leave one."
            raise ValueError(f"in {folder}, {names} hold different files for {number}. {cure}")


def _labels(names: Iterable[str]) -> dict[str, str]:
    """Name of a folder -> what the student is called in reports."""
    labels: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        wanted = plain_text.line(name, MOST_NAME)
        label, number = wanted, 1
        while label in taken:
            number += 1
            label = f"{wanted} ({number})"
        taken.add(label)
        labels[name] = label
    return labels


# -- Whose is what --


def _job(entry: os.DirEntry) -> tuple[str, Callable[[], Collection]] | None:
    """Whose it is, and what reads it; a student may have several. None if it is nobody's."""
    name, path = entry.name, Path(entry.path)
    if is_hidden((name,)):
        return None
    kind = FOLDER if entry.is_dir(follow_symlinks=False) else _kind_of(path)
    exported = exported_name(name) if kind != FOLDER else None
    stem = without_archive_suffix(name)
    if exported is not None:
        return exported.student, partial(_read_exported, path, kind)
    if kind == FOLDER:
        return name, partial(_read_folder, path)
    if stem is not None:
        return stem, partial(_read_top_archive, path, kind)
    if kind == LINK and _leads_to_folder(path):
        return name, partial(Collection, problems=[_unread_words(name, kind)])
    stem = without_unread_suffix(name)
    if stem is None and name.lower().endswith(".py"):
        # A row of its own for what may be the teacher's; whoever sent `ada.py` may be ada.
        stem = name[:-3] if exercise_number(name) is None else name
    if stem is None:
        return None
    return stem, partial(Collection, problems=[_unread_words(name, kind)])


def _kind_of(path: Path) -> str:
    try:
        return kind_of(path.lstat().st_mode)
    except OSError:
        return FILE  # reading it will fail, and say why


def _leads_to_folder(path: Path) -> bool:
    """Whether a link does, or leads nowhere."""
    return os.path.isdir(path) or not os.path.exists(path)


def _unread_words(name: str, kind: str) -> str:
    if without_unread_suffix(name):
        return f"{short(name)} is an archive of a kind that is not read; ask for .zip or .tar.gz"
    if kind == LINK:
        return f"{short(name)} is a link; links are not followed"
    if kind != FILE:
        return f"{short(name)} is {kind}, not {FILE}; it is not read"
    if exercise_number(name):
        return f"{short(name)} is not read: it lies beside the students' folders, in none of them"
    return f"{short(name)} is named neither after an exercise nor as Canvas or Moodle name files"


def _read_all(jobs: Iterable[tuple[str, Callable[[], Collection]]]) -> dict[str, Collection]:
    """Student -> everything of the student's, by name."""
    jobs = list(jobs)
    found: dict[str, Collection] = {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for (name, _), one in zip(jobs, pool.map(lambda job: _safely(*job), jobs), strict=True):
            found.setdefault(name, Collection()).add(one)
    return dict(sorted(found.items()))


def _safely(name: str, read: Callable[[], Collection]) -> Collection:
    """What `read` finds. A failure is this student's problem, and nobody else's."""
    try:
        return read()
    except Exception as error:
        return Collection(problems=[f"{short(name)} cannot be read: {reason(error)}"])


# -- Reading --


def _read_exported(path: Path, kind: str) -> Collection:
    """One of the files that a learning platform has put into one folder."""
    exported = exported_name(path.name)
    version, found = (exported.version, exported.attachment), Collection()
    if kind == FILE and without_archive_suffix(exported.name):
        found.add(read_archive(path), exported.name)
        found.files = [replace(one, version=version) for one in found.files]
    else:
        num_bytes = path.lstat().st_size
        found.take(exported.name, kind, num_bytes, partial(read_plain, path), version)
    if exported.is_late:
        found.problem(f"{exported.name} is late, says Canvas")
    return found


def _read_top_archive(path: Path, kind: str) -> Collection:
    if kind != FILE:
        return Collection(problems=[f"{short(path.name)} is {kind}, not {FILE}; it is not read"])
    found = Collection()
    found.add(read_archive(path), path.name)
    return found


def _read_folder(folder: Path) -> Collection:
    """A student's folder, the outer folders first, and the archives in it."""
    found, archives, number = Collection(), [], 0
    waiting = deque([folder])
    while waiting:
        entries = _entries_of(waiting.popleft(), folder, found)
        for entry in entries:
            number += 1
            if number > collection.MOST_FILES:
                most = collection.MOST_FILES
                found.problem(f"holds more than {most} files; only {most} were looked at")
                waiting.clear()
                break
            path = Path(entry.path)
            parts = path.relative_to(folder).parts
            if is_hidden(parts):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                found.problem(f"{short('/'.join(parts))} cannot be read: {reason(error)}")
                continue
            kind = kind_of(status.st_mode)
            if kind == FOLDER:
                waiting.append(path)
            if kind == FILE and without_archive_suffix(entry.name):
                archives.append(path)
            else:
                found.take("/".join(parts), kind, status.st_size, partial(read_plain, path))
    for path in archives[:MOST_ARCHIVES]:
        found.add(read_archive(path), path.relative_to(folder).as_posix())
    found.unopened += [path.name for path in archives[MOST_ARCHIVES:]]
    return found


def _entries_of(path: Path, folder: Path, found: Collection) -> list[os.DirEntry]:
    try:
        with os.scandir(path) as entries:
            some = islice(entries, collection.MOST_FILES + 1)
            return sorted(some, key=lambda entry: entry.name)
    except OSError as error:
        name = path.relative_to(folder).as_posix()
        where = "its folder" if name == "." else short(name)
        found.problem(f"{where} cannot be read: {reason(error)}")
        return []


# -- What is graded --


def _submission(student: str, found: Collection) -> Submission:
    """Of several files for one exercise, one is graded; the others are named."""
    by_number = {one.number: one.name for one in exercises()}
    candidates: dict[str, list[Found]] = {}
    problems = list(found.problems)
    for one in found.files:
        number = exercise_number(one.parts[-1])
        if number in by_number:
            candidates.setdefault(by_number[number], []).append(one)
        else:
            problems.append(f"{short(one.name)} is not read: there is no exercise {number}")
    sources = {}
    for exercise, files in sorted(candidates.items()):
        source, words = _choose(exercise, files)
        problems += words
        if source is not None:
            sources[exercise] = source
    if not candidates:
        problems += [f"{short(x)} is an archive that was not opened" for x in found.unopened]
    if not sources and not problems:
        problems.append("no file in it is named after an exercise, as ex06_one_f_one_b.py")
    told = [plain_text.line(words, MOST_PROBLEM) for words in problems]
    if len(told) > MOST_PROBLEMS:
        told[MOST_PROBLEMS - 1 :] = [f"and {len(told) - MOST_PROBLEMS + 1} more problems"]
    return Submission(student, sources, tuple(told))


def _choose(exercise: str, files: list[Found]) -> tuple[str | None, list[str]]:
    """The text that is graded, if one can be read, and what is to be said of the others."""
    by_place: dict[tuple, list[Found]] = {}
    for one in files:
        by_place.setdefault((one.name, one.version), []).append(one)
    words = [
        f"{short(name)} is in it {len(same)} times; the last is taken"
        for (name, _), same in by_place.items()
        if len({one.data for one in same}) > 1
    ]
    last = [same[-1] for same in by_place.values()]
    ordered = sorted(last, key=partial(_preference, exercise))
    for number, one in enumerate(ordered):
        try:
            text = decode(one.data)
        except ValueError as error:
            words.append(f"{short(one.name)} cannot be read: {error}")
            continue
        words += [
            f"{short(other.name)} is another file for {exercise}; {short(one.name)} is graded"
            for other in ordered[number + 1 :]
            if other.data != one.data
        ]
        return text, words
    return None, words


def _preference(exercise: str, found: Found) -> tuple:
    """The latest version first, then the file least deep, then the one with the full name."""
    version, attachment = found.version
    is_renamed = found.parts[-1].lower() != f"{exercise}.py"
    return -version, -attachment, len(found.parts), is_renamed, found.name
