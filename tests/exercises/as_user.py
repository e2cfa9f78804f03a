"""Grades a few files as a user of one's choice; a program, since it gives up what it may do.

    python -m tests.exercises.as_user FOLDER UID KIND       prints the report as JSON

Started by: `test_grading`. Python and the package may lie in the home of root, where no other user may
look. So this process first makes such folders readable, for itself alone (Linux, root).
"""

import os
import sys
from pathlib import Path

from minimegatron.exercises.grading import isolation
from minimegatron.exercises.grading.cell import Limits
from minimegatron.exercises.grading.grade import Settings, grade
from minimegatron.exercises.grading.reports import to_json
from minimegatron.exercises.grading.submissions import find_submissions


def open_closed_folders() -> None:
    """In a mount namespace of its own, only what is needed is left in folders closed to others."""
    needed = isolation._needed_folders()
    closed = {closed for path in needed if (closed := closed_parent(path)) is not None}
    if not closed:
        return
    isolation.call("unshare", isolation.CLONE_NEWNS)
    isolation._mount("none", "/", None, isolation.MS_REC | isolation.MS_PRIVATE)
    isolation._hide(sorted(closed), needed, 1 << 20)


def closed_parent(path: Path) -> Path | None:
    """The first folder on the way there that others may not enter."""
    return next((one for one in reversed(path.parents) if not one.stat().st_mode & 1), None)


def main() -> None:
    """Grades the folder's submissions."""
    folder, uid, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    open_closed_folders()
    if uid:
        os.environ["HOME"] = "/nowhere"
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    limits = Limits(seconds=90, memory_bytes=2 << 30)
    settings = Settings(41, kind, jobs=2, patience=3.0, limits=limits)
    print(to_json(grade(find_submissions(folder), settings)))


if __name__ == "__main__":
    main()
