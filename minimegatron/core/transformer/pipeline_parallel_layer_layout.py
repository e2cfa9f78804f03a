"""Which stage holds which layer, when the user says so: `"Et*3|(tt|)*29,m|L"`.

Counterpart: `megatron.core.transformer.pipeline_parallel_layer_layout`, under the same names; there
the class asks `parallel_state` for the rank, here the rank is passed in, so that this file needs no
torch.

The grammar, after commas (cosmetic) are dropped:

    layout := item*                 item := (symbol | "|" | "(" item+ ")" ) ["*" count]
    symbol := "E" | "t" | "m" | "L"     embedding, transformer decoder layer, MTP layer, loss

`|` splits stages; a group in parentheses needs a count; groups nest; a stage may be empty. Stages
come in model order, which is also virtual-stage order; a placement says which rank holds which.
"""

from functools import lru_cache
from itertools import groupby

from minimegatron.core.orders.placement import Placement, usual_placement
from minimegatron.core.transformer.enums import LayerType

SYMBOLS = {
    "E": LayerType.embedding,
    "t": LayerType.decoder,
    "m": LayerType.mtp,
    "L": LayerType.loss,
}
LETTERS = {layer_type: letter for letter, layer_type in SYMBOLS.items()}

MAX_SYMBOLS = 100_000
"""The longest layout after replication; a longer one comes from a mistake in nested counts."""

# A symbol and where in the layout string it stands, so that any later fault can point at it.
Placed = tuple[str, int]


