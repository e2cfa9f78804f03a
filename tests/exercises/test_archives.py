"""Archives of every kind, whole, broken and hostile: a grade or a problem, and the grader goes on."""

import bz2
import gzip
import io
import lzma
import random
import re
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from pathlib import Path

import pytest

from minimegatron.exercises.grading import archives, collection
from minimegatron.exercises.grading.archives import look_into
from minimegatron.exercises.grading.collection import MOST_BYTES
from minimegatron.exercises.grading.submissions import Submission
from tests.exercises.handed_in import (
    FILE,
    MINE,
    NAME,
    OTHER,
    SOURCE,
    only,
    read,
    tar_bytes,
    tar_info,
    zip_bytes,
)
from tests.figures import slowness

# -- Archives that are read --


READ = [
    ("UPPER.ZIP", "UPPER", zip_bytes(MINE)),
    ("x.zip", "x", zip_bytes(MINE, method=zipfile.ZIP_LZMA)),
    ("b.zip", "b", zip_bytes(MINE, method=zipfile.ZIP_BZIP2)),
    ("x.tar.gz", "x", gzip.compress(tar_bytes(MINE))),
    ("y.TGZ", "y", gzip.compress(tar_bytes(MINE))),
    ("v1.2.tar.xz", "v1.2", lzma.compress(tar_bytes(MINE))),
    ("z.tar.bz2", "z", bz2.compress(tar_bytes(MINE))),
    ("plain.tar", "plain", tar_bytes(MINE)),
    ("really.zip", "really", gzip.compress(tar_bytes(MINE))),
    ("windows.zip", "windows", zip_bytes((f"C:\\Users\\ada\\{FILE}", MINE[1]))),
    ("absolute.zip", "absolute", zip_bytes((f"/etc/{FILE}", MINE[1]))),
    ("upwards.tar", "upwards", tar_bytes((f"../../{FILE}", MINE[1]))),
    ("shout.zip", "shout", zip_bytes((FILE.upper(), MINE[1]))),
    ("again.zip", "again", zip_bytes(("ex01_rank_arithmetic (1).py", MINE[1]))),
    ("mac.zip", "mac", zip_bytes((f"__MACOSX/._{FILE}", b"\0\5\x16\7"), MINE)),
    ("nulls.zip", "nulls", zip_bytes((".DS_Store", b"\0\0\0\1Bud1"), MINE)),
]


@pytest.mark.parametrize(("name", "student", "data"), READ, ids=[one[0] for one in READ])
def test_archives_that_are_read(name, student, data, tmp_path):
    base = tmp_path / "in"
    base.mkdir()
    (base / name).write_bytes(data)
    assert only(base) == Submission(student, {NAME: SOURCE})
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert not Path(f"/etc/{FILE}").exists()


def damaged(data: bytes, method: int) -> bytes:
    """The archive, with other bytes in the middle of the member's compressed ones."""
    archive = bytearray(zip_bytes((FILE, data), method=method))
    middle = len(archive) // 3
    archive[middle : middle + 40] = bytes(255 - byte for byte in archive[middle : middle + 40])
    return bytes(archive)


NOISE = random.Random(0).randbytes(2000)


BROKEN = [
    ("deflate.zip", damaged(NOISE, zipfile.ZIP_DEFLATED), "cannot be read"),
    ("lzma.zip", damaged(NOISE, zipfile.ZIP_LZMA), "cannot be read"),
    ("bz2.zip", damaged(NOISE, zipfile.ZIP_BZIP2), "cannot be read"),
    ("stored.zip", damaged(NOISE, zipfile.ZIP_STORED), "CRC"),
    ("half.zip", zip_bytes(MINE)[:60], "cannot be opened"),
    ("empty.zip", b"", "cannot be opened"),
    ("text.zip", b"PK no zip", "cannot be opened"),
    ("half.tar.gz", gzip.compress(tar_bytes(MINE))[:40], "cannot be opened"),
    ("half.tar.xz", lzma.compress(tar_bytes(MINE))[:90], "cannot be opened"),
    ("noise.tar.gz", b"\x1f\x8b\x08\0" + NOISE, "cannot be opened"),
    ("text.tar.gz", gzip.compress(b"no tar" * 200), "cannot be opened"),
    ("rar.zip", b"Rar!\x1a\x07\0" + NOISE, "is a RAR archive"),
    ("ada.rar", b"Rar!\x1a\x07\0" + NOISE, "a kind that is not read"),
    ("nothing.zip", zip_bytes(("notes.txt", b"-")), "no file in it is named after an exercise"),
    ("99.zip", zip_bytes(("ex99_new.py", b"-")), "there is no exercise ex99"),
]


