"""What the commands say by themselves: examples that run, usage for who typed nothing, 80 columns."""

import argparse
import doctest
import importlib
import io
import re
import shlex

import pytest

from minimegatron.__main__ import COMMANDS, main
from minimegatron.core import output
from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.labs.labs import LABS, find_lab
from minimegatron.exercises.student import markdown, pages
from minimegatron.exercises.student.markdown import print_markdown
from minimegatron.exercises.student.student_folder import StudentFolder
from minimegatron.training.utils import print_rank_0

MODULES = {
    name: importlib.import_module(f"minimegatron.commands.{name}_command") for name in COMMANDS
}
NEED_ARGUMENTS = ("convert", "groups", "layout", "plan", "preprocess", "trace")


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def help_of(words: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def sub_actions(name: str) -> list[list[str]]:
    return [[name, action] for action in getattr(MODULES[name], "EXAMPLES_OF", ())]


ALL_HELP = [words for name in COMMANDS for words in ([name], *sub_actions(name))]


@pytest.mark.parametrize("words", ALL_HELP, ids=" ".join)
def test_every_help_ends_with_examples_that_parse(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(words, capsys)
    assert max(map(len, text.splitlines())) <= 80
    examples = text.partition("\nexamples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 4
    for line in examples:
        program, name, *rest = shlex.split(line)
        assert (program, [name, *rest][: len(words)]) == ("minimegatron", words)
        parser = argparse.ArgumentParser(exit_on_error=False)
        MODULES[name].add_arguments(parser)
        parser.parse_args(rest)  # raises, or exits, for what does not parse


def test_every_action_of_exercises_and_of_trace_has_examples():
    for name in ("exercises", "trace"):
        listed = re.search(r"\{(.*?)\}", str(_choices(name))).group(1)
        assert set(re.findall(r"'(\w+)'", listed)) == set(MODULES[name].EXAMPLES_OF)


def _choices(name: str) -> str:
    parser = argparse.ArgumentParser(exit_on_error=False)
    MODULES[name].add_arguments(parser)
    with pytest.raises(argparse.ArgumentError) as error:
        parser.parse_args(["no-such-action"])
    return "{" + str(error.value).partition("choose from ")[2].replace(")", "}")


@pytest.mark.parametrize("name", NEED_ARGUMENTS)
def test_alone_it_prints_its_usage_and_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name])
    words = capsys.readouterr().err
    assert ended.value.code == 2 and words.startswith(f"usage: minimegatron {name} ")
    assert f"\nexamples:\n  minimegatron {name} {MODULES[name].EXAMPLES[0]}\n" in words
    usage, missing = words.splitlines()[0], words.rpartition("required: ")[2]
    assert len(usage) <= 80
    for argument in missing.strip().split(", "):
        assert argument.lower() in usage.lower(), usage


def test_with_something_missing_one_line_stays_enough(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--pp", "4"])
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["plan", "groups", "layout"])
def test_examples_run(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in MODULES[name].EXAMPLES:
        assert main([name, *shlex.split(words)]) == 0, words
    assert capsys.readouterr().out


def test_a_schedule_is_named_in_any_case(capsys):
    texts = []
    for name in ("1f1b", "1F1B", "GPipe", "gpipe"):
        assert main(["plan", "--pp", "2", "--microbatches", "3", "--schedule", name]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[2] == texts[3] != texts[0]


TABLES = [
    "groups --world-size 64 --tp 2 --pp 2 --ep 2",
    "groups --world-size 1024 --tp 8 --pp 16 --ep 8 --cp 2",
    "layout Et|t|t|tL --pp 4 --hidden-size 1024 --vocab-size 50304",
    "exercises list",
    "exercises lab list",
    "plan --pp 4 --microbatches 8 --width 80",
    "plan --pp 4 --microbatches 8 --vpp 2 --width 80",
    "plan --pp 4 --microbatches 8 --vpp 2 --schedule combined --layer-nodes 2,2,1,1 --width 80",
    "plan --pp 2 --microbatches 4 --context-parallel-size 4 --ring-times 4,1 --width 80",
]


@pytest.mark.parametrize("words", TABLES)
def test_tables_fit_80_columns(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80, max(lines, key=len)


def test_columns_that_do_not_fit_stand_below(capsys):
    words = "plan --pp 4 --microbatches 8 --vpp 2 --width"
    texts = []
    for width in ("80", "120"):
        assert main([*words.split(), width]) == 0
        texts.append(capsys.readouterr().out)
    narrow, wide = texts
    row = next(line for line in wide.splitlines() if line.startswith("rank 0  10 F"))
    pieces = [line for line in narrow.splitlines() if line.startswith("rank 0  ")]
    cells = [cell for line in pieces for cell in re.split(r" {2,}", line)[1:]]
    assert len(pieces) == 2 and cells == re.split(r" {2,}", row)[1:]


def test_a_number_without_an_exercise_is_answered_in_two_lines(capsys):
    assert main(["exercises", "check", "99"]) == 2
    words = capsys.readouterr().err
    assert words.count("\n") == 1 and len(words) <= 2 * 80
    assert "'99'" in words and f"all {len(exercises())}" in words and "exercises list" in words
    with pytest.raises(ValueError, match="fit 'gradient'; name one of: .*ex13_gradient_norm"):
        find("gradient")


def test_the_lab_of_the_examples_is_there():
    named = {word for words in MODULES["exercises"].EXAMPLES_OF["lab"] for word in words.split()}
    assert named & {lab.name for lab in LABS}
    assert find_lab("backward-of-the-newest")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_pages_in_the_terminal_wrap_and_show_no_markdown(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for exercise in exercises():
        print_markdown(pages.page_words(exercise))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= min(columns, markdown.MOST_WIDTH)
        assert exercise.title.split()[0] in text
        assert not re.search(r"^#+ |^```|\*\*|\]\(", text, re.MULTILINE), exercise.name


def test_drawings_of_pages_are_not_wrapped():
    for exercise in exercises():
        drawings = re.findall(r"^```\n(.*?)^```", pages.page_words(exercise), re.S | re.M)
        lines = [line for drawing in drawings for line in drawing.splitlines()]
        assert max(map(len, lines), default=0) <= 78, exercise.name


def test_a_page_and_a_hint_on_an_output_without_unicode(monkeypatch, tmp_path):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    folder = StudentFolder.open(tmp_path)
    folder.start(find("ex06"))
    for action in ("page", "hint"):
        assert main(["exercises", "--folder", str(tmp_path), action, "ex06"]) == 0
    stream.flush()
    assert b"Warm-up count" in raw.getvalue() and b"Hint 1" in raw.getvalue()


def test_a_line_of_the_log_fits_a_terminal_and_stays_whole_in_a_file(monkeypatch, capsys):
    assert doctest.testmod(output).failed == 0
    line = (
        " iteration 60/60 | lm loss 3.5811 | lr 1.67e-05 | grad norm 1.682 | 4,268 tokens/s | 9 ms"
    )
    rule = "-" * 120
    print_rank_0(line)
    assert capsys.readouterr().out == line + "\n"
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    print_rank_0(f"{rule}\n{line}\n{rule}\nx")
    first, *middle, last, end = terminal.getvalue().splitlines()
    assert first == last == "-" * 50 and end == "x" and max(map(len, middle)) <= 50
    assert " ".join(piece.strip() for piece in middle) == line.strip()
