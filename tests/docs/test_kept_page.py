"""What is kept and what is computed again: the record, the formula beside it, conjugates as drawn."""

import importlib
import re
from functools import partial
from pathlib import Path

import pytest

from minimegatron import launch
from minimegatron.core.tensor_parallel import mappings, standalone_regions
from minimegatron.planner.memory import activation_bytes_per_layer

kept = importlib.import_module("cases.kept")
record_kept = importlib.import_module("records.kept_bytes")

pytestmark = pytest.mark.processes


def test_the_record_has_all_runs_and_the_sizes_of_its_program():
    assert kept.record()["sizes"] == record_kept.SIZES
    assert list(kept.record()["runs"]) == list(record_kept.RUNS)
    assert kept.record()["provenance"]


@pytest.mark.parametrize("run", kept.record()["runs"])
def test_the_formula_is_within_a_percent_of_what_was_measured(run):
    assert abs(kept.error(run)) < 0.01


def test_what_is_recorded_is_what_is_measured_today():
    """On one rank; those over two ranks are the same program."""
    alone = tuple(name for name, run in record_kept.RUNS.items() if run[0] == 1)
    assert len(alone) >= 4
    found = launch(partial(record_kept.measure, alone), 1)[0]
    assert tuple(found) == alone
    for name, run in found.items():
        assert run == kept.record()["runs"][name], name


def test_each_tensor_of_the_layer_has_a_name():
    rows = kept.layer_rows()
    assert sum(size for _, size in rows) == pytest.approx(kept.kept("as it is"))
    assert [round(size) for name, size in rows if "GELU" in name] == [8, 8]


def test_masks_are_the_sum_of_both_dropouts():
    sizes = (64, 2, 32, 4)
    unit = 64 * 2 * 32
    for t, is_sequence_parallel in ((1, False), (2, False), (2, True)):
        of = [
            activation_bytes_per_layer(
                *sizes, t, sequence_parallel=is_sequence_parallel, mask_bytes=mask
            )
            for mask in (0, 1, 2)
        ]
        each = 2 * unit / (t if is_sequence_parallel else 1)
        assert [of[1] - of[0], of[2] - of[1]] == [each, each]
    assert activation_bytes_per_layer(*sizes) == 34 * unit
    assert activation_bytes_per_layer(*sizes, recompute="full", mask_bytes=2) == 2 * unit


def test_the_drawn_moves_are_the_conjugates_of_the_code():
    """Forward and backward of the four functions, as the picture names them."""
    word = {"_reduce": "all-reduce", "_gather_along_first_dim": "all-gather"}
    word["_reduce_scatter_along_first_dim"] = "reduce-scatter"
    functions = {
        "without sequence parallelism": (
            "_CopyToModelParallelRegion",
            "_ReduceFromModelParallelRegion",
        ),
        "with sequence parallelism": (
            "_GatherFromSequenceParallelRegion",
            "_ReduceScatterToSequenceParallelRegion",
        ),
    }
    source = "".join(Path(f.__file__).read_text() for f in (mappings, standalone_regions))
    for row, names in functions.items():
        for name, (forward, backward, _) in zip(names, kept.MOVES[row], strict=True):
            body = re.search(rf"class {name}\(.+?(?=\nclass |\n# --)", source, re.DOTALL)[0]
            ways = body.partition("def backward")
            for text, said in ((ways[0], forward), (ways[2], backward)):
                called = [w for call, w in word.items() if re.search(rf"\b{call}\b", text)]
                assert said in (called or ["nothing"]), (name, called, said)


def test_what_is_held_while_a_layer_is_made_again():
    assert kept.held_while_recomputed().startswith("38.2 s b h: 4 inputs of 2")