@pytest.mark.parametrize(("name", "data", "words"), BROKEN, ids=[one[0] for one in BROKEN])
def test_a_broken_archive_is_a_problem_of_one_student(name, data, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    found = only(tmp_path)
    assert not found.sources and words in " ".join(found.problems)
    assert str(tmp_path) not in " ".join(found.problems)


def test_what_came_before_the_damage_is_graded(tmp_path):
    whole = gzip.compress(tar_bytes(MINE, ("noise", random.Random(1).randbytes(200_000))))
    (tmp_path / "x.tar.gz").write_bytes(whole[: len(whole) // 2])
    found = only(tmp_path)
    assert found.sources == {NAME: SOURCE} and "cannot be read to its end" in found.problems[0]


def test_names_in_a_zip_that_are_not_utf_8(tmp_path):
    data = zip_bytes(("é" + FILE, SOURCE.encode()))
    assert "é".encode() in data
    (tmp_path / "x.zip").write_bytes(data.replace("é".encode(), b"\xff\xfe"))
    assert "a name in it is not UTF-8" in only(tmp_path).problems[0]


def test_an_encrypted_zip(tmp_path):
    data = bytearray(zip_bytes((FILE, SOURCE.encode())))
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(signature) + offset] |= 1
    (tmp_path / "x.zip").write_bytes(data)
    assert "it is encrypted; ask for it without a password" in only(tmp_path).problems[0]


def test_links_and_devices_in_archives_are_not_read(tmp_path):
    link = zipfile.ZipInfo(FILE)
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    (tmp_path / "zip.zip").write_bytes(zip_bytes((link, b"/etc/passwd")))
    for name, kind in (
        ("soft", tarfile.SYMTYPE),
        ("hard", tarfile.LNKTYPE),
        ("pipe", tarfile.FIFOTYPE),
        ("device", tarfile.CHRTYPE),
    ):
        info = tar_info(FILE, kind, "/etc/passwd")
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes((info, b"")))
    found = read(tmp_path)
    assert not any(found[one].sources for one in ("zip", "soft", "hard", "pipe", "device"))
    for name in ("zip", "soft", "hard"):
        assert f"{FILE} is a link, not a plain file; it is not read" in found[name].problems[0]
    assert "a device" in found["pipe"].problems[0] and "a device" in found["device"].problems[0]


def test_a_sparse_file_in_a_tar_archive(tmp_path):
    info = tarfile.TarInfo(FILE)
    info.pax_headers = {"GNU.sparse.map": "0,3", "GNU.sparse.size": str(8 << 40)}
    info.size = 3
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"abc"))
    (tmp_path / "x.tar").write_bytes(file.getvalue())
    assert "is a sparse file" in only(tmp_path).problems[0]


