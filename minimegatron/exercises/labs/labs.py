"""Break it on purpose: a copy of the package with one known fault; predict, run, explain.

Torch-free. Megatron has no counterpart.
"""

import importlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimegatron.exercises.check.runner import ROOT
from minimegatron.exercises.labs.faults import FAULTS, FORMER_NAMES, Fault, apply_fault
from minimegatron.exercises.labs.lab_job import LabJob
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.collected import Collected
from minimegatron.exercises.room.plain_data import from_line
from minimegatron.exercises.room.verdict import Verdict

PACKAGE = Path(__file__).parents[2]

OUTCOMES = {
    "hang": "the ranks wait for each other for ever",
    "error": "an exception",
    "loss": "it runs, but the loss is wrong",
    "gradient": "the loss is right, but a gradient is wrong",
    "memory": "every number is right, but a stage holds more activations than it must",
    "update": "loss and gradients are right, but the norm or the weights after the update are not",
    "nothing": "nothing that one step could show",
}
"""What one may predict."""


@dataclass(frozen=True)
class Lab:
    """A fault, and the smallest layout that shows it."""

    name: str
    layout: dict[str, Any]
    """Of `gpt_step.StepCase`."""
    num_ranks: int
    strict: bool = False
    """Messages meet as NCCL's do, the n-th send the n-th receive; gloo would hide the fault."""

    @property
    def fault(self) -> Fault:
        """What is changed, and the story."""
        return next(fault for fault in FAULTS if fault.name == self.name)


def start_lab(lab: Lab, folder: Path) -> str:
    """Makes the copy in `folder`; returns the change, as lines of a patch."""
    shutil.rmtree(folder, ignore_errors=True)
    copy_package(folder)
    apply_fault(lab.fault, folder / "minimegatron")
    return patch_words(lab.fault)


def copy_package(folder: Path) -> None:
    """The package as it is, with what Python has compiled, or every rank would compile it again."""
    being_written = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(PACKAGE, folder / "minimegatron", ignore=being_written)


def patch_words(fault: Fault) -> str:
    """The file, and the lines before and after."""
    source = (PACKAGE / fault.file).read_text(encoding="utf-8")
    before, _, after = source.partition(fault.old)
    first = before.rpartition("\n")[2]
    last = after.partition("\n")[0]
    old = (first + fault.old + last).rstrip("\n").splitlines()
    new = (first + fault.new + last).rstrip("\n").splitlines()
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    number = before.count("\n") + 1
    lines = [f"minimegatron/{fault.file}, line {number}:"]
    lines += [f"  - {line}" for line in old] + [f"  + {line}" for line in new if line.strip()]
    return "\n".join(lines)


