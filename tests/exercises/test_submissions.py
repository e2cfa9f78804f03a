"""Reading what students hand in: whatever it is, a grade or a problem, and for that student only."""

import bz2
import codecs
import gzip
import io
import lzma
import os
import random
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from pathlib import Path

import pytest

from minimegatron.exercises.catalog import exercises, find
from minimegatron.exercises.grading import archives, collection, submissions
from minimegatron.exercises.grading.collection import MOST_BYTES, MOST_PROBLEMS, MOST_TAKEN
from minimegatron.exercises.grading.file_names import canvas_name, exercise_number
from minimegatron.exercises.grading.plain_text import _IN_LINE
from minimegatron.exercises.grading.remarks import SAME_CODE, TOO_DEEP, remarks_on
from minimegatron.exercises.grading.source_text import decode
from minimegatron.exercises.grading.submissions import Submission, find_submissions

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


# -- Bombs --


def zeros(num_bytes: int, compressor) -> bytes:
    piece = bytes(1 << 20)
    return b"".join(compressor.compress(piece) for _ in range(num_bytes >> 20)) + compressor.flush()


def tar_header(name: str, num_bytes: int, kind: bytes = b"0") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = num_bytes, kind
    return info.tobuf(tarfile.GNU_FORMAT)


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
    assert time.monotonic() - began < 150
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
    assert time.monotonic() - began < 100
    assert not found["slow"].sources
    assert "it needs more than 1024 MiB of memory or 3 s" in found["slow"].problems[0]
    assert "its list of files has 9437184 bytes; 8388608 are allowed" in found["long"].problems[0]


# -- Folders --


def test_everything_that_a_folder_may_hold(tmp_path):
    for name in "abcdefghij":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / FILE).mkdir()
    os.mkfifo(tmp_path / "b" / "ex01.py")
    (tmp_path / "c" / FILE).symlink_to("/etc/passwd")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    (tmp_path / "d" / FILE).write_text(SOURCE)
    (tmp_path / "e" / "EX01_Rank_Arithmetic.PY").write_text(SOURCE)
    (tmp_path / "f" / FILE).write_bytes(b"")
    (tmp_path / "g" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "g" / ".ipynb_checkpoints" / FILE).write_text(OTHER)
    (tmp_path / "h" / FILE).write_text("#" * (2 << 20))
    (tmp_path / "i" / os.fsdecode(b"ex01_\xff\x1b[31m.py")).write_text(SOURCE)
    (tmp_path / "i" / os.fsdecode(b"ex99_\xff\x1b[31m.py")).write_text(SOURCE)
    (tmp_path / "j" / "x.zip").symlink_to("/dev/zero")
    found = read(tmp_path)
    assert f"{FILE} is a folder, not a plain file" in found["a"].problems[0]
    assert "a device, a pipe or a socket" in found["b"].problems[0]
    assert f"{FILE} is a link, not a plain file" in found["c"].problems[0]
    assert found["d"] == Submission("d", {NAME: SOURCE})
    assert found["e"] == Submission("e", {NAME: SOURCE})
    assert found["f"] == Submission("f", {NAME: ""})
    assert not found["g"].sources and found["g"].problems
    assert "2097152 bytes; 1048576 are allowed" in found["h"].problems[0]
    assert found["i"].sources == {NAME: SOURCE}
    assert found["i"].problems[0].startswith("ex99_\\xff\\x1b[31m.py is not read")
    assert not found["j"].sources and found["j"].problems


def test_everything_that_may_stand_in_a_students_place(tmp_path):
    base, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    base.mkdir()
    elsewhere.mkdir()
    (elsewhere / FILE).write_text(SOURCE)
    (base / "linked").symlink_to(elsewhere)
    (base / "lost").symlink_to(tmp_path / "nowhere")
    (base / "linked.zip").symlink_to(elsewhere / FILE)
    os.mkfifo(base / "pipe.zip")
    (base / os.fsdecode(b"not\xffutf8")).mkdir()
    (base / "not\\xffutf8").mkdir()
    (base / "bell\x07\x1b]0;title\x07\n").mkdir()
    (base / "\u202egpj.exe").mkdir()
    (base / ".git").mkdir()
    (base / "__MACOSX").mkdir()
    (base / "grades.csv").write_text("student,points\n")
    (base / "ada.py").write_text(SOURCE)
    found = read(base)
    assert set(found) - {"honest"} == {
        "linked",
        "lost",
        "pipe",
        "not\\xffutf8",
        "not\\xffutf8 (2)",
        "bell\\x07\\x1b]0;title\\x07\\n",
        "\\u202egpj.exe",
        "ada",
    }
    assert not any(one.sources for name, one in found.items() if name != "honest")
    assert all(one.problems for name, one in found.items() if name != "honest")
    assert "linked is a link; links are not followed" in found["linked"].problems
    assert "linked.zip is a link" in " ".join(found["linked"].problems)


