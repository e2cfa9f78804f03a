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