def run_lab(lab: Lab, folder: Path, timeout: float = 120.0) -> Verdict:
    """Runs one training step with the copy in `folder`, in a process of its own."""
    program = (
        f"import sys; sys.path[:0] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
        f"from minimegatron.exercises.labs.labs import serve; serve({lab.name!r}, {str(folder)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=timeout,
    )
    try:
        return Verdict.from_json(done.stdout.decode().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RuntimeError(f"the lab ended without an answer: {error}") from error


def serve(name: str, folder: str) -> None:
    """In that process: prints the verdict as JSON."""
    print(check_lab(find_lab(name), Path(folder)).to_json())


def check_lab(lab: Lab, folder: Path, patience: float = 3.0) -> Verdict:
    """The step on ranks; `folder` holds the copy."""
    on_ranks = importlib.import_module("minimegatron.exercises.room.on_ranks")
    side = importlib.import_module("minimegatron.exercises.labs.lab_side")
    path = (folder / "minimegatron" / lab.fault.file).resolve()
    job = LabJob(str(folder.resolve()), str(path), lab.layout, lab.strict)
    found = on_ranks.collect_on_ranks(job, lab.num_ranks, patience, side.step_on_rank)
    return _noticed(found)


def _noticed(found: Collected) -> Verdict:
    """What the first rank that failed has told; how the ranks ended, if none did."""
    told = [(rank, from_line(lines[0])) for rank, lines in enumerate(found.lines) if lines]
    told.sort(key=lambda pair: pair[0] != found.rank)
    if told and found.ending == verdict.RAISED:
        rank, first = told[0]
        return Verdict(first["failed"], first["text"], rank=rank, printed=found.printed)
    if found.ending:
        return Verdict(found.ending, found.text, rank=found.rank, printed=found.printed)
    return Verdict(verdict.PASSED, num_cases=1, num_passed=1)


def outcome_of(found: Verdict) -> str:
    """Which of `OUTCOMES` a verdict is."""
    if found.kind == verdict.PASSED:
        return "nothing"
    if found.kind != verdict.WRONG:
        return "hang" if found.kind in (verdict.HANG, verdict.TIMEOUT) else "error"
    first = found.text.splitlines()[0]
    for word in ("gradient", "loss"):
        if f" {word} " in first.partition("is wrong")[0]:
            return word
    return "memory" if "activations" in first else "update"


def find_lab(text: str) -> Lab:
    """The lab whose name begins with `text`, or its number in the list. Raises ValueError."""
    labs, text = LABS, FORMER_NAMES.get(text, text)
    if text.isdigit() and 0 < int(text) <= len(labs):
        return labs[int(text) - 1]
    fitting = [lab for lab in labs if lab.name == text] or [
        lab for lab in labs if lab.name.startswith(text)
    ]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(lab.name for lab in fitting or labs)
    raise ValueError(f"{len(fitting)} labs fit {text!r}; name one of: {names}")


def layout_words(lab: Lab) -> str:
    """The layout in words: "tp 2, pp 2, 4 ranks"."""
    sizes = {key: value for key, value in lab.layout.items() if not isinstance(value, bool)}
    flags = [key for key, value in lab.layout.items() if value is True]
    flags += [f"not {key}" for key, value in lab.layout.items() if value is False]
    parts = [f"{key.replace('num_', '')} {value}" for key, value in sizes.items()]
    ranks = f"{lab.num_ranks} rank{'s' * (lab.num_ranks > 1)}"
    return ", ".join([*parts, *(flag.replace("_", " ") for flag in flags), ranks])


_PP2 = {"pp": 2, "num_microbatches": 3}
_PP3 = {"pp": 3, "num_microbatches": 4}
_VP = {"pp": 2, "vp": 2, "num_microbatches": 4}
_TP = {"tp": 2, "num_microbatches": 2}
_SP = _TP | {"sequence_parallel": True}
_CLIP = {"clip_grad": 0.1}
_TOKENS = {"per_token": True}
_OVERLAP = {"pp": 2, "num_microbatches": 3, "overlap_grad_reduce": True}
_MOE = {"num_microbatches": 2, "num_experts": 4}
_EP = _MOE | {"ep": 2}
_EP_TP = _EP | _SP | {"etp": 1}
_ETP = {"num_microbatches": 2, "num_experts": 2, "etp": 2, "swiglu": True}
_BALANCE = {"balance": "aux_loss"}
_BY_SEQUENCE = {"balance": "seq_aux_loss"}
_COMBINED = _EP | {"num_microbatches": 3, "overlap_moe": True}
_EMPTY = _EP | {"num_experts": 8, "topk": 1, "overlap_grad_reduce": True}
_CP = {"cp": 2, "num_microbatches": 2}
_MTP = {"mtp": 1, "num_microbatches": 3}
_BERT = {"family": "bert", "num_microbatches": 2}
_T5 = {"family": "t5", "num_layers": 2, "num_microbatches": 2}
_MAMBA = {"family": "mamba", "num_microbatches": 2}
_POLICY = {"family": "policy", "num_microbatches": 3}
_RERUN = {"num_microbatches": 2, "rerun": True}

LABS = (
    # -- One rank --
    Lab("loss-not-divided-by-microbatches", {"num_microbatches": 3}, 1),
    Lab("gradients-overwritten", {"num_microbatches": 3}, 1),
    # -- Data parallel --
    Lab("gradients-not-averaged", {"num_microbatches": 2}, 2),
    Lab("tokens-of-one-replica", {"num_microbatches": 2} | _TOKENS, 2),
    # -- Pipeline --
    Lab("backward-of-the-newest", _PP2, 2),
    Lab("one-warm-up-too-many", _PP2, 2),
    Lab("warm-up-not-clamped", {"pp": 3, "num_microbatches": 1}, 3),
    Lab("input-without-gradient", _PP2, 2),
    Lab("gradient-to-the-next-stage", _PP3, 3, strict=True),
    Lab("tied-embedding-not-summed", _PP2, 2),
    Lab("embedding-group-of-all-stages", _PP3, 3),
    Lab("tokens-of-every-stage", _PP2 | _TOKENS, 2),
    Lab("loss-scale-on-every-stage", _PP2 | {"loss_scale": 4.0}, 2),
    Lab("shared-weight-counted-twice", _PP2 | _CLIP, 2),
    Lab("no-sync-forgotten", _OVERLAP, 4),
    # -- Interleaved --
    Lab("interleaved-warm-up-once", _VP, 2, strict=True),
    Lab("all-stages-send-first", _VP, 2, strict=True),
    Lab("backward-chunks-in-forward-order", _VP, 2),
    Lab("one-receive-too-many", _VP, 2),
    Lab("short-group-allowed", _VP | {"num_microbatches": 3}, 2),
    Lab("chunks-share-an-iterator", _VP, 2),
    Lab("input-of-another-chunk", _VP, 2),
    Lab("chunks-laid-out-by-rank", _VP, 2),
    # -- Tensor parallel --
    Lab("input-gradient-not-summed", _TP, 2),
    Lab("bias-on-every-rank", _TP, 2),
    Lab("foreign-tokens-not-masked", _TP, 2),
    Lab("softmax-of-a-part", _TP, 2),
    Lab("same-draw-on-every-rank", _TP, 2),
    Lab("clipped-by-the-local-norm", _TP | _CLIP, 2),
    Lab("replicas-counted-often", _TP | _CLIP, 2),
    Lab("sequence-parallel-gradient-not-scattered", _SP, 2),
    Lab("norm-gradients-not-summed", _SP, 2),
    Lab("norm-gradients-averaged", _SP, 2),
    Lab("full-sequence-buffer", _SP | {"pp": 2}, 4),
    # -- Experts: the router --
    Lab("aux-loss-discarded", _MOE | _BALANCE, 1),
    Lab("aux-scale-not-over-M", _MOE | _BALANCE, 1),
    Lab("seq-aux-mixes-sequences", _MOE | _BY_SEQUENCE, 1),
    Lab("seq-aux-ignores-batch", _MOE | _BY_SEQUENCE | _TOKENS, 1),
    Lab("aux-counts-local", _EP_TP | _BALANCE, 2),
    Lab("aux-per-token-local", _EP_TP | _BALANCE | _TOKENS, 2),
    # -- Experts: the tokens' way --
    Lab("probs-gradient-dropped", _EP, 2),
    Lab("unsorted-local-experts", _EP, 2),
    Lab("a2a-backward-same-splits", _EP, 2),
    Lab("gather-backward-slices", _EP | {"dispatcher": "allgather"}, 2),
    Lab("empty-expert-skipped", _EMPTY, 4),
    # -- Experts: their parameters --
    Lab("expert-key-local", _EP, 2),
    Lab("expert-grads-over-edp", _EP, 4),
    Lab("experts-in-dense-buffer", _EP, 2),
    Lab("expert-mark-by-ep-only", _ETP, 2),
    Lab("expert-norm-by-tp-rank", _EP_TP | _CLIP, 2),
    # -- Experts: combined 1F1B --
    Lab("residual-gradient-lost", _COMBINED, 2),
    Lab("final-norm-outside-plan", _COMBINED, 2),
    Lab("exchange-of-another-forward", _COMBINED, 2),
    Lab("combined-without-extra-warmup", _COMBINED | _VP, 4),
    # -- Ranks that share sequences --
    Lab("context-ranks-forgotten", _CP, 2),
    Lab("rope-restarts-on-each-rank", _CP | {"rope": True}, 2),
    Lab("ring-takes-the-wrong-half", _CP, 2),
    Lab("ring-backward-with-partial-lse", _CP, 2),
    Lab("ring-gradients-stop-early", _CP, 2),
    # -- Further tokens --
    Lab("mtp-return-dropped", _MTP, 1),
    Lab("mtp-scale-without-m", _MTP, 1),
    Lab("mtp-depth-two-predicts-depth-one", _MTP | {"mtp": 2}, 1),
    Lab("eh-proj-gather-reduces", _TP | _MTP, 2),
    Lab("mtp-stage-outside-embedding-group", _PP2 | _MTP | {"tied": False}, 2),
    # -- BERT --
    Lab("padding-masks-queries-only", _BERT, 1),
    Lab("mask-only-on-first-stage", _BERT | {"pp": 2}, 2),
    Lab("lm-head-dense-unflagged", _BERT | {"tp": 2, "sequence_parallel": True}, 2),
    Lab("pooler-flagged-partial", _BERT | {"tp": 2, "sequence_parallel": True}, 2),
    # -- T5 --
    Lab("cross-attention-on-decoder-states", _T5, 1),
    Lab("position-embedding-of-one-stack", _T5 | {"pp": 2, "split": 1}, 2),
    Lab("encoder-gradient-not-added", _T5 | {"pp": 3, "split": 1}, 3),
    Lab("encoder-gradient-added-to-decoder", _T5 | {"pp": 4, "split": 1, "num_layers": 3}, 4),
    # -- Mamba --
    Lab("conv-not-causal", _MAMBA | {"pattern": "M"}, 1),
    Lab("chunk-state-dropped", _MAMBA | {"pattern": "M"}, 1),
    Lab("in-proj-cut-across-sections", _MAMBA | {"pattern": "M", "tp": 2}, 2),
    Lab("letters-of-the-first-stage", _MAMBA | {"pattern": "M*", "pp": 2}, 2),
    # -- Rewards --
    Lab("clipped-from-above-only", _POLICY, 1),
    Lab("best-of-both-ratios", _POLICY, 1),
    Lab("distance-the-other-way", _POLICY, 1),
    Lab("weights-without-a-cap", _POLICY | {"pp": 2}, 2),
    # -- Steps that run again --
    Lab("rerun-does-not-rewind", _RERUN, 1),
    Lab("rerun-keeps-rng", _RERUN | {"dropout": 0.1}, 1),
    Lab("rerun-decided-alone", _RERUN, 2),
)
"""Those faults that one step of a small model can show, the simplest layouts first."""
