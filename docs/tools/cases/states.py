"""What the page on state-space layers shows: the scan by hand and in segments, costs, who holds what.

Called by: `cases`, where pages find it as `states`. Calls: the package's scans, mixer and pattern of
layers; `family_pictures`. Reads docs/benchmarks/scan_speed.json and entered_files.json.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cases.case_words import size_words, table
from minimegatron.core.models.mamba.mamba_layer_specs import get_mamba_stack_spec
from minimegatron.core.ssm.mamba_hybrid_layer_allocation import Symbols, allocate_layers
from minimegatron.core.ssm.mamba_mixer import MambaMixer
from minimegatron.core.ssm.ops.ssd_combined import (
    mamba_chunk_scan_combined,
    mamba_recurrence,
    segment_sums,
)
from minimegatron.core.tensor_parallel.initial_weights import weights_drawn_later
from minimegatron.core.tensor_parallel.sharding import shard_parameter
from minimegatron.core.transformer.layer_placement import layers_of_virtual_stages
from minimegatron.core.transformer.transformer_config import TransformerConfig
from pictures import family_pictures, pictures
from pictures.family_pictures import Panel, Section
from source.places import DOCS, read_json, recorded

# -- Three tokens by hand --

DECAYS, WRITTEN = (0.5, 0.5, 0.25), (4.0, 2.0, 8.0)
"""Of three tokens, in a state of one number: exp(dt A), and dt x B."""


def _scalars(decays: Sequence[float], written: Sequence[float]) -> tuple[torch.Tensor, ...]:
    """x, dt, A, B, C of one head with P = N = 1, with C = 1, for these decays and parts written."""
    decay = torch.tensor(decays, dtype=torch.float64)
    dt = -decay.log().view(1, -1, 1)
    x = torch.tensor(written, dtype=torch.float64).view(1, -1, 1, 1) / dt[..., None]
    ones = torch.ones(1, len(decays), 1, 1, dtype=torch.float64)
    return x, dt, torch.tensor([-1.0], dtype=torch.float64), ones, ones


def states_of(decays: Sequence[float], written: Sequence[float]) -> list[float]:
    """The state after each token; C is 1, so that it is what the token reads."""
    return mamba_recurrence(*_scalars(decays, written)).flatten().tolist()


def state_after(decays: Sequence[float], written: Sequence[float]) -> str:
    """
    >>> state_after([0.5, 0.5], [4, 2])
    '4'
    """
    return f"{states_of(decays, written)[-1]:.4g}"


def share_left(decays: Sequence[float], writer: int, reader: int) -> str:
    """Of what token `writer` wrote, how much token `reader` finds.

    >>> share_left([0.5, 0.5, 0.25], 0, 2)
    '0.125'
    """
    a = torch.tensor(decays, dtype=torch.float64).log()
    return f"{float(segment_sums(a).exp()[reader, writer]):.4g}"


def decays_words() -> str:
    return _listed(DECAYS)


def written_words() -> str:
    return _listed(WRITTEN)


def _listed(numbers: Sequence[float]) -> str:
    *first, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(first)} and {last}"


def hand_table() -> str:
    """Three tokens: what decays, what is written, what is left, and the same as a sum over the past."""
    decay = segment_sums(torch.tensor(DECAYS, dtype=torch.float64).log()).exp()
    rows = []
    for t, state in enumerate(states_of(DECAYS, WRITTEN)):
        terms = [f"{float(decay[t, j]):g} · {WRITTEN[j]:g}" for j in range(t + 1)]
        before = f"{DECAYS[t]:g} · {states_of(DECAYS, WRITTEN)[t - 1] if t else 0:g}"
        rows.append([t, f"{before} + {WRITTEN[t]:g} = **{state:g}**", " + ".join(terms)])
    return table(["token", "the state, token by token", "the same, all at once"], rows)


# -- In chunks --

FIGURE_DECAYS, CHUNK = (0.9, 0.8, 0.9, 0.7, 0.9, 0.5, 0.9, 0.8), 4


def decay_figure() -> str:
    """exp(segment_sums(a)) for eight tokens in segments of four."""
    a = torch.tensor(FIGURE_DECAYS, dtype=torch.float64).log()
    return family_pictures.decays(segment_sums(a).exp().tolist(), CHUNK)


def draw(
    s: int, b: int = 1, heads: int = 4, head_dim: int = 16, state_dim: int = 16, groups: int = 1
) -> tuple[torch.Tensor, ...]:
    """x, dt, A, B, C as a mixer might have them, in float64, with gradients."""
    torch.manual_seed(0)
    shapes = [(b, s, heads, head_dim), (b, s, groups, state_dim), (b, s, groups, state_dim)]
    x, B, C = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    dt = torch.rand(b, s, heads, dtype=torch.float64) * 0.1
    A = -torch.rand(heads, dtype=torch.float64) * 15 - 1
    return tuple(each.requires_grad_() for each in (x, dt, A, B, C))


def largest_difference(s: int = 64, chunk: int = 16) -> str:
    """Of outputs and of all gradients, between both forms, relative to the largest number."""
    found = []
    for scan in (mamba_recurrence, lambda *args: mamba_chunk_scan_combined(*args, chunk)):
        inputs = draw(s)
        y = scan(*inputs)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        found.append([y.detach(), *(each.grad for each in inputs)])
    gaps = [
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(*found, strict=True)
    ]
    return f"{max(gaps):.0e}"


# -- Time and memory, as the benchmark measured them --

FUSED, SCORES = "attention, fused", "attention with its scores"
LOOP, CHUNKS = "token after token", "in segments"
WAYS = (SCORES, CHUNKS, LOOP, FUSED)


@cache
def measured() -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of the benchmark of scans, by way and number of tokens."""
    kept = read_json(DOCS / "benchmarks" / "scan_speed.json")
    return {(row["way"], row["tokens"]): row for row in kept["tables"][0]["rows"]}