def _fault(text: str, position: int, reason: str) -> ValueError:
    """The reason, then two lines: the layout and a caret under the fault."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return ValueError(f"pipeline layout: {reason}\n  {shown}\n  {' ' * position}^")


# -- From a string to placed symbols --


def _unroll(text: str) -> list[Placed]:
    """Replications written out: `"(t|)*2"` becomes t | t |, each with its position in `text`."""
    characters = [(c, i) for i, c in enumerate(text) if c != ","]
    open_groups: list[tuple[list[Placed], int]] = []  # what precedes each "(", and where it is
    items: list[Placed] = []
    cursor = 0
    while cursor < len(characters):
        character, position = characters[cursor]
        cursor += 1
        if character == "(":
            open_groups.append((items, position))
            items = []
            continue
        if character == ")":
            if not open_groups:
                raise _fault(text, position, "')' closes nothing; remove it or add a '(' before it")
            if not items:
                raise _fault(text, position, "the parentheses are empty; put symbols inside")
            operand = items
            items, _ = open_groups.pop()
        elif character == "|" or character in SYMBOLS:
            operand = [(character, position)]
        else:
            raise _fault(text, position, _explain_stray(character))
        count, cursor = _read_count(text, characters, cursor, needed=character == ")")
        if len(items) + len(operand) * count > MAX_SYMBOLS:
            raise _fault(text, position, f"the counts multiply to over {MAX_SYMBOLS} symbols")
        items.extend(operand * count)
    if open_groups:
        raise _fault(text, open_groups[-1][1], "'(' is never closed; add ')*' and a count")
    return items


def _explain_stray(character: str) -> str:
    if character == "*":
        return "'*' has nothing to repeat; put a symbol or a group in parentheses before it"
    if character.isdecimal():
        return f"{character!r} stands alone; a count follows '*', as in t*3"
    return f"unknown symbol {character!r}; use E, t, m, L, '|', parentheses, '*' and counts"


def _read_count(text: str, characters: list[Placed], cursor: int, needed: bool) -> tuple[int, int]:
    """The count after `*`, 1 where there is none and none is `needed`; and the new cursor."""
    end = len(text)
    character, position = characters[cursor] if cursor < len(characters) else ("", end)
    if character != "*":
        if needed:
            raise _fault(text, position, "a group needs a count; write '*' and a number here")
        return 1, cursor
    cursor += 1
    digits = ""
    start = characters[cursor][1] if cursor < len(characters) else end
    while cursor < len(characters) and characters[cursor][0] in "0123456789":
        digits += characters[cursor][0]
        cursor += 1
    if not digits and cursor < len(characters) and characters[cursor][0] == "-":
        raise _fault(text, start, "the count is negative; give 1 or more")
    if not digits:
        raise _fault(text, start, "'*' has no count; write a number of 1 or more here")
    if int(digits[:9]) == 0:
        raise _fault(text, start, "the count is zero; give 1 or more, or remove what it repeats")
    if cursor < len(characters) and characters[cursor][0] == "*":
        raise _fault(text, characters[cursor][1], "a second count; multiply the two into one")
    return min(int(digits[:9]), MAX_SYMBOLS + 1), cursor


def _split_stages(items: list[Placed]) -> list[list[Placed]]:
    stages: list[list[Placed]] = [[]]
    for item in items:
        if item[0] == "|":
            stages.append([])
        else:
            stages[-1].append(item)
    return stages


def _text_of(layout: list) -> str:
    """The string for a list of stages, so that lists get the same checks and carets as strings."""
    stages = []
    for stage in layout:
        if not isinstance(stage, list | tuple):
            raise ValueError(
                f"pipeline layout: a list holds one list per stage, not {type(stage).__name__} "
                f"({stage!r}); write [['embedding', 'decoder'], ['decoder', 'loss']]"
            )
        letters = []
        for layer in stage:
            name = layer.name if isinstance(layer, LayerType) else str(layer).strip().lower()
            if name not in LayerType.__members__ or LayerType[name] not in LETTERS:
                known = ", ".join(layer_type.name for layer_type in LETTERS)
                raise ValueError(f"pipeline layout: unknown layer type {layer!r}; use {known}")
            letters.append(LETTERS[LayerType[name]])
        stages.append("".join(letters))
    return "|".join(stages)


class PipelineParallelLayerLayout:
    """A custom division of the layers over `pipeline_model_parallel_size` ranks.

    Args:
        layout: a layout string, or a list of stages, each a list of `LayerType` or its names.
        pipeline_model_parallel_size: p; the number of stages must be p times the chunks per rank.
        placement: which rank holds which stage; None for a line or, with several chunks, a loop.

    Attributes:
        layout: `layout[pp_rank][vp_stage]`, the list of `LayerType` of that chunk.
        flatten_layout: every layer in model order.
        virtual_pipeline_model_parallel_size: chunks per rank, 1 or more.

    Raises ValueError, with a caret under the fault, for a string outside the grammar and for a
    number of stages that p does not divide, or that is not the placement's. What the layers are is
    checked by `validate_layer_layout`.
    """

    def __init__(
        self,
        layout: str | list,
        pipeline_model_parallel_size: int,
        placement: Placement | None = None,
    ):
        p = pipeline_model_parallel_size
        if p < 1:
            raise ValueError(f"pipeline_model_parallel_size is {p}; give 1 or more")
        self.input_data = layout
        self.text = layout if isinstance(layout, str) else _text_of(layout)
        items = _unroll(self.text)
        self._stages = _split_stages(items)
        if len(self._stages) % p:
            raise self._wrong_number_of_stages(items, p)
        self.placement = placement or usual_placement(p, len(self._stages) // p)
        self._check_placement(p)
        self.pipeline_model_parallel_size = p
        self.virtual_pipeline_model_parallel_size = self.placement.num_model_chunks
        self._placed = [item for stage in self._stages for item in stage]
        self.flatten_layout = [SYMBOLS[letter] for letter, _ in self._placed]
        self.layout = [
            [[SYMBOLS[letter] for letter, _ in self._stages[stage]] for stage in of_rank]
            for of_rank in self.placement.stages
        ]

    def _check_placement(self, p: int) -> None:
        placement, count = self.placement, len(self._stages)
        if (placement.pp_size, placement.num_stages) != (p, count):
            raise _fault(
                self.text,
                len(self.text),
                f"{count} stages over {p} pipeline ranks do not fit placement {placement.name}, which "
                f"has {placement.num_stages} over {placement.pp_size}; write {placement.num_stages}",
            )

    def _wrong_number_of_stages(self, items: list[Placed], p: int) -> ValueError:
        count = len(self._stages)
        bars = [position for symbol, position in items if symbol == "|"]
        surplus = count % p
        # Points at the bar that opens the first surplus stage, or at the end where stages lack.
        where = bars[count - surplus - 1] if count > p else len(self.text)
        remedy = f"add {p - surplus}" + (f" or remove {surplus}" if count > p else "")
        return _fault(
            self.text,
            where,
            f"{count} stages cannot be divided over {p} pipeline ranks; {remedy}",
        )

    def __repr__(self) -> str:
        return self.text

    # -- Is it a model? --

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None = None) -> bool:
        """Checks the layers against the model's size.

        Returns whether an MTP layer sits on another rank than the loss ("standalone"). Raises
        ValueError, with a caret under the fault, unless: E stands once, first of the first stage; L
        once, last of the last stage; t `num_layers` times; m `mtp_num_layers` times, after every t,
        all in one stage, which is the last chunk of its rank.
        """
        self._check_end("E", 0, "first", "the first stage takes in the tokens")
        self._check_end("L", -1, "last", "the last stage computes the loss")
        self._check_count("t", num_layers, "--num-layers")
        self._check_count("m", mtp_num_layers or 0, "--mtp-num-layers")
        return self._check_mtp()

    def _positions(self, letter: str) -> list[int]:
        return [position for symbol, position in self._placed if symbol == letter]

    def _check_end(self, letter: str, end: int, word: str, reason: str) -> None:
        found = self._positions(letter)
        at_end = 0 if end == 0 else len(self.text)
        if not found:
            raise _fault(self.text, at_end, f"{letter} is missing; put it {word}: {reason}")
        if len(found) > 1:
            raise _fault(
                self.text, found[1], f"{letter} stands {len(found)} times; keep one, {word}"
            )
        stage = self._stages[end]
        if not stage or stage[end][0] != letter:
            raise _fault(self.text, found[0], f"{letter} is not {word}; move it: {reason}")

    def _check_count(self, letter: str, wanted: int, flag: str) -> None:
        found = self._positions(letter)
        if len(found) == wanted:
            return
        if len(found) > wanted:
            where, remedy = found[wanted], f"remove {len(found) - wanted}"
        else:
            before = found or self._positions("t") or self._positions("E")
            where, remedy = before[-1], f"add {wanted - len(found)}"
        raise _fault(
            self.text,
            where,
            f"{letter} stands {len(found)} time{'s' * (len(found) != 1)} but {flag} is {wanted}; "
            f"{remedy} or set {flag} {len(found)}",
        )

    def _check_mtp(self) -> bool:
        p, v = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        holders = [i for i, stage in enumerate(self._stages) if any(s == "m" for s, _ in stage)]
        if not holders:
            return False
        first_m = self._positions("m")[0]
        letters = [letter for letter, _ in self._placed]
        if "t" in letters[letters.index("m") :]:
            raise _fault(self.text, first_m, "m stands before a t; move it behind the last t")
        if len(holders) > 1:
            second = next(where for s, where in self._stages[holders[1]] if s == "m")
            raise _fault(self.text, second, "m stands in two stages; put all m into one stage")
        rank, chunk = self.placement.place_of(holders[0])
        last_of_ranks = [max(stages) for stages in self.placement.stages]
        if holders[0] not in last_of_ranks:
            where = f"the last stage of a rank, such as {last_of_ranks[rank]} (counted from 0)"
            if min(last_of_ranks) == (v - 1) * p:
                where = f"one of the last {p} stages (chunk {v - 1})"
            raise _fault(
                self.text,
                first_m,
                f"m is in chunk {chunk} of pipeline rank {rank}; move it to {where}",
            )
        return rank != self.placement.last_rank

    # -- What one chunk holds --

    def _stage_id(self, vp_stage: int | None, pp_rank: int | None) -> int:
        p, v = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        for name, value, size in (("pp_rank", pp_rank, p), ("vp_stage", vp_stage, v)):
            if value is None and size > 1:
                raise ValueError(
                    f"{name} is None, but this layout has {size}; pass 0 to {size - 1}"
                )
            if value is not None and not 0 <= value < size:
                raise ValueError(f"{name} is {value}; this layout has 0 to {size - 1}")
        return self.placement.stage_of(pp_rank or 0, vp_stage or 0)

    def get_num_layers_to_build(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """How many layers of this type the chunk holds. None stands for 0 where the size is 1."""
        stage = self._stages[self._stage_id(vp_stage, pp_rank)]
        return sum(SYMBOLS[letter] == layer_type for letter, _ in stage)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """How many layers of this type all earlier virtual stages hold."""
        earlier = self._stages[: self._stage_id(vp_stage, pp_rank)]
        return sum(SYMBOLS[letter] == layer_type for stage in earlier for letter, _ in stage)

    def get_layer_id_list(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> list[int]:
        """The global ids, from 0, of the layers of this type in the chunk."""
        offset = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(
            range(offset, offset + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank))
        )

    # -- For people --

    def pretty_repr(self) -> str:
        """A table: one row per pipeline rank (equal neighbours merged), one column per chunk."""
        v = self.virtual_pipeline_model_parallel_size
        rows = [["PP \\ VPP rank", *map(str, range(v))]]
        cells = [[describe_stage(chunk) for chunk in chunks] for chunks in self.layout]
        for row, ranks in groupby(range(len(cells)), key=cells.__getitem__):
            first, *others = ranks
            rows.append([f"{first}~{others[-1]}" if others else str(first), *row])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.insert(1, "-+-".join("-" * width for width in widths))
        return "\n".join(lines)

    # -- From strings, under Megatron's names --

    @staticmethod
    @lru_cache
    def from_str(
        layout: str, pipeline_model_parallel_size: int, placement: Placement | None = None
    ) -> "PipelineParallelLayerLayout":
        """The layout of a string; the same object for the same arguments."""
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size, placement)

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """The number of stages, pp x vpp, of a layout string."""
        return len(PipelineParallelLayerLayout.parse_str_to_list(layout))

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[LayerType]]:
        """The stages of a layout string, in model order, each a list of `LayerType`."""
        stages = _split_stages(_unroll(layout_str))
        return [[SYMBOLS[letter] for letter, _ in stage] for stage in stages]


def describe_stage(stage: list[LayerType]) -> str:
    """A chunk in words: `"embedding + 3 × decoder"`, or `"(empty)"`."""
    words = []
    for layer_type, run in groupby(stage):
        count = len(list(run))
        words.append(layer_type.name if count == 1 else f"{count} × {layer_type.name}")
    return " + ".join(words) or "(empty)"
