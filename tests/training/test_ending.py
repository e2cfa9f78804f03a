"""How a rank's own process ends: its groups destroyed, and no thread inside torch."""

import subprocess
import sys

from minimegatron.training import ending
from tests.rank_programs import ROOT, run_programs, started_programs

TINY = (
    "--hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 1 "
    "--num-layers 2 --pipeline-model-parallel-size 2"
)


def test_training_ends_well_while_a_message_is_still_being_freed(tmp_path):
    words = ["-m", "tests.training.lingering_pretrain", *TINY.split()]
    codes, printed = run_programs(words, 2, TMPDIR=tmp_path)
    assert codes == [0, 0], printed
    assert "after training is done" in printed[0]
    assert all("groups at the end: False" in text for text in printed)
    assert not list(tmp_path.glob("minimegatron-*"))


UNFINISHED = """
import sys, time
import torch, torch.distributed as dist
from minimegatron.training import ending

ending.DESTROY_SECONDS = 1.0
ending.end_properly()
if sys.argv[1:] != ["one"]:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    else:
        time.sleep(600)
sys.exit(3)
"""


def test_a_collective_that_never_completes_does_not_keep_the_process():
    """Rank 0 began one; rank 1 is in no hurry."""
    with started_programs(["-c", UNFINISHED], 2) as (program, _):
        printed = program.communicate(timeout=100)[0]
        assert program.returncode == 1, printed
        assert "Timeout (0:00:01)!" in printed and "in _end" in printed


def test_without_groups_the_exit_code_is_kept():
    done = subprocess.run([sys.executable, "-c", UNFINISHED, "one"], cwd=ROOT, timeout=100)
    assert done.returncode == 3


def test_only_threads_of_gloo_that_run_are_waited_for(monkeypatch):
    assert not ending._are_threads_at_work()
    looks = iter([True, False, True, False, False, True])
    monkeypatch.setattr(ending, "_are_threads_at_work", lambda: next(looks))
    ending._wait_until_quiet(60.0)
    assert list(looks) == [True]
