"""`minimegatron layout` prints the documented table and points at faults."""

import pytest

from minimegatron.__main__ import main
from tests.core.transformer.test_layout import DEEPSEEK_V3, DEEPSEEK_V3_TABLE


def test_table(capsys: pytest.CaptureFixture) -> None:
    assert main(["layout", DEEPSEEK_V3, "--pp", "16"]) == 0
    assert capsys.readouterr().out == DEEPSEEK_V3_TABLE + "\n"
    numbers = ["--num-layers", "61", "--mtp-num-layers", "1"]
    assert main(["layout", DEEPSEEK_V3, "--pp", "16", *numbers]) == 0


def test_faults(capsys: pytest.CaptureFixture) -> None:
    assert main(["layout", "E|tx|L", "--pp", "3"]) == 2
    assert capsys.readouterr().err.endswith("\n  E|tx|L\n     ^\n")
    assert main(["layout", "E|t|L", "--pp", "3", "--num-layers", "2"]) == 2
    assert "add 1 or set --num-layers 1\n  E|t|L\n    ^\n" in capsys.readouterr().err
    assert main(["layout", "E|t|L", "--pp", "0"]) == 2
    assert "pipeline_model_parallel_size is 0" in capsys.readouterr().err


def test_what_stages_hold_and_send_on(capsys: pytest.CaptureFixture) -> None:
    sizes = ["--hidden-size", "16", "--vocab-size", "100"]
    assert main(["layout", "Et|t|m|L", "--pp", "4", *sizes]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert table[0].split("  ")[0] == "stage" and len(table) == 5
    layer = 12 * 16**2 + 13 * 16
    for row, number, copies, sent in zip(
        table[1:],
        (layer + 1600, layer + 32, layer + 512 + 96 + 1600, 1600),
        ("1 x 1,600", "none", "1 x 1,600", "1 x 1,600"),
        ("[s, b, 16]", "[s, b, 16]", "[2 s, b, 16]", "nothing"),
        strict=True,
    ):
        assert f"{number:,}" in row and copies in row and row.endswith(sent)
    untied = ["--untie-embeddings-and-output-weights"]
    assert main(["layout", "Et|tmL", "--pp", "2", *sizes, *untied]) == 0
    assert "2 x 1,600" in capsys.readouterr().out
    for missing in (sizes[:2], sizes[2:]):
        assert main(["layout", "Et|tL", "--pp", "2", *missing]) == 2
        assert "give the other one too, or neither" in capsys.readouterr().err
    assert main(["layout", "Et|tL", "--pp", "2", "--hidden-size", "0", *sizes[2:]]) == 2
    assert "--hidden-size is 0; give 1 or more" in capsys.readouterr().err
