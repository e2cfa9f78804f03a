"""`minimegatron plan`: what it accepts, what it refuses in one line, and user schedules."""

import json
import re

import pytest

from minimegatron.__main__ import main
from minimegatron.core.orders.orders import get_schedule, schedule_names, unregister


def run(line: str) -> int:
    """The exit code, also where arguments do not parse."""
    try:
        return main(["plan", *line.split()])
    except SystemExit as error:
        return error.code


def refused(capsys, line: str) -> str:
    """The one line on stderr."""
    assert run(line) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("minimegatron plan: error: ")
    assert streams.err.count("\n") == 1
    return streams.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--pp 4", "--microbatches"),
        ("--pp 0 --microbatches 4", "pp is 0"),
        ("--pp 4 --microbatches x", "invalid int value: 'x'"),
        ("--pp 4 --microbatches 8 --vpp 2 --group-size 3", "4, 3 and 8"),
        ("--pp 4 --microbatches 9 --vpp 2", "last group of 1"),
        ("--pp 4 --microbatches 8 --schedule foo", "known are no-pipelining, gpipe, 1f1b"),
        ("--pp 4 --microbatches 8 --schedule gpipe --vpp 2", "leave vpp out"),
        ("--pp 4 --microbatches 8 --overlap-p2p-comm", "turn it off"),
        ("--pp 4 --microbatches 8 --forward-time -1", "-1 is negative"),
        ("--pp 4 --microbatches 8 --forward-time nan", "'nan' is not a number"),
        ("--pp 4 --microbatches 8 --backward-time 1/0", "'1/0' is not a number"),
        ("--pp 4 --microbatches 8 --imbalance 1,2", "2 factors for 4 stages"),
        ("--pp 4 --microbatches 8 --bandwidth 3", "add --message-bytes"),
        ("--pp 4 --microbatches 8 --message-bytes 1 --bandwidth 0", "not above 0"),
        ("--pp 4 --microbatches 8 --format gif", "invalid choice: 'gif'"),
        ("--pp 4 --microbatches 8 --width 3", "give 40 or more"),
        ("--pp 4 --microbatches 8 --layer-time loss=1:1", "add --layout"),
        ("--pp 2 --microbatches 4 --layout Et|tL --layer-time loss=1", "write NAME=FORWARD:BACK"),
        ("--pp 2 --microbatches 4 --layout Et|tL --layer-time x=1:1", "NAME one of embedding"),
        ("--pp 2 --microbatches 4 --layout Et|tL --layer-time loss=1:x", "'x' is not a number"),
        ("--pp 2 --microbatches 4 --layout Et|tL --imbalance 1,1", "exclude each other"),
        ("--pp 2 --microbatches 4 --layout Et|t|t|tL --vpp 3", "leave --vpp out"),
        ("--pp 1 --microbatches 4 --layer-nodes 2,2,1", "has 3 times; give four: attention, mlp"),
        ("--pp 1 --microbatches 4 --layers-per-chunk 2", "add --layer-nodes"),
        ("--pp 1 --microbatches 4 --context-parallel-size 4", "add --ring-times"),
        ("--pp 1 --microbatches 4 --ring-times 1,1", "add --context-parallel-size"),
        (
            "--pp 1 --microbatches 4 --ring-times 1,1 --context-parallel-size 0",
            "size is 0; give 1 or more",
        ),
        (
            "--pp 1 --microbatches 4 --ring-times 1 --context-parallel-size 2",
            "has 1 times; give two: a block and a hop",
        ),
        (
            "--pp 1 --microbatches 4 --ring-times 1,1 --context-parallel-size 2 --forward-time 1",
            "--ring-times and --forward-time exclude each other",
        ),
        ("--pp 1 --microbatches 4 --layer-nodes 1,1,1,1 --layers-per-chunk 0", "give 1 or more"),
        ("--pp 1 --microbatches 4 --layer-nodes 1,1,1,1 --delay-wgrad-compute", "is no-pipelining"),
        ("--pp 2 --microbatches 4 --layer-nodes 1,1,1,1 --imbalance 1,1", "exclude each other"),
        ("--pp 1 --microbatches 4 --layer-nodes 1,1,-1,1", "-1 is negative; give 0 or more"),
        (
            "--pp 1 --microbatches 4 --layer-nodes 1,1,1,1 --forward-time 1",
            "and --forward-time excl",
        ),
        ("--pp 1 --microbatches 4 --layer-nodes 1,1,1,1 --backward-time 1", "--backward-time excl"),
        ("--pp 1 --microbatches 4 --schedule combined --vpp 2", "use 2 or more stages"),
        ("--pp 2 --microbatches 4 --schedule combined", "set vpp to 2 or more, or use 1 stage"),
        ("--pp 2 --microbatches 4 --output /nowhere/plan.svg", "/nowhere/plan.svg"),
        ("--pp 2 --microbatches 4 --user-schedule mine", "write FILE.py:FUNCTION"),
        ("--pp 2 --microbatches 4 --user-schedule no.py:mine", "there is no file no.py"),
        ("--pp 2 --microbatches 4 --schedule gpipe --user-schedule a.py:b", "exclude each other"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, monkeypatch, tmp_path, line, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("def b(stage): return ()\n")
    assert words in refused(capsys, line)


def test_text_goes_to_the_terminal_and_files_are_named(capsys, tmp_path):
    assert run("--pp 2 --microbatches 2") == 0
    assert capsys.readouterr().out.startswith("1F1B, 2 stages, 2 microbatches\n")
    for format, start in (("svg", "<svg"), ("json", "{"), ("chrome", "{"), ("text", "1F1B")):
        path = tmp_path / f"plan.{format}"
        assert run(f"--pp 2 --microbatches 2 --format {format} --output {path}") == 0
        assert capsys.readouterr().out == f"wrote {path}\n"
        assert path.read_text().startswith(start)


def test_times_are_those_of_a_whole_stage(capsys):
    makespans = []
    for options in ("", "--vpp 2", "--vpp 4"):
        line = f"--pp 4 --microbatches 8 --forward-time 2 --backward-time 4 {options}"
        assert run(f"{line} --format json") == 0
        makespans.append(json.loads(capsys.readouterr().out)["summary"]["makespan"])
    assert makespans == [66, 57, 52.5]


def test_layout_gives_costs_and_chunks(capsys):
    line = "--pp 2 --microbatches 2 --layout Et|t|t|tL --layer-time loss=1:2 --format json"
    assert run(line) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["config"]["num_model_chunks"] == 2
    lengths = {
        (e["rank"], e["chunk"]): e["end"] - e["start"]
        for rank in data["ranks"]
        for e in rank
        if e["kind"] == "forward"
    }
    assert lengths == {(0, 0): 1, (1, 0): 1, (0, 1): 1, (1, 1): 2}


def test_layers_have_nodes_and_a_step_three_ways(capsys):
    line = "--pp 1 --microbatches 4 --schedule combined --layer-nodes 2,2,1,1 --layers-per-chunk 4"
    assert run(line) == 0
    text = capsys.readouterr().out
    assert "a2a: all-to-alls, - = hidden by what is computed beside, / exposed" in text
    assert "not joined: a step's end is not waited for" in text
    assert "  256     192       64          64\n" in text
    assert "  206     192       64          14\n" in text
    # The same costs for any schedule; and chunks of a layout.
    makespans = []
    for options in ("--delay-wgrad-compute --schedule combined", "--schedule no-pipelining"):
        assert run(f"{line} {options} --format json") == 0
        makespans.append(json.loads(capsys.readouterr().out)["summary"]["makespan"])
    assert makespans == [201, 256]
    layout = (
        "--pp 2 --microbatches 2 --layout Ett|t|tt|tL --schedule combined --layer-nodes 2,2,1,1"
    )
    assert run(f"{layout} --format json") == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    lengths = {
        (e["rank"], e["chunk"]): e["end"] - e["start"]
        for rank in ranks
        for e in rank
        if e["kind"] == "forward"
    }
    assert lengths == {(0, 0): 12, (1, 0): 6, (0, 1): 12, (1, 1): 6}


def test_ranks_that_share_a_sequence_have_a_ring(capsys):
    line = "--pp 1 --microbatches 2 --context-parallel-size 4 --ring-times 4,5"
    assert run(line) == 0
    text = capsys.readouterr().out
    assert (
        "ring: hops of attention's ring, - = hidden by what is computed beside, / exposed" in text
    )
    assert "attention of a layer, 4 ranks  length  computes  ring hops  exposed\n" in text
    assert "backward                       41      32        35         9\n" in text
    assert "all-to-all" not in text and "combined" not in text
    # With the rest of the layer; over the stages of a layout; beside all-to-alls.
    makespans = []
    for options in ("--layer-nodes 2,3", "--layer-nodes 2,3 --layers-per-chunk 2"):
        assert run(f"{line} {options} --format json") == 0
        makespans.append(json.loads(capsys.readouterr().out)["summary"]["makespan"])
    assert makespans == [2 * (3 * 5 + 19 + 41), 4 * (3 * 5 + 19 + 41)]
    assert run(f"{line} --schedule combined --layer-nodes 2,3,1,1") == 0
    text = capsys.readouterr().out
    assert "\n  a2a " in text and "\n  ring" in text and "combined, weights delayed" in text


def test_further_tokens_cost_a_layer_a_projection_and_a_loss(capsys):
    line = "--pp 4 --microbatches 2 --layout Ett|tt|mm|L --forward-time 6 --backward-time 12"
    line += " --layer-time loss=1:2 --message-bytes 10 --format json"
    assert run(line) == 0
    data = json.loads(capsys.readouterr().out)
    lengths = [
        next(e["end"] - e["start"] for e in r if e["kind"] == "forward") for r in data["ranks"]
    ]
    assert lengths == [12, 12, 14, 3]
    assert data["config"]["message_factors"] == [1, 1, 3, 3]
    assert data["summary"]["bytes_sent"] == 2 * 2 * 10 * (1 + 1 + 3)
    assert run(f"{line} --layer-time mtp=5:7") == 0
    data = json.loads(capsys.readouterr().out)
    assert next(e["end"] - e["start"] for e in data["ranks"][2] if e["kind"] == "forward") == 10


def test_a_split_pipeline_sends_two_messages_and_has_two_kinds_of_stage(capsys):
    split = "--pp 3 --microbatches 4 --pipeline-model-parallel-split-rank 1"
    sizes = "--message-bytes 8 --encoder-message-bytes 12"
    assert run(f"{split} {sizes} --encoder-times 2,4 --format json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["config"]["message_sizes"] == [[12], [8, 12], [8, 12]]
    assert data["summary"]["messages"] == {"activation": 12, "gradient": 12}
    assert data["summary"]["bytes_sent"] == 2 * 4 * (12 + 8 + 12)
    lengths = [
        next(e["end"] - e["start"] for e in r if e["kind"] == "forward") for r in data["ranks"]
    ]
    assert lengths == [2, 1, 1]
    assert run(f"{split} {sizes} --bandwidth 8") == 0
    printed = capsys.readouterr().out
    assert "3 stages, two tensors sent from stage 1 on, 4 microbatches" in printed
    assert "message 1 to 1.5" in printed
    assert "12 activations, 12 gradients  = (2p - q - 2)M each way" in printed


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--pipeline-model-parallel-split-rank 3", "split_rank is 3; give 1 to 2"),
        ("--pipeline-model-parallel-split-rank 1 --vpp 2", "--vpp 2: two stacks run by plain 1F1B"),
        ("--pipeline-model-parallel-split-rank 1 --wire tagged", "lowered for a wire"),
        ("--pipeline-model-parallel-split-rank 1 --imbalance 1,1,2", "give --encoder-times"),
        ("--pipeline-model-parallel-split-rank 1 --encoder-times 1", "--encoder-times are two"),
        ("--encoder-message-bytes 4", "add --pipeline-model-parallel-split-rank"),
    ],
)
def test_a_split_that_cannot_be_planned(capsys, flags, words):
    assert run(f"--pp 3 --microbatches 4 {flags}") != 0
    assert words in capsys.readouterr().err


