"""Small jobs that hang, each by one mistake that people make; the hang doctor says why.

Run by: `verdicts`; or `python docs/tools/tell.py hang NAME` to see one. Calls: `launch`,
with a short hang time-out. The page on hangs shows what was printed.
"""

import sys
import time
from unittest import mock

import torch
import torch.distributed as dist

from minimegatron.backend import mesh
from minimegatron.core.collectives import all_gather, all_reduce, all_to_all
from minimegatron.exercises.bench import gpt_step
from minimegatron.launching.launcher import HangError, RankError, launch

HANG_SECONDS = 2.0


def as_between_machines() -> object:
    """Groups that are made within it use gloo's network, and no memory that ranks share.

    Over shared memory a rank would tell the others that it has failed, and what it calls.
    """
    return mock.patch.object(mesh, "is_supported", lambda: False)


def data_of_unequal_length() -> None:
    """Rank 2 has one batch fewer, so it enters one sum fewer."""
    num_batches = 3 if dist.get_rank() == 2 else 4
    for _ in range(num_batches):
        all_reduce(torch.ones(8), dist.group.WORLD)


def shorter_last_batch() -> None:
    """Rank 1's last batch has 3 rows, the others' 4."""
    with as_between_machines():
        group = dist.new_group()
    for rows in (4, 3 if dist.get_rank() == 1 else 4):
        all_reduce(torch.ones(rows, 8), group)
    all_reduce(torch.ones(1), group)


def evaluation_on_one_rank() -> None:
    """Only the last rank evaluates, and its evaluation asks all ranks for their losses."""
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 2:
        all_gather(torch.empty(3), torch.ones(1), group)
    all_reduce(torch.ones(8), dist.group.WORLD)


def no_tokens_no_exchange() -> None:
    """No token of rank 1's chose an expert elsewhere in layer 2, so it leaves the exchange out."""
    with as_between_machines():
        group = dist.new_group()
    for layer in range(3):
        rows = 0 if layer == 2 and dist.get_rank() == 1 else 2
        if rows:
            splits = [rows] * dist.get_world_size()
            tokens = torch.ones(sum(splits), 8)
            all_to_all(torch.empty_like(tokens), tokens, group, splits, splits)
    all_reduce(torch.ones(8), group)


def groups_in_another_order() -> None:
    """Two groups of the same ranks; rank 1 takes them in the opposite order."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in reversed(groups) if dist.get_rank() == 1 else groups:
        all_reduce(torch.ones(8), group)


def exception_that_is_caught() -> None:
    """Stage 1 meets a bad sample, and the loop goes on as if nothing were."""
    with as_between_machines():
        step = gpt_step.on_these_ranks({"pp": 3, "num_microbatches": 4})
        if dist.get_rank() == 1:
            step.chunks[0].module.forward = _raise_for_a_bad_sample
        try:
            step.forward_backward()
        except ValueError:
            print("skipping this batch")
        all_reduce(torch.ones(1), dist.group.WORLD)


def _raise_for_a_bad_sample(*unused: object, **also_unused: object) -> None:
    raise ValueError("token 50257 is not in the vocabulary")


def unequal_microbatches() -> None:
    """Each stage has worked out the number of microbatches from its own data."""
    num_microbatches = 4 if dist.get_rank() == 0 else 6
    gpt_step.on_these_ranks({"pp": 2, "num_microbatches": num_microbatches}).forward_backward()


def data_that_does_not_come() -> None:
    """The first stage waits for a file system; the other one waits for the first stage."""
    step = gpt_step.on_these_ranks({"pp": 2, "num_microbatches": 4})
    if dist.get_rank() == 0:
        step.data = _read_slowly(step.data)
    step.forward_backward()


def _read_slowly(data: list) -> object:
    yield from data[:2]
    time.sleep(600)


NUM_RANKS = {
    data_of_unequal_length: 3,
    shorter_last_batch: 3,
    evaluation_on_one_rank: 3,
    no_tokens_no_exchange: 2,
    groups_in_another_order: 2,
    exception_that_is_caught: 3,
    unequal_microbatches: 2,
    data_that_does_not_come: 2,
}
JOBS = {function.__name__: function for function in NUM_RANKS}


def verdict_of(name: str) -> str:
    """What the doctor says of the job. Raises RuntimeError if it says nothing."""
    function = JOBS[name]
    try:
        launch(function, NUM_RANKS[function], hang_timeout=HANG_SECONDS, backend="gloo")
    except HangError as error:
        return str(error)
    except RankError as error:
        # gloo ends a rank that gets another size than it expects, where NCCL would wait.
        if error.diagnosis is not None:
            return f"{str(error).splitlines()[0]}\n\n{error.diagnosis.text}"
        raise
    raise RuntimeError(f"{name} did not hang")


def main() -> None:
    """Lets the job that is named hang. Raises SystemExit if there is none of this name."""
    names = sys.argv[1:]
    if len(names) != 1 or names[0] not in JOBS:
        raise SystemExit("name one job: " + ", ".join(JOBS))
    print(verdict_of(names[0]))
