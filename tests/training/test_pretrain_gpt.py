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


def test_a_run_loads_nothing_of_what_it_was_not_asked_for():
    """Nobody records, plans, diagnoses or saves here; a log line and an evaluation are asked for."""
    flags = RUN.partition(" --pipeline")[0].split()
    program = (
        f"import sys; sys.argv[1:] = {flags}; from minimegatron import pretrain_gpt\n"
        "pretrain_gpt.main(); print('LOADED', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    loaded = {name for name in line.split() if name.startswith("minimegatron.")}
    assert "minimegatron.training.training" in loaded
    asked_by_nobody = r"minimegatron\.(doctor|planner|tracing|core\.dist_checkpointing|moved)\b"
    assert not [name for name in loaded if re.match(asked_by_nobody, name)]
    # Where there are other ranks, a thread asks whether one has ended; it does so within a step.
    program = "import sys; from minimegatron.doctor import processes; processes.sample(1)\n"
    program += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = {name for name in done.stdout.split() if name.startswith("minimegatron.doctor.")}
    assert loaded == {"minimegatron.doctor.processes"} and "torch" not in done.stdout.split()
