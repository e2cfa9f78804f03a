"""A process whose result was rejected ends with Megatron's exit code."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 1 --global-batch-size 1 --train-iters 9 --lr 1e-2 "
    "--eval-iters 0 --padded-vocab-size 512 --device cpu --rerun-mode validate_results "
    "--error-injection-rate 2"
)


def test_the_exit_code_is_the_verdicts():
    command = [sys.executable, "-m", "minimegatron.pretrain_gpt", *FLAGS.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 17, done.stderr
    assert "transient error: the same device computes another result" in done.stderr
    assert "with code 17: a result was rejected, and its verdict is above" in done.stdout
    assert "terminate called" not in done.stderr
