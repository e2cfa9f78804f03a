"""Kills a rank at a random moment, starts the run again, and compares with a run left alone.

    python -m tests.faults.kill --runs 50

Every run: a small GPT trains with a checkpoint every second step; one random rank gets SIGKILL at a
random moment, in every second run while a checkpoint is being written; the run is started again by
`torchrun --max-restarts`, and goes on from its newest complete checkpoint. At the end, every weight,
every moment of the optimizer, all random numbers and the schedule must be those of a run that nobody
disturbed, bit for bit. Needs Linux (/proc). The exit code is 1 if any run differs.

`--launcher ranks` starts ranks from a process that has torch loaded already and starts them again
itself: seconds per run instead of tens of seconds, with the same killing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.dist_checkpointing.core import ASIDE, check_files, load_common_state_dict
from minimegatron.core.dist_checkpointing.serialization import load_plain_tensors
from minimegatron.launching import launcher
from minimegatron.training.checkpoint_folder import complete_iterations, find_checkpoint
from minimegatron.training.global_vars import destroy_global_vars

STEPS, SAVE_INTERVAL = 12, 2
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --eval-iters 0 "
    f"--train-iters {STEPS} --save-interval {SAVE_INTERVAL} --keep-last 2 --log-interval 1"
)
LAYOUTS = {
    1: "",
    2: "--pipeline-model-parallel-size 2",
    4: "--pipeline-model-parallel-size 2 --use-distributed-optimizer --bf16",
}
PATIENCE = 900.0
"""Seconds until a run that has not ended counts as hanging."""


@dataclass
class Outcome:
    """What happened in one run."""

    moment: str
    victim: int
    newest: int
    """The newest complete iteration when the rank was killed, 0 for none."""
    problems: list[str] = field(default_factory=list)


# -- Two ways to start ranks, and to start them again --


class TorchrunJob:
    """`torchrun --max-restarts`: its agent notices the death and starts all ranks again."""

    def __init__(self, folder: Path, num_ranks: int):
        self.log = folder.with_suffix(".log")
        command = [Path(sys.executable).with_name("torchrun"), "--standalone"]
        command += ["--nproc-per-node", str(num_ranks), "--max-restarts", "3"]
        command += ["-m", "minimegatron.pretrain_gpt", *argv(folder, num_ranks)]
        with open(self.log, "w") as log:
            self._agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def pids(self) -> list[int]:
        """The ranks that run now, rank 0's first."""
        try:
            children = Path(f"/proc/{self._agent.pid}/task/{self._agent.pid}/children").read_text()
            return sorted(int(pid) for pid in children.split() if _is_rank(int(pid)))
        except FileNotFoundError:
            return []

    def wait(self) -> str:
        """Empty, or why the job did not succeed."""
        try:
            code = self._agent.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return f"hangs after {PATIENCE:g} s; see {self.log}"
        return f"ended with {code}; see {self.log}" if code else ""

    def is_over(self) -> bool:
        """True once all ranks have ended for good."""
        return self._agent.poll() is not None

    def stop(self) -> None:
        """Leaves no process behind."""
        for pid in [*self.pids(), self._agent.pid]:
            _kill(pid)
        self._agent.wait()


def _is_rank(pid: int) -> bool:
    try:
        return b"minimegatron.pretrain_gpt" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class RanksJob:
    """Forked ranks; when one dies, all are ended and started again."""

    def __init__(self, folder: Path, num_ranks: int):
        self.folder, self.num_ranks = folder, num_ranks
        self._ranks: launcher.RankProcesses | None = None
        self._failure = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        words = argv(self.folder, self.num_ranks)
        for _ in range(3):
            with launcher.RankProcesses(
                train, self.num_ranks, words, str(self.folder.with_suffix(".log")), device="cpu"
            ) as self._ranks:
                try:
                    self._ranks.wait(PATIENCE)
                    self._failure = ""
                    return
                except launcher.RankError as error:
                    self._failure = str(error)

    def pids(self) -> list[int]:
        """The ranks that run now, rank 0's first."""
        return [] if self._ranks is None else [p.pid for p in self._ranks.processes if p.is_alive()]

    def wait(self) -> str:
        """Empty, or why the job did not succeed."""
        self._thread.join()
        return self._failure

    def is_over(self) -> bool:
        """True once all ranks have ended for good."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Leaves no process behind."""
        self._thread.join()


JOBS = {"torchrun": TorchrunJob, "ranks": RanksJob}


def argv(folder: Path, num_ranks: int) -> list[str]:
    """The command line of a run that saves to `folder`, and goes on from there."""
    return f"{FLAGS} {LAYOUTS[num_ranks]} --save {folder} --load {folder}".split()


