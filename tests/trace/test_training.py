"""`--trace` and `--pace-...` on a whole training run: every link from train_step down is there."""

import sys

import pytest

from minimegatron import pretrain_gpt
from minimegatron.tracing.trace_view import Trace
from tests.ranks import run_ranks

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --eval-iters 1 --log-interval 1"
)


def train(flags: str) -> None:
    sys.argv = ["pretrain_gpt", *FLAGS.split(), *flags.split()]
    pretrain_gpt.main()


def names_above(recording, name: str) -> list[str]:
    """The names around the first event called `name`, inside out."""
    event = next(event for event in recording.events if event.name == name)
    above = []
    while event.parent is not None:
        event = recording.events[event.parent]
        above.append(event.name)
    return above


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    pace = "--pace-forward-ms 4 --pace-backward-ms 6"
    run_ranks(train, 2, f"--pipeline-model-parallel-size 2 --trace {folder} {pace}", timeout=120)
    return Trace.load(folder)


def test_every_link_of_the_chain(pipeline):
    first, last = pipeline.ranks
    above_forward = ["forward-backward", "train-step"]
    assert names_above(first, "forward-compute") == above_forward
    assert names_above(first, "forward-step-func") == ["forward-compute", *above_forward]
    assert names_above(first, "model-forward") == [
        "forward-step-func",
        "forward-compute",
        *above_forward,
    ]
    assert names_above(last, "loss-func")[:2] == ["loss-compute", "forward-compute"]
    assert names_above(last, "backward-compute") == above_forward
    assert names_above(first, "finalize-model-grads") == above_forward
    assert names_above(first, "optimizer") == ["train-step"]
    assert names_above(first, "embedding-grads-all-reduce")[0] == "finalize-model-grads"
    symbols = {event.name: event.symbol for event in last.events}
    assert symbols["forward-step-func"] == "minimegatron.pretrain_gpt.forward_step"
    assert symbols["train-step"] == "minimegatron.training.training.train_step"


def test_training_and_evaluation_follow_their_plans(pipeline):
    # Three training steps; validation and test, one global batch each.
    assert pipeline.num_steps == 5
    configs = [pipeline.step(number).config for number in range(5)]
    assert [config.forward_only for config in configs] == [False] * 3 + [True] * 2
    for number in range(5):
        assert pipeline.compare_with_plan(number) == []
    assert all(rank.pace == {"forward_ms": 4.0, "backward_ms": 6.0} for rank in pipeline.ranks)


def test_bucket_launches_and_collectives(tmp_path):
    folder = tmp_path / "trace"
    flags = f"--overlap-grad-reduce --trace {folder} --trace-first-step 1 --trace-num-steps 1"
    run_ranks(train, 2, flags, timeout=120)
    recording = Trace.load(folder).rank(1)
    assert sum(event.name == "train-step" for event in recording.events) == 1
    assert recording.coordinates["dp"] == 1 and recording.sizes["dp"] == 2
    above = names_above(recording, "bucket-launch")
    assert above == ["backward-compute", "forward-backward", "train-step"]
    launch = next(event for event in recording.events if event.name == "bucket-launch")
    collectives = [e for e in recording.events if e.attributes.get("group_size")]
    assert launch.attributes["bytes"] > 0 and collectives
    assert all(event.attributes["group_size"] == 2 for event in collectives)
    assert Trace.load(folder).step(0, dp=1).config.schedule == "no-pipelining"
    assert Trace.load(folder).compare_with_plan(0, dp=1) == []
