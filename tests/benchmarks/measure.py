"""Times several implementations of one pipeline in the same processes, taking turns.

Called by: `step_time`, `paced`. Calls: `peers` for one step of each, `stages` for what they compute.

Rules: one thread per rank; all implementations run in the same ranks; each repetition runs every
one of them once, starting with another one each time; medians. All ranks start a step at an agreed
instant, and the step ends when its last rank is done.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

from tests.benchmarks import peers
from tests.benchmarks.stages import Case, build_chunk, build_inputs, loss_of

IDEAL = "compute only"
_HEAD_START_SECONDS = 0.005


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


def _timed(step) -> tuple[float, list[torch.Tensor]]:
    """Seconds from the agreed start to this rank's end."""
    start = torch.tensor([time.perf_counter() + _HEAD_START_SECONDS], dtype=torch.float64)
    dist.broadcast(start, 0)
    dist.barrier()
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    losses = step()
    return time.perf_counter() - start.item(), losses


def _fingerprint(chunks, losses) -> list[float]:
    """This rank's losses and gradient norms, to see that all implementations did the same."""
    norms = [
        sum(float(p.grad.double().square().sum()) for p in chunk.parameters()) ** 0.5
        for chunk in chunks
    ]
    return [float(loss) for loss in losses] + norms


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


def _measure_case(case: Case, names: list[str], repetitions: int) -> dict:
    steps, skipped, chunks = _prepare(case, names)
    gc.collect()
    gc.freeze()
    order = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for repetition in range(repetitions):
        turn = repetition % len(order)
        for name in order[turn:] + order[:turn]:
            _clear(chunks)
            seconds[name].append(_timed(steps[name])[0])
    everyone: list = [None] * case.num_stages
    dist.all_gather_object(everyone, seconds)
    slowest = {
        name: [max(ranks) for ranks in zip(*(rank[name] for rank in everyone), strict=True)]
        for name in order
    }
    return {"case": case, "seconds": slowest, "skipped": skipped}


def _rank_main(rank: int, size: int, store: str, cases, names, repetitions, queue) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        for case in cases:
            result = _measure_case(case, names, repetitions)
            if rank == 0:
                queue.put(result)
        dist.destroy_process_group()
    except BaseException:
        queue.put(f"rank {rank}:\n{traceback.format_exc()}")
        queue.close()
        queue.join_thread()
        os._exit(1)


def measure(cases: list[Case], names: list[str], repetitions: int):
    """Yields one result per case; all cases must have the same number of stages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.preload"])
    size, queue = cases[0].num_stages, context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(
                target=_rank_main, args=(rank, size, store, cases, names, repetitions, queue)
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            for _ in cases:
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


def machine_facts() -> str:
    """The machine and the versions, in one line."""
    model = "unknown CPU"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    try:
        from importlib.metadata import version

        megatron = version("megatron-core")
    except ImportError:
        megatron = "not installed"
    return (
        f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, megatron-core {megatron}, "
        f"gloo, one thread per rank, load average at start {os.getloadavg()[0]:.1f}"
    )


def ideal_seconds(result: dict) -> float:
    case = result["case"]
    if case.is_paced:
        return case.paced_ideal_seconds
    return statistics.median(result["seconds"][IDEAL]) * case.ideal_factor


def report(result: dict) -> list[dict]:
    """Prints the table of one case and returns its rows."""
    case, ideal = result["case"], ideal_seconds(result)
    medians = {
        name: statistics.median(times) for name, times in result["seconds"].items() if name != IDEAL
    }
    base = medians.get("megatron")
    print(f"\n{case.label}: ideal {ideal * 1e3:.1f} ms")
    print(f"  {'implementation':<18} {'median ms':>10} {'min':>9} {'excess':>8} {'/ megatron':>11}")
    rows = []
    for name, median in medians.items():
        row = {
            "case": case.label,
            "implementation": name,
            "ideal_ms": ideal * 1e3,
            "median_ms": median * 1e3,
            "min_ms": min(result["seconds"][name]) * 1e3,
            "excess": median / ideal - 1,
            "ratio_to_megatron": median / base if base else None,
            "repetitions": len(result["seconds"][name]),
        }
        ratio = f"{row['ratio_to_megatron']:11.3f}" if base else f"{'-':>11}"
        print(
            f"  {name:<18} {row['median_ms']:10.1f} {row['min_ms']:9.1f} "
            f"{100 * row['excess']:7.1f}% {ratio}"
        )
        rows.append(row)
    for name, reason in result["skipped"].items():
        print(f"  {name:<18} skipped: {reason}")
    sys.stdout.flush()
    return rows


def benchmark_main(description: str, cases: list[Case], default_names: str, repetitions: int):
    """The command line shared by the pipeline benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--implementations", default=default_names, help="separated by commas")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--only", default="", help="cases whose label contains this text")
    parser.add_argument("--stages", type=int, nargs="*", help="only these numbers of stages")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    names = options.implementations.split(",")
    cases = [
        case
        for case in cases
        if options.only in case.label and case.num_stages in (options.stages or [case.num_stages])
    ]
    module = sys.modules["__main__"].__spec__.name
    command = " ".join(["python -m", module, *sys.argv[1:]])
    print(f"$ {command}\n{machine_facts()}")
    rows = []
    for num_stages in dict.fromkeys(case.num_stages for case in cases):
        group = [case for case in cases if case.num_stages == num_stages]
        for result in measure(group, names, options.repetitions):
            rows += report(result)
    if options.json:
        with open(options.json, "w") as out:
            json.dump({"command": command, "machine": machine_facts(), "rows": rows}, out, indent=1)
