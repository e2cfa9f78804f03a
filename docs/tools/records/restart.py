"""Records what happens when a rank dies in step 57, into restart.json beside this file.

Run by: `python docs/tools/record.py restart`, about a minute and a half on two cores. Calls:
`dying_run` under torchrun, then compares the last checkpoints, weight by weight.

    whole        60 steps on 4 ranks (2 stages, 2 copies), nobody dies
    died         the same, but rank 3 is killed in step 57; torchrun starts all ranks again
    other        from the checkpoint of step 50, on 2 ranks, as 2 tensor-parallel ranks
    whole, other without dropout and in fp32: there the layout makes no difference but round-off
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from minimegatron.core.dist_checkpointing.core import load_common_state_dict
from minimegatron.core.dist_checkpointing.serialization import load_plain_tensors
from records.recorded_words import keep, provenance, torchrun

SAVED, DIES, LAST = 50, 57, 60
DYING_RANK = 3
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --padded-vocab-size 512 --micro-batch-size 2 --global-batch-size 16 "
    f"--lr 1e-2 --eval-iters 0 --log-interval 1 --train-iters {LAST} --save-interval {SAVED}"
).split()
FP16 = ["--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "20"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
STAGES = ["--pipeline-model-parallel-size", "2"]
TENSOR = ["--tensor-model-parallel-size", "2"]
DYING = f"--dying-rank {DYING_RANK} --dying-step {DIES}".split()


def main() -> None:
    """Runs all five, compares, writes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "whole": run(folder, "whole", 4, [*STAGES, *FP16, *DROPOUT]),
            "died": run(folder, "died", 4, [*STAGES, *FP16, *DROPOUT, *DYING], restarts=1),
        }
        start_from(folder / "died", folder / "other")
        runs["other"] = run(folder, "other", 2, [*TENSOR, *FP16, *DROPOUT])
        run(folder, "plain", 4, [*STAGES, *NO_DROPOUT])
        start_from(folder / "plain", folder / "plain-other")
        run(folder, "plain-other", 2, [*TENSOR, *NO_DROPOUT])
        found = {
            "provenance": provenance("restart"),
            "steps": {"saved": SAVED, "dies": DIES, "last": LAST},
            "dying rank": DYING_RANK,
            "runs": runs,
            "saved": saved_numbers(folder / "died"),
            "differences": {
                "died": difference(folder / "whole", folder / "died"),
                "other": difference(folder / "whole", folder / "other"),
                "plain-other": difference(folder / "plain", folder / "plain-other"),
            },
        }
    keep("restart", found)
    print(f"restart: {found['differences']}")


def run(
    folder: Path, name: str, num_ranks: int, flags: list[str], restarts: int = 0
) -> dict[str, Any]:
    """One run, which goes on from what its folder holds."""
    places = ["--save", name, "--load", name]
    own = ["--max-restarts", str(restarts)] if restarts else []
    command, lines, seconds = torchrun(num_ranks, [*own, "--", *MODEL, *flags, *places], folder)
    print(f"{name}: {seconds:.0f} s")
    if not any(f"saved checkpoint of iteration {LAST}" in line for line in lines):
        raise RuntimeError(f"{name} did not come to its end:\n" + "\n".join(lines))
    return {"command": command, "lines": [line for line in lines if line]}


def start_from(source: Path, target: Path) -> None:
    """A folder in which the checkpoint before the death is the newest."""
    checkpoint = f"iter_{SAVED:07}"
    shutil.copytree(source / checkpoint, target / checkpoint)
    (target / "latest_checkpointed_iteration.txt").write_text(str(SAVED))


def saved_numbers(folder: Path) -> dict[str, Any]:
    """What the checkpoint holds beside tensors, but for the arguments."""
    common = load_common_state_dict(folder / f"iter_{SAVED:07}")
    return {key: value for key, value in common.items() if key not in ("args", "torch")}


def difference(one: Path, other: Path) -> dict[str, float]:
    """The largest difference of any weight, and of any moment, after the last step."""
    found = {}
    for what, prefix in (("weights", "model."), ("moments", "optimizer.state.exp_avg")):
        ours, theirs = (
            load_plain_tensors(folder / f"iter_{LAST:07}", prefix) for folder in (one, other)
        )
        found[what] = max(
            float((tensor.double() - theirs[name].double()).abs().max())
            for name, tensor in ours.items()
        )
    return found
