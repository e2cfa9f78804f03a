"""What the name of a file says: which exercise it is for, whose it is, and whether it is an archive.

Torch-free. Megatron has no counterpart.
"""

import re
from typing import NamedTuple

ARCHIVES = (
    ".zip",
    ".tar",
    ".tar.gz",
    ".tgz",
    ".tar.xz",
    ".txz",
    ".tar.bz2",
    ".tbz",
    ".tbz2",
)
UNREAD_ARCHIVES = (".rar", ".7z", ".gz", ".xz", ".bz2", ".zst", ".zipx", ".lzh", ".cab")
"""Told from other files, so that whoever hands one in has a row in the report."""
EXERCISE = re.compile(r"(ex[0-9][0-9][a-z]?)(?![a-z0-9]).*\.py", re.I | re.A | re.S)
_ATTACHED = r"_(?:(?P<attachment>[0-9]{1,20})_(?P<name>.+)|(?P<typed>(?:text|link)\.html))"
CANVAS = (
    re.compile(rf"(?P<late>LATE_)?(?P<who>anon_[a-z0-9]+){_ATTACHED}", re.I | re.S),
    re.compile(rf"(?P<who>.*?)(?P<late>_LATE)?(?P<user>_[0-9]{{1,20}}){_ATTACHED}", re.I | re.S),
)
"""As Canvas names the files that it packs: anonymous students, and those with names."""
MOODLE = re.compile(
    r"(?P<who>.+_[0-9]{1,20})_assignsubmission_(?:file|onlinetext)_(?P<name>.+)", re.I | re.S
)
BLACKBOARD = re.compile(
    r".+_(?P<who>[^_]+)_attempt_(?P<date>\d{4}(?:-\d\d){5})(?:_(?P<name>.+)|(?P<typed>\.txt))",
    re.I | re.S | re.A,
)
VERSION = re.compile(r"-([0-9]{1,4})(?=\.[^.]+$)")


class ExportedName(NamedTuple):
    """A file that a learning platform has packed: all students' files lie in one folder."""

    student: str
    """The name that the platform makes, with the user's number if there is one."""
    name: str
    """As the platform shows it."""
    version: int = 0
    """Of a file that is handed in again: Canvas adds `-1`, `-2`, Blackboard the date."""
    attachment: int = 0
    is_late: bool = False
    """Canvas says so."""


def exported_name(name: str) -> ExportedName | None:
    """Takes apart what Canvas, Moodle or Blackboard put together; None for any other name.

    >>> exported_name("lovelaceada_LATE_12345_678901_ex06_one_f_one_b-1.py")
    ExportedName(student='lovelaceada_12345', name='ex06_one_f_one_b-1.py', version=1, \
attachment=678901, is_late=True)
    >>> exported_name("Ada Lovelace_777_assignsubmission_file_ex06.py").student
    'Ada Lovelace_777'
    >>> exported_name("Week 2_s4711_attempt_2026-11-23-10-11-12_ex06.py")[:2]
    ('s4711', 'ex06.py')
    """
    if match := MOODLE.fullmatch(name):
        return ExportedName(match["who"], match["name"])
    if match := BLACKBOARD.fullmatch(name):
        version = int(match["date"].replace("-", ""))
        return ExportedName(match["who"], match["name"] or match["typed"], version)
    return _canvas_name(name)


def _canvas_name(name: str) -> ExportedName | None:
    match = next(filter(None, (form.fullmatch(name) for form in CANVAS)), None)
    if match is None or re.match("ex[0-9][0-9]", match["who"], re.I):
        return None
    parts = match.groupdict()
    student, is_late = parts["who"] + parts.get("user", ""), bool(parts["late"])
    if parts["typed"]:
        return ExportedName(student, parts["typed"], is_late=is_late)
    found = VERSION.search(parts["name"])
    return ExportedName(
        student,
        parts["name"],
        int(found[1]) if found else 0,
        int(parts["attachment"]),
        is_late,
    )


def exercise_number(name: str) -> str | None:
    """The exercise that the file is named after.

    >>> exercise_number("EX06_one_f_one_b (1).PY"), exercise_number("ex06b.py")
    ('ex06', 'ex06b')
    >>> exercise_number("ex061.py"), exercise_number("._ex06.py")
    (None, None)
    """
    match = EXERCISE.fullmatch(name)
    return match[1].lower() if match else None


def without_archive_suffix(name: str) -> str | None:
    """What stands before the suffix of an archive that can be read; None if there is no such suffix.

    >>> without_archive_suffix("ADA.ZIP"), without_archive_suffix("ada.tar.gz")
    ('ADA', 'ada')
    """
    return _without(name, ARCHIVES)


def without_unread_suffix(name: str) -> str | None:
    """The same for archives that cannot be read."""
    return _without(name, UNREAD_ARCHIVES)


def _without(name: str, suffixes: tuple[str, ...]) -> str | None:
    fitting = [one for one in suffixes if name.lower().endswith(one)]
    if not fitting:
        return None
    return name[: -len(max(fitting, key=len))] or None


def path_parts(name: str) -> tuple[str, ...]:
    r"""Folders and the file's name, as some system wrote them; nothing leads out of the archive.

    >>> path_parts("../../etc/ex01.py"), path_parts("C:\\Users\\ada\\ex01.py")
    (('etc', 'ex01.py'), ('Users', 'ada', 'ex01.py'))
    """
    parts = re.split(r"[/\\]", name)
    return tuple(x for x in parts if x not in ("", ".", "..") and not re.fullmatch("[A-Za-z]:", x))


def is_hidden(parts: tuple[str, ...]) -> bool:
    """Whether a system or a tool put it there: `._ex01.py`, `__MACOSX`, `.ipynb_checkpoints`."""
    return any(part.startswith(".") or part in ("__MACOSX", "__pycache__") for part in parts)