def test_a_pair_is_explained_and_what_it_needs_to_show_anything(capsys):
    line = "--pp 2 --vpp 2 --microbatches 4 --schedule combined"
    assert run(line) == 0
    text = capsys.readouterr().out
    assert (
        "a pair is one step, drawn side by side or in two chunks; it may hold a layer more\n"
        in text
        and "--layer-nodes shows" in text
    )
    assert "5 F      3 F 3 B  5 B" in text and "5 = warm-up (+ a layer)" in text
    assert run(line + " --layer-nodes 2,2,1,1") == 0
    text = capsys.readouterr().out
    assert "a pair is" in text and "--layer-nodes" not in text
    assert run("--pp 2 --vpp 2 --microbatches 4") == 0
    assert "a pair" not in capsys.readouterr().out


def test_bandwidth_and_transport(capsys):
    line = "--pp 2 --microbatches 1 --message-bytes 6 --bandwidth 3 --comm-time 0.5 --format json"
    assert run(line) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["summary"]["makespan"] == 6 + 2 * 2.5
    assert data["summary"]["bytes_sent"] == 12


def test_two_stages_with_batched_messages_fail_the_check(capsys):
    line = "--pp 2 --microbatches 4 --vpp 2"
    assert run(line) == 0
    capsys.readouterr()
    assert run(f"{line} --batch-p2p-comm") == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert all(": crossed: message " in text for text in streams.err.splitlines())


