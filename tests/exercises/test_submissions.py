"""Reading what students hand in: whatever it is, a grade or a problem, and for that student only."""

import ast
import codecs
import os
from pathlib import Path

import pytest

from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.grading import collection, submissions
from minimegatron.exercises.grading.collection import MOST_PROBLEMS, MOST_TAKEN
from minimegatron.exercises.grading.decoded_text import decode
from minimegatron.exercises.grading.file_names import exercise_number, exported_name
from minimegatron.exercises.grading.submissions import (
    Submission,
    find_submissions,
    unread_names,
)
from tests.exercises.handed_in import (
    FILE,
    MINE,
    NAME,
    OTHER,
    SOURCE,
    only,
    read,
    tar_bytes,
    zip_bytes,
)

# -- Folders --


def test_everything_that_a_folder_may_hold(tmp_path):
    for name in "abcdefghijk":
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
    (tmp_path / "k" / "linked").symlink_to(tmp_path / "d")
    found = read(tmp_path)
    assert not found["k"].sources and found["k"].problems
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
    assert f"more than {MOST_TAKEN} files or 4194304 bytes" in found["x"].problems[0]
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


def test_moodles_and_blackboards_flat_exports(tmp_path):
    for name, text in (
        ("Bob Builder_777_assignsubmission_file_ex01.py", "Bob's"),
        ("Bob Builder_777_assignsubmission_onlinetext_onlinetext.html", "<p>"),
        ("Ada Lovelace_778_assignsubmission_file_EX01_rank_arithmetic.py", "Ada's"),
        ("Week 2_s4711_attempt_2026-11-23-10-11-12_ex01.py", "first"),
        ("Week 2_s4711_attempt_2026-11-24-09-00-00_ex01.py", "second"),
        ("Week 2_s4711_attempt_2026-11-24-09-00-00.txt", "what Blackboard says"),
        ("ex01_s4712_attempt_2026-11-24-09-00-00_my answer.pdf", "%PDF"),
    ):
        (tmp_path / name).write_text(text)
    name = "Cid_779_assignsubmission_file_all of it.zip"
    (tmp_path / name).write_bytes(zip_bytes(MINE))
    found = read(tmp_path)
    del found["honest"]
    assert {name: one.sources for name, one in found.items()} == {
        "Bob Builder_777": {NAME: "Bob's"},
        "Ada Lovelace_778": {NAME: "Ada's"},
        "Cid_779": {NAME: SOURCE},
        "s4711": {NAME: "second"},
        "s4712": {},
    }
    assert found["s4712"].problems and not found["Ada Lovelace_778"].problems


def test_a_class_is_not_taken_for_one_student(tmp_path):
    for place in ("export/ada", "export/bob", "top"):
        (tmp_path / "nested" / place).mkdir(parents=True)
    nested, export = tmp_path / "nested", tmp_path / "nested" / "export"
    (nested / "top").rmdir()
    for student in ("ada", "bob"):
        (export / student / FILE).write_text(student)
    with pytest.raises(ValueError, match=f"ada and bob hold different .* Then grade {export}"):
        find_submissions(nested)
    assert [one.student for one in find_submissions(export)] == ["ada", "bob"]
    (export / FILE).write_text(SOURCE)  # its own; the others are older
    assert [one.sources for one in find_submissions(nested)] == [{NAME: SOURCE}]
    flat = tmp_path / "flat"
    flat.mkdir()
    for student in ("ada", "bob"):
        (flat / f"ex01_{student}.py").write_text(student)
    with pytest.raises(
        ValueError, match="ex01_ada.py and ex01_bob.py .* Give each student a folder"
    ):
        find_submissions(flat)
    (flat / "ex01_bob.py").write_text("ada")
    assert len(find_submissions(flat)) == 1


def test_a_students_own_folder_is_not_taken_for_canvas(tmp_path):
    (tmp_path / "ex06_one_f_one_b_2024_12_notes.py").write_text("")
    (tmp_path / FILE).write_text(SOURCE)
    (found,) = find_submissions(tmp_path)
    assert found.student == tmp_path.name and found.sources[NAME] == SOURCE
    assert exported_name("ex06_2024_12_notes.py") is None


STRAY = "ex01_model_answer.py"


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("beside", ["", "ada.zip", "ada.rar", "ada_1_2_ex01.py"])
def test_a_stray_file_does_not_make_the_class_one_student(make, beside, tmp_path):
    make(tmp_path / STRAY)
    (tmp_path / beside).touch() if beside else (tmp_path / "ada").mkdir()
    found = {one.student: one for one in find_submissions(tmp_path)}
    assert set(found) == {STRAY, "ada_1" if "_" in beside else "ada"}
    assert not found[STRAY].sources and " not " in found[STRAY].problems[0]


