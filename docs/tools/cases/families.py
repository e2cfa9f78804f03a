"""What the page on BERT and T5 shows: an old launch script beside today's, T5's messages, a gradient.

Called by: `cases`, where pages find it as `families`. Calls: the package's parser, its split of T5
and its backward; `family_pictures`.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import torch

from cases.case_words import size_words, table
from cases.states import entered
from minimegatron.core.models.T5.stack_split import (
    StackSplit,
    ranks_with_position_embedding_of_t5,
    ranks_with_word_embedding_of_t5,
)
from minimegatron.core.pipeline_parallel.steps import backward_step
from minimegatron.planner.memory import message_bytes
from minimegatron.planner.stack_costs import messages_behind
from minimegatron.training.arguments import _build_parser
from minimegatron.training.older_arguments import add_old_flags
from pictures import family_pictures
from pictures.family_pictures import Link
from source.places import RECORDINGS, read_json

# -- A launch script of 2021 --

OLD_FLAGS = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4
    --global-batch-size 32 --seq-length 512 --max-position-embeddings 512 --train-iters 1000000
    --save CHECKPOINTS --load CHECKPOINTS --data-path my-bert_text_sentence --vocab-file bert-vocab.txt
    --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.0001 --lr-decay-style linear
    --min-lr 1.0e-5 --lr-decay-iters 990000 --weight-decay 1e-2 --clip-grad 1.0
    --lr-warmup-fraction .01 --log-interval 100 --save-interval 10000 --eval-interval 1000
    --eval-iters 10 --fp16
"""
"""What examples/pretrain_bert_distributed.sh of that time gives to pretrain_bert.py."""


@cache
def _old_flags() -> tuple[list[str], list[str]]:
    """The script's flags: those that today's parser has, and those that it knows from old scripts only.

    Raises ValueError for one that it does not know.
    """
    words = shlex.split(OLD_FLAGS)
    _, unknown = _build_parser(None, {}).parse_known_args(words)
    if unknown:
        raise ValueError(f"the parser does not know {unknown}")
    of_old_scripts = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_old_flags(of_old_scripts)
    flags = [word for word in words if word.startswith("--")]
    old = [flag for flag in flags if flag in of_old_scripts._option_string_actions]
    return [flag for flag in flags if flag not in old], old


def num_old_flags() -> int:
    return sum(map(len, _old_flags()))


def launch_table() -> str:
    """The script's words, and what one types today."""
    kept, (data_impl,) = _old_flags()
    rows = [
        [
            "`python -m torch.distributed.launch`",
            "`torchrun`",
            "the older one runs too; it adds `--local-rank`, which changes nothing",
        ],
        ["`pretrain_bert.py`", "`-m minimegatron.pretrain_bert`", ""],
        [f"`{data_impl} mmap`", "–", "read, and a line says that it changes nothing"],
        [f"{len(kept) - 1} other flags", "the same", ""],
        [
            "`--distributed-backend nccl`",
            "the same",
            "without GPUs the run ends before any group exists",
        ],
    ]
    return table(["2021", "today", ""], rows)


# -- Who has which stack --


def stack_of(split: StackSplit, stage: int) -> str:
    return "encoder" if split.has_encoder(stage) else "decoder"


def messages(p: int, q: int) -> list[list[str]]:
    """For each link, the stack that each tensor on it is from. Their gradients go back.

    >>> messages(4, 2)
    [['encoder'], ['encoder'], ['decoder', 'encoder']]
    """
    return StackSplit(p, q).shapes_behind(["encoder"], ["decoder"])[: p - 1]


def copies(p: int, q: int, tied: bool = True) -> tuple[list[int], list[int]]:
    """Stages with words, and with positions."""
    split, ranks = StackSplit(p, q), list(range(p))
    return (
        ranks_with_word_embedding_of_t5(split, tied, ranks),
        ranks_with_position_embedding_of_t5(split, True, ranks),
    )


def stages_words(stages: Sequence[int]) -> str:
    """
    >>> stages_words([0, 2, 3]), stages_words([0, 1])
    ('0, 2 and 3', '0 and 1')
    """
    *first, last = map(str, stages)
    return f"{', '.join(first)} and {last}" if first else last


def copies_words(p: int, q: int, tied: bool = True) -> str:
    """
    >>> copies_words(4, 2), copies_words(4, 2, tied=False)
    ('0, 2 and 3', '0 and 2')
    """
    return stages_words(copies(p, q, tied)[0])


SHORT = {"encoder": "[s_enc, b, h]", "decoder": "[s_dec, b, h]"}


def links_figure(p: int = 4, q: int = 2) -> str:
    """Stages, and the tensors on each link."""
    split = StackSplit(p, q)
    words, positions = copies(p, q)
    stages, hues = [], []
    for stage in range(p):
        has = ["words"] * (stage in words) + ["positions"] * (stage in positions)
        last = ["head, loss"] if stage == p - 1 else []
        stages.append([f"stage {stage}", stack_of(split, stage), ", ".join(has) or "–", *last])
        hues.append(0 if split.has_encoder(stage) else 2)
    over = [[SHORT[kind] for kind in kinds] for kinds in messages(p, q)]
    return family_pictures.links(stages, hues, [Link(kinds, kinds) for kinds in over])


