"""What Mamba checks in the arguments.

Megatron has no counterpart; see the package.
"""

import argparse

from minimegatron.core.ssm.mamba_config import check_mamba, check_mamba_model
from minimegatron.core.ssm.mamba_hybrid_layer_allocation import Symbols, allocate_layers
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.argument_checks import check_layers
from minimegatron.training.families.family_checks import FamilyChecks


def check_hybrid_layers(args: argparse.Namespace, config: TransformerConfig) -> None:
    """Each layer has a letter, a Mamba layer has sizes that fit, and every chunk gets its layers.

    Raises ValueError, with the flags, the numbers and the remedy.
    """
    check_mamba_model(config)
    letters = allocate_layers(config.num_layers, override_pattern=args.hybrid_override_pattern)
    if Symbols.MAMBA in letters:
        check_mamba(config)
    check_layers(args, config)


MAMBA = FamilyChecks("pretrain_mamba", sections=("mamba",), check_layers=check_hybrid_layers)