# -- User schedules --

GOOD = """
def mine(stage):
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)
"""


@pytest.fixture
def user_file(tmp_path):
    def write(text: str):
        path = tmp_path / "user.py"
        path.write_text(text)
        return f"--pp 3 --microbatches 4 --user-schedule {path}:mine"

    return write


def test_a_user_schedule_is_drawn(capsys, user_file):
    assert run(user_file(GOOD)) == 0
    text = capsys.readouterr().out
    assert text.startswith("mine, 3 stages, 4 microbatches\n")
    # One microbatch at a time: nothing overlaps.
    assert re.search(r"^idle / total +66.7%$", text, re.MULTILINE)


def test_a_registered_user_schedule(capsys, user_file):
    from minimegatron.planner.registry import unregister_schedule

    line = user_file(
        "from minimegatron.planner.registry import register_schedule\n"
        f"@register_schedule('one by one'){GOOD}"
    )
    assert run(line) == 0
    unregister_schedule("one by one")


def test_problems_of_a_user_schedule_are_listed(capsys, user_file):
    assert run(user_file(GOOD.replace("yield stage.send_forward(i)", "pass"))) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    lines = streams.err.splitlines()
    assert len(lines) > 1
    assert lines[0] == (
        "rank 1, microbatch 0, chunk 0: leak: activation is expected from rank 0, which never "
        "sends it"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(stage): pass", "user.py has no function 'mine'"),
        ("mine = 3", "user.py has no function 'mine'"),
        ("def mine(stage)\n  pass", "SyntaxError"),
        ("import no_such_module", "user.py:1: ModuleNotFoundError"),
        ("def mine(stage):\n    yield stage.froward(0)", "user.py:2: AttributeError"),
        ("def mine(stage):\n    yield 3", "schedule mine yielded 3 on rank 0"),
        ("def mine(stage):\n    return 3", "must yield actions"),
        ("def mine():\n    yield 3", "mine must be a function of one argument"),
    ],
)
def test_a_broken_user_file_is_refused_with_its_line(capsys, user_file, text, words):
    assert words in refused(capsys, user_file(text))