def test_a_failure_of_ours_is_one_students_problem(tmp_path, monkeypatch):
    def fail(folder: Path):
        if folder.name == "ada":
            raise RuntimeError("a defect in here")
        return real(folder)

    real = submissions._read_folder
    monkeypatch.setattr(submissions, "_read_folder", fail)
    (tmp_path / "ada").mkdir()
    assert only(tmp_path).problems == ("ada cannot be read: RuntimeError: a defect in here",)


def test_what_may_not_be_read(tmp_path, monkeypatch):
    if os.getuid() == 0:
        real_open, real_scan = os.open, os.scandir

        def refuse(path, *rest, **options):
            if "secret" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return (real_open if rest else real_scan)(path, *rest, **options)

        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(os, "scandir", refuse)
    (tmp_path / "x" / "secret").mkdir(parents=True)
    (tmp_path / "x" / "ex01_secret.py").write_text(SOURCE)
    (tmp_path / "x" / "secret").chmod(0)
    (tmp_path / "x" / "ex01_secret.py").chmod(0)
    assert only(tmp_path).problems == (
        "ex01_secret.py cannot be read: Permission denied",
        "secret cannot be read: Permission denied",
    )


def test_the_limit_of_files_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "MOST_FILES", 10)
    (tmp_path / "x").mkdir()
    for number in range(10):
        (tmp_path / "x" / f"a{number}").write_text("")
    (tmp_path / "x" / FILE).write_text(SOURCE)
    assert only(tmp_path).problems == ("holds more than 10 files; only 10 were looked at",)


def test_the_limit_of_files_in_archives_is_told(tmp_path):
    many = [(f"a{number}", b"") for number in range(collection.MOST_FILES)]
    (tmp_path / "x.zip").write_bytes(zip_bytes(*many, MINE))
    (tmp_path / "y.tar.gz").write_bytes(gzip.compress(tar_bytes(*many, MINE), 1))
    found = read(tmp_path)
    for name in "xy":
        assert "more than 20000 files; only the first 20000" in found[name].problems[0]


def test_many_and_long_problems_are_cut(tmp_path):
    for name in "xyz":
        (tmp_path / name).mkdir()
    for number in range(MOST_TAKEN + 10):
        (tmp_path / "x" / f"ex01_{number}.py").write_text(str(number))
    long = "/".join(["y" * 200] * 40 + [FILE])
    (tmp_path / "z.zip").write_bytes(zip_bytes((long, b"\0")))
    deep = tmp_path / "y"
    for _ in range(15):
        deep = deep / ("d" * 200)
        deep.mkdir()
    (deep / FILE).write_text(SOURCE)
    found = read(tmp_path)
    assert found["x"].problems[-1] == f"and {MOST_TAKEN - MOST_PROBLEMS + 1} more problems"
    assert f"more than {MOST_TAKEN} files are named after an exercise" in found["x"].problems[0]
    assert found["y"].sources == {NAME: SOURCE}
    assert "NUL bytes" in found["z"].problems[0] and len(found["z"].problems[0]) < 500


def test_folders_deeper_than_a_path_can_say(tmp_path):
    (tmp_path / "x").mkdir()
    here = os.open(tmp_path / "x", os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 200, dir_fd=here)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    assert "cannot be read: File name too long" in only(tmp_path).problems[0]


# -- Whose file, and which --


def test_one_student_as_folder_and_archive_is_one_row(tmp_path):
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / FILE).write_text(SOURCE)
    (tmp_path / "twice.zip").write_bytes(zip_bytes((FILE, SOURCE.encode())))
    assert only(tmp_path) == Submission("twice", {NAME: SOURCE})


