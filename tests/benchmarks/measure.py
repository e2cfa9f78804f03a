"""Times several implementations of one pipeline in the same processes, taking turns.

Called by: `step_time`, `paced`. Calls: `peers` for one step of each, `stages` for what they compute,
`turns`. One thread per rank; all implementations run in the same ranks.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from tests.benchmarks import peers, results
from tests.benchmarks.results import LOST, TIED, WON, noise_of, verdict
from tests.benchmarks.stages import Case, build_chunk, build_inputs, loss_of
from tests.benchmarks.turns import Times, take_turns

IDEAL = "compute only"


def _build_compute_only(case: Case, chunks, inputs):
    """All of a rank's forwards and backwards, on local data: what a step costs without messages."""
    x = inputs[: case.seq_length].clone().requires_grad_(dist.get_rank() > 0)
    is_last = dist.get_rank() == case.num_stages - 1
    grad = torch.zeros(case.message_shape)

    def step() -> list[torch.Tensor]:
        for _ in range(case.num_microbatches):
            for index, chunk in enumerate(chunks):
                y = chunk(x)
                if is_last and index == case.num_chunks - 1:
                    loss_of(y).backward()
                else:
                    torch.autograd.backward(y, grad)
        return []

    return step


def _fingerprint(chunks, losses) -> list[float]:
    """This rank's losses and gradient norms, to see that all implementations did the same."""
    norms = [
        sum(float(p.grad.double().square().sum()) for p in chunk.parameters()) ** 0.5
        for chunk in chunks
    ]
    return [float(loss.detach()) for loss in losses] + norms


def _check_same(name: str, reference: list[float], got: list[float]) -> None:
    close = len(reference) == len(got) and all(
        abs(a - b) <= 1e-4 * max(1.0, abs(a)) for a, b in zip(reference, got, strict=True)
    )
    if not close:
        raise RuntimeError(f"{name} computed {got}, the others {reference}")


def _prepare(case: Case, names: list[str]) -> tuple[dict, dict, list]:
    """Steps by name, reasons for what was left out, and the chunks; each step has run twice."""
    rank = dist.get_rank()
    chunks = [build_chunk(case, i * case.num_stages + rank) for i in range(case.num_chunks)]
    inputs = build_inputs(case)
    steps, skipped, reference = {}, {}, None
    if not case.is_paced:
        steps[IDEAL] = _build_compute_only(case, chunks, inputs)
        steps[IDEAL]()
    for name in names:
        try:
            step = peers.build(name, case, chunks, inputs)
        except peers.PeerMissing as reason:
            skipped[name] = str(reason)
            continue
        for _ in range(1 if case.is_paced else 2):
            _clear(chunks)
            losses = step()
        fingerprint = _fingerprint(chunks, losses)
        reference = reference or fingerprint
        _check_same(name, reference, fingerprint)
        steps[name] = step
    return steps, skipped, chunks


def _clear(chunks) -> None:
    for chunk in chunks:
        chunk.zero_grad(set_to_none=False)


@dataclass(frozen=True)
class Job:
    """A case, and how to time it."""

    case: Case
    names: list[str]
    repetitions: int


def _measure_case(job: Job) -> dict:
    steps, skipped, chunks = _prepare(job.case, job.names)
    times = take_turns(steps, job.repetitions, partial(_clear, chunks))
    return {"case": job.case, "times": times, "skipped": skipped}


def _rank_main(rank: int, store: str, jobs: list[Job], queue) -> None:
    torch.set_num_threads(1)
    size = jobs[0].case.num_stages
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        for job in jobs:
            result = _measure_case(job)
            if rank == 0:
                queue.put(result)
        dist.destroy_process_group()
    except BaseException:
        queue.put(f"rank {rank}:\n{traceback.format_exc()}")
        queue.close()
        queue.join_thread()
        os._exit(1)