def test_a_stray_file_beside_a_linked_folder(tmp_path):
    (tmp_path / "ada").symlink_to("/usr")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / STRAY).touch()
    assert {one.student for one in find_submissions(tmp_path)} == {STRAY, "ada", "loop"}


def test_what_the_commands_put_into_a_students_folder_leaves_it_one_students(tmp_path):
    for name in ("replays", "labs", ".git", "__pycache__"):
        (tmp_path / name).mkdir()
    (tmp_path / FILE).write_text(SOURCE)
    (tmp_path / "submission.zip").write_bytes(zip_bytes(MINE))
    assert find_submissions(tmp_path) == [Submission(tmp_path.name, {NAME: SOURCE})]


def test_entries_without_a_row_are_named(tmp_path):
    unread = ["carol.ipynb", "dave.txt", "erin", "frank\x1b.docx", "iris"]
    for name in unread[:-1]:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "iris")
    (tmp_path / "max").symlink_to("/etc/passwd")
    for name in ("ada.zip", "pia.py", ".DS_Store", "ada_1_2_ex01.py"):
        (tmp_path / name).touch()
    (tmp_path / "otto").mkdir()
    assert unread_names(tmp_path) == [name.replace("\x1b", "\\x1b") for name in unread] + ["max"]
    assert unread_names(tmp_path / "otto") == []
    (tmp_path / "otto" / FILE).touch()
    (tmp_path / "otto" / "notes.txt").touch()
    assert unread_names(tmp_path / "otto") == []


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
        (b"#!/usr/bin/python\r\n# coding=koi8-r\r\n", "#!/usr/bin/python\n# coding=utf-8\n"),
        (b"\r# coding: latin-1\rx = '\xe9'", "\n# coding: utf-8\nx = 'é'"),
        (b"# caf\xe9\r\n# coding: latin-1-unix\r\n", "# café\n# coding: utf-8\n"),
        (b"x = 1\r# coding: utf-7\r", "x = 1\n# coding: utf-7\n"),
        (b"#\v\x1c\n# coding: latin-1\n", "#\v\x1c\n# coding: utf-8\n"),
        (b"\f\n# coding: cp1252 coding: utf-7\n", "\f\n# coding: utf-8 coding: utf-7\n"),
        (b"# coding: utf8\n# coding: utf-7\n", "# coding: utf-8\n# coding: utf-7\n"),
        (b"\xef\xbb\xbf" * 3 + b"x = 1\n", "x = 1\n"),
        (b"\xef\xbb\xbf" * 2 + b"# coding: utf-7\n# +AAo-", "# coding: utf-8\n# +AAo-"),
        ("x = 'é'\n".encode(), "x = 'é'\n"),
        (b"", ""),
    ],
)
def test_texts_are_read_as_python_reads_them(data, text):
    assert decode(data) == text
    as_bytes, as_text = (ast.dump(ast.parse(one)) for one in (text.encode(), text))
    assert as_bytes == as_text


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
        (b"# coding: raw_unicode_escape\n'\\ud800'", "raw_unicode_escape"),
        (b"# coding: idna\n", "idna"),
        (b"# coding: " + b"x" * 5000 + b"\n", "unknown encoding"),
        (b"# coding: utf-7\n", "utf-7"),
        (b"\r# coding: utf-7\rx = 1\r# +AAo-y = 1\r", "utf-7"),
        (b"#\r\t# coding=utf_7\r", "utf_7"),
        (b"x = 1\rx = '\xe9'\r", "line 2 has the byte 0xe9"),
        (b"# coding: utf-16\n", "utf-16"),
        (b"\xef\xbb\xbf# coding: latin-1\n", "utf-8"),
        (b"# coding: ascii\n'\xe9'", "not ASCII"),
    ],
)
def test_other_encodings_are_a_problem(data, words):
    with pytest.raises(ValueError) as error:
        decode(data)
    assert words.lower() in str(error.value).lower() and not isinstance(error.value, UnicodeError)


# -- Gradescope --


def test_gradescopes_folder_is_one_students_whatever_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "GRADESCOPE", tmp_path)
    (found,) = find_submissions(tmp_path)
    assert not found.sources and "no file in it is named after an exercise" in found.problems[0]
    (tmp_path / "homework").mkdir()
    (tmp_path / "homework" / FILE).write_text(SOURCE)
    (tmp_path / "notes").mkdir()
    assert find_submissions(tmp_path) == [Submission(tmp_path.name, {NAME: SOURCE})]
