"""A step unrolled: one node per line that calls, each message with both ends, only lines that ran."""

import re

import pytest

from minimegatron.planner.actions import RECEIVE, SEND
from minimegatron.tracing.code_rows import rows_of
from minimegatron.tracing.trace_words import names_of
from minimegatron.tracing.unrolled import unroll
from minimegatron.tracing.unrolled_outline import outline_html
from minimegatron.tracing.unrolled_page import unrolled_data, unrolled_html
from tests.ranks import run_ranks
from tests.trace.recordings import record_lines
from tests.trace.test_line_recorder import marked, recorded
from tests.trace.test_outputs import minimegatron

# -- One rank: rows, nodes, text --


def test_a_loops_turns_are_one_node():
    run, _ = recorded(count=3)
    unrolled = unroll(run)[0]
    found = {unrolled.source(node).name.rpartition(".")[2]: node for node in unrolled.nodes}
    assert found["half"].num_calls == 3 and found["half"].parent is unrolled.root
    assert found["forward"].units == {(0, 0): 1, (1, 0): 1, (2, 0): 1}
    assert found["double"].num_calls == 6, "two calls in each of three"
    assert found["double"].units == {(0, 0): 2, (1, 0): 2, (2, 0): 2}, (
        "of their caller's microbatch"
    )
    assert [unrolled.nodes[node.number] for node in unrolled.nodes] == unrolled.nodes


def test_decorators_that_hand_on_are_left_out():
    run, rank = recorded()
    unrolled = unroll(run)[0]
    names = [unrolled.source(node).name for node in unrolled.nodes]
    assert not [name for name in names if name.endswith("handing_on.<locals>.call")]
    (node,) = [n for n in unrolled.nodes if unrolled.source(n).name.endswith(".decorated")]
    assert node.parent is unrolled.root
    first = unrolled.place(unrolled.root)[1]
    lines = unrolled.source(unrolled.root).text.split("\n")
    assert "decorated(total)" in lines[node.line - 1] and first > 0


def test_the_text_has_all_lines_that_ran_and_no_other():
    run, rank = recorded(count=2)
    text = run.unrolled()
    shown = {int(number) for number in re.findall(r"^ *(\d+) ", text, re.MULTILINE)}
    ran = set()
    for function in rank.lines.functions:
        if not rank.hands_on(function.source):
            first = int(function.source.rpartition(":")[2])
            ran |= {first + line - 1 for line in function.lines}
    assert ran <= shown
    for words in ("never", "not run", "of watchers"):
        assert marked(words) not in shown
    assert "… 1 line: raise ValueError" in text
    assert "… 2 lines: decorated()" in text
    assert "# in 1 of 2 calls" in text


def test_a_call_stands_below_its_whole_statement_and_an_exit_below_its_block():
    text = recorded(count=1)[0].unrolled()
    order = [line.strip().split("  ")[0] for line in text.split("\n") if "└" in line]
    assert order.index("└ Guard.__exit__") > order.index("└ forward")
    lines = text.split("\n")
    at = next(n for n, line in enumerate(lines) if "└ forward" in line)
    assert lines[at - 1].strip().endswith(")") and "number," not in lines[at - 1]


def test_lines_stand_at_the_first_call():
    text = recorded(count=1)[0].unrolled()
    assert text.count("def double(") == 1
    assert "def train_step(" in text


def test_what_is_first_called_within_a_later_call_is_shown_there():
    text = recorded(count=1)[0].unrolled()
    assert text.count("def chosen(") == 1 and text.count("def seldom(") == 1
    assert text.index("def chosen(") < text.index("= its lines stand") < text.index("def seldom(")
    assert text.count("def often(") == 2, "each of its calls runs a line that the other does not"


def test_depth_and_microbatch():
    run, _ = recorded(count=3)
    outline = run.unrolled(depth=0)
    assert not re.search(r"^ *\d+ ", outline, re.MULTILINE)
    assert "forward  microbatches 0-2  3 calls" in outline and "half" not in outline
    assert "via" not in outline, "the step calls it itself"
    one = run.unrolled(depth=1)
    assert "for number in numbers(count):" in one and "if is_even(number):" not in one
    about = run.unrolled(microbatch=1)
    assert "forward  microbatch 1  [" in about and "└ half" not in about
    with pytest.raises(ValueError, match="about microbatch 9; there are 0-2"):
        run.unrolled(microbatch=9)
    with pytest.raises(ValueError, match="no recorded lines of rank 3; there are: 0"):
        run.unrolled(rank=3)


def test_a_row_says_what_only_some_of_its_calls_ran():
    run, _ = recorded(count=3)
    unrolled = unroll(run)[0]
    of_name = {unrolled.name(node): node for node in unrolled.nodes}
    rows = unrolled.rows(of_name["half"])
    assert set(rows.counts.values()) == {2, 1} and not rows.folds
    often = [node for node in unrolled.nodes if unrolled.name(node) == "often"]
    assert [len(unrolled.rows(node).folds) for node in often] == [1, 1], "each shows its own lines"


def test_names_that_two_have_say_the_file():
    names = names_of(["a.x.run", "a.y.run", "a.y.Chunk.run", "a.y.run.<locals>.inner"])
    assert names == ["x.run", "y.run", "Chunk.run", "inner, defined in run"]


def test_without_lines_it_says_what_to_do():
    run, _ = recorded(step=9)
    with pytest.raises(ValueError, match="--trace-lines STEP"):
        run.unrolled()


ROWS = '''def f(
    a,
    b,
    c,
):
    """What it is.

    And more.
    """
    # About the first.
    if a:
        first(a)
    # About the second.
    elif b:
        second(
            b,
        )
    else:
        # About the third.
        third(c)
    try:
        risky()
    except ValueError:
        mend()
    finally:
        end()

    def inner():
        return a

    return inner
'''


