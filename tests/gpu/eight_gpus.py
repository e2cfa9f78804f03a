"""Parts on eight GPUs: layouts, one GPU for each process; and two machines.

Called by: `run_part`. Calls: `parity`, the benchmarks' training step, torchrun.
"""

import contextlib
import dataclasses
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from minimegatron.core import collectives, parallel_state
from minimegatron.core.utils import get_device
from tests import parity
from tests.benchmarks.megatron_like import OURS, Shape, Training, load
from tests.gpu.one_gpu import backends_in, layouts
from tests.gpu.place import Finding, Place, at_most, is_equal
from tests.gpu.speed import SMALLEST
from tests.gpu.tensors import settle

BUBBLE_BOUND = 0.15
KILLED_WITHIN = 60.0
TRAINING = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --log-interval 1 "
    "--eval-iters 0"
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


# -- layouts --


def pipeline_seconds(num_stages: int, is_quick: bool) -> tuple[float, float]:
    """In a rank: of a step without its update, with M = p and with M = 4 p microbatches."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    large = Shape(2 * num_stages, 2048, 16, 1024, 1, num_stages, 512, bf16=True)
    shape = dataclasses.replace(SMALLEST if is_quick else large, pp=num_stages)
    medians = []
    for num_microbatches in (num_stages, 4 * num_stages):
        of_this = dataclasses.replace(shape, num_microbatches=num_microbatches)
        training = Training(load(OURS), of_this, get_device().type)
        training.optimizer.step = lambda: (True, 0.0, None)
        seconds = []
        for _ in range(2 if is_quick else 8):
            settle()
            dist.barrier()
            begun = time.perf_counter()
            training.step()
            settle()
            seconds.append(time.perf_counter() - begun)
        medians.append(statistics.median(seconds[1:]))
    return medians[0], medians[1]


def bubble(place: Place) -> Finding:
    """The time that a step needs besides its microbatches': p - 1 of them."""
    num_stages = place.ranks(8)
    both = place.launch(pipeline_seconds, num_stages, num_stages, place.is_quick)
    few, many = (max(seconds) for seconds in zip(*both, strict=True))
    of_one = (many - few) / (3 * num_stages)
    waited = few / of_one - num_stages
    what = f"bubble of {num_stages} stages, in microbatches, beside {num_stages - 1}: off by"
    judged = place.is_gpu and not place.is_quick
    return at_most(what, abs(waited / (num_stages - 1) - 1), BUBBLE_BOUND if judged else 1e9)


def all_reduce_bandwidth(is_quick: bool) -> float:
    """In a rank: bytes per second over each link, 2 (n - 1) / n of the tensor."""
    size, group = dist.get_world_size(), dist.group.WORLD
    tensor = torch.ones((1 << 10) if is_quick else (1 << 28), device=get_device())
    best = float("inf")
    for _ in range(5):
        settle()
        begun = time.perf_counter()
        collectives.all_reduce(tensor, group)
        settle()
        best = min(best, time.perf_counter() - begun)
    return 2 * (size - 1) / size * tensor.nbytes / best


def many_layouts(place: Place) -> Iterator[Finding]:
    """Layouts of eight ranks against one process; how fast tensors move."""
    cases = [
        parity.Case(tp=2, pp=2, dp=2),
        parity.Case(pp=4, vp=2, G=4, dp=2),
        parity.Case(pp=8, M=8),
        parity.Case(tp=2, dp=4, dist_opt=True, overlap_grad_reduce=True, overlap_param_gather=True),
    ]
    if place.is_quick:
        cases = [parity.Case(tp=2)]
    yield from layouts(place, cases)
    yield bubble(place)
    bandwidth = min(place.launch(all_reduce_bandwidth, place.ranks(8), place.is_quick))
    expected = "whatever the links can do"
    yield Finding("all-reduce, bytes/s over a link", f"{bandwidth:.3g}", expected)


# -- visible, nodes --


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def one_visible(place: Place) -> Iterator[Finding]:
    """As `srun --gpus-per-task=1` does: each process sees one GPU, which is not another's."""
    num_ranks = place.ranks(8)
    running = []
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "OMP_NUM_THREADS": 1}
    for rank in range(num_ranks):
        places = {"RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": _gpu(rank)}
        sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        numbers = settings | places | sizes
        command = [sys.executable, "-m", "minimegatron.pretrain_gpt", *TRAINING.split()]
        running.append(
            subprocess.Popen(
                [*command, "--train-iters", "2", "--device", place.device],
                env={**os.environ, **{name: str(value) for name, value in numbers.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    texts = _texts(running, 240)
    yield is_equal("exit codes", {process.returncode for process in running}, {0})
    yield is_equal("backend", backends_in(texts[0]), ["nccl" if place.is_gpu else "shm"])


def _gpu(number: int) -> str:
    """The name of this machine's GPU number so and so, of those that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number] if visible else str(number)


def _texts(running: list[subprocess.Popen], seconds: float) -> list[str]:
    """What the processes print, once they have ended; none is left behind."""
    deadline = time.monotonic() + seconds
    try:
        return [
            process.communicate(timeout=max(1, deadline - time.monotonic()))[0]
            for process in running
        ]
    finally:
        for process in running:
            process.kill()


def two_nodes(place: Place) -> Iterator[Finding]:
    """Two torchruns stand for two machines, each with half of the GPUs; one is killed."""
    per_node, port = max(1, place.ranks(place.num_gpus or 2) // 2), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for node in range(2):
            gpus = ",".join(_gpu(node * per_node + local) for local in range(per_node))
            command = [*TORCHRUN, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node"]
            command += [str(per_node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            command += ["-m", "minimegatron.pretrain_gpt", *TRAINING.split()]
            command += ["--train-iters", "100000", "--device", place.device]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
            with (Path(folder) / str(node)).open("w") as log:
                running.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        try:
            is_training = _until(lambda: "iteration" in (Path(folder) / "0").read_text(), 120)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running[1].pid, 9)
            begun = time.monotonic()
            has_ended = _until(lambda: running[0].poll() is not None, 2 * KILLED_WITHIN)
            seconds = time.monotonic() - begun
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
            for node in range(2):
                print((Path(folder) / str(node)).read_text())
    yield is_equal("both train", is_training, True)
    yield is_equal("the other one ends", has_ended, True)
    yield at_most("seconds until then", seconds, KILLED_WITHIN)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False
