"""A model of one's own, `tests.toy_model`: trained at p = 2, t = 2, and as its recipe says.

Parity in float64 as for every other model; `pretrain` itself; and what the package asks of the chunk,
name by name, is what the page lists.
"""

import contextlib
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest import mock

import torch

from minimegatron.training.arguments import parse_args
from tests import toy_model
from tests.figures import figure
from tests.parity import Case
from tests.ranks import run_ranks
from tests.test_house import code_lines
from tests.test_parity import check
from tests.training.short_runs import little_text
from tests.training.test_bad_configs import launcher_environment

PAGE = Path(__file__).parents[1] / "docs/recipes/own_model.md"
CASES = [
    Case(tp=2, pp=2, num_layers=4, model="toy"),
    Case(tp=2, pp=2, vp=2, batched=False, dist_opt=True, model="toy"),
]


def test_losses_gradients_and_weights_equal_one_process(tmp_path_factory):
    check(CASES, 4, tmp_path_factory.getbasetemp())


# -- Through `pretrain` --

RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 3e-2 --log-interval 1 "
    "--eval-iters 1 --split 90,5,5 --padded-vocab-size 512"
)
CUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def a_run(flags: str) -> tuple[str, set[str]]:
    """What the program prints, and what the package asks of its chunk."""
    asked: set[str] = set()
    sys.argv = ["toy_model", *RUN.split(), *flags.split()]
    with contextlib.redirect_stdout(io.StringIO()) as printed, little_text(), watched(asked):
        runpy.run_path(toy_model.__file__, run_name="__main__")
    return printed.getvalue(), asked


@contextlib.contextmanager
def watched(asked: set[str]):
    """Collects names of a chunk that `minimegatron` reads or sets; torch's own are left out."""
    plain = set(dir(torch.nn.Module())) | set(vars(torch.nn.Module()))
    read, write = torch.nn.Module.__getattribute__, torch.nn.Module.__setattr__

    def note(chunk, name):
        caller = sys._getframe(2).f_globals["__name__"]
        # Parts of the model are found by walking over it; their names are its own affair.
        is_chunk = type(chunk).__name__ == "ConvolutionModel" and name not in plain
        is_asked = caller.startswith("minimegatron.") and is_chunk
        if is_asked and name not in vars(chunk)["_modules"]:
            asked.add(name)

    def reading(chunk, name):
        note(chunk, name)
        return read(chunk, name)

    def writing(chunk, name, value):
        note(chunk, name)
        write(chunk, name, value)

    with (
        mock.patch.object(torch.nn.Module, "__getattribute__", reading, create=True),
        mock.patch.object(torch.nn.Module, "__setattr__", writing),
    ):
        yield


def losses_of(printed: str) -> dict[int, float]:
    lines = re.findall(r"^ iteration +(\d+)/\d+ \| lm loss (\d\.\d+)", printed, re.M)
    return {int(number): float(loss) for number, loss in lines}


def test_pretrain_trains_it_and_needs_no_more_than_the_page_says(tmp_path):
    cut = run_ranks(a_run, 4, f"{CUT} --train-iters 6 --save-interval 4 --save {tmp_path}")
    losses = losses_of(cut[0][0])
    assert len(losses) == 6 and losses[6] < losses[1] - 0.5
    assert "validation loss at iteration 6" in cut[0][0]
    (whole,) = run_ranks(a_run, 1, "--train-iters 6")
    for number, loss in losses_of(whole[0]).items():
        assert abs(loss - losses[number]) < 2e-5 * loss
    # -- A checkpoint of four ranks, in one process --
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    (resumed,) = run_ranks(a_run, 1, f"--train-iters 6 --load {tmp_path}")
    found = losses_of(resumed[0])
    assert found.keys() == {5, 6} and abs(found[6] - losses[6]) < 2e-5 * losses[6]
    # -- What was asked of a chunk --
    (half,) = run_ranks(a_run, 1, "--train-iters 1 --bf16")
    page = PAGE.read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.M)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    asked = set().union(*(names for _, names in [*cut, resumed, half]))
    figure(f"losses {losses[1]} to {losses[6]}; asked of a chunk: {', '.join(sorted(asked))}")
    assert "No chunk may have a part with the name `module`" in page
    assert asked == (listed - {"forward"}) | {"module"}


def test_it_is_one_page():
    assert len(code_lines(Path(toy_model.__file__))) <= 60


def test_the_command_of_the_page_needs_nothing_but_the_package():
    command = re.search(r"Save it as `(\S+)`.*?```console\n\$ (.*?)```", PAGE.read_text(), re.S)
    words = shlex.split(command[2].replace("\\\n", " "))
    assert words[:4] == ["torchrun", "--nproc-per-node", "4", command[1]]
    assert not re.search(r"^(from|import) tests", Path(toy_model.__file__).read_text(), re.M)
    args = parse_args(argv=words[4:], environ=launcher_environment(0, 4))
    assert (args.data_parallel_size, args.seq_length) == (1, 64)
