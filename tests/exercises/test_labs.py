"""Every lab shows something, and shows nothing without its fault: labs cannot rot."""

import io
import json
import re
from pathlib import Path

import pytest

from minimegatron.__main__ import main
from minimegatron.exercises.labs import labs
from minimegatron.exercises.labs.faults import FAULTS, FORMER_NAMES
from minimegatron.exercises.labs.labs import (
    LABS,
    OUTCOMES,
    check_lab,
    copy_package,
    find_lab,
    outcome_of,
    patch_words,
    start_lab,
)
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.verdict import Verdict
from minimegatron.exercises.student.student_folder import STATE, StudentFolder

PATIENCE = 4.0

SHOWN = {
    "loss": "softmax-of-a-part foreign-tokens-not-masked same-draw-on-every-rank "
    "chunks-laid-out-by-rank unsorted-local-experts expert-key-local "
    "final-norm-outside-plan rope-restarts-on-each-rank ring-takes-the-wrong-half "
    "padding-masks-queries-only mask-only-on-first-stage conv-not-causal chunk-state-dropped "
    "in-proj-cut-across-sections letters-of-the-first-stage clipped-from-above-only "
    "best-of-both-ratios distance-the-other-way weights-without-a-cap rerun-does-not-rewind "
    "rerun-keeps-rng",
    "memory": "one-warm-up-too-many",
    "update": "clipped-by-the-local-norm shared-weight-counted-twice replicas-counted-often "
    "expert-norm-by-tp-rank",
    "hang": "gradient-to-the-next-stage interleaved-warm-up-once all-stages-send-first "
    "rerun-decided-alone",
    "error": "warm-up-not-clamped input-without-gradient embedding-group-of-all-stages "
    "backward-chunks-in-forward-order one-receive-too-many short-group-allowed "
    "chunks-share-an-iterator input-of-another-chunk full-sequence-buffer "
    "no-sync-forgotten a2a-backward-same-splits empty-expert-skipped "
    "exchange-of-another-forward combined-without-extra-warmup "
    "cross-attention-on-decoder-states encoder-gradient-added-to-decoder "
    "expert-mark-by-ep-only mtp-stage-outside-embedding-group",
}
"""Every other lab ends in a wrong gradient."""


def outcome_expected(name: str) -> str:
    return next((kind for kind, names in SHOWN.items() if name in names.split()), "gradient")


NAMED = {
    "loss": r"loss is wrong",
    "memory": r"holds .* more than it must",
    "update": r"\bclips\b|in the norm",
    "hang": r"wait for each other for ever",
    "error": r"\braises\b",
    "gradient": r"\bgradients?\b",
}
"""How a story says what comes of its fault. Stories of other outcomes speak of gradients too."""


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_a_story_names_the_outcome(lab):
    """`test_a_lab_shows_its_fault` holds the run to the same outcome."""
    found = {kind for kind, words in NAMED.items() if re.search(words, lab.fault.story, re.I)}
    expected = outcome_expected(lab.name)
    assert expected in found and found <= {expected, "gradient"}, lab.fault.story


def test_the_teachers_live_demo_predicts_what_happens():
    page = (Path(__file__).parents[2] / "docs" / "teachers.md").read_text()
    demos = re.findall(r"lab run ([\w-]+) --predict (\w+)", page)
    assert ("hang" in dict(demos).values()) and demos
    for name, predicted in demos:
        assert outcome_expected(find_lab(name).name) == predicted


def test_a_lab_is_found_by_its_former_name(tmp_path):
    for former, name in FORMER_NAMES.items():
        assert find_lab(former) is find_lab(name)
        folder = StudentFolder(tmp_path)
        folder.labs[former] = {"predicted": "error", "outcome": "error"}
        folder.save()
        assert list(StudentFolder.open(tmp_path).labs) == [name]


# `make test` runs the first of each layout and outcome, and one hang: each takes 4 s.
FIRST = {(outcome_expected(lab.name), str(lab.layout)): lab for lab in reversed(LABS)}.values()
LATER = {"num_experts", "cp", "mtp", "family", "rerun"}
"""Labs of these subjects are for `make test-full`, but for a few."""
EVERY_TIME = {lab.name for lab in FIRST if not LATER & lab.layout.keys()}
EVERY_TIME -= {"interleaved-warm-up-once"}
EVERY_TIME |= {"aux-loss-discarded", "expert-grads-over-edp", "ring-gradients-stop-early"}
EVERY_TIME |= {"mtp-return-dropped", "mask-only-on-first-stage", "encoder-gradient-not-added"}
RUN = [
    pytest.param(lab, marks=[] if lab.name in EVERY_TIME else [pytest.mark.full], id=lab.name)
    for lab in LABS
]