def measure(jobs: list[Job]) -> Iterator[dict]:
    """Yields one result per job; all cases must have the same number of stages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.preload"])
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_rank_main, args=(rank, store, jobs, queue))
            for rank in range(jobs[0].case.num_stages)
        ]
        for process in ranks:
            process.start()
        try:
            for _ in jobs:
                result = queue.get(timeout=600)
                if isinstance(result, str):
                    raise RuntimeError(result)
                yield result
            for process in ranks:
                process.join(timeout=60)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()


# -- Reporting --

LEAST_EXCESS = 0.005
NOTE = (
    "Noise: the gap between one implementation under two names (ours, ours'), at least the typical "
    "one of the run. A peer within it of ours is a tie."
)
COLUMNS = {
    "case": ("case", ""),
    "implementation": ("implementation", ""),
    "median_ms": ("median ms", ".1f"),
    "ideal_ms": ("ideal ms", ".1f"),
    "excess": ("excess", ".1%"),
    "ratio_to_megatron": ("/ megatron's best", ".3f"),
    "noise": ("noise", ".1%"),
    "ours": ("ours against it", ""),
}


def ideal_seconds(case: Case, times: dict[str, Times]) -> float:
    """Closed form for paced stages; else what computing took, with fill and drain."""
    if case.is_paced:
        return case.paced_ideal_seconds
    return times[IDEAL].median * case.ideal_factor


def rows_of(result: dict) -> list[dict]:
    """One row per implementation. Those of `ours'` give the noise of the case, not a competitor."""
    case, times = result["case"], result["times"]
    ideal = ideal_seconds(case, times)
    base = min((t.median for n, t in times.items() if family(n) == "megatron"), default=None)
    return [
        {
            "case": case.label,
            "implementation": name,
            "median_ms": measured.median * 1e3,
            "min_ms": min(measured.wall) * 1e3,
            "ideal_ms": ideal * 1e3,
            "excess": measured.median / ideal - 1,
            "ratio_to_megatron": None if base is None else measured.median / base,
            "repetitions": len(measured.wall),
        }
        for name, measured in times.items()
        if name != IDEAL
    ]


def family(name: str) -> str:
    """
    >>> family("megatron-flush"), family("ours'")
    ('megatron', 'ours')
    """
    return name.rstrip("'").partition("-")[0]


def judge(rows_by_case: list[list[dict]]) -> None:
    """Adds to every row the noise of its case, and to a peer's row how ours did against it."""
    gaps = [_gap_of(rows) for rows in rows_by_case]
    for rows, own_gap in zip(rows_by_case, gaps, strict=True):
        ours, noise = ours_of(rows), noise_of(own_gap, gaps)
        for row in rows:
            row["noise"] = noise
            if family(row["implementation"]) != "ours":
                row["ours"] = verdict(ours["median_ms"], row["median_ms"], noise)


def ours_of(rows: list[dict]) -> dict:
    """The row of ours, as training would send its messages: with interleaving, overlapped."""
    by_name = {row["implementation"]: row for row in rows}
    return by_name.get("ours-overlap") or by_name["ours"]


def _gap_of(rows: list[dict]) -> float:
    """Between ours under its two names; the relative gap of the medians."""
    ours = ours_of(rows)
    again = [row for row in rows if row["implementation"] == ours["implementation"] + "'"]
    return abs(ours["median_ms"] / again[0]["median_ms"] - 1) if again else 0.0


def excess_ratio(rows: list[dict]) -> float | None:
    """Ours / megatron's in the best of its ways; None where megatron did not run.

    An excess below `LEAST_EXCESS`, which may even be negative, counts as that much.
    """
    theirs = [r["excess"] for r in rows if family(r.get("implementation", "")) == "megatron"]
    if not theirs:
        return None
    return max(ours_of(rows)["excess"], LEAST_EXCESS) / max(min(theirs), LEAST_EXCESS)


def score(rows: list[dict]) -> dict[str, int]:
    """How often ours won, tied and lost, over peers and cases."""
    verdicts = [row["ours"] for row in rows if "ours" in row]
    return {word: verdicts.count(word) for word in (WON, TIED, LOST)}


def default_names(case: Case) -> list[str]:
    """Interleaving as training would choose it, against every way that megatron has."""
    if case.num_chunks == 1:
        return ["ours", "ours'", "megatron", "torch", "minimal"]
    ways = ["megatron", "megatron-overlap", "megatron-flush"]
    return ["ours-overlap", "ours-overlap'", *ways, "torch"]


def benchmark_main(
    name: str, doc: str, cases: list[Case], repetitions: Callable[[Case], int], argv=None
) -> int:
    """The command line shared by the pipeline benchmarks."""
    arguments = results.parser(doc)
    arguments.add_argument("--implementations", help="separated by commas; else by case")
    arguments.add_argument("--repetitions", type=int)
    arguments.add_argument("--only", default="", help="cases whose label contains this text")
    arguments.add_argument("--stages", type=int, nargs="*", help="only these numbers of stages")
    report = results.Report(name, doc, arguments, argv)
    options = report.options
    if options.quick:
        cases = [min(cases, key=lambda c: (c.num_stages, c.seq_length, c.forward_seconds))]
        options.implementations, options.repetitions = "ours,ours',torch", 1
    jobs = [
        Job(
            case,
            options.implementations.split(",") if options.implementations else default_names(case),
            options.repetitions or repetitions(case),
        )
        for case in cases
        if options.only in case.label and case.num_stages in (options.stages or [case.num_stages])
    ]
    rows_by_case = []
    for num_stages in dict.fromkeys(job.case.num_stages for job in jobs):
        for result in measure([job for job in jobs if job.case.num_stages == num_stages]):
            rows_by_case.append(rows_of(result))
            for row in rows_by_case[-1]:
                words = f"{row['median_ms']:10.1f} ms {row['excess']:8.1%}"
                print(f"  {row['case']:<28} {row['implementation']:<18} {words}", flush=True)
            for skipped, reason in result["skipped"].items():
                print(f"  {result['case'].label:<28} {skipped:<18} skipped: {reason}", flush=True)
    judge(rows_by_case)
    rows = [row for rows in rows_by_case for row in rows]
    report.table("Excess over the ideal", COLUMNS, rows, NOTE)
    counts = score(rows)
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    report.claim("no peer is faster, beyond the noise", words, counts[LOST] == 0)
    return report.finish()