def _lengths() -> list[int]:
    return sorted({tokens for _, tokens in measured()})


def milliseconds(way: str, s: int) -> float:
    """Forward and backward of one layer's scan or attention."""
    return measured()[way, s]["median_ms"]


def kept_bytes(way: str, s: int) -> int:
    """What autograd keeps between them."""
    return measured()[way, s]["kept_bytes"]


def growth_figure() -> str:
    """Time of a forward and backward, and bytes kept between them, by length."""
    lengths = _lengths()
    times = {way: [milliseconds(way, s) for s in lengths] for way in WAYS}
    kept = {way: [kept_bytes(way, s) for s in lengths] for way in WAYS}
    panels = [
        Panel("time", times, [(value, f"{value:,} ms") for value in (1, 10, 100, 1000)]),
        Panel("kept", kept, [(2**n, size_words(2**n)) for n in (18, 20, 22, 24, 26)]),
    ]
    return family_pictures.growth(lengths, panels)


def time_ratio(way: str, s: int, factor: int = 2) -> str:
    """How many times as long a sequence takes that is `factor` times as long."""
    return f"{milliseconds(way, factor * s) / milliseconds(way, s):.1f}"


def kept_ratio(way: str, s: int, factor: int = 2) -> str:
    """How many times as much is kept for a sequence that is `factor` times as long."""
    return f"{kept_bytes(way, factor * s) / kept_bytes(way, s):.1f}"


def times_faster(s: int) -> str:
    """In segments, against token after token."""
    return f"{milliseconds(LOOP, s) / milliseconds(CHUNKS, s):.0f}"


# -- Files that a step enters --


@cache
def entered() -> dict[str, list[str]]:
    """By model, the files that one training step enters; recorded by `records.entered_files`."""
    return recorded("entered_files")["files"]


def both(one: str, other: str) -> list[str]:
    """Files that steps of both models enter."""
    return sorted(set(entered()[one]) & set(entered()[other]))


def only(one: str, other: str) -> list[str]:
    """Files that a step of the first model enters, and none of the other."""
    return sorted(set(entered()[one]) - set(entered()[other]))


AREAS = (
    ("the schedule and its messages", "core/pipeline_parallel/"),
    ("gradients and optimizer", "core/distributed/", "core/optimizer/"),
    ("tensor parallelism", "core/tensor_parallel/"),
    ("layers and models", "core/transformer/", "core/models/", "core/ssm/"),
    ("the program and its loop", "pretrain_", "training/"),
    ("the rest", ""),
)


def _by_area(files: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name, *_ in AREAS}
    for file in files:
        name = next(name for name, *starts in AREAS if file.startswith(tuple(starts)))
        found[name].append(file)
    return found


def entered_table(one: str = "GPT", other: str = "Mamba") -> str:
    """How many files both steps enter, and which only one does, by area."""
    shared, of_one, of_other = map(_by_area, (both(one, other), only(one, other), only(other, one)))
    rows = []
    for name, *_ in AREAS:
        cells = [_names(of_one[name]), _names(of_other[name])]
        if shared[name] or any(cells):
            rows.append([name, len(shared[name]), *(cell or "–" for cell in cells)])
    total = [len(both(one, other)), len(only(one, other)), len(only(other, one))]
    rows.append(["**all**", *(f"**{number}**" for number in total)])
    return table(["", "both", f"only {one}", f"only {other}"], rows)


def _names(files: Sequence[str]) -> str:
    return ", ".join(f"`{Path(file).name}`" for file in files)


# -- The state's memory --