def test_of_two_files_one_is_graded_and_the_other_is_named(tmp_path):
    (tmp_path / "twice" / "old").mkdir(parents=True)
    (tmp_path / "twice" / "old" / FILE).write_text(OTHER)
    (tmp_path / "twice" / "ex01.py").write_text(SOURCE)
    (tmp_path / "twice.tar").write_bytes(tar_bytes((FILE, OTHER.encode())))
    found = only(tmp_path)
    assert found.sources == {NAME: SOURCE}
    assert found.problems == (
        f"old/{FILE} is another file for {NAME}; ex01.py is graded",
        f"twice.tar/{FILE} is another file for {NAME}; ex01.py is graded",
    )


def test_a_file_that_cannot_be_read_leaves_the_next(tmp_path):
    (tmp_path / "x" / "old").mkdir(parents=True)
    (tmp_path / "x" / FILE).write_bytes(b"x = '\xe9'\n")
    (tmp_path / "x" / "old" / FILE).write_text(SOURCE)
    found = only(tmp_path)
    assert found.sources == {NAME: SOURCE}
    assert "line 1 has the byte 0xe9, which is not UTF-8" in found.problems[0]


def test_canvas_flat_export(tmp_path):
    for name, text in (
        ("lovelaceada_12345_678901_ex06_one_f_one_b.py", "one"),
        ("lovelaceada_12345_678902_ex01_rank_arithmetic-1.py", "second"),
        ("lovelaceada_12345_678900_ex01_rank_arithmetic.py", "first"),
        ("van_der_berg_LATE_4_7_ex01_rank_arithmetic-12.py", "late"),
        ("lovelaceada_99_5_EX01_rank_arithmetic.PY", "another Ada"),
        ("anon_x1Y2z_8_ex01.py", "nobody"),
        ("LATE_anon_a_9_ex01.py", "nobody, late"),
        ("typed_1_text.html", "<p>"),
        ("pdf_1_2_answer.pdf", "%PDF"),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "zipped_LATE_3_4_submission-2.zip").write_bytes(zip_bytes(MINE))
    found = read(tmp_path)
    del found["honest"]
    six = find("ex06").name
    assert {name: one.sources for name, one in found.items()} == {
        "lovelaceada_12345": {six: "one", NAME: "second"},
        "lovelaceada_99": {NAME: "another Ada"},
        "van_der_berg_4": {NAME: "late"},
        "anon_x1Y2z": {NAME: "nobody"},
        "anon_a": {NAME: "nobody, late"},
        "typed_1": {},
        "pdf_1": {},
        "zipped_3": {NAME: SOURCE},
    }
    assert found["van_der_berg_4"].problems == ("ex01_rank_arithmetic-12.py is late, says Canvas",)
    assert found["lovelaceada_12345"].problems == (
        f"{FILE} is another file for {NAME}; ex01_rank_arithmetic-1.py is graded",
    )
    assert found["typed_1"].problems and found["pdf_1"].problems
    assert not found["lovelaceada_99"].problems


def test_a_students_own_folder_is_not_taken_for_canvas(tmp_path):
    (tmp_path / "ex06_one_f_one_b_2024_12_notes.py").write_text("")
    (tmp_path / FILE).write_text(SOURCE)
    (found,) = find_submissions(tmp_path)
    assert found.student == tmp_path.name and found.sources[NAME] == SOURCE
    assert canvas_name("ex06_2024_12_notes.py") is None


def test_every_file_that_start_makes_is_recognised():
    for exercise in exercises():
        assert exercise_number(f"{exercise.name}.py") == exercise.number
        assert exercise_number(f"{exercise.name}-1.PY") == exercise.number


