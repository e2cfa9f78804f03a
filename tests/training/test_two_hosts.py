"""Two hosts: the recipe of docs/recipes/multi_node.md, run over two network namespaces.

Each namespace has its own interfaces, addresses and ports, as a machine has; a pair of virtual
Ethernet devices is the cable between them. Tensor-parallel ranks share a host, the pipeline crosses.
"""

import contextlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.training.global_vars import destroy_global_vars
from tests.ranks import run_ranks

FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 2 "
    "--hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --log-interval 1 "
    "--hidden-dropout 0 --attention-dropout 0 --eval-iters 1"
)
TORCHRUN = Path(sys.executable).with_name("torchrun")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts():
    """Names of two connected namespaces, with the first one's address; gone afterwards."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: the command `ip` (Debian package iproute2) is missing")
    number = random.randrange(1 << 24)
    hosts = [f"mm{number:x}a", f"mm{number:x}b"]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for host in hosts:
            ip("netns", "add", host)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        first, second = (f"v{number:x}a", f"v{number:x}b")
        ip("link", "add", first, "type", "veth", "peer", "name", second)
        for host, device, address in zip(hosts, (first, second), addresses, strict=True):
            ip("link", "set", device, "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", host, "link", "set", device, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield hosts, (first, second), addresses[0]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def losses(text: str) -> list[str]:
    return re.findall(r"iteration +\d+/4 \| lm loss ([\d.]+)", text)


def train(flags: str) -> str:
    """The same run on one machine: what this rank prints."""
    sys.argv = ["pretrain_gpt.py", *flags.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pretrain_gpt.main()
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    return out.getvalue()


@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_recipe_trains_over_two_hosts_as_on_one(two_hosts, tmp_path, per_host):
    flags = f"{FLAGS} --tensor-model-parallel-size {per_host}"
    hosts, devices, address = two_hosts
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = run_ranks(train, 2 * per_host, flags, timeout=100)[0]
    port = str(random.randrange(20000, 40000))  # the namespace has all ports to itself
    running = []
    for node, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        command = ["ip", "netns", "exec", host, TORCHRUN, "--nnodes", "2"]
        command += ["--nproc-per-node", str(per_host)]
        command += ["--node-rank", str(node), "--master-addr", address, "--master-port", port]
        command += ["-m", "minimegatron.pretrain_gpt", *flags.split()]
        log = open(tmp_path / f"{node}.log", "w")  # noqa: SIM115
        running.append(
            subprocess.Popen(
                command,
                env={**environment, "GLOO_SOCKET_IFNAME": device},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        deadline = time.monotonic() + 200
        codes = [process.wait(max(1, deadline - time.monotonic())) for process in running]
    finally:
        for process in running:
            process.kill()
    logs = [(tmp_path / f"{node}.log").read_text() for node in range(2)]
    assert codes == [0, 0], "\n".join(log[-2000:] for log in logs)
    assert len(losses(alone)) == 4
    assert losses(logs[0]) == losses(alone)
    assert losses(logs[1]) == []  # only rank 0 speaks
