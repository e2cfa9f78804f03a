"""`make demo`: the command it shows is the one it runs, and every layout it offers is a valid one."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from minimegatron import train_rl
from minimegatron.rl.rl_arguments import add_rl_arguments
from minimegatron.training.arguments import parse_args
from minimegatron.training.config import Arguments
from tests.training.test_bad_configs import launcher_environment

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


WORD_PIECE = {"tokenizer_type": "BertWordPieceLowerCase"}
DEFAULTS = {
    "gpt": {"model_family": "gpt"},
    "bert": {"model_family": "bert", **WORD_PIECE},
    "t5": {"model_family": "t5", "vocab_extra_ids": 100, **WORD_PIECE},
    "mamba": {"model_family": "mamba"},
    "rl": train_rl.DEFAULTS,
}
"""What each program says in `args_defaults`."""


def dry_run(*settings: str) -> str:
    """What `make demo` would do, without doing it."""
    command = ["make", "--dry-run", "demo", *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.replace("\\\n", " ")


def arguments_of_demo(*settings: str) -> Arguments:
    *_, last = [line for line in dry_run(*settings).splitlines() if "torchrun" in line]
    words = shlex.split(last.partition("minimegatron.rl.demo ")[2] or last)
    world_size = int(words[words.index("--nproc-per-node") + 1])
    program = words.index("-m") + 1
    family = words[program].removeprefix("minimegatron.pretrain_")
    family = "rl" if family == "minimegatron.train_rl" else family
    return parse_args(
        add_rl_arguments if family == "rl" else None,
        argv=words[program + 1 :],
        args_defaults=DEFAULTS[family],
        environ=launcher_environment(0, world_size),
    )


def num_microbatches(args: Arguments) -> int:
    return args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)


def test_demo_is_two_by_two_with_eight_microbatches():
    args = arguments_of_demo()
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.world_size == 4
    assert num_microbatches(args) == 8
    assert args.data_path is None and args.sample_tokens > 0


def test_demo_shows_what_it_runs():
    shown, ran = [line for line in dry_run().splitlines() if "torchrun" in line]
    assert shlex.split(ran) == shlex.split(shown)


OFFER = r"make demo (LAYOUT=(?:\"[^\"]*\")?)(.*)"


def test_every_layout_offered_works():
    offered = re.findall(OFFER, dry_run())
    assert len(offered) == 7
    layouts, experts = [], []
    for layout, rest in offered:
        settings = [layout.replace('"', ""), *re.findall(r"NPROC=\d+", rest)]
        args = arguments_of_demo(*settings)
        experts.append((args.num_experts, args.expert_model_parallel_size))
        layouts.append(
            (
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                args.data_parallel_size,
            )
        )
        assert args.context_parallel_size == (2 if "context" in layout else 1)
        assert args.mtp_num_layers == (1 if "mtp" in layout else None)
    *dense, shared, alone, further, with_experts = layouts
    assert dense == [(1, 4, None, 1), (2, 2, 2, 1), (2, 1, None, 2)]
    assert (shared, alone, further) == ((1, 1, None, 2), (1, 1, None, 1), (1, 2, None, 2))
    assert with_experts == (1, 1, None, 4)
    assert experts == [(None, 1)] * 6 + [(8, 2)]


@pytest.mark.parametrize("model", ["bert", "t5", "mamba"])
def test_other_models(model):
    """Each runs as it is, on four ranks, and in three more layouts; 8 microbatches in two stages."""
    args = arguments_of_demo(f"MODEL={model}")
    assert (args.model_family, args.world_size, num_microbatches(args)) == (model, 4, 8)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    shown, ran = [line for line in dry_run(f"MODEL={model}").splitlines() if "torchrun" in line]
    assert shlex.split(ran) == shlex.split(shown)
    offered = re.findall(OFFER.replace("demo", f"demo MODEL={model}"), dry_run(f"MODEL={model}"))
    assert len(offered) == 3
    for layout, rest in offered:
        settings = [f"MODEL={model}", layout.replace('"', ""), *re.findall(r"NPROC=\d+", rest)]
        args = arguments_of_demo(*settings)
        assert args.model_family == model


def test_rewards():
    """Two stages, as it is; in three more layouts; what judges the run is not in the shown command."""
    args = arguments_of_demo("MODEL=rl")
    assert (args.world_size, args.pipeline_model_parallel_size, num_microbatches(args)) == (2, 2, 4)
    assert args.grpo_prompts_per_step * args.grpo_group_size == args.global_batch_size
    shown, ran = [line for line in dry_run("MODEL=rl").splitlines() if "torchrun" in line]
    judge, _, judged = ran.partition("minimegatron.rl.demo ")
    assert judge.endswith("python -m ") and shlex.split(judged) == shlex.split(shown)
    offered = re.findall(OFFER.replace("demo", "demo MODEL=rl"), dry_run("MODEL=rl"))
    sizes = []
    for layout, rest in offered:
        settings = ["MODEL=rl", layout.replace('"', ""), *re.findall(r"NPROC=\d+", rest)]
        args = arguments_of_demo(*settings)
        sizes.append((args.tensor_model_parallel_size, args.context_parallel_size, args.world_size))
    assert sizes == [(2, 1, 2), (1, 2, 2), (1, 1, 1)]


def test_what_reads_word_pieces_installs_them():
    for model in ("gpt", "bert", "t5", "mamba", "rl"):
        command = ["make", "--dry-run", "--always-make", "demo", f"MODEL={model}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        assert (".[data]" in done.stdout) == (model in ("bert", "t5"))


def test_no_such_model():
    command = ["make", "--dry-run", "demo", "MODEL=gtp"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0 and "MODEL is gtp; give gpt, bert, t5, mamba or rl" in done.stderr