# -- Message sizes --


def link_bytes(p: int, q: int, link: int, s_enc: int, s_dec: int, b: int, h: int) -> int:
    """One microbatch, one direction, in bf16."""
    sizes = (int(message_bytes(length, b, h)) for length in (s_enc, s_dec))
    return sum(messages_behind(StackSplit(p, q), *sizes)[link])


def link_words(p: int, q: int, link: int, s_enc: int, s_dec: int, b: int, h: int) -> str:
    return size_words(link_bytes(p, q, link, s_enc, s_dec, b, h))


def sizes_table(p: int, q: int, s_enc: int, s_dec: int, b: int, h: int) -> str:
    """What goes over each link for one microbatch, in each direction."""
    rows = [
        [f"{link} → {link + 1}", " and ".join(kinds), link_words(p, q, link, s_enc, s_dec, b, h)]
        for link, kinds in enumerate(messages(p, q))
    ]
    return table(["link", "tensors of", "one direction"], rows)


# -- The gradient of the encoder's output --


@cache
def sum_of_gradients(e: float, d: float, num_stages: int = 2) -> list[tuple[float, float, float]]:
    """Of decoder stages that multiply their input by e: (of the input, own part of e's, e's sum).

    The last stage first. Each runs the package's `backward_step`; the last one's output is the loss.
    """
    config = SimpleNamespace(deallocate_pipeline_outputs=False, grad_scale_func=None)
    state, value, inputs = torch.tensor(e, dtype=torch.float64), d, []
    for _ in range(num_stages):
        given = [torch.tensor(value, dtype=torch.float64), state.clone()]
        for tensor in given:
            tensor.requires_grad_()
        output = given[0] * given[1]
        inputs.append((given, output))
        value = float(output.detach())
    found, behind = [], None
    for given, output in reversed(inputs):
        outputs = [output] if behind is None else [output, given[1]]
        grads = backward_step(given, outputs, behind or [None], None, config)
        from_behind = 0.0 if behind is None else float(behind[1])
        found.append((float(grads[0]), float(grads[1]) - from_behind, float(grads[1])))
        behind = grads
    return found


def whole_gradient(e: float, d: float, num_stages: int = 2) -> float:
    """Of e, in one process: autograd's own."""
    state = torch.tensor(e, dtype=torch.float64, requires_grad=True)
    value = torch.tensor(d, dtype=torch.float64)
    for _ in range(num_stages):
        value = value * state
    value.backward()
    return float(state.grad)


E_OUTPUT, D_INPUT = 2.0, 3.0
"""Of the page's case."""


def sum_table(num_stages: int = 2) -> str:
    """What each decoder stage adds to the gradient of the encoder's output."""
    rows = []
    for place, (given, own, total) in enumerate(sum_of_gradients(E_OUTPUT, D_INPUT, num_stages)):
        stage = num_stages - place
        behind = f"{total - own:g}" if place else "–"
        rows.append([f"stage {stage}", f"{given:g}", f"{own:g}", behind, f"**{total:g}**"])
    rows.append(
        ["one process", "", "", "", f"**{whole_gradient(E_OUTPUT, D_INPUT, num_stages):g}**"]
    )
    head = ["backward of", "∂L/∂input", "its own term of ∂L/∂e", "from the stage after", "sent on"]
    return table(head, rows)


def gradient_words(e: float, d: float, num_stages: int) -> str:
    """Own parts, from the last stage on, and their sum.

    >>> gradient_words(2.0, 3.0, 2)
    '6 + 6 = 12'
    """
    found = sum_of_gradients(e, d, num_stages)
    return f"{' + '.join(f'{own:g}' for _, own, _ in found)} = {found[-1][2]:g}"


@cache
def recorded() -> tuple[int, int]:
    """Of the recorded run: microbatches, and messages of its step."""
    recording = read_json(RECORDINGS / "t5.json")
    command = recording["provenance"]["command"].split()
    (plan,) = [one for one in recording["steps"][0]["figures"] if one["label"] == "plan"]
    num_messages = int(re.search(r"(\d+) messages", plan["remark"])[1])
    return int(command[command.index("--global-batch-size") + 1]), num_messages


# -- Files --


def num_files(model: str) -> int:
    """Files that a step enters."""
    return len(entered()[model])


def num_new_files(model: str, beside: str = "GPT") -> int:
    """Files that a step of one model enters, and a step of the other does not."""
    return len(set(entered()[model]) - set(entered()[beside]))


def num_shared_files(model: str, beside: str = "GPT") -> int:
    return len(set(entered()[model]) & set(entered()[beside]))
