"""What is said of one family of models before anything starts; and whether its data is there.

Megatron has no counterpart; there a run finds out when it builds datasets. Here it is known before any
process group exists: every rank makes the same checks, with the same answer.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minimegatron.core.datasets import indexed_dataset, stdlib_text
from minimegatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from minimegatron.core.datasets.stdlib_corpus import num_blocks
from minimegatron.core.datasets.utils import get_blend_from_list
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.argument_checks import check_layers
from minimegatron.training.argument_utils import flags_by_name

# -- The data is there, and every part of it that the run asks for --


def check_data(args: argparse.Namespace) -> None:
    """The data is there, and every split that the run asks for has some of it."""
    spans = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
    if args.data_path is None:
        check_spans(
            args, spans, num_blocks(stdlib_text.stdlib_files()), "blocks of the built-in text"
        )
        return
    for prefix in prefixes_of_data(args):
        lengths = indexed_dataset.open_tokens(prefix).sequence_lengths
        check_spans(args, spans, len(lengths), f"documents of --data-path {prefix}")
        for name, (begin, end) in wanted_spans(args, spans, len(lengths)).items():
            if not lengths[begin:end].any():
                raise ValueError(
                    f"--split {args.split} gives {name} {end - begin} of the {len(lengths)} documents "
                    f"of --data-path {prefix}, none of which has a token; raise its share, or make "
                    "the data from other text"
                )


def prefixes_of_data(args: argparse.Namespace) -> list[str]:
    """The datasets that --data-path names. Raises ValueError for one that is not there."""
    if not args.data_path:
        raise ValueError("--data-path is empty; give a prefix, or drop it for the built-in text")
    prefixes = get_blend_from_list(args.data_path)[0]
    for prefix in prefixes:
        if not indexed_dataset.IndexedDataset.exists(prefix):
            raise ValueError(
                f"--data-path {prefix}: {prefix}.idx and {prefix}.bin are not both there; make "
                "them from text with `minimegatron preprocess`, and leave out the endings"
            )
    return prefixes


def check_spans(
    args: argparse.Namespace, spans: list[tuple[float, float] | None], count: int, what: str
) -> None:
    """Raises ValueError for a split that is wanted and gets none of the `count` documents."""
    for name, (begin, end) in wanted_spans(args, spans, count).items():
        if begin == end:
            raise ValueError(
                f"--split {args.split} gives {name} none of the {count} {what}; "
                f"raise its share, or give it 0 to do without {name}"
            )


def wanted_spans(
    args: argparse.Namespace, spans: list[tuple[float, float] | None], count: int
) -> dict[str, tuple[int, int]]:
    """By the name of each split that is wanted: its first of `count` documents, one past its last."""
    wanted = (args.train_iters > 0, args.eval_iters > 0, args.eval_iters > 0)
    return {
        name: (round(span[0] * count), round(span[1] * count))
        for name, span, is_wanted in zip(
            ("training", "validation", "test"), spans, wanted, strict=True
        )
        if span is not None and is_wanted
    }


# -- One family --


Check = Callable[[argparse.Namespace], None]


@dataclass(frozen=True)
class FamilyChecks:
    """How the arguments of one family are checked."""

    program: str
    """What trains it, for messages."""
    sections: tuple[str, ...] = ()
    """Sections of `training.config` that are for it, of those that are not for all."""
    unused: tuple[str, ...] = ()
    """Arguments of these sections that are refused all the same, by one of the checks."""
    checks: tuple[Check, ...] = ()
    """Each raises ValueError with one sentence: the flags, the numbers, what to change."""
    check_layers: Callable[[argparse.Namespace, TransformerConfig], None] = check_layers
    """Whether every chunk gets a whole number of layers."""
    check_data: Check = check_data
    """Whether the data is there, and every split that the run asks for has some of it."""


def check_unused(unused: Mapping[str, tuple[Any, str]], args: argparse.Namespace) -> None:
    """Nothing is asked for that a family would not do.

    `unused` has for an argument the value that means nothing, and why no other can be used.
    """
    for name, (nothing, why) in unused.items():
        value = args.__dict__[name]
        if value != nothing:
            given = f"is {value}" if type(value) is not bool else "is given"
            raise ValueError(f"{flags_by_name()[name]} {given}, but {why}")
