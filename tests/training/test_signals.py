"""A scheduler's signal reaches torchrun, not the ranks: the options of docs/recipes/multi_node.md."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from torch.distributed.run import get_args_parser

from minimegatron.training.checkpoint_folder import complete_iterations
from minimegatron.training.dist_signal_handler import ENDING
from tests.training.short_runs import MODEL, PP2

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "multi_node.md"
TORCHRUN = Path(sys.executable).with_name("torchrun")


def recipe() -> tuple[signal.Signals, int, dict[str, str]]:
    """The signal that Slurm sends, how many seconds before the end, and torchrun's options."""
    script = re.search(r"```bash\n(.*?)```", RECIPE.read_text(), re.DOTALL)[1]
    name, seconds = re.search(r"#SBATCH --signal=(\w+)@(\d+)", script).groups()
    command = script[script.index("torchrun ") : script.index("-m minimegatron")]
    words = shlex.split(command.replace("\\\n", " "))[1:]
    return (
        signal.Signals[f"SIG{name}"],
        int(seconds),
        dict(zip(words[::2], words[1::2], strict=True)),
    )


def test_ranks_have_time_to_save_and_the_signal_means_that():
    number, seconds, options = recipe()
    assert number in ENDING
    assert 30 < int(options["--shutdown-timeout"]) < seconds


def test_the_recipes_signal_ends_the_run_with_a_checkpoint(tmp_path):
    number, _, options = recipe()
    # An older torchrun lacks `--shutdown-timeout`, a still older one `--signals-to-handle` too: it
    # passes on SIGTERM, not the recipe's signal. The recipe says so.
    known = get_args_parser()._option_string_actions
    if "--signals-to-handle" not in known:
        number = signal.SIGTERM
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    for name in ("--max-restarts", "--signals-to-handle", "--shutdown-timeout"):
        command += [name, options[name]] if name in known else []
    command += ["-m", "minimegatron.pretrain_gpt", *MODEL.split(), *PP2.split()]
    command += f"--train-iters 100000 --log-interval 1 --save {tmp_path}".split()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            for line in run.stdout:
                if line.startswith(" iteration"):
                    break
            run.send_signal(number)
            out, err = run.communicate(timeout=100)
        finally:
            run.kill()
    assert len(complete_iterations(tmp_path)) == 1, err
    (iteration,) = complete_iterations(tmp_path)
    assert f"exiting after iteration {iteration}: received {number.name}" in out
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
    # The ranks ended by themselves; torchrun ends as one that was signalled does.
    assert run.returncode == 1
    assert f"got signal: {number.value}" in err
    assert "forcefully exiting" not in err