def test_no_submissions_at_all(tmp_path):
    with pytest.raises(ValueError, match="holds neither folders nor zip files"):
        find_submissions(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="holds neither folders nor zip files"):
        find_submissions(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_submissions(tmp_path / "notes.txt")


# -- Encodings --


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfx = 1\n", "x = 1\n"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", "# -*- coding: utf-8 -*-\nx = 'é'\n"),
        (b"\n# vim: set fileencoding=cp1252 :\n'\x80'", "\n# vim: set fileencoding=utf-8 :\n'€'"),
        (b"#!/usr/bin/python\r\n# coding=koi8-r\r\n", "#!/usr/bin/python\r\n# coding=utf-8\r\n"),
        ("x = 'é'\n".encode(), "x = 'é'\n"),
        (b"", ""),
    ],
)
def test_texts_are_read_as_python_reads_them(data, text):
    assert decode(data) == text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"x = 1\nx = '\xe9'\n", "line 2 has the byte 0xe9, which is not UTF-8"),
        ("x = 1".encode("utf-16"), "UTF-16"),
        (codecs.BOM_UTF16_BE + b"\0x", "UTF-16"),
        ("x = 1".encode("utf-32"), "UTF-16 or UTF-32"),
        (b"x = '\0'", "NUL"),
        (b"# coding: nonsense\n", "nonsense"),
        (b"# coding: zlib\n", "zlib"),
        (b"# coding: punycode\n", "punycode"),
        (b"# coding: unicode_escape\n'\\ud800'", "unicode_escape"),
        (b"# coding: utf-7\n", "utf-7"),
        (b"# coding: utf-16\n", "utf-16"),
        (b"\xef\xbb\xbf# coding: latin-1\n", "utf-8"),
        (b"# coding: ascii\n'\xe9'", "not ASCII"),
    ],
)
def test_other_encodings_are_a_problem(data, words):
    with pytest.raises(ValueError) as error:
        decode(data)
    assert words.lower() in str(error.value).lower() and not isinstance(error.value, UnicodeError)


# -- Remarks --


@pytest.mark.parametrize("exercise", exercises(), ids=lambda one: one.number)
def test_no_remark_on_what_was_given(exercise):
    stub = (exercise.folder / "stub.py").read_text()
    solution = (exercise.folder / "solution.py").read_text()
    assert remarks_on(exercise, stub) == ()
    assert remarks_on(exercise, solution + "\n# mine\n") == (SAME_CODE,)
    # As the student writes it, with the stub's imports: other names, no comments.
    other = stub.partition("\ndef ")[0] + "\n" + solution.replace("order", "my_order") + "\ny = 1\n"
    assert remarks_on(exercise, other) == ()


@pytest.mark.parametrize(
    ("number", "source", "words"),
    [
        ("ex01", "from minimegatron.core.rank_generator import *", ""),
        ("ex01", "import minimegatron.core.rank_generator as r\nr.RankGenerator", ""),
        (
            "ex01",
            "from minimegatron.core.rank_generator import RankGenerator as R\n"
            "def get_ranks(self, token):\n    return R.get_ranks(self, token)",
            "it uses minimegatron.core.rank_generator.RankGenerator.get_ranks",
        ),
        (
            "ex12",
            "from minimegatron.core.pipeline_parallel.schedule_table import get_schedule_table as f",
            "it uses minimegatron.core.pipeline_parallel.schedule_table.get_schedule_table",
        ),
        (
            "ex12",
            "from minimegatron.core.pipeline_parallel import schedule_table as t\n"
            "f = t.get_schedule_table",
            "it uses minimegatron.core.pipeline_parallel.schedule_table.get_schedule_table",
        ),
        ("ex12", "from minimegatron.core.pipeline_parallel.schedule_table import *", "it uses"),
        ("ex12", '"""As minimegatron.exercises.catalog says."""', ""),
        (
            "ex12",
            "import importlib\n"
            "importlib.import_module('minimegatron.exercises.catalog.ex12_x.solution')",
            "it imports from the catalogue",
        ),
        (
            "ex12",
            "from minimegatron.exercises.catalog import find",
            "it imports from the catalogue",
        ),
        ("ex12", "def f(:", ""),
        ("ex12", "x = 1" + " + 1" * 100_000, TOO_DEEP),
        ("ex12", "-" * 900_000 + "1", TOO_DEEP),
        ("ex12", "x = '\0'", ""),
        ("ex12", "# \ud800", ""),
    ],
)
def test_remarks(number, source, words):
    found = remarks_on(find(number), source)
    assert len(found) == bool(words) and words in " ".join(found)
