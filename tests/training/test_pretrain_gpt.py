"""The example itself, as a person starts it."""

import re
import subprocess
import sys
from pathlib import Path

RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 "
    "--log-interval 2 --eval-iters 1 --eval-interval 4 --sample-tokens 3 "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
)


def test_short_run_under_torchrun(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "minimegatron.pretrain_gpt"]
    command += [*RUN.split(), "--save", str(tmp_path), "--save-interval", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    lines = re.findall(r"^ iteration (\d)/6 \| lm loss (\d\.\d+) \| lr \S+ \| grad norm", out, re.M)
    assert [number for number, _ in lines] == ["2", "4", "6"]  # each once: rank 0 only
    assert float(lines[-1][1]) < float(lines[0][1])
    assert len(re.findall(r"validation loss at iteration 4 \|", out)) == 1
    assert len(re.findall(r"validation loss at iteration 6 on validation set \|", out)) == 1
    assert len(re.findall(r"validation loss at iteration 6 on test set \|", out)) == 1
    assert out.count("unigram entropy of the validation text") == 2
    assert out.count("a sample of what the model writes") == 2
    assert out.count("saved checkpoint of iteration 5") == 1
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert "100%" in done.stderr and "Traceback" not in done.stderr