@pytest.mark.parametrize("lab", RUN)
def test_a_lab_shows_its_fault(lab, tmp_path):
    start_lab(lab, tmp_path)
    found = check_lab(lab, tmp_path, PATIENCE)
    assert outcome_of(found) == outcome_expected(lab.name), found.text
    assert "Traceback" not in found.text.splitlines()[0]


WHOLE = list({(str(lab.layout), lab.num_ranks, lab.strict): lab for lab in LABS}.values())
WHOLE_EVERY_TIME = {lab.name for lab in WHOLE if not LATER & lab.layout.keys()}
WHOLE_EVERY_TIME = set(sorted(WHOLE_EVERY_TIME)[::3]) | {"expert-grads-over-edp"}
WHOLE_EVERY_TIME |= {"context-ranks-forgotten"}


@pytest.mark.parametrize(
    "lab",
    [
        pytest.param(lab, marks=[] if lab.name in WHOLE_EVERY_TIME else [pytest.mark.full])
        for lab in WHOLE
    ],
    ids=lambda lab: f"{lab.layout}-{lab.num_ranks}",
)
def test_nothing_is_shown_without_a_fault(lab, tmp_path):
    copy_package(tmp_path)
    found = check_lab(lab, tmp_path, PATIENCE)
    if lab.name == "short-group-allowed":
        assert "ValueError" in found.text.splitlines()[0]
    else:
        assert found.kind == verdict.PASSED, found.text


def test_labs_are_faults_of_the_suite():
    names = [lab.name for lab in LABS]
    assert len(names) == len(set(names)) >= 30
    assert set(names) <= {fault.name for fault in FAULTS}
    assert {outcome_expected(name) for name in names} == set(OUTCOMES) - {"nothing"}


def test_the_patch_shows_both_lines():
    words = patch_words(find_lab("gradients-overwritten").fault)
    assert "distributed_data_parallel.py, line" in words
    assert "  - " in words and "param.main_grad.add_(param.grad)" in words
    assert "  + " in words and "param.main_grad.copy_(param.grad)" in words


def test_names_and_numbers():
    assert find_lab("1") is LABS[0] and find_lab("softmax") is find_lab("softmax-of-a-part")
    with pytest.raises(ValueError, match="labs fit 'norm-gradients'"):
        find_lab("norm-gradients")


def test_predict_run_explain(tmp_path, capsys, monkeypatch):
    words = ["exercises", "--folder", str(tmp_path), "lab"]
    found = Verdict(verdict.WRONG, "rank 0: gradient of w is wrong: it is 2, expected 1")
    monkeypatch.setattr(
        "minimegatron.commands.exercises_command.run_lab", lambda lab, folder: found
    )
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main([*words, "start", "gradients-ov"]) == 0
    out = capsys.readouterr().out
    assert "What will happen?" in out and "add_(param.grad)" in out
    assert "Only the last microbatch counts" not in out, "the story comes after the run"
    copy = tmp_path / "labs" / "gradients-overwritten" / "minimegatron"
    assert "copy_(param.grad)" in (copy / labs.find_lab("2").fault.file).read_text()
    assert main([*words, "run", "gradients-ov"]) == 0
    assert "Why:" not in capsys.readouterr().out, "no answer before a prediction"
    assert main([*words, "run", "gradients-ov", "--predict", "hang"]) == 0
    out = capsys.readouterr().out
    assert "you predicted: the ranks wait for each other" in out
    assert "Why: Each microbatch's gradient replaces the one before. Only the last" in out
    state = json.loads(Path(tmp_path / STATE).read_text())
    assert state["labs"] == {"gradients-overwritten": {"predicted": "hang", "outcome": "gradient"}}
    assert main([*words, "list"]) == 0
    assert "1 of" in capsys.readouterr().out
    assert main([*words, "start"]) == 2
