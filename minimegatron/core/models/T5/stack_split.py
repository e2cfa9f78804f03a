"""Which stages of a pipeline have which of T5's two stacks. Torch-free.

Megatron of today has no counterpart: it runs T5 on one stage. Until July 2024 it had a split rank q
(`get_pipeline_model_parallel_split_rank` of `parallel_state`): stages before q have the encoder, q and
those after it the decoder.

    stage            0 .. q-1           q .. p-1
    stack            encoder            decoder
    its line         ranks 0 .. q-1     ranks 0 .. p-q-1

A stack is cut over its own line of stages as a model of one stack is over all of them.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class StackLine:
    """The stages of one stack: what a `TransformerBlock` asks of its pipeline group."""

    place: int
    num_stages: int

    def rank(self) -> int:
        """This stage's number, from 0, in the line."""
        return self.place

    def size(self) -> int:
        """How many stages the line has."""
        return self.num_stages


@dataclass(frozen=True)
class StackSplit:
    """What a pipeline of `pp_size` stages has where. `split_rank` None: one stage has all."""

    pp_size: int
    split_rank: int | None

    def __post_init__(self) -> None:
        p, q = self.pp_size, self.split_rank
        if p == 1 and q is not None:
            raise ValueError(
                f"pipeline_model_parallel_split_rank is {q}, but pipeline_model_parallel_size 1 has "
                "no stages to split; drop it"
            )
        if p > 1 and (q is None or not 0 < q < p):
            given = "not given" if q is None else str(q)
            right = "1" if p == 2 else f"1 to {p - 1}"
            raise ValueError(
                f"T5 over pipeline_model_parallel_size {p} needs the first stage of its decoder, and "
                f"pipeline_model_parallel_split_rank is {given}; give {right}, or use 1 stage"
            )

    def check_stage(
        self, rank: int, begins: bool, ends: bool, has_encoder: bool, has_decoder: bool
    ) -> None:
        """Raises ValueError for a stage that has other parts than its place says."""
        given = (begins, ends, has_encoder, has_decoder)
        places = (self.begins(rank), self.ends(rank))
        wanted = (*places, self.has_encoder(rank), self.has_decoder(rank))
        if given != wanted:
            raise ValueError(
                f"stage {rank} of {self.pp_size} with split rank {self.split_rank} has (pre_process, "
                f"post_process, add_encoder, add_decoder) {wanted}, not {given}; pass these to T5Model"
            )

    def has_encoder(self, rank: int) -> bool:
        """Whether stage `rank` has layers of the encoder."""
        return self.split_rank is None or rank < self.split_rank

    def has_decoder(self, rank: int) -> bool:
        """Whether stage `rank` has layers of the decoder."""
        return self.split_rank is None or rank >= self.split_rank

    def begins(self, rank: int) -> bool:
        """Whether stage `rank` embeds tokens: it is the first of its line."""
        return rank in (0, self.split_rank)

    def ends(self, rank: int) -> bool:
        """Whether stage `rank` is the last of its line."""
        return rank + 1 in (self.split_rank, self.pp_size)

    def shapes_behind(self, encoder_shapes: list, decoder_shapes: list) -> list[list]:
        """Of each stage, what it sends on: its stack's output, and the decoder the encoder's too.

        The shapes are those of one message, in a list. What the last stage would send is there too.

        >>> StackSplit(3, 1).shapes_behind(["text"], ["answer"])
        [['text'], ['answer', 'text'], ['answer', 'text']]
        """
        num_encoder_stages = self.encoder_line(0).size()
        num_decoder_stages = self.pp_size - num_encoder_stages
        both = decoder_shapes + encoder_shapes
        return [encoder_shapes] * num_encoder_stages + [both] * num_decoder_stages

    def encoder_config(self, config: Any, num_layers: int) -> Any:
        """`config` for an encoder of `num_layers` layers over the stages that have it."""
        stages = self.encoder_line(0).size()
        return replace(config, num_layers=num_layers, pipeline_model_parallel_size=stages)

    def encoder_line(self, rank: int) -> StackLine:
        """Stage `rank`, which has the encoder, in the encoder's line."""
        return StackLine(rank, self.split_rank or 1)

    def decoder_line(self, rank: int) -> StackLine:
        """Stage `rank`, which has the decoder, in the decoder's line."""
        first = self.split_rank or 0
        return StackLine(rank - first, self.pp_size - first)


def check_t5(config: Any) -> None:
    """Raises ValueError for what two stacks do not run with."""
    has_stages = config.pipeline_model_parallel_size > 1
    v, c = config.virtual_pipeline_model_parallel_size, config.context_parallel_size
    heads, groups = config.num_attention_heads, config.num_query_groups
    for is_asked, what, why in (
        (v is not None, f"virtual_pipeline_model_parallel_size is {v}", NO_CHUNKS),
        (config.pipeline_schedule is not None, "pipeline_schedule is given", NO_CHUNKS),
        *(
            (vars(config)[name], f"{name} is given", "but it cuts one stack, and T5 has two")
            for name in CUTS
        ),
        (c > 1, f"context_parallel_size is {c}", "but cross attention needs the whole text"),
        (config.num_moe_experts, f"num_moe_experts is {config.num_moe_experts}", ONE_MLP),
        (
            config.mtp_num_layers,
            f"mtp_num_layers is {config.mtp_num_layers}",
            "but T5 predicts one token at a time",
        ),
        (
            groups != heads,
            f"num_query_groups is {groups}",
            f"but each of {heads} heads has keys of its own",
        ),
        (config.qk_layernorm, "qk_layernorm is on", "but T5 has no such norms"),
        (config.defer_embedding_wgrad_compute, "defer_embedding_wgrad_compute is on", NO_DEFERRAL),
        (
            config.fp32_residual_connection and has_stages,
            "fp32_residual_connection is on",
            "but what the encoder sends on is in the weights' precision",
        ),
    ):
        if is_asked:
            raise ValueError(f"{what}, {why}; leave it out for T5")


CUTS = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
NO_CHUNKS = "but two stacks run by plain 1F1B only"
ONE_MLP = "but a layer of T5 has one MLP"
NO_DEFERRAL = "but T5's head does not put it off"

# -- Which stages share weights --


def ranks_with_word_embedding_of_t5(
    split: StackSplit, is_tied: bool, pp_ranks: list[int]
) -> list[int]:
    """Of one pipeline's global ranks, those with a copy of the word embedding.

    Where a stack begins and, if it is tied, where the loss is. Bound to its first two arguments it is
    what `initialize_model_parallel` takes as `get_embedding_ranks`.
    """
    places = {0, split.split_rank or 0} | ({split.pp_size - 1} if is_tied else set())
    return [pp_ranks[place] for place in sorted(places)]


def ranks_with_position_embedding_of_t5(
    split: StackSplit, is_learned: bool, pp_ranks: list[int]
) -> list[int]:
    """The same for positions, if they are learned: where a stack begins."""
    return ranks_with_word_embedding_of_t5(split, False, pp_ranks) if is_learned else pp_ranks[:1]
