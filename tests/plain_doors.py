"""The doors of rooms in a plain step: what of a room the step itself calls, and files that are loaded.

`plain_runs` has the runs and the rooms; a *door* is a function of a room that a function outside calls.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.code_recorder import Call, Record
from tests.code_shares import functions_of

IsInRoom = Callable[[str], bool]


def doors(calls: list[Call], is_in_room: IsInRoom) -> set[tuple[str, str]]:
    """File and name of each function of a room that was called from outside all rooms."""
    found, open_calls = set(), []
    for call in calls:
        del open_calls[call.depth - 1 :]
        if open_calls and is_in_room(call.file) and not is_in_room(open_calls[-1].file):
            found.add((call.file, call.name))
        open_calls.append(call)
    return found


def door_lines(step: Record, package: Path, is_in_room: IsInRoom) -> Iterator[int]:
    """How many lines of each door the step has run."""
    names = doors(step.calls, is_in_room)
    for file in {file for file, _ in names}:
        for function in functions_of((package / file).read_text()):
            if (file, function.name) in names:
                yield len(step.lines[file] & function.lines)


def lines_with_doors(step: Record, package: Path, is_in_room: IsInRoom) -> int:
    """Lines of one step: all outside rooms, and of rooms the doors alone."""
    outside = sum(len(lines) for file, lines in step.lines.items() if not is_in_room(file))
    return outside + sum(door_lines(step, package, is_in_room))


def files_outside(step: Record, is_in_room: IsInRoom) -> set[str]:
    """Files outside rooms of which the step has called a function."""
    return {file for file, entered in step.entered.items() if entered and not is_in_room(file)}
