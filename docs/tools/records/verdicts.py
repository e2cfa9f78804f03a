"""Records what the hang doctor says of real hangs, into verdicts.json beside this file.

Run by: `python docs/tools/record.py verdicts`, about a minute on two cores. Calls: labs of the
exercises, the jobs of `hanging_ranks`, and `dying_run` under torchrun with a rank that is stopped.

    {"provenance": {...}, "verdicts": {name: {"kind", "command", "lines"}}}

A verdict is kept from its first line to the last of "Each rank"; the Python stacks below it, which are
of this machine, are not. Its kind is told by its advice, of which each kind has one.
"""

import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from minimegatron.doctor.advice import ADVICE
from minimegatron.exercises.labs.labs import find_lab, run_lab, start_lab
from records.hanging_ranks import JOBS, verdict_of
from records.recorded_words import keep, plain, provenance, torchrun

LABS = ("interleaved-warm-up-once", "all-stages-send-first", "gradient-to-the-next-stage")
LAST_LINE = "(* = where to look first"
STOPPED = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 "
    "--eval-iters 0 --train-iters 5 --pipeline-model-parallel-size 4 --hang-timeout 5 "
    "--dying-rank 2 --dying-step 3 --dying-forward 4 --dying-signal SIGSTOP"
)


def main() -> None:
    """Lets each job hang, and keeps what was said."""
    verdicts = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for lab_name in LABS:
            lab = find_lab(lab_name)
            start_lab(lab, folder / lab_name)
            text = run_lab(lab, folder / lab_name).text
            command = f"minimegatron exercises lab run {lab_name} --predict hang"
            verdicts[lab_name] = kept(command, text)
        for job in JOBS:
            command = f"python docs/tools/tell.py hang {job}"
            verdicts[job] = kept(command, verdict_of(job))
        command, lines, _ = torchrun(4, STOPPED, folder)
        verdicts["stopped"] = kept(command, "\n".join(lines))
    found = {"provenance": provenance("verdicts"), "verdicts": verdicts}
    keep("verdicts", found)
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict['kind']}")


def kept(command: str, text: str) -> dict[str, object]:
    """A verdict. Raises ValueError if there is none in the text."""
    lines = [plain(line) for line in text.splitlines()]
    first = next((n for n, line in enumerate(lines) if line.startswith(("HANG:", "rank "))), None)
    last = next((n for n, line in enumerate(lines) if LAST_LINE in line), None)
    if first is None or last is None:
        raise ValueError(f"{command}: no verdict in\n{text}")
    lines = lines[first : last + 1]
    return {"kind": kind_of(lines), "command": command, "lines": lines}


def kind_of(lines: Sequence[str]) -> str:
    """Of `minimegatron.doctor.findings`, by the advice that stands in the verdict."""
    words = " ".join(" ".join(lines).split())
    kinds = [kind for kind, advice in ADVICE.items() if re.sub(r"\s+", " ", advice) in words]
    if len(kinds) != 1:
        raise ValueError(f"the advice of {len(kinds)} kinds of hang stands in: {words}")
    return kinds[0]
