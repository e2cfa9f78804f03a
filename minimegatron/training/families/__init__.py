"""What each family of models checks in the arguments, beside what all of them do.

Megatron has no counterpart; there each program asserts what it needs while it runs.

A program says what it trains: `pretrain(..., args_defaults={"model_family": "bert"})`. One that does
not say is checked as far as all models are alike.
"""

import argparse
import dataclasses

from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.argument_utils import flag_name
from minimegatron.training.config import SECTIONS
from minimegatron.training.families import bert_checks, mamba_checks, t5_checks
from minimegatron.training.families.family_checks import FamilyChecks

FAMILIES = {
    None: lambda: FamilyChecks("", sections=("bert", "t5", "mamba")),
    "gpt": lambda: FamilyChecks("pretrain_gpt"),
    "bert": lambda: bert_checks.BERT,
    "t5": lambda: t5_checks.T5,
    "mamba": lambda: mamba_checks.MAMBA,
}
"""By `args.model_family`. A family's module is loaded when somebody asks for it."""


def check_family(args: argparse.Namespace, config: TransformerConfig) -> None:
    """Every chunk gets its layers; flags of another family are refused; then the family's own checks,
    and the data.

    Raises ValueError, with the flags, the numbers and the remedy.
    """
    family = FAMILIES[args.model_family]()
    if args.position_embedding_type == "relative" and args.model_family != "t5":
        raise ValueError(
            "--position-embedding-type relative is for pretrain_t5; use learned_absolute or rope"
        )
    _refuse_flags_of_others(args, family)
    family.check_layers(args, config)
    for check in (*family.checks, family.check_data):
        check(args)


def _refuse_flags_of_others(args: argparse.Namespace, family: FamilyChecks) -> None:
    for section in ("bert", "t5", "mamba"):
        for field in dataclasses.fields(SECTIONS[section]):
            value = args.__dict__[field.name]
            if section not in family.sections and value != field.default:
                programs = [
                    x.program
                    for x in (family_of() for family_of in FAMILIES.values())
                    if x.program and section in x.sections and field.name not in x.unused
                ]
                raise ValueError(
                    f"{flag_name(field)} is given, but {family.program} trains a model that does not "
                    f"use it; drop it, or run {' or '.join(programs)}"
                )
