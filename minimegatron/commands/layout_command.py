"""`minimegatron layout "Et*3|(tt|)*29,m|L" --pp 16`: which rank holds what, as tables.

Torch-free. Megatron has no counterpart.
"""

import argparse

from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.planner.memory import num_layer_parameters
from minimegatron.planner.mtp_costs import (
    lengths_behind,
    parameters_of_stages,
    stages_of_layout,
    vocabulary_matrices,
)

USAGE = "LAYOUT --pp N [options]"
EXAMPLES = (
    "'Ettt|tttt|tttt|tttL' --pp 4",
    "'Et*3|(tt|)*29,m|L' --pp 16 --num-layers 61",
    "'Et|t|t|tL' --pp 4 --hidden-size 1024 --vocab-size 50304",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The layout, the number of stages; numbers of layers, to check them too; sizes, to count."""
    parser.add_argument(
        "layout",
        help="E embedding, t transformer layer, m MTP layer, L loss; '|' between stages; "
        "t*3 and (tt|)*29 repeat; commas say nothing",
    )
    parser.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--num-layers", type=int, metavar="N", help="check that there are N transformer layers"
    )
    parser.add_argument(
        "--mtp-num-layers", type=int, metavar="N", help="check that there are N MTP layers"
    )
    parser.add_argument(
        "--hidden-size",
        type=int,
        metavar="H",
        help="with --vocab-size: what each stage holds and sends on, too; layers are GPT-2's (12h² + "
        "13h parameters) and positions without parameters",
    )
    parser.add_argument("--vocab-size", type=int, metavar="V", help="tokens of the vocabulary")
    parser.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="the output layer has weights of its own",
    )


def run(args: argparse.Namespace) -> None:
    """Prints the tables. Raises ValueError, with a caret under the fault."""
    layout = PipelineParallelLayerLayout.from_str(args.layout, args.pp)
    wanted = {LayerType.decoder: args.num_layers, LayerType.mtp: args.mtp_num_layers}
    decoder, mtp = (
        layout.flatten_layout.count(layer_type) if number is None else number
        for layer_type, number in wanted.items()
    )
    layout.validate_layer_layout(decoder, mtp)
    sizes = (args.hidden_size, args.vocab_size)
    if (args.hidden_size is None) != (args.vocab_size is None):
        raise ValueError(
            "parameters need both --hidden-size and --vocab-size; give the other one too, or neither"
        )
    for name, size in zip(("--hidden-size", "--vocab-size"), sizes, strict=True):
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; give 1 or more")
    print(layout.pretty_repr())
    if args.hidden_size is not None:
        print()
        print(_stages(layout, *sizes, not args.untie_embeddings_and_output_weights))


def _stages(
    layout: PipelineParallelLayerLayout, hidden_size: int, vocab_size: int, is_tied: bool
) -> str:
    """What each stage holds, and sends on, as a table."""
    stages = stages_of_layout(layout)
    layer = num_layer_parameters(hidden_size)
    parameters = parameters_of_stages(stages, layer, hidden_size, vocab_size, is_tied)
    copies, lengths = vocabulary_matrices(stages, is_tied), lengths_behind(stages)
    rows = [["stage", "rank", "chunk", "parameters", "of them vocabulary", "sends on"]]
    for stage, number in enumerate(parameters):
        place = layout.placement.place_of(stage)
        length = "s" if lengths[stage] == 1 else f"{lengths[stage]} s"
        sent = "nothing" if stage == len(stages) - 1 else f"[{length}, b, {hidden_size}]"
        words = f"{copies[stage]} x {vocab_size * hidden_size:,}" if copies[stage] else "none"
        rows.append([str(stage), *map(str, place), f"{number:,}", words, sent])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
    return "\n".join(lines)
