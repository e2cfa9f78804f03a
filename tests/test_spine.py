"""The spine, docs/spine.toml: its files, its length, and that a training step enters no other file."""

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

import minimegatron
from minimegatron import pretrain_gpt
from minimegatron.training import training
from tests.ranks import run_ranks
from tests.test_house import PACKAGE, ROOT, code_lines
from tests.training.short_runs import PP2, TP2, ZERO1, little_text

sys.path.insert(0, str(ROOT / "docs" / "tools"))
spine = importlib.import_module("source.spine")

MOST_LINES = 8_900
"""Of code, in all files of the list."""


def test_every_file_is_there_once():
    files = [link.file for link in spine.read_spine()]
    assert not [file for file in files if not (PACKAGE / file).is_file()]
    assert not [file for file, count in Counter(files).items() if count > 1]


def test_rooms_are_there_and_apart_from_the_list():
    listed = {link.file for link in spine.read_spine()}
    for room in spine.read_rooms():
        assert not [file for file in room.files if not (PACKAGE / file).exists()], room.name
        assert not [file for file in listed if room.has(file)], room.name


def test_sections_stand_together():
    sections = [link.section for link in spine.read_spine()]
    changes = [name for number, name in enumerate(sections) if sections[number - 1] != name]
    assert len(changes) == len(set(sections)) >= 8


def test_it_goes_down_the_chain_and_back_up():
    files = [link.file for link in spine.read_spine()]
    chain = [
        "pretrain_gpt.py",
        "training/training.py",
        "core/pipeline_parallel/schedules.py",
        "core/pipeline_parallel/steps.py",
        "core/pipeline_parallel/p2p_communication.py",
        "core/models/gpt/gpt_model.py",
        "core/tensor_parallel/layers.py",
        "core/distributed/param_and_grad_buffer.py",
        "core/distributed/finalize_model_grads.py",
        "core/optimizer/optimizer.py",
    ]
    assert [file for file in files if file in chain] == chain


def test_it_is_short():
    num_lines = sum(len(code_lines(PACKAGE / link.file)) for link in spine.read_spine())
    assert num_lines == sum(link.num_lines for link in spine.read_spine()) <= MOST_LINES


def test_minutes_follow_from_the_lines():
    """Within one step, so that not every edit asks for another figure."""
    wrong = {
        link.file: f"{link.minutes} minutes for {link.num_lines} lines of code"
        for link in spine.read_spine()
        if link.minutes % spine.STEP
        or abs(link.minutes - spine.minutes_of(link.num_lines)) > spine.STEP
        or abs(link.minutes - link.num_lines / spine.lines_per_minute()) > spine.STEP
    }
    assert not wrong, f"run: python docs/tools/record.py spine; {wrong}"


def test_what_each_is_fits_a_line():
    for link in spine.read_spine():
        assert link.what.endswith((".", "?")) and len(link.what) <= 90, link


def test_readme_says_what_the_list_says():
    text = (ROOT / "README.md").read_text()
    found = spine.SENTENCE.findall(text)
    assert len(found) == 1
    files, lines, hours = (int(number.replace(",", "")) for number in found[0])
    links = spine.read_spine()
    again = "run: python docs/tools/record.py spine"
    assert files == len(links), again
    assert abs(lines - sum(link.num_lines for link in links)) <= 150, again
    assert abs(hours - sum(link.minutes for link in links) / 60) <= 1, again
    assert spine.ENTERED.search(text), "README says how many of the files a step enters"
    assert spine.ENTERED.sub(rf"\g<1>{spine.num_entered()}", text) == text, again
    assert "weekend" not in (ROOT / "README.md").read_text()


# -- A training step on real ranks --

STEP = (
    f"{TP2} {PP2} {ZERO1} --overlap-grad-reduce --overlap-param-gather --num-layers 4 "
    "--hidden-size 16 --num-attention-heads 4 --position-embedding-type rope --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --eval-iters 0 --padded-vocab-size 512"
)


def files_entered() -> Counter:
    """In a rank: the package's files whose functions the second `train_step` calls, and how often."""
    entered, train_step, num_steps = Counter(), training.train_step, []
    package = f"{Path(minimegatron.__file__).parent}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            entered[file.removeprefix(package)] += 1

    def watched(*args, **kwargs):
        num_steps.append(1)
        sys.setprofile(note if len(num_steps) == 2 else None)
        try:
            return train_step(*args, **kwargs)
        finally:
            sys.setprofile(None)

    training.train_step = watched
    sys.argv = ["pretrain_gpt", *STEP.split()]
    with little_text():
        pretrain_gpt.main()
    return entered


@pytest.fixture(scope="module")
def entered() -> list[Counter]:
    return run_ranks(files_entered, 4, timeout=120)


def test_a_training_step_enters_nothing_else(entered):
    """But rooms."""
    rest = set().union(*entered) - {link.file for link in spine.read_spine()}
    outside = {file for file in rest if not any(room.has(file) for room in spine.read_rooms())}
    assert not outside, (
        f"a training step enters these; give them a place in docs/spine.toml: {outside}"
    )


def test_the_watch_sees_the_whole_chain(entered):
    """Of each rank: the loop, the schedule, messages, the model, gradients, the optimizer."""
    for rank in entered:
        assert len(rank) > 35
        for file in (
            "training/training.py",
            "core/pipeline_parallel/schedules.py",
            "core/pipeline_parallel/p2p_communication.py",
            "core/transformer/transformer_layer.py",
            "core/distributed/param_and_grad_buffer.py",
            "core/optimizer/distrib_optimizer.py",
        ):
            assert rank[file] > 0, file
