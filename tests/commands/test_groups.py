"""`minimegatron groups` and the command line around it."""

import re
import subprocess
import sys

import pytest

from minimegatron.__main__ import COMMANDS, main


def groups_of(text: str, name: str) -> list[list[int]]:
    """The groups printed for one kind, its continuation lines included."""
    paragraph = re.search(rf"^{name} .*?(?=^\S|\Z|^$)", text, re.MULTILINE | re.DOTALL).group()
    return [[int(rank) for rank in body.split()] for body in re.findall(r"\[([^]]*)\]", paragraph)]


def run(line: str) -> int:
    return main(line.split())


def test_prints_the_sixteen_gpu_example(capsys):
    assert run("groups --world-size 16 --tp 2 --pp 4") == 0
    text = capsys.readouterr().out
    assert groups_of(text, "tp") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert groups_of(text, "pp") == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert groups_of(text, "mp") == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert groups_of(text, "dp") == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]
    ]  # fmt: skip
    assert groups_of(text, "embd") == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert "as dp" in text
    # Rank 13: tensor rank 1, the first copy of the model, last stage.
    row = next(line for line in text.splitlines() if line.startswith("  13"))
    assert row.replace("|", "").split() == ["13", "1", "0", "0", "3", "1", "0", "0"]
    assert max(map(len, text.splitlines())) <= 100


def test_e_a_group_of_all_ranks_is_made_beside_the_default_one(capsys):
    """As `parallel_state` does: the default group serves for none of the kinds."""
    run("groups --world-size 4 --tp 2 --pp 2")
    text = " ".join(capsys.readouterr().out.split())
    assert "9 distinct sets of ranks, so 9 process groups beside the default one" in text


def test_other_orders_and_large_worlds(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run("groups --world-size 8 --tp 2 --pp 2 --order pp-dp-tp") == 0
    text = capsys.readouterr().out
    assert groups_of(text, "pp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(text, "tp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert run("groups --world-size 65536 --tp 8 --pp 16 --ep 8") == 0
    text = capsys.readouterr().out
    assert "and 8188 more (--full)" in text
    assert len(text.splitlines()) < 150
    assert run("groups --world-size 128 --full") == 0
    text = capsys.readouterr().out
    assert "--full" not in text
    assert text.splitlines()[-1].split()[0] == "127"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("groups --world-size 16 --tp 3", "world size 16 is not divisible by tp=3"),
        ("groups --world-size 16 --tp 0", "tp is 0; give a whole number, 1 or more"),
        ("groups --world-size -4", "world size is -4"),
        ("groups --world-size 16 --order tp-pp-zp", "has the word 'zp'"),
        ("groups --world-size 16 --ep 5", "not divisible by etp=1 x ep=5"),
        ("groups --world-size many", "invalid int value: 'many'"),
        ("groups --tp 2", "the following arguments are required: --world-size"),
        ("groups --world-size 16 --tensor 2", "unrecognized arguments: --tensor 2"),
        ("gruops", "there is no command 'gruops'; did you mean 'groups'?"),
        ("zzz", "there is no command 'zzz'; use one of: convert, exercises, groups"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(arguments, message, capsys):
    try:
        code = main(arguments.split())
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "groups" in capsys.readouterr().out
    assert main([]) == 2
    capsys.readouterr()
    for command in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert f"usage: minimegatron {command}" in capsys.readouterr().out


def test_needs_no_torch_and_survives_a_closed_pipe():
    code = (
        "import sys; sys.modules['torch'] = None; from minimegatron.__main__ import main; "
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "groups", "--world-size", "16", "--tp", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "16 ranks" in result.stdout
    module = f"{sys.executable} -m minimegatron groups --world-size 65536 --full | head -1"
    result = subprocess.run(module, shell=True, capture_output=True, text=True)
    assert result.stdout == "65536 ranks, order tp-cp-ep-dp-pp\n"
    assert result.stderr == ""
