"""Does a grade depend on the hidden seed? `python -m tests.exercises.ten_seeds LOG [ex04 ...]`.

Every known mistake is checked with the public seed and with ten hidden ones. It must fail with all of
them: a file that passes with one seed and fails with another gets another grade for another seed. The
log gets a line for each mistake; those that are in it already are not checked again.

The public check says which case refuses the file, or its first case alone does. The same ranks then
answer the cases up to that one for all hidden seeds, each with the student's file loaded anew. A seed
whose case there is right is checked alone. On two processors, one such command at a time is fastest.
"""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from minimegatron.exercises.check import engine
from minimegatron.exercises.check.engine import Sheet, check_file
from minimegatron.exercises.exercise import exercises, find
from minimegatron.exercises.room import on_ranks, rank_side, verdict
from minimegatron.exercises.room.collect import collect
from minimegatron.exercises.room.collected import Collected, Question
from minimegatron.exercises.room.plain_data import from_line, to_line
from minimegatron.exercises.room.room import Job
from minimegatron.exercises.room.verdict import Verdict
from tests.exercises.wrong_solutions import WrongSolution, wrong_solutions

PUBLIC = 0
HIDDEN = (1, 2, 3, 4, 5, 41, 12345, 20261121, 7 * 10**8, 2**31 - 2)
PATIENCE = 5.0
FAILURES = (verdict.WRONG, verdict.HANG, verdict.RAISED, verdict.DIED)
"""How a mistake may end. A check that takes too long, or fails itself, is no grade."""


def kinds_of(wrong: WrongSolution, folder: Path, seeds: Iterable[int]) -> list[str]:
    """How the check ends with each seed, the first of them the public one: "wrong", "hang", ..."""
    path = wrong.write(folder)
    on_ranks.HANG_SECONDS = 1.0 if wrong.hangs else 2.5
    public, *hidden = seeds
    first, where = _first_case(wrong, path, public), (0, 0)
    if first.has_passed or wrong.hangs:
        first = check_file(wrong.exercise, path, public, patience=PATIENCE)
        where = None if first.has_passed else _where(wrong, public, first.num_passed)
    if where is None:
        kinds = [check_file(wrong.exercise, path, s, patience=PATIENCE).kind for s in hidden]
    else:
        kinds = _kinds_together(wrong, path, hidden, *where)
    return [first.kind, *kinds]


def _first_case(wrong: WrongSolution, path: Path, seed: int) -> Verdict:
    """What comes of the first case alone; most mistakes are refused there."""
    sheet = Sheet(wrong.exercise, seed)
    sheet.judge(0, collect(_up_to(sheet.questions[0], 0), path, PATIENCE))
    found = sheet.verdict()
    return replace(found, kind=verdict.PASSED) if found.num_passed else found


def _where(wrong: WrongSolution, seed: int, num_passed: int) -> tuple[int, int] | None:
    """Question, and place in it, of the case behind those that passed; None for one that may hang."""
    for number, question in enumerate(Sheet(wrong.exercise, seed).questions):
        num_cases = len(from_line(question.cases))
        if num_passed < num_cases:
            return None if question.hangs or wrong.hangs else (number, num_passed)
        num_passed -= num_cases
    return None  # all passed, and then a rank did not come to its end


def _kinds_together(
    wrong: WrongSolution, path: Path, seeds: Sequence[int], number: int, place: int
) -> list[str]:
    """The kinds for all seeds, from the cases of question `number` up to `place`."""
    sheets = [Sheet(wrong.exercise, seed) for seed in seeds]
    questions = [_up_to(sheet.questions[number], place) for sheet in sheets]
    if questions[0].is_alone:
        collected = [collect(question, path, PATIENCE) for question in questions]
    else:
        collected = _collected_together(questions, path)
    kinds = []
    for sheet, seed, said in zip(sheets, seeds, collected, strict=True):
        sheet.judge(number, said)
        found = sheet.verdict()
        if found.num_passed > place:  # refused by none of those that were asked
            found = check_file(wrong.exercise, path, seed, patience=PATIENCE)
        kinds.append(found.kind)
    return kinds


def _up_to(question: Question, place: int) -> Question:
    return replace(question, cases=to_line(from_line(question.cases)[: place + 1]))


def _collected_together(questions: Sequence[Question], path: Path) -> list[Collected]:
    """What ranks say to each question. Where one ends them, others are asked the rest."""
    found: list[Collected] = []
    while rest := questions[len(found) :]:
        job = Job(rest[0].module, str(path.resolve()), to_line([one.cases for one in rest]))
        num_ranks, patience = rest[0].num_ranks, PATIENCE * len(rest)
        whole = on_ranks.collect_on_ranks(job, num_ranks, patience, work_on_seeds)
        lines = [[_lines_of(said, number) for said in whole.lines] for number in range(len(rest))]
        is_over = [all(said and '"over"' in said[-1] for said in of_ranks) for of_ranks in lines]
        num_over = [*is_over, False].index(False)
        if whole.ending:
            num_over = min(num_over, len(rest) - 1)
        found += [Collected(lines[number]) for number in range(num_over)]
        if num_over < len(rest):
            found.append(replace(whole, lines=lines[num_over]))
    return found


def _lines_of(said: Sequence[str], number: int) -> list[str]:
    parted = [line.partition(" ") for line in said]
    return [line for asked, _, line in parted if asked == str(number)]


def work_on_seeds(job: Job) -> None:
    """On each rank: the cases of one seed after the other's. A line begins with the seed's place."""
    with (
        rank_side.printing_to(job.pipes),
        open(f"{job.lines}/{dist.get_rank()}", "w", encoding="utf-8") as file,
    ):
        for number, cases in enumerate(from_line(job.cases)):
            words = {"file": file, "flush": True}
            rank_side.answer_cases(
                replace(job, cases=cases), lambda line, n=number, w=words: print(n, line, **w)
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Checks those that the log lacks; ends with 1 if the log has one that did not always fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("exercises", nargs="*", help="ex04 ...; all without")
    parser.add_argument("--seeds", type=int, default=len(HIDDEN), help="how many hidden ones")
    args = parser.parse_args(argv)
    engine.AGAIN_SECONDS = 0.0
    args.log.touch()
    done = {line.partition(":")[0] for line in args.log.read_text().splitlines()}
    for exercise in [find(name) for name in args.exercises] or exercises():
        for wrong in wrong_solutions(exercise):
            name = f"{exercise.number} {wrong.name}"
            if name not in done:
                line = f"{name}: {_line(wrong, HIDDEN[: args.seeds])}"
                print(line, flush=True)
                with args.log.open("a") as log:
                    log.write(line + "\n")
    lines = args.log.read_text().splitlines()
    odd = [line for line in lines if not line.endswith("one grade, 0 points")]
    print(f"{len(lines)} mistakes, {len(odd)} of them not always 0 points", *odd, sep="\n")
    return int(bool(odd))


def _line(wrong: WrongSolution, hidden: Sequence[int]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        public, *others = kinds_of(wrong, Path(folder), (PUBLIC, *hidden))
    have_failed = all(kind in FAILURES for kind in (public, *others))
    grade = "one grade, 0 points" if have_failed else "NOT one grade"
    return f"public {public}; hidden, {len(hidden)} seeds: {' '.join(others)}; {grade}"


if __name__ == "__main__":
    raise SystemExit(main())