def train(words: list[str], log: str) -> None:
    """In a rank of `RanksJob`: the whole of `pretrain_gpt`, which prints to the file `log`."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["pretrain_gpt.py", *words]
    pretrain_gpt.main()
    destroy_global_vars()
    parallel_state.destroy_model_parallel()


# -- One run --


def disturbed_run(
    job_class: type, folder: Path, num_ranks: int, during_save: bool, dice: random.Random
) -> Outcome | None:
    """Starts a run and kills a rank of it. None if the run was over before."""
    job = job_class(folder, num_ranks)
    try:
        moment = wait_for_moment(job, folder, during_save, dice)
        pids, victim = job.pids(), dice.randrange(num_ranks)
        newest = max(complete_iterations(folder), default=0)
        writing = is_writing(folder)
        if moment is None or len(pids) <= victim or not _kill(pids[victim]):
            job.wait()
            return None
        outcome = Outcome("during a save" if writing else moment, victim, newest)
        failure = job.wait()
        if failure:
            outcome.problems.append(failure)
        return outcome
    finally:
        job.stop()


def wait_for_moment(
    job: TorchrunJob | RanksJob, folder: Path, during_save: bool, dice: random.Random
) -> str | None:
    """Sleeps until the moment has come; says what it is. None if the run is over."""
    while not job.pids() and not job.is_over():
        time.sleep(0.01)
    if not during_save and dice.random() < 0.2:
        time.sleep(dice.uniform(0.0, 1.0))
        return None if job.is_over() else "while starting"
    # A run shows how far it is by its checkpoints.
    iteration = SAVE_INTERVAL * dice.randrange(STEPS // SAVE_INTERVAL)
    while not job.is_over():
        is_there = max(complete_iterations(folder), default=0) >= iteration
        if is_there and (is_writing(folder) or not during_save):
            time.sleep(dice.uniform(0.0, 0.005 if during_save else 0.1))
            return None if job.is_over() else "between saves"
        time.sleep(0.002)
    return None


def is_writing(folder: Path) -> bool:
    """True while there is a checkpoint that is not complete."""
    return any(ASIDE in path.name for path in folder.glob("iter_*"))


def differences(folder: Path, expected: Path) -> list[str]:
    """What of the final checkpoints differs."""
    newest = find_checkpoint(folder)
    if newest is None or newest.name != expected.name:
        return [f"ends with {newest}, not {expected.name}"]
    check_files(newest)
    ours, theirs = load_plain_tensors(newest), load_plain_tensors(expected)
    problems = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    common = [load_common_state_dict(path) for path in (newest, expected)]
    for numbers in common:
        del numbers["args"]
    if common[0] != common[1]:
        problems.append(f"common.json: {json.dumps(common)}")
    return problems


# -- All runs --


def undisturbed(folder: Path, num_ranks: int) -> Path:
    """The last checkpoint of a run that nobody disturbs."""
    failure = RanksJob(folder / "undisturbed", num_ranks).wait()
    if failure:
        raise RuntimeError(f"the undisturbed run {failure}")
    return find_checkpoint(folder / "undisturbed")


def kill_runs(
    runs: int, kind: str, num_ranks: int, seed: int, folder: Path, expected: Path
) -> list[Outcome]:
    """As the module says, with `expected` from `undisturbed`; one outcome per run."""
    dice, outcomes = random.Random(seed), []
    with tqdm(total=runs, unit="run", disable=None) as bar:
        number = 0
        while len(outcomes) < runs:
            number += 1
            disturbed = folder / f"run-{number}"
            outcome = disturbed_run(JOBS[kind], disturbed, num_ranks, len(outcomes) % 2 == 0, dice)
            if outcome is None:
                continue  # it was over before the moment had come
            outcome.problems += differences(disturbed, expected)
            outcomes.append(outcome)
            bar.update()
            tqdm.write(
                f"run {len(outcomes)}: rank {outcome.victim} killed {outcome.moment}, newest "
                f"complete iteration {outcome.newest}: {'; '.join(outcome.problems) or 'equal'}"
            )
            if not outcome.problems:
                shutil.rmtree(disturbed)
    return outcomes


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--launcher", choices=JOBS, default="torchrun")
    parser.add_argument("--ranks", type=int, choices=LAYOUTS, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    # Ended, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="minimegatron-kill-"))
    expected = undisturbed(folder, args.ranks)
    outcomes = kill_runs(args.runs, args.launcher, args.ranks, args.seed, folder, expected)
    wrong = [outcome for outcome in outcomes if outcome.problems]
    moments = Counter(outcome.moment for outcome in outcomes)
    print(
        f"{len(outcomes) - len(wrong)} of {len(outcomes)} runs end bit-identical to the "
        f"undisturbed one; killed {', '.join(f'{n} {what}' for what, n in moments.items())}"
    )
    if wrong:
        print(f"what the others left is in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
