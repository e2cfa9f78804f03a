"""Reads zip and tar archives: in a process of its own, so that no archive can end the grading.

Torch-free. Megatron has no counterpart.

Few bytes of an archive can ask for any amount of memory or time. The process has limits on both, and
nothing is unpacked to disk: it answers with the files that are named after an exercise.
"""

import base64
import bz2
import contextlib
import gzip
import json
import lzma
import os
import resource
import stat
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from minimegatron.exercises.grading import collection
from minimegatron.exercises.grading.collection import (
    DEVICE,
    FILE,
    FOLDER,
    LINK,
    MOST_BYTES,
    Collection,
    Found,
    kind_of,
    open_plain,
    reason,
)
from minimegatron.exercises.grading.file_names import is_hidden, path_parts

MOST_UNPACKED = 256 << 20
"""Bytes of a tar archive, unpacked, that are looked at."""
MOST_LIST = 8 << 20
"""Bytes of a zip archive's list of files."""
MEMORY, SECONDS, MOST_WAIT = 1 << 30, 30, 120
"""Of the process: bytes, seconds of a processor, and seconds on the clock."""
ROOT = str(Path(__file__).parents[3])
PROGRAM = (
    "import sys; sys.path[:0] = [] if {root!r} in sys.path else [{root!r}]; "
    "from minimegatron.exercises.grading.archives import serve; serve({seconds})"
)
STREAMS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
"""How a compressed tar archive begins, and what unpacks it."""
OTHERS = {b"Rar!": "a RAR archive", b"7z\xbc\xaf": "a 7-Zip archive"}


def read_archive(path: Path) -> Collection:
    """What is in it. Whatever is wrong with the archive becomes a problem."""
    found = Collection()
    try:
        with open(open_plain(path), "rb") as file:
            done = subprocess.run(
                [sys.executable, "-P", "-c", PROGRAM.format(root=ROOT, seconds=SECONDS)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=MOST_WAIT,
            )
        if done.returncode != 0:
            raise ValueError(
                f"it needs more than {MEMORY >> 20} MiB of memory or {SECONDS} s, or ends Python "
                f"(exit code {done.returncode})"
            )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        found.problem(f"cannot be opened: no answer after {MOST_WAIT} s")
    except (OSError, ValueError) as error:
        found.problem(f"cannot be opened: {reason(error)}")
    else:
        found.files = [Found(name, base64.b64decode(data)) for name, data in answer["files"]]
        found.problems, found.unopened = answer["problems"], answer["unopened"]
    return found


# -- The process --


def serve(seconds: int) -> None:
    """Reads the archive that is the standard input; writes JSON."""
    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, seconds)):
        # macOS has no limit on memory.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))
    with os.fdopen(0, "rb") as file:
        found = look_into(file)
    files = [[one.name, base64.b64encode(one.data).decode()] for one in found.files]
    print(
        json.dumps({"files": files, "problems": found.problems, "unopened": found.unopened[:100]})
    )


def look_into(file: BinaryIO) -> Collection:
    """What an archive holds, of any kind that can be read; what it is called does not matter."""
    found = Collection()
    try:
        head = file.read(512)
        file.seek(0)
        unpack = next((STREAMS[x] for x in STREAMS if head.startswith(x)), None)
        other = next((OTHERS[x] for x in OTHERS if head.startswith(x)), None)
        if other:
            found.problem(f"cannot be opened: it is {other}; ask for .zip or .tar.gz")
        elif unpack:
            with unpack(file) as stream:
                _look_into_tar(stream, found)
        elif head[257:262] == b"ustar":
            _look_into_tar(file, found)
        else:
            _look_into_zip(file, found)
    except MemoryError:
        found.problem(f"cannot be read to its end: it needs more than {MEMORY >> 20} MiB of memory")
    except Exception as error:
        how = "read to its end" if found.files else "opened"
        found.problem(f"cannot be {how}: {reason(error)}")
    return found


def _too_many(found: Collection) -> None:
    most = collection.MOST_FILES
    found.problem(f"holds more than {most} files; only the first {most} were looked at")


# -- zip --


def _look_into_zip(file: BinaryIO, found: Collection) -> None:
    with zipfile.ZipFile(_ShortReads(file)) as archive:
        infos = [x for x in archive.infolist() if not is_hidden(path_parts(x.filename))]
        for info in infos[: collection.MOST_FILES]:
            kind = _zip_kind(info)
            found.take(info.filename, kind, info.file_size, partial(_zip_member, archive, info))
        if len(infos) > collection.MOST_FILES:
            _too_many(found)


def _zip_kind(info: zipfile.ZipInfo) -> str:
    if info.is_dir():
        return FOLDER
    mode = info.external_attr >> 16
    # Windows writes no mode, some tools one without a kind.
    return kind_of(mode) if stat.S_IFMT(mode) else FILE


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.flag_bits & 1:
        raise ValueError("it is encrypted; ask for it without a password")
    data = b""
    with archive.open(info) as member:
        # In small pieces: for some methods, zipfile unpacks all of what it reads at a time.
        while len(data) <= MOST_BYTES and (piece := member.read(4096)):
            data += piece
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes, though it says {info.file_size}")
    return data


class _ShortReads:
    """A file whose list of files, which zipfile reads at once, may not be too long."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """As a file's, but ValueError for a size that no honest archive needs."""
        if size > MOST_LIST:
            raise ValueError(f"its list of files has {size} bytes; {MOST_LIST} are allowed")
        return self._file.read(size)


# -- tar --


def _look_into_tar(stream: Any, found: Collection) -> None:
    # "r|": from front to back, one member at a time.
    with tarfile.open(fileobj=_Counted(stream), mode="r|", errors="surrogateescape") as archive:
        number = 0
        for member in archive:
            # A hidden folder may hold many files, and none that counts; bytes are limited anyway.
            number += not is_hidden(path_parts(member.name))
            if number > collection.MOST_FILES:
                _too_many(found)
                return
            kind = _tar_kind(member)
            found.take(member.name, kind, member.size, partial(_tar_member, archive, member))


def _tar_kind(member: tarfile.TarInfo) -> str:
    if member.issparse():
        return "a sparse file"
    if member.isreg():
        return FILE
    if member.isdir():
        return FOLDER
    return LINK if member.issym() or member.islnk() else DEVICE


def _tar_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    with archive.extractfile(member) as file:
        return file.read(MOST_BYTES + 1)


class _Counted:
    """A stream that ends in a ValueError after so many bytes."""

    def __init__(self, stream: Any):
        self._stream, self._num_bytes = stream, 0

    def read(self, size: int = -1) -> bytes:
        """As a file's."""
        data = self._stream.read(size)
        self._num_bytes += len(data)
        if self._num_bytes > MOST_UNPACKED:
            raise ValueError(
                f"unpacked, it has more than {MOST_UNPACKED >> 20} MiB; what comes after was not "
                "looked at"
            )
        return data
