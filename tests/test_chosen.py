"""`make test FILE=...` and `CHANGED=1`: which tests are chosen for a change, and that they are run."""

import doctest
import json
import os
import subprocess
import sys

import pytest

from tests import chosen, entering
from tests.chosen import choose

RECORD = {
    "files": ["minimegatron/core/a.py", "minimegatron/core/b.py", "tests/helper.py"],
    "tests": {
        "tests/core/test_a.py::test_one": [2.0, [0, 1, 2]],
        "tests/test_far.py::test_much": [5.0, [0, 1, 2]],
        "tests/test_far.py::test_little": [1.0, [0]],
        "tests/test_other.py::test_other": [1.0, [1]],
    },
}


def names(files: list[str], seconds: float = 100.0) -> list[str]:
    return [name.rpartition("::")[2] for name in choose(files, RECORD, seconds).names]


def test_tests_that_enter_a_file_come_by_how_much_they_say_of_it():
    """First those of the file named after it, then those that enter the fewest others."""
    assert names(["minimegatron/core/a.py"]) == ["test_one", "test_little", "test_much"]
    assert names(["minimegatron/core/b.py"]) == ["test_other", "test_one", "test_much"]


def test_tests_whose_own_file_has_changed_come_first():
    assert names(["minimegatron/core/a.py", "tests/test_far.py"])[:2] == [
        "test_little",
        "test_much",
    ]


def test_the_time_is_kept_and_what_is_left_is_told():
    found = choose(["minimegatron/core/a.py"], RECORD, seconds=3.5)
    assert [name.rpartition("::")[2] for name in found.names] == ["test_one", "test_little"]
    assert (found.num_entering, found.seconds) == (3, 3.0)


def test_of_a_changed_file_of_tests_what_is_new_is_run_too():
    """Whole if nothing of it is recorded; a test that is recorded counts as its seconds say."""
    found = set(choose(["tests/test_chosen.py"], RECORD).names)
    assert found == {"tests/test_chosen.py"}
    recorded = {"tests/test_chosen.py::test_old", "tests/test_chosen.py::test_slow[1]"}
    chosen_ones = {*found, "tests/test_chosen.py::test_old", "tests/test_far.py::test_x[1]"}
    met = {
        "tests/test_chosen.py::test_old[case]": True,
        "tests/test_chosen.py::test_new[case]": True,
        "tests/test_chosen.py::test_slow[1]": False,
        "tests/test_far.py::test_x[1]": True,
        "tests/test_far.py::test_x[2]": False,
        "tests/test_house.py::test_y": False,
    }
    assert {test: chosen.is_chosen(test, chosen_ones, recorded) for test in met} == met