# -- Orders --

ORDER = """
from minimegatron.core.orders.orders import register_order


@register_order("of-a-test")
def mine(rank):
    for i in range(rank.num_microbatches):
        yield rank.forward(i)
        yield rank.backward_input(i)
        yield rank.backward_weight(i)
"""


@pytest.fixture
def forgotten():
    yield
    if "of-a-test" in schedule_names():
        unregister("of-a-test")


@pytest.mark.parametrize("wire", ["", "--wire tagged", "--wire untagged"])
def test_an_order_needs_no_messages(capsys, user_file, forgotten, wire):
    assert run(f"{user_file(ORDER)} {wire}") == 0
    text = capsys.readouterr().out
    expected = wire.removeprefix("--wire ") or "tagged"
    assert text.startswith(f"of-a-test, 3 stages, 4 microbatches, {expected} wire\n")


def test_problems_of_an_order_are_listed(capsys, user_file, forgotten):
    assert run(user_file(ORDER.replace("yield rank.backward_weight(i)", "pass"))) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.splitlines()) == 12
    assert streams.err.startswith(
        "rank 0, microbatch 0, chunk 0: absent: its weight gradient is never computed\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("yield rank.forward(i)", "yield rank.froward(i)", "user.py:8: AttributeError"),
        ("yield rank.forward(i)", "yield i", "order of-a-test yielded 0 on rank 0"),
        ('@register_order("of-a-test")', "", "no attribute 'backward_input'"),
    ],
)
def test_a_broken_order_is_refused_with_its_line(capsys, user_file, forgotten, old, new, words):
    assert words in refused(capsys, user_file(ORDER.replace(old, new)))