def folds_of(ran, text=ROWS):
    return [(f.first, f.last, f.words) for f in rows_of(text, dict.fromkeys(ran, 1), 1).folds]


def test_what_is_folded():
    head = [(2, 4, "arguments"), (6, 9, "docstring")]
    assert folds_of({11, 12, 21, 22, 26, 28, 31}) == [
        *head,
        (13, 20, "if b"),
        (23, 24, "except ValueError"),
        (29, 29, "the lines of inner: they stand where it is…"),
    ]
    taken = folds_of({11, 14, 15, 16, 21, 22, 23, 24, 26, 28, 31})
    assert taken[2:4] == [(12, 12, "first()"), (18, 20, "third()")]
    last = folds_of({11, 14, 20, 21, 22, 26, 28, 31})
    assert (18, 20, "third()") not in last and (15, 17, "second()") in last


def test_a_match_has_cases():
    cases = "        case 1:\n            a()\n        case _:\n            b()\n"
    text = f"def f(x):\n    match x:\n{cases}"
    assert folds_of({2, 3, 4}, text) == [(5, 6, "case _")]
    assert folds_of({2, 3, 5, 6}, text) == [(4, 4, "a()")]


def test_lines_beyond_the_text_are_left_out():
    assert folds_of({2, 50}, "def f():\n    a()\n") == []
    assert folds_of({1, 2}, "") == []


def test_a_lambda_and_what_is_no_python_have_lines_too():
    assert folds_of({1}, "lambda n: -n)\n") == []
    assert folds_of({2}, "= (\n 1\n") == [(1, 1, "…")]


def test_a_statement_that_some_calls_ran():
    rows = rows_of(
        "def f(x):\n    if x:\n        a(\n            x\n        )\n    b()\n",
        {2: 5, 3: 2, 4: 2, 6: 5},
        5,
    )
    assert rows.counts == {3: 2} and rows.folds == ()
    assert rows.ends == {3: 5, 4: 5}


# -- Several ranks: messages --


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    run = run_ranks(record_lines, 2, str(folder), timeout=120)[0]
    run.folder = folder
    return run


@pytest.mark.processes
def test_each_message_knows_its_other_end(pipeline):
    found = unroll(pipeline)
    rows = {rank: [row for node in u.nodes for row in node.rows] for rank, u in found.items()}
    assert len(rows[0]) == len(rows[1]) == 2 * 4, "an activation and a gradient of 4 microbatches"
    for rank, own in rows.items():
        by_number = {row.number: row for row in rows[1 - rank]}
        for row in own:
            other = by_number[row.peer_number]
            assert row.peer_rank == 1 - rank and other.peer_number == row.number
            assert other.message.microbatch == row.message.microbatch
            assert other.message.payload == row.message.payload
            assert {other.message.direction, row.message.direction} == {SEND, RECEIVE}
            node = found[1 - rank].nodes[row.peer_node]
            assert other in node.rows


@pytest.mark.processes
def test_the_report_says_that_times_are_longer(pipeline):
    assert "line by line" in pipeline.report(1) and "line by line" not in pipeline.report(0)


@pytest.mark.processes
def test_the_command_prints_or_writes_it(pipeline, capsys, tmp_path):
    folder = pipeline.folder
    code, out, _ = minimegatron(
        capsys, "unroll", folder, "--rank", 1, "--microbatch", 2, "--depth", 0
    )
    assert code == 0 and out.strip() == pipeline.unrolled(1, 2, 0).strip()
    page = tmp_path / "step.html"
    assert minimegatron(capsys, "unroll", folder, "--html", page, "--rank", 1)[0] == 0
    assert page.read_text() == unrolled_html(pipeline, 1)
    for arguments, words in (
        (("--rank", 7), "no recorded lines of rank 7; there are: 0, 1"),
        (("--depth", -1), "--depth -1 is below 0"),
        (("--html", page, "--depth", 2), "--depth is chosen on the page"),
        (("--microbatch", 9), "microbatch 9; there are 0-3"),
    ):
        code, _, err = minimegatron(capsys, "unroll", folder, *arguments)
        assert code == 2 and words in err and len(err.strip().splitlines()) == 1


@pytest.mark.processes
def test_the_page_has_all_of_it_and_needs_no_script(pipeline):
    data = unrolled_data(pipeline)
    html = outline_html(data)
    ids = re.findall(r'id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    links = re.findall(r'href="#([^"]+)"', html)
    assert len(links) == 16 and set(links) <= set(ids)
    assert html.count("<i>via ModelChunk.backward_step</i>") == 3, "two loops, and one"
    for rank in data["ranks"]:
        assert all(node[1] < number for number, node in enumerate(rank["nodes"]))
    page = unrolled_html(pipeline, 1)
    assert re.search(r'"first": ?1\b', page) and html in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page), "it needs no other file"
    with pytest.raises(ValueError, match="no recorded lines of rank 5"):
        unrolled_html(pipeline, 5)


@pytest.mark.processes
def test_backward_is_called_from_the_schedule_and_hooks_from_backward(pipeline):
    unrolled = unroll(pipeline)[0]
    nodes = [n for n in unrolled.nodes if unrolled.source(n).name.endswith("users_hook")]
    assert [set(node.units) for node in nodes] == [{(0, 0), (1, 0), (2, 0)}, {(3, 0)}]
    for node in nodes:  # in the steady state, and in cool-down
        callers, at = [], node.parent
        while at is not None:
            callers.append(unrolled.source(at).name.rpartition(".")[2])
            at = at.parent
        assert "backward_step" in callers and "one_f_one_b" in callers
