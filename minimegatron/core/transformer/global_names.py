"""Names of parameters in the full model: they do not depend on the layout.

Megatron has no counterpart.
"""

from collections.abc import Iterator

import torch

from minimegatron.core.parameter_marks import restore_marks


def global_parameter_name(model: torch.nn.Module, name: str) -> str:
    """The name in the full model of what the chunk `model` calls `name`.

    Every module on the way from the parameter up to `model` that has a `global_name` is asked for
    it. `decoder.layers.0.` of a later chunk becomes `decoder.layers.{its place in the model}.`; the
    last stage's copy of a tied embedding gets the embedding's own name.

    Args:
        model: a model chunk, wrapped (`Float16Module`, DDP) or not.
        name: from `model.named_parameters()`; the prefixes of wrappers are dropped.
    """
    while hasattr(model, "module"):
        model = model.module
        name = name.removeprefix("module.")
    child, dot, rest = name.partition(".")
    if dot:
        name = f"{child}.{global_parameter_name(getattr(model, child), rest)}"
    return model.global_name(name) if hasattr(model, "global_name") else name


def named_global_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """`model.named_parameters()` under their names in the full model, with all their marks."""
    restore_marks(model)
    for name, param in model.named_parameters():
        yield global_parameter_name(model, name), param
