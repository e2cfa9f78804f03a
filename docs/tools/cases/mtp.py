"""What the page on multi-token prediction shows: shifted targets, weights of losses, who holds what.

Called by: `cases`, where pages find it as `mtp`. Calls: the package's shift, its scale of further
losses, its placement of layers; `sequence_pictures`.
"""

from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace

import torch

from cases.case_words import table
from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.layer_placement import (
    ranks_with_word_embedding,
)
from minimegatron.core.transformer.mtp_loss import scale_mtp_as_mean, scale_mtp_as_sum
from minimegatron.core.transformer.multi_token_prediction import process_mtp_loss, roll_tensor
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.core.transformer.stages_as_told import get_mtp_ranks
from pictures import sequence_pictures

TEXT = ("the", "cat", "sat", "on", "a", "mat", "and", "slept", "well")
"""The page's sequence, and the label of its last token."""
K = 2


# -- What is read and predicted --


def shifted(values: Sequence[int], depth: int) -> list[int]:
    """What depth `depth` has in place of these; 0 where nothing is left."""
    tensor = torch.tensor(values)
    for _ in range(depth):
        tensor, _ = roll_tensor(tensor)
    return tensor.tolist()


def _words(words: Sequence[str], depth: int) -> list[str]:
    found = shifted(range(1, len(words) + 1), depth)
    return [words[number - 1] if number else "" for number in found]


def reads(text: Sequence[str], depth: int) -> list[str]:
    """The token that the depth embeds at each position; of depth 0 the model's own."""
    return _words(text[:-1], depth)


def targets(text: Sequence[str], depth: int) -> list[str]:
    return _words(text[1:], depth)


def targets_figure(num_depths: int = K) -> str:
    """Two rows for the model and for each depth."""
    rows = []
    for depth in range(num_depths + 1):
        name = f"depth {depth}" if depth else "the model"
        rows.append((f"{name} reads", reads(TEXT, depth), 7))
        rows.append((f"{name} predicts", targets(TEXT, depth), depth))
    return sequence_pictures.shifted(rows)


def read_word(text: Sequence[str], depth: int, position: int) -> str:
    return reads(text, depth)[position]


def target_word(text: Sequence[str], depth: int, position: int) -> str:
    return targets(text, depth)[position]


def num_targets(length: int, depth: int) -> int:
    return sum(shifted([1] * length, depth))


def counts(mask: Sequence[int], num_depths: int) -> list[int]:
    """Tokens that count, of the model and of each depth."""
    return [sum(shifted(mask, depth)) for depth in range(num_depths + 1)]


def counts_words(mask: Sequence[int], depth: int) -> str:
    """
    >>> counts_words([1, 1, 0], 1)
    'the model has 2, depth 1 has 1'
    """
    found = counts(mask, depth)
    return f"the model has {found[0]}, depth {depth} has {found[-1]}"


# -- How much a loss weighs --

Masks = Sequence[Sequence[int]]
"""Of a microbatch, whether a position counts in the main loss: [b][s]."""


def gradients(
    masks: Masks, num_depths: int, factor: float, num_microbatches: int, per_token: bool
) -> list[torch.Tensor]:
    """By what the package's step multiplies the losses of each depth, [b, s]; the loss scale is 1."""
    mask = torch.tensor(masks)
    b, s = mask.shape
    losses = [torch.ones(b, s, dtype=torch.float64, requires_grad=True) for _ in range(num_depths)]
    left = iter(losses)
    config = SimpleNamespace(
        mtp_num_layers=num_depths,
        mtp_loss_scaling_factor=factor,
        calculate_per_token_loss=per_token,
    )
    model = SimpleNamespace(
        config=config,
        training=False,
        pg_collection=SimpleNamespace(),
        cp_group=None,
        output_layer=lambda states, **_: (states, None),
        compute_language_model_loss=lambda labels, logits: next(left),
    )
    states = torch.zeros((1 + num_depths) * s, b, 1, dtype=torch.float64)
    main = process_mtp_loss(model, states, mask, mask, None)
    set_scale = scale_mtp_as_sum if per_token else scale_mtp_as_mean
    set_scale(torch.ones(()), num_microbatches, 1)
    main.sum().backward()
    return [loss.grad for loss in losses]


def weight(
    masks: Masks,
    depth: int,
    num_depths: int,
    factor: float,
    num_microbatches: int,
    all_tokens: int | None = None,
) -> Fraction:
    """Of the loss of one token that counts, in one process; of depth 0 the main loss.

    `all_tokens`: of the step, with `calculate_per_token_loss`; None without.
    """
    if depth == 0:
        return Fraction(1, all_tokens or num_counted(masks, 0) * num_microbatches)
    grads = gradients(masks, num_depths, factor, num_microbatches, all_tokens is not None)
    (value,) = set(grads[depth - 1].flatten().tolist()) - {0.0}
    return Fraction(value).limit_denominator(10**6) / (all_tokens or 1)