def state_elements(heads: int, head_dim: int, state_dim: int, b: int = 1) -> int:
    """Of one layer, whatever the length: [b, n, P, N]. Asked of the scan itself.

    >>> state_elements(4, 16, 16), state_elements(4, 16, 16, b=3)
    (1024, 3072)
    """
    inputs = [each.detach() for each in draw(1, b, heads, head_dim, state_dim)]
    return mamba_recurrence(*inputs, return_final_states=True)[1].numel()


def cache_elements(groups: int, head_dim: int, s: int, b: int = 1) -> int:
    """Keys and values of s tokens, for one layer of attention."""
    return 2 * s * b * groups * head_dim


def more_from(heads: int, head_dim: int, state_dim: int, groups: int, kv_channels: int) -> int:
    """From how many tokens on keys and values take more room than the state."""
    one = cache_elements(groups, kv_channels, 1)
    return state_elements(heads, head_dim, state_dim) // one + 1


# -- Sections over tensor ranks --


def sections_of(sizes: Sequence[tuple[str, int]]) -> list[Section]:
    found, start = [], 0
    for name, size in sizes:
        found.append(Section(name, start, start + size))
        start += size
    return found


SECTIONS = ("z", "x", "B", "C", "dt")


def mixer(t: int, rank: int, **sizes: Any) -> MambaMixer:
    """The mixer of one of t ranks, its weights without values."""
    config = TransformerConfig(
        num_layers=1, num_attention_heads=t, tensor_model_parallel_size=t, **sizes
    )
    group = SimpleNamespace(size=lambda: t, rank=lambda: rank)
    spec = get_mamba_stack_spec().submodules.mamba_layer.submodules.mixer
    with weights_drawn_later():
        return MambaMixer(
            config, spec.submodules, config.hidden_size, pg_collection=SimpleNamespace(tp=group)
        )


def rows_of_rank(t: int, rank: int, as_one: bool = False, **sizes: Any) -> list[Section]:
    """Rows of the whole `in_proj` that a rank holds, by section; `as_one`: if it were one matrix."""
    made = mixer(t, rank, **sizes)
    whole = sections_of(
        [(name, t * size) for name, size in zip(SECTIONS, made.sections, strict=True)]
    )
    weight = made.in_proj.weight
    if as_one:
        weight = SimpleNamespace(
            tensor_model_parallel=True, partition_dim=0, partition_stride=1, partition_sizes=None
        )
    numbers = torch.arange(whole[-1].end)
    held = shard_parameter(numbers, weight, rank, t).tolist() if t > 1 else numbers.tolist()
    found = []
    for name, start, end in whole:
        rows = [row for row in held if start <= row < end]
        if rows:
            found.append(Section(name, rows[0], rows[-1] + 1))
    return found


SIZES = {
    "hidden_size": 16,
    "mamba_head_dim": 4,
    "mamba_state_dim": 4,
    "mamba_num_groups": 2,
}
"""Of the mixer that the picture of sections shows."""


def sections_figure(t: int = 2) -> str:
    """Rows of `in_proj`: of the whole, of each rank, and of a rank if they were cut as one matrix."""
    rows = [("whole", rows_of_rank(1, 0, **SIZES))]
    rows += [(f"rank {rank}", rows_of_rank(t, rank, **SIZES)) for rank in range(t)]
    rows += [
        (f"wrong: rank {rank}", rows_of_rank(t, rank, as_one=True, **SIZES)) for rank in range(t)
    ]
    return family_pictures.sections(rows, SECTIONS, rows[0][1][-1].end)


def rows_words(t: int, rank: int, as_one: bool = False, **sizes: Any) -> str:
    """
    >>> rows_words(2, 1, hidden_size=16, mamba_head_dim=4, mamba_state_dim=4, mamba_num_groups=2)
    'z 16–31, x 48–63, B 68–71, C 76–79, dt 84–87'
    """
    found = rows_of_rank(t, rank, as_one, **sizes)
    return ", ".join(f"{name} {start}–{end - 1}" for name, start, end in found)


# -- A pattern over stages --

KINDS = {Symbols.MAMBA: "Mamba", Symbols.ATTENTION: "attention", Symbols.MLP: "MLP"}


def pattern_stages(pattern: str, p: int, v: int = 1) -> list[list[str]]:
    """What each virtual stage holds."""
    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=16,
        num_attention_heads=1,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v if v > 1 else None,
        pipeline_dtype=torch.float32,
    )
    letters = iter(allocate_layers(len(pattern), override_pattern=pattern))
    stages = [
        [KINDS[next(letters)] for _ in range(count)] for count in layers_of_virtual_stages(config)
    ]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def pattern_figure(pattern: str = "MM*-MM*-", p: int = 4) -> str:
    return pictures.stages_picture(pattern_stages(pattern, p), p)


def stage_words(pattern: str, p: int, stage: int) -> str:
    """
    >>> stage_words("MM*-MM*-", 4, 3)
    'attention, MLP, loss'
    """
    return ", ".join(pattern_stages(pattern, p)[stage])