def test_an_order_that_is_not_registered_is_told_how(capsys, user_file):
    text = "def mine(rank):\n    yield rank.forward(0)\n    yield rank.backward(0)\n"
    assert "put @register_order(NAME) before an order" in refused(capsys, user_file(text))


def test_every_registered_name_is_known(capsys):
    built_in = [
        name
        for name in schedule_names()
        if getattr(get_schedule(name).order, "__module__", "").startswith("minimegatron.")
    ]
    assert built_in == [
        "no-pipelining",
        "gpipe",
        "1f1b",
        "interleaved",
        "combined",
        "breadth-first",
    ]
    for name in built_in:
        chunks = ("interleaved", "combined", "breadth-first")
        options = "--vpp 2" if name in chunks else ""
        p = 1 if name == "no-pipelining" else 4
        assert run(f"--pp {p} --microbatches 8 --schedule {name} --wire untagged {options}") == 0
        assert "untagged wire" in capsys.readouterr().out


def test_with_lowered_messages_two_ranks_cross_nothing(capsys):
    assert run("--pp 2 --microbatches 4 --vpp 2 --batch-p2p-comm --wire untagged") == 0
    capsys.readouterr()
    assert "invalid choice: 'bare'" in refused(capsys, "--pp 2 --microbatches 4 --wire bare")


def test_with_two_copies_a_chunk_is_a_whole_stage(capsys, user_file, forgotten):
    """Two copies of the model: a chunk is a p-th of it, not half of a p-th."""
    text = ORDER.replace("import register_order\n", "import register_order\n" + BOTH_IMPORT)
    text = text.replace('"of-a-test"', '"of-a-test", placement=BOTH')
    text = text.replace("yield rank.", "yield from both(rank, i, rank.").replace("(i)", ")")
    assert run(f"{user_file(text)} --format json") == 0
    data = json.loads(capsys.readouterr().out)
    lengths = {e["end"] - e["start"] for e in data["ranks"][0] if e["kind"] == "forward"}
    assert lengths == {1}


BOTH_IMPORT = """from minimegatron.core.orders.placement import BOTH


def both(rank, i, make):
    yield make(i, 0 if i < rank.num_microbatches // 2 else 1)
"""