def test_one_name_twice_in_an_archive(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = zip_bytes((FILE, OTHER.encode()), (FILE, SOURCE.encode()))
    (tmp_path / "x.zip").write_bytes(data)
    found = only(tmp_path)
    assert found.sources == {NAME: SOURCE}
    assert f"{FILE} is in it 2 times; the last is taken" in found.problems[0]


def test_archives_in_archives_are_named(tmp_path):
    (tmp_path / "x.zip").write_bytes(zip_bytes(("inner.zip", zip_bytes(MINE))))
    found = only(tmp_path)
    assert found.problems == ("x.zip/inner.zip is an archive that was not opened",)


def test_an_archive_in_a_students_folder_is_read(tmp_path):
    (tmp_path / "Ada_1_assignsubmission_file_").mkdir()
    (tmp_path / "Ada_1_assignsubmission_file_" / "submission.zip").write_bytes(zip_bytes(MINE))
    found = only(tmp_path)
    assert found == Submission("Ada_1_assignsubmission_file_", {NAME: SOURCE})


def test_the_limit_of_files_in_archives_is_told(tmp_path):
    many = [(f"a{number}", b"") for number in range(collection.MOST_FILES)]
    (tmp_path / "x.zip").write_bytes(zip_bytes(*many, MINE))
    (tmp_path / "y.tar.gz").write_bytes(gzip.compress(tar_bytes(*many, MINE), 1))
    found = read(tmp_path)
    for name in "xy":
        assert "more than 20000 files; only the first 20000" in found[name].problems[0]


# -- Bombs --


def zeros(num_bytes: int, compressor) -> bytes:
    piece = bytes(1 << 20)
    return b"".join(compressor.compress(piece) for _ in range(num_bytes >> 20)) + compressor.flush()


def tar_header(name: str, num_bytes: int, kind: bytes = b"0") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = num_bytes, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def test_what_a_tool_has_hidden_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "MOST_FILES", 3)
    hidden = [(f".venv/{number}.py", b"x") for number in range(9)]
    mine = (FILE, SOURCE.encode())
    for name, data in (
        ("a.zip", zip_bytes(*hidden, mine)),
        ("b.tar", tar_bytes(*hidden, mine)),
    ):
        (tmp_path / name).write_bytes(data)
        found = look_into(io.BytesIO(data))
        assert [one.name for one in found.files] == [FILE] and not found.problems


def test_bombs_go_off_elsewhere(tmp_path):
    size = 300 << 20
    for name, compressor in (
        ("a.tar.gz", zlib.compressobj(9, wbits=31)),
        ("b.tar.xz", lzma.LZMACompressor(preset=1)),
        ("c.tar.bz2", bz2.BZ2Compressor(1)),
    ):
        head = compressor.compress(tar_header(FILE, 4) + b"x=1\n".ljust(512, b"\0"))
        head += compressor.compress(tar_header("zeros", size))
        (tmp_path / name).write_bytes(head + zeros(size, compressor))
    (tmp_path / "d.zip").write_bytes(zip_bytes((FILE, bytes(20 << 20))))
    # It says that it has 10 bytes, and has 20 MiB.
    lying = bytearray(zip_bytes((FILE, bytes(20 << 20)), method=zipfile.ZIP_BZIP2))
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        struct.pack_into("<I", lying, lying.index(signature) + offset, 10)
    (tmp_path / "e.zip").write_bytes(lying)
    began = time.monotonic()
    found = read(tmp_path)
    assert time.monotonic() - began < 60 * slowness()
    for name in "abc":
        assert found[name].sources == {NAME: "x=1\n"}
        assert "more than 256 MiB" in found[name].problems[0]
    assert f"{20 << 20} bytes; {MOST_BYTES} are allowed" in found["d"].problems[0]
    assert not found["d"].sources and not found["e"].sources and found["e"].problems


def test_headers_that_ask_for_time_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "SECONDS", 3)
    # tarfile looks for a number in these digits, again from each digit on.
    digits = b"1" * (64 << 20)
    with gzip.open(tmp_path / "slow.tar.gz", "wb", compresslevel=1) as file:
        file.write(tar_header("pax", len(digits), tarfile.XHDTYPE) + digits + bytes(512))
        file.write(tar_header(FILE, 4) + b"x=1\n".ljust(512, b"\0"))
    # A list of files that says that it is long.
    data = bytearray(zip_bytes(MINE)) + bytes(9 << 20)
    end = data.index(b"PK\5\6")
    record = data[end : end + 22]
    struct.pack_into("<I", record, 12, 9 << 20)
    struct.pack_into("<I", record, 16, 0)
    (tmp_path / "long.zip").write_bytes(bytes(data) + record)
    began = time.monotonic()
    found = read(tmp_path)
    assert time.monotonic() - began < 30 * slowness()
    assert not found["slow"].sources
    # From Python 3.13 on, tarfile looks once, and refuses such a header.
    refused = "it needs more than 1024 MiB of memory or 3 s|ReadError: invalid header"
    assert re.search(refused, found["slow"].problems[0])
    assert "its list of files has 9437184 bytes; 8388608 are allowed" in found["long"].problems[0]
