"""Which layer of a hybrid model is of which kind: a string with a letter for each. Torch-free.

Counterpart: `megatron.core.ssm.mamba_hybrid_layer_allocation`.
"""


class Symbols:
    """The letters, one per layer."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"
    VALID = (MAMBA, ATTENTION, MLP)


LEFT_OUT = {
    "E": "experts",
    "G": "gated delta nets",
    "D": "sparse attention",
    "+": "a whole transformer layer",
    "|": "a border of stages",
    "/": "further tokens",
}
"""Letters of other releases of Megatron."""


def allocate_layers(total_layers_count: int, *, override_pattern: str | None = None) -> list[str]:
    """The letters of all layers, the first one's first; Mamba for all without a pattern.

    Raises ValueError for another number of letters, or for one that is not known.

    >>> allocate_layers(3, override_pattern="M*-"), allocate_layers(2)
    (['M', '*', '-'], ['M', 'M'])
    """
    pattern = override_pattern
    if pattern is None:
        return [Symbols.MAMBA] * total_layers_count
    for place, letter in enumerate(pattern, start=1):
        if letter not in Symbols.VALID:
            what = "is unknown"
            if letter in LEFT_OUT:
                what = f"stands for {LEFT_OUT[letter]} in other releases, which is left out here"
            if letter == "|":
                what += " (pipeline_model_parallel_layout sets it)"
            raise ValueError(
                f"hybrid_override_pattern {pattern!r}: letter {place}, {letter!r}, {what}; "
                "use M (Mamba), * (attention) and - (MLP)"
            )
    if len(pattern) != total_layers_count:
        raise ValueError(
            f"hybrid_override_pattern {pattern!r} has {len(pattern)} letters but num_layers is "
            f"{total_layers_count}; give a letter for each layer"
        )
    return list(pattern)