def num_counted(masks: Masks, depth: int) -> int:
    return sum(sum(shifted(mask, depth)) for mask in masks)


MASKS = ((1, 1, 1, 1, 1, 1, 0, 0),), ((1,) * 8,)
"""Of two microbatches."""
FACTOR = 0.1


def weights_table(num_depths: int = K) -> str:
    """Of the first microbatch: each loss's tokens, what one weighs, and all together, by the flag."""
    all_tokens = sum(num_counted(masks, 0) for masks in MASKS)
    rows = []
    for depth in range(num_depths + 1):
        n = num_counted(MASKS[0], depth)
        cells: list[object] = [f"depth {depth}" if depth else "the model", n]
        for tokens in (None, all_tokens):
            one = weight(MASKS[0], depth, num_depths, FACTOR, len(MASKS), tokens)
            cells += [one, n * one]
        rows.append(cells)
    head = ["", "tokens", "flag off: one token", "together", "flag on: one token", "together"]
    return table(head, rows)


# -- Where it lies --


def _config(layout: str) -> SimpleNamespace:
    stages = layout.count("|") + 1
    return SimpleNamespace(
        num_layers=layout.count("t"),
        mtp_num_layers=layout.count("m") or None,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=None,
        pipeline_schedule=None,
        pipeline_model_parallel_layout=PipelineParallelLayerLayout.from_str(layout, stages),
    )


def stages_with_embedding(layout: str, tied: bool = False) -> list[int]:
    """Those of a layout without repetitions that hold the word embedding or a copy of it."""
    config = _config(layout)
    return ranks_with_word_embedding(config, tied, range(config.pipeline_model_parallel_size))


def embedding_words(layout: str, tied: bool = False) -> str:
    """
    >>> embedding_words("Et|t|m|L"), embedding_words("Et|tm|L", tied=True)
    ('stages 0 and 2', 'stages 0, 1 and 2')
    """
    *first, last = map(str, stages_with_embedding(layout, tied))
    return f"stages {', '.join(first)} and {last}"


def message_lengths(layout: str, s: int | str = "s") -> list[str]:
    """Of what each stage sends on: how often the sequence's length."""
    config = _config(layout)
    num_stages = config.pipeline_model_parallel_size
    (at,) = get_mtp_ranks(range(num_stages), config)
    depths = 1 + config.mtp_num_layers
    if isinstance(s, int):
        return [f"{depths * s if stage >= at else s:,}" for stage in range(num_stages - 1)]
    return [f"{depths} {s}" if stage >= at else s for stage in range(num_stages - 1)]


def message_words(layout: str, stage: int, s: int, b: int, h: int) -> str:
    """
    >>> message_words("Et|tm|L", 1, 8, 2, 4)
    '[16, 2, 4]'
    """
    return f"[{message_lengths(layout, s)[stage]}, {b}, {h}]"


def _held(kinds: Sequence[LayerType]) -> str:
    """What a stage has, in words."""
    words = []
    for kind, singular, plural in (
        (LayerType.embedding, "embedding", ""),
        (LayerType.decoder, "layer", "layers"),
        (LayerType.mtp, "depth", "depths"),
        (LayerType.loss, "output layer", ""),
    ):
        number = kinds.count(kind)
        if number:
            words.append(f"{number} {plural if number > 1 else singular}" if plural else singular)
    return ", ".join(words)


def stages_table(layout: str) -> str:
    """Who holds what, reads what, and sends what on."""
    config = _config(layout)
    untied, tied = (stages_with_embedding(layout, is_tied) for is_tied in (False, True))
    sent = [f"[{length}, b, h]" for length in message_lengths(layout)] + ["–"]
    rows = []
    for stage, (kinds,) in enumerate(config.pipeline_model_parallel_layout.layout):
        copy = "copy" if stage in untied else "copy if tied" if stage in tied else "–"
        copy = "**original**" if LayerType.embedding in kinds else copy
        read = ["tokens"] * (LayerType.embedding in kinds or LayerType.mtp in kinds)
        read += ["labels, mask"] * (LayerType.loss in kinds)
        cells = [stage, _held(kinds), copy, ", ".join(read) or "–", sent[stage]]
        rows.append(cells)
    return table([f"`{layout}`", "holds", "embedding", "reads", "sends on"], rows)
