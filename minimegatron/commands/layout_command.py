"""`minimegatron layout "Et*3|(tt|)*29,m|L" --pp 16`: which rank holds what, as a table.

Torch-free. Megatron has no counterpart.
"""

import argparse

from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The layout, the number of stages, and, to check them too, the numbers of layers."""
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


def run(args: argparse.Namespace) -> None:
    """Prints the table. Raises ValueError, with a caret under the fault."""
    layout = PipelineParallelLayerLayout.from_str(args.layout, args.pp)
    wanted = {LayerType.decoder: args.num_layers, LayerType.mtp: args.mtp_num_layers}
    decoder, mtp = (
        layout.flatten_layout.count(layer_type) if number is None else number
        for layer_type, number in wanted.items()
    )
    layout.validate_layer_layout(decoder, mtp)
    print(layout.pretty_repr())