@pytest.mark.processes
def test_what_is_chosen_runs_though_some_of_it_is_no_more(tmp_path):
    """A test that has another name now stops nothing."""
    place = tmp_path / "chosen.json"
    file = "tests/core/test_rank_generator.py"
    names = [f"{file}::test_rank_offset_and_left_out_words", f"{file}::test_that_was"]
    place.write_text(json.dumps({"names": names, "recorded": names}))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.chosen",
        "-p",
        "no:cacheprovider",
        file,
    ]
    done = subprocess.run(
        command,
        env=os.environ | {chosen.PLACE: str(place)},
        cwd=entering.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout and "deselected" in done.stdout, done.stdout


def test_a_file_that_no_test_enters_has_the_tests_that_name_it(tmp_path, monkeypatch):
    """Not those that have its name as a part of another."""
    monkeypatch.setattr(chosen, "ROOT", tmp_path)
    (tmp_path / "tests" / "core").mkdir(parents=True)
    (tmp_path / "tests" / "core" / "test_a.py").write_text("from minimegatron.core import sizes\n")
    (tmp_path / "tests" / "test_far.py").write_text("resizes = 1\n")
    assert names(["minimegatron/core/sizes.py"]) == ["test_one"]
    assert names(["README.md"]) == []


def test_the_site_is_built_for_a_change_in_docs_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(chosen, "ROOT", tmp_path)
    (tmp_path / "tests" / "docs").mkdir(parents=True)
    (tmp_path / "tests" / "docs" / "test_pages.py").write_text("def test_page(site: Path): ...\n")
    record = {
        "files": ["minimegatron/core/a.py"],
        "tests": {
            "tests/docs/test_pages.py::test_page": [1.0, [0]],
            "tests/test_a.py::test_a": [2.0, [0]],
        },
    }
    of_code = choose(["minimegatron/core/a.py"], record)
    assert (of_code.names, of_code.num_entering) == (["tests/test_a.py::test_a"], 2)
    both = choose(["minimegatron/core/a.py", "docs/index.md"], record, seconds=300)
    assert (len(both.names), both.seconds) == (2, 3 + chosen.SECONDS_OF_THE_SITE)


def test_a_known_mistake_belongs_to_the_file_in_which_it_is_made():
    found = choose(["minimegatron/core/pipeline_parallel/loops.py"], RECORD)
    name = "tests/test_mutations.py::test_the_fault_is_noticed[one-warm-up-too-many]"
    assert name in found.names


def test_what_has_changed(tmp_path, monkeypatch):
    """Against a commit, with files that git does not know; without any, the last commit's."""
    answers = {
        ("diff", "--name-only", "HEAD"): "",
        ("ls-files", "--others", "--exclude-standard"): "",
        ("diff", "--name-only", "HEAD~1"): "minimegatron/core/a.py",
    }
    monkeypatch.setattr(chosen, "git", lambda *words: answers[words])
    assert chosen.changed_files("HEAD") == ["minimegatron/core/a.py"]
    answers["ls-files", "--others", "--exclude-standard"] = "new.py"
    assert chosen.changed_files("HEAD") == ["new.py"]


def test_examples():
    for module in (chosen, entering):
        failed, tried = doctest.testmod(module)
        assert tried and not failed, module


def test_a_path_may_be_written_in_another_way(capsys):
    """And a known mistake stands in the list once, though its test is recorded too."""
    lists = []
    for before in ("", "./"):
        path = f"{before}minimegatron/core/pipeline_parallel/loops.py"
        assert chosen.main(["--list", "--file", path]) == 0
        lists.append(capsys.readouterr().out)
    assert lists[0] == lists[1]
    names = lists[0].splitlines()
    assert len(names) == len(set(names)) and any("test_mutations" in name for name in names)


def test_a_file_that_is_not_there_is_refused(capsys):
    assert chosen.main(["--file", "minimegatron/nowhere.py"]) == 2
    assert "no such file: minimegatron/nowhere.py" in capsys.readouterr().out


def test_the_record_is_of_tests_and_files_that_there_are():
    record = entering.read(entering.RECORD.read_text())
    assert not [path for path in record["files"] if path.startswith(".hypothesis")]
    gone = [path for path in record["files"] if not (entering.ROOT / path).is_file()]
    assert len(gone) < 0.05 * len(record["files"]), "run: make test-map"
    files = {name.partition("::")[0] for name in record["tests"]}
    unknown = {
        str(path.relative_to(entering.ROOT))
        for path in (entering.ROOT / "tests").rglob("test_*.py")
        if not {"right", "wrong", "sample", "honest", "fixtures"} & set(path.parts)
    } - files
    assert len(unknown) < 0.1 * len(files), "run: make test-map"


@pytest.mark.parametrize("phase", ["call", "setup"])
def test_what_a_test_enters_is_noted_with_its_name(tmp_path, phase):
    """Also for the tests of its file, where a fixture enters it."""
    (tmp_path / "notes").write_text(
        f"tests/test_x.py::test_one[case (a)] ({phase})\ttests/chosen.py\n"
        "tests/test_x.py::test_two (call)\ttests/entering.py\n\tREADME.md\n"
    )
    (tmp_path / "times").write_text(
        "tests/test_x.py::test_one[case (a)]\t1.5\ntests/test_x.py::test_one[b]\t0.5\n"
        "tests/test_x.py::test_two\t1\n"
    )
    record = entering.made_of(tmp_path / "notes", tmp_path / "times")
    assert record["files"] == ["tests/chosen.py", "tests/entering.py"]
    assert record["tests"]["tests/test_x.py::test_one"] == [2.0, [0]]
    assert record["tests"]["tests/test_x.py::test_two"] == [1.0, [1] if phase == "call" else [0, 1]]
    assert entering.read(entering.written(record)) == record


def test_what_all_tests_of_a_file_enter_is_written_once():
    assert entering.read(entering.written(RECORD)) == RECORD
    assert (
        '"tests/test_far.py": [0],\n"tests/test_far.py::test_much": [5.0,[1,2]]'
        in entering.written(RECORD)
    )


def test_cases_that_take_long_stand_apart(tmp_path):
    (tmp_path / "notes").write_text("tests/test_x.py::test_one[a] (call)\ttests/chosen.py\n")
    (tmp_path / "times").write_text(
        "tests/test_x.py::test_one[a]\t8\ntests/test_x.py::test_one[a]\t1\n"
        "tests/test_x.py::test_one[b]\t2.0\n"
    )
    assert entering.made_of(tmp_path / "notes", tmp_path / "times")["tests"] == {
        "tests/test_x.py::test_one[a]": [9.0, [0]],
        "tests/test_x.py::test_one[b]": [2.0, []],
    }


def test_a_case_that_is_a_path_has_the_same_name_in_every_clone(tmp_path):
    case = f"tests/test_x.py::test_one[{entering.ROOT}/a.py]"
    (tmp_path / "notes").write_text(f"{case} (call)\ttests/chosen.py\n")
    (tmp_path / "times").write_text(f"{case}\t11\n")
    record = entering.made_of(tmp_path / "notes", tmp_path / "times")
    assert record["tests"] == {"tests/test_x.py::test_one[ROOT/a.py]": [11.0, [0]]}


def test_files_of_tests_are_recorded_anew_one_by_one():
    """All earlier rows of such a file are removed: a test may have another name now."""
    new = {
        "files": ["minimegatron/core/c.py"],
        "tests": {"tests/test_far.py::test_new": [1.5, [0]]},
    }
    record = entering.merged(RECORD, new)
    assert [*record["tests"]] == [
        "tests/core/test_a.py::test_one",
        "tests/test_far.py::test_new",
        "tests/test_other.py::test_other",
    ]
    assert record["files"][2] == "minimegatron/core/c.py"
    assert record["tests"]["tests/test_far.py::test_new"] == [1.5, [2]]
    assert record["tests"]["tests/core/test_a.py::test_one"] == [2.0, [0, 1, 3]]


@pytest.mark.processes
def test_ranks_and_programs_note_for_the_test_that_runs(tmp_path):
    """A forked process too, whose environment is of the time when its server began."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from tests import entering\n"
        "entering.start()\n"
        "from tests import chosen, checkout\n"
        "for name in ('one', 'two'):\n"
        "    open(entering.place_of_test(sys.argv[1]), 'w').write(f'tests/test_x.py::{name} (call)')\n"
        "    if os.fork() == 0:\n"
        "        chosen.is_named_after('a', 'b') if name == 'one' else checkout.git('version')\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    environment = os.environ | {entering.FOLDER: str(tmp_path), "PYTHONPATH": str(entering.ROOT)}
    subprocess.run([sys.executable, program, tmp_path], env=environment, check=True)
    noted = (tmp_path / "notes").read_text().splitlines()
    assert "tests/test_x.py::one (call)\ttests/chosen.py" in noted
    assert "tests/test_x.py::two (call)\ttests/checkout.py" in noted
    assert "tests/test_x.py::two (call)\ttests/chosen.py" not in noted


def test_make_runs_what_is_chosen():
    command = ["make", "--dry-run", "test", "FILE=a.py b.py"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=entering.ROOT).stdout
    assert "-m tests.chosen --file a.py --file b.py -n 3" in said
    command = ["make", "--dry-run", "test", "CHANGED=1"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=entering.ROOT).stdout
    assert "-m tests.chosen --changed HEAD -n 3" in said
