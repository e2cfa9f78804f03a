"""What the tests of submissions share: making archives, and reading a folder with care."""

import io
import tarfile
import zipfile
from pathlib import Path

from minimegatron.exercises.grading.collection import MOST_PROBLEMS
from minimegatron.exercises.grading.submissions import Submission, find_submissions
from minimegatron.exercises.room.plain_text import _IN_LINE

NAME = "ex01_rank_arithmetic"
FILE = f"{NAME}.py"
SOURCE = "x = 'mine'\n"
OTHER = "x = 'another'\n"


def read(base: Path) -> dict[str, Submission]:
    """Every student's; an honest one stands beside each hostile one, and is read as ever."""
    (base / "honest").mkdir()
    (base / "honest" / FILE).write_text(SOURCE)
    found = find_submissions(base)
    names = [one.student for one in found]
    assert len(set(names)) == len(names)
    for one in found:
        assert not _IN_LINE.search(one.student + "".join(one.problems))
        assert len(one.problems) <= MOST_PROBLEMS
        assert sum(map(len, one.problems)) < 100_000
    by_name = {one.student: one for one in found}
    assert by_name["honest"] == Submission("honest", {NAME: SOURCE})
    return by_name


def only(base: Path) -> Submission:
    """The one student's beside the honest one."""
    (found,) = (one for name, one in read(base).items() if name != "honest")
    return found


def zip_bytes(*members: tuple[str | zipfile.ZipInfo, bytes], method=zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data, compress_type=method)
    return file.getvalue()


def tar_bytes(*members: tuple[str | tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def tar_info(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


MINE = ("sub/" + FILE, SOURCE.encode())
