"""Records how even the load of experts becomes, into expert_loads.json beside it.

Run by: `python docs/tools/record.py expert-loads`, about a minute on two cores. Calls: torchrun with
`minimegatron.pretrain_gpt`, three times the same small model on two ranks; the runs differ in what
balances it.

    {"provenance": {...}, "command", "runs": {name: {"flags", "imbalance": [...], "loss": [...]}}}

Both lists have a number for each step, as the log says it.
"""

import json
import re
import shlex

from records.recorded_words import launched, provenance
from source.places import RECORDS

OUT = RECORDS / "expert_loads.json"
LINE = re.compile(r"iteration +(\d+)/\d+ \| lm loss ([\d.]+) \|[^\n\r]*?load imbalance ([\d.]+)")
NUM_STEPS = 150

LAUNCH = "--standalone --nproc-per-node 2 -m minimegatron.pretrain_gpt"
MODEL = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-score-function sigmoid "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 16 "
    f"--train-iters {NUM_STEPS} --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 10 "
    "--adam-beta2 0.95 --weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 "
    "--eval-iters 0"
)
RUNS = {
    "neither": "--moe-router-load-balancing-type none",
    "auxiliary loss": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "bias": "--moe-router-load-balancing-type none --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01",
}
"""What balances -> its flags."""


def record(flags: str) -> dict[str, object]:
    """One run. Raises ValueError if a step's line is missing."""
    words = [*shlex.split(LAUNCH), *shlex.split(MODEL), *shlex.split(flags)]
    steps = {
        int(step): (float(loss), float(load)) for step, loss, load in LINE.findall(launched(words))
    }
    if sorted(steps) != list(range(1, NUM_STEPS + 1)):
        raise ValueError(f"{flags}: {len(steps)} of {NUM_STEPS} steps have a line in the log")
    losses, loads = zip(*(steps[step] for step in sorted(steps)), strict=True)
    return {"flags": flags, "imbalance": list(loads), "loss": list(losses)}


def main() -> None:
    """Runs all and writes the file."""
    data = {"provenance": provenance("expert-loads"), "command": f"torchrun {LAUNCH} {MODEL}"}
    data["runs"] = {}
    for name, flags in RUNS.items():
        run = data["runs"][name] = record(flags)
        print(
            f"{name}: load imbalance {run['imbalance'][0]} at first, {run['imbalance'][-1]} at last"
        )
    text = json.dumps(data, indent=1)
    OUT.write_text(re.sub(r"(?<=[\d.,\[])\s+(?=[\d\]])", " ", text) + "\n")
