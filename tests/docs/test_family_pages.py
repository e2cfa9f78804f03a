"""What the tour's pages on other models show: T5's messages and gradients, scans, sections, files."""

import importlib

import pytest
import torch

from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.core.ssm.mamba_config import MambaSizes
from minimegatron.planner.ssm_costs import mamba_state_bytes
from tests.docs.conftest import ROOT

families = importlib.import_module("cases.families")
states = importlib.import_module("cases.states")
record = importlib.import_module("records.entered_files")


def cells(table: str) -> list[list[str]]:
    """Of a Markdown table, without its head."""
    return [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


# -- BERT and T5 --


def test_every_flag_of_the_old_script_is_read():
    kept, old = families._old_flags()
    assert old == ["--data-impl"] and len(set(kept)) == len(kept) == families.num_old_flags() - 1
    assert f"{len(kept) - 1} other flags" in families.launch_table()


def test_a_flag_that_nobody_knows_ends_the_build(monkeypatch):
    monkeypatch.setattr(families, "OLD_FLAGS", "--no-such-flag 1")
    with pytest.raises(ValueError, match="does not know"):
        families._old_flags.__wrapped__()


@pytest.mark.parametrize(("p", "q"), [(2, 1), (3, 1), (3, 2), (6, 4)])
def test_decoder_stages_get_what_the_one_before_sends(p, q):
    over = families.messages(p, q)
    assert over == [["encoder"]] * q + [["decoder", "encoder"]] * (p - 1 - q)
    picture = families.links_figure(p, q)
    assert picture.count("mm-activation-head") == sum(map(len, over)) + 1  # one in the legend
    assert picture.count("mm-gradient-head") == picture.count("mm-activation-head")
    words, positions = families.copies(p, q)
    assert words == sorted({0, q, p - 1}) and positions == [0, q]
    assert all(StackSplit(p, q).begins(stage) for stage in positions)


def test_sizes_of_messages():
    rows = cells(families.sizes_table(4, 2, 512, 128, 4, 1024))
    assert [row[2] for row in rows] == ["4 MiB", "4 MiB", "5 MiB"]
    assert families.link_bytes(4, 2, 2, 512, 128, 4, 1024) == 2 * (512 + 128) * 4 * 1024


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_parts_of_the_gradient_add_up_to_that_of_one_process(num_stages):
    e, d = 2.0, 3.0
    found = families.sum_of_gradients(e, d, num_stages)
    whole = families.whole_gradient(e, d, num_stages)
    assert found[-1][2] == whole == num_stages * d * e ** (num_stages - 1)
    assert sum(own for _, own, _ in found) == whole and all(own > 0 for _, own, _ in found)
    assert [total for *_, total in found] == sorted(total for *_, total in found)


def test_the_recorded_run_has_the_messages_that_the_page_counts():
    num_microbatches, num_messages = families.recorded()
    assert num_messages == 2 * num_microbatches * sum(map(len, families.messages(3, 1)))


# -- A stage that is no transformer --


def test_three_tokens_by_hand():
    (zero, one, two) = cells(states.hand_table())
    assert zero[1].endswith("**4**") and one[1].endswith("**4**") and two[1].endswith("**9**")
    for row, (*_, wanted) in zip((zero, one, two), ((4,), (4,), (9,)), strict=True):
        terms = [term.split(" · ") for term in row[2].split(" + ")]
        assert sum(float(a) * float(b) for a, b in terms) == wanted
    assert states.decays_words() == "0.5, 0.5 and 0.25" and states.written_words() == "4, 2 and 8"


def test_the_matrix_of_decays_is_lower_triangular_and_a_product():
    a = torch.tensor(states.FIGURE_DECAYS, dtype=torch.float64).log()
    matrix = states.segment_sums(a).exp()
    assert torch.equal(matrix, matrix.tril()) and torch.equal(matrix.diagonal(), torch.ones(8))
    assert matrix[7, 2] == pytest.approx(torch.tensor(states.FIGURE_DECAYS[3:]).prod().item())
    picture = states.decay_figure()
    inside = 2 * (4 * 5 // 2)
    assert picture.count('fill-opacity="') == 8 * 9 // 2
    assert picture.count("mm-hue-5") == inside + 1  # one in the legend


def test_both_forms_are_the_same():
    assert 0 < float(states.largest_difference()) < 1e-12


def test_the_state_does_not_grow_and_keys_and_values_do():
    sizes = MambaSizes(num_heads=80, head_dim=64, num_groups=8, state_dim=128)
    elements = states.state_elements(80, 64, 128)
    assert elements == 80 * 64 * 128 == mamba_state_bytes(1, sizes, 1, bytes_per_element=1)
    length = states.more_from(80, 64, 128, 8, 128)
    before, at = (states.cache_elements(8, 128, s) for s in (length - 1, length))
    assert before <= elements < at


def test_what_was_measured_is_what_the_page_says():
    """Chunks are faster than token after token; twice the tokens are about twice of all but scores."""
    assert float(states.times_faster(512)) >= 5
    for way in states.WAYS:
        grown = float(states.kept_ratio(way, 1024))
        assert grown > 3 if way == states.SCORES else grown < 2.2, way
    assert states.growth_figure().count("<polyline") == 3 * len(states.WAYS)


@pytest.mark.parametrize("t", [1, 2])
def test_sections_are_cut_one_by_one(t):
    whole = states.rows_of_rank(1, 0, **states.SIZES)
    for name, start, end in whole:
        held = [
            section
            for rank in range(t)
            for section in states.rows_of_rank(t, rank, **states.SIZES)
            if section.name == name
        ]
        assert [held[0].start, held[-1].end] == [start, end]
        assert all(section.end - section.start == (end - start) // t for section in held)
    as_one = states.rows_of_rank(2, 0, True, **states.SIZES)
    assert [section.name for section in as_one] == ["z", "x"]
    assert states.sections_figure().count("<title>") == 3 * 5 + 2 + 4


def test_a_pattern_over_stages():
    stages = states.pattern_stages("MM*-MM*-", 4)
    assert stages[0] == ["embedding", "Mamba", "Mamba"] and stages[1] == ["attention", "MLP"]
    assert sum(map(len, stages)) == 8 + 2
    assert states.pattern_stages("M*", 1) == [["embedding", "Mamba", "attention", "loss"]]


# -- Files that a step enters --


def test_the_schedule_and_the_optimizer_are_the_same_for_all_models():
    """As the record says. The full tests record it again."""
    entered = states.entered()
    assert set(entered) == set(record.PROGRAMS)
    for files in entered.values():
        assert all((ROOT / "minimegatron" / file).is_file() for file in files)
    same = ("core/pipeline_parallel/", "core/distributed/", "core/optimizer/")
    # A stage of GPT asks its placement whether it needs a batch; BERT's and T5's stages all read one.
    # A mean, as BERT's loss function returns it, is looked at. Both stacks of T5 have positions.
    asks = {"core/orders/placement.py", "core/pipeline_parallel/user_results.py"}
    asks |= {"core/distributed/embedding_copies.py"}
    of_each = [{f for f in files if f.startswith(same)} - asks for files in entered.values()]
    assert all(files == of_each[0] for files in of_each)
    assert all("/ssm/" in file for file in states.only("Mamba", "GPT"))
    rows = cells(states.entered_table())
    assert [row[2:] for row in rows[:2]] == [["–", "–"]] * 2
    assert int(rows[-1][1].strip("*")) == sum(int(row[1]) for row in rows[:-1])


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("name", record.PROGRAMS)
def test_the_record_is_what_a_step_enters(name):
    """`python docs/tools/record.py entered-files` makes it again."""
    assert record.entered_by(*record.PROGRAMS[name]) == states.entered()[name]
